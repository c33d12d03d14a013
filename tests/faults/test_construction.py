"""Constructions that fail: peers hear why at once, the first error is raised, and nothing stays behind."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ep_plugin import _C, HierarchicalAllGather, MoECommunicator, MoECommunicatorConfig
from ep_plugin.collectives import engine as collective_engine
from ep_plugin.errors import PeerAborted, PeerTimeout
from ep_plugin.moe.high_throughput.engine import HighThroughputEngine
from ep_plugin.runtime.base import BaseEngine
from ep_plugin.transport import shm
from tests.faults.fault_cases import open_communicator, round_trip
from tests.ranks import run_ranks, values

FAILS = 1  # the rank that fails
PATIENCE_S = 20.0  # far more than any test here may take: nothing ends by a deadline


def _bad_device(rank: int) -> str:
    config = MoECommunicatorConfig(num_experts=4, hidden_size=8, topk=2, timeout_s=PATIENCE_S)
    with pytest.raises(ValueError if rank == FAILS else PeerAborted) as caught:
        MoECommunicator(None, config, device="meta" if rank == FAILS else "cpu")
    with open_communicator(2) as comm:
        round_trip(comm)
    return str(caught.value)


def _cleanup_fails(rank: int) -> tuple[list[str], list[str]]:
    closed: list[str] = []

    class Failing(BaseEngine):
        found_error = described = None  # type: ignore[assignment]

        def _construct(self) -> None:
            self._resources.callback(closed.append, "memory")
            raise MemoryError("first")

    def abort(reason: str) -> None:
        raise OSError("store is gone")

    def close() -> None:
        closed.append("exchange")

    exchange: Any = SimpleNamespace(
        name="0.1", ident="", rank=rank, size=1, job_ranks=(rank,), timeout_s=1.0, abort=abort, close=close
    )
    with pytest.raises(MemoryError, match="first") as caught:
        Failing(exchange, torch.device("cpu"))
    return closed, caught.value.__notes__


def test_cleanup_that_fails_keeps_the_first_error_and_closes_the_rest() -> None:
    closed, notes = _cleanup_fails(0)
    assert closed == ["memory", "exchange"]
    assert notes == ["cleaning up failed, too: OSError: store is gone"]


def test_a_rank_that_cannot_construct_does_not_keep_its_peers_waiting() -> None:
    began = time.monotonic()
    texts = values(run_ranks(2, _bad_device))
    assert texts == [
        "rank 1 aborted: ValueError: device: expected cpu or cuda, got meta",
        "device: expected cpu or cuda, got meta",
    ]
    assert time.monotonic() - began < PATIENCE_S


def _misses(rank: int) -> None:
    """Rank 1 misses three constructions. Then both construct together, five times."""
    if rank != FAILS:
        for _ in range(3):
            with pytest.raises(PeerTimeout, match="for rank 1"):
                open_communicator(2, timeout_s=0.5)
    for _ in range(5):
        dist.barrier()
        with open_communicator(2, timeout_s=PATIENCE_S) as comm:
            round_trip(comm)


@pytest.mark.parametrize("nodes", ["1", "2"])
def test_ranks_construct_together_after_one_has_missed_constructions(nodes: str) -> None:
    values(run_ranks(2, _misses, env={"EP_TEST_NODES": nodes}))


def _first(*_: Any, **__: Any) -> Any:
    raise MemoryError("first")


def _failing_after(function: Callable[..., None]) -> Callable[..., None]:
    def fail(*args: Any) -> None:
        function(*args)
        raise OSError("second")

    return fail


# What fails, of which object, and what makes it.
STAGES: dict[str, tuple[Any, str, Callable[[], Any]]] = {
    "block": (shm._Block, "close", lambda: open_communicator(2, timeout_s=PATIENCE_S)),
    "board": (_C, "list_board", lambda: open_communicator(2, timeout_s=PATIENCE_S)),
    "communicator": (HighThroughputEngine, "_comm_struct", lambda: open_communicator(2, timeout_s=PATIENCE_S)),
    "collective": (collective_engine, "_node_of", lambda: HierarchicalAllGather().allocate(10, torch.uint8)),
}


def _mappings() -> list[str]:
    """The peer memory that is mapped here."""
    with open("/proc/self/maps") as file:
        return [line for line in file if "ep_plugin-" in line]


def _fails_at(rank: int, stage: str) -> None:
    owner, name, make = STAGES[stage]
    before = _mappings()
    with pytest.MonkeyPatch.context() as patch:
        if rank == FAILS:
            patch.setattr(owner, name, _first)
            patch.setattr(_C, "unlist_board", _failing_after(_C.unlist_board))  # the clean-up
        with pytest.raises(MemoryError if rank == FAILS else PeerAborted, match="first") as caught:
            make()
        notes = getattr(caught.value, "__notes__", [])
        assert any("OSError: second" in note for note in notes) == (rank == FAILS and stage != "block"), notes
        del caught
    assert _mappings() == before
    with open_communicator(2) as comm:
        round_trip(comm)


@pytest.mark.parametrize("stage", STAGES)
def test_a_construction_whose_cleanup_fails_too_leaks_no_mapping(stage: str) -> None:
    values(run_ranks(2, _fails_at, stage))
