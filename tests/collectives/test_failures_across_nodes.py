"""Failures in a group of two emulated nodes of two ranks: every rank raises or has the right result, and soon."""

from __future__ import annotations

import datetime
import random
import threading
import time
from collections import deque
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ep_plugin import HierarchicalAllGather, HierarchicalReduceScatter
from ep_plugin.collectives.base import Collective
from ep_plugin.errors import EpPluginError, PeerAborted
from ep_plugin.runtime.failures import GroupBoards
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


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_no_fault_leaves_a_wrong_result_behind(kind: str) -> None:
    rounds = 30
    for wrong, raised in values(run_ranks(RANKS, _fails_at_random, kind, 7, rounds, env=NODES, timeout_s=150)):
        assert wrong == 0 and raised > rounds // 2, (wrong, raised)


def _meets_garbage(rank: int, key: str, text: str) -> None:
    """Rank 0 writes `text` under a key of the failures; then rank 1 fails."""
    comm = HierarchicalAllGather()
    assert _call(comm, rank, 10)
    boards: Any = comm.engine_on(torch.device("cpu")).group_boards
    if rank == 0:
        boards._store.set(key, text)
    dist.barrier()
    if rank != 1:  # which would write its own wait
        boards._waited_for = 3  # as after a wait in vain, so that polls look for other ranks' waits
    boards.poll()
    assert boards.first is None and all(-1 <= waited_for < RANKS for waited_for in boards._waits.values())
    assert key != "1 waits" or 1 not in boards._waits
    comm.check()
    dist.barrier()
    if rank == 1:
        comm.abort("no room")
    with pytest.raises(PeerAborted, match="rank 1 aborted: no room"):
        _checks(comm)
    assert any(thread.name == "ep_plugin failures" for thread in threading.enumerate())
    comm.close()


def _checks(comm: Any) -> None:
    until = time.monotonic() + 20
    while time.monotonic() < until:
        comm.check()
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("failure", "no JSON"),
        ("failure", "[" * 100_000),
        ("failure", "7"),
        ("failure", '["2", "reason"]'),
        ("failure", '[true, "reason"]'),
        ("failure", '[4, "reason"]'),
        ("failure", "[2, null]"),
        ("1 waits", "soon"),
        ("1 waits", "4"),
        ("1 waits", "-2"),
    ],
)
def test_garbage_in_the_store_is_no_failure_and_hides_none(key: str, text: str) -> None:
    values(run_ranks(RANKS, _meets_garbage, key, text, env=NODES))


def test_a_poll_reads_a_bounded_number_of_keys() -> None:
    reads: list[str] = []

    class Store:
        def check(self, keys: list[str]) -> bool:
            reads.extend(keys)
            return keys[0] in ("5 waits", "900 waits")

        def get(self, key: str) -> bytes:
            return b"7"

    boards = GroupBoards.__new__(GroupBoards)
    boards._store, boards._group_size, boards._waits = Store(), 1024, {}
    boards._unknown = deque(range(1, 1024))
    for polls in range(1, 1024 // 64 + 1):
        boards._read_waits()
        assert len(reads) <= 64 * polls
    assert boards._waits == {5: 7, 900: 7} and len(boards._unknown) == 1021
