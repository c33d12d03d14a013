"""Failures in a group of two emulated nodes of two ranks: every rank raises or has the right result, and soon."""

from __future__ import annotations

import datetime
import random
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ep_plugin import HierarchicalAllGather, HierarchicalReduceScatter
from ep_plugin.collectives.base import Collective
from ep_plugin.errors import EpPluginError, PeerAborted
from tests.faults.fault_cases import nothing_left_behind
from tests.ranks import run_ranks, values

RANKS = 4
NODES = {"EP_PLUGIN_RANKS_PER_NODE": "2"}
KINDS: dict[str, type[Collective]] = {"gather": HierarchicalAllGather, "sum": HierarchicalReduceScatter}


def _call(comm: Any, rank: int, count: int) -> bool:
    """One operation; whether its result is right."""
    if isinstance(comm, HierarchicalAllGather):
        out = torch.empty(RANKS * count)
        comm(out, torch.full((count,), rank + 1.0))
        return torch.equal(out, torch.arange(1.0, RANKS + 1).repeat_interleave(count))
    out = torch.empty(count)
    comm(out, torch.full((RANKS * count,), rank + 1.0))
    return torch.equal(out, torch.full((count,), 10.0))


def _aborts_before(rank: int, kind: str, count: int) -> tuple[float, str]:
    """Rank 1 aborts; the others call: how long each call lasts, and what it raises."""
    comm = KINDS[kind]()
    assert _call(comm, rank, count)
    dist.barrier()
    if rank == 1:
        comm.abort("MemoryError: no room")
    began = time.monotonic()
    with pytest.raises(PeerAborted, match="rank 1 aborted: MemoryError: no room") as caught:
        for _ in range(3):
            assert _call(comm, rank, count), "a wrong result without an error"
    seconds = time.monotonic() - began
    with pytest.raises(PeerAborted):
        comm.check()
    comm.close()
    nothing_left_behind()
    assert caught.value.rank == 1
    return seconds, str(caught.value)


@pytest.mark.parametrize("count", [10, 600_000])
@pytest.mark.parametrize("kind", KINDS)
def test_an_abort_reaches_the_other_node_within_a_second(kind: str, count: int) -> None:
    for seconds, _ in values(run_ranks(RANKS, _aborts_before, kind, count, env=NODES)):
        assert seconds < 1.5, "a second, and what a crowded machine adds"


def _aborts_while_idle(rank: int) -> None:
    comm = HierarchicalReduceScatter()
    assert _call(comm, rank, 10)
    dist.barrier()
    if rank == 1:
        comm.abort("no room")
    until = time.monotonic() + 20
    with pytest.raises(PeerAborted, match="rank 1 aborted: no room"):
        while time.monotonic() < until:
            comm.check()
            time.sleep(0.01)
    comm.close()


def test_an_abort_reaches_ranks_of_other_nodes_that_only_check() -> None:
    values(run_ranks(RANKS, _aborts_while_idle, env=NODES))


def _sends_a_bad_sum(rank: int) -> str:
    """As on GPUs, whose hosts do not know yet that a sum has failed when it is sent."""
    comm = HierarchicalReduceScatter()
    assert _call(comm, rank, 10)
    if rank == 0:
        boards: Any = comm.engine_on(torch.device("cpu")).group_boards
        boards._fault = torch.ones(8, dtype=torch.uint8)
    said = ""
    try:
        _call(comm, rank, 10)
    except PeerAborted as error:
        said = str(error)
    dist.barrier()
    comm.close()
    return said


def test_a_sum_that_arrives_with_a_bad_status_is_an_error() -> None:
    said = values(run_ranks(RANKS, _sends_a_bad_sum, env=NODES))
    assert "rank 0 aborted: a sum inside its node has failed" in said[2], said
    assert said[0] == said[1] == said[3] == ""


def _fails_at_random(rank: int, kind: str, seed: int, rounds: int) -> tuple[int, int]:
    """In each round one rank fails in a way of its own at a moment of its own: wrong results, and errors."""
    alike, wrong, raised = random.Random(seed), 0, 0
    for _ in range(rounds):
        victim, how, delay = alike.randrange(RANKS), alike.choice(["abort", "raise", "thread"]), alike.random() / 50
        count, calls = alike.choice([5, 3000, 400_000]), alike.randrange(1, 4)
        group = dist.new_group(timeout=datetime.timedelta(seconds=8))
        comm: Any = KINDS[kind](group)
        try:
            if not _call(comm, rank, 10):
                wrong += 1
            for call in range(calls + 3):
                if rank == victim and call == calls:
                    _fail(comm, how, delay)
                if not _call(comm, rank, count):
                    wrong += 1
            comm.check()
        except (EpPluginError, ValueError):
            raised += 1
        comm.close()
        dist.barrier()
    return wrong, raised


def _fail(comm: Any, how: str, delay: float) -> None:
    if how == "abort":
        time.sleep(delay)
        comm.abort("on purpose")
    elif how == "thread":
        threading.Timer(delay, comm.abort, ["on purpose"]).start()
        time.sleep(delay)
    else:
        engine = comm.engine_on(torch.device("cpu"))

        def broken(*_: Any) -> None:
            raise RuntimeError("on purpose")

        with pytest.raises(RuntimeError, match="on purpose"):
            engine.run("all-gather", broken)


@pytest.mark.parametrize("kind", KINDS)
def test_no_fault_leaves_a_wrong_result_behind(kind: str) -> None:
    rounds = 30
    for wrong, raised in values(run_ranks(RANKS, _fails_at_random, kind, 7, rounds, env=NODES, timeout_s=150)):
        assert wrong == 0 and raised > rounds // 2, (wrong, raised)
