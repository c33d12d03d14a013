"""Gathers and scatters of ranks that disagree, and of ranks that die: who raises what, and when."""

from __future__ import annotations

import datetime
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ep_plugin import _C, HierarchicalAllGather, HierarchicalReduceScatter
from ep_plugin.collectives import base
from ep_plugin.collectives.base import Collective, CollectiveWork
from ep_plugin.errors import (
    CommunicatorClosed,
    DisagreementError,
    EpPluginError,
    NotSupported,
    PeerAborted,
    PeerTimeout,
)
from ep_plugin.runtime import faults
from ep_plugin.transport import topology
from tests.collectives.collective_cases import gather_ones, scatter_ones
from tests.faults.fault_cases import die_at_gate, nothing_left_behind, orphaned_names, set_deadline
from tests.ranks import run_ranks, values

SIZE = 3
DEADLINE_S = 1.5
GRACE_S = 5.0
CPU = torch.device("cpu")
BIG = 300_000  # elements: several chunks


OPERATIONS: dict[str, tuple[type[Collective], Callable[[Collective, int], torch.Tensor]]] = {
    "all_gather": (HierarchicalAllGather, gather_ones),
    "reduce_scatter": (HierarchicalReduceScatter, scatter_ones),
}


def _killed(rank: int, name: str, victim: int) -> PeerTimeout:
    kind, operation = OPERATIONS[name]
    comm = kind()
    operation(comm, 10)
    set_deadline(comm.engine_on(CPU), DEADLINE_S)
    if rank == victim:
        engine = comm.engine_on(CPU)
        engine.comm.gate = _C.Step[name.upper()]
        die_at_gate(_Held(engine))
    began = time.monotonic()
    with pytest.raises(PeerTimeout) as caught:
        for _ in range(3):
            operation(comm, BIG)
    assert time.monotonic() - began < DEADLINE_S + GRACE_S
    for call in (comm.check, lambda: operation(comm, 10), lambda: comm.allocate(5, torch.float32)):
        with pytest.raises(PeerTimeout) as again:
            call()
        assert str(again.value) == str(caught.value)
    comm.close()
    comm.close()
    nothing_left_behind()
    return caught.value


class _Held:
    def __init__(self, engine: Any) -> None:
        self.engine = engine


@pytest.mark.deadline
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_rank_killed_in_an_operation_is_named_by_every_survivor(name: str) -> None:
    victim = 1
    outcomes = run_ranks(SIZE, _killed, name, victim)
    assert outcomes[victim].exitcode == -signal.SIGKILL
    for rank in (0, 2):
        (error,) = values([outcomes[rank]])
        assert (error.rank, error.step) == (victim, name)
        assert f"rank {rank} waited {DEADLINE_S:g} s for rank {victim} at step {name}" in str(error)
    assert not orphaned_names()


def _gave_up(rank: int, waited_for: dict[int, int]) -> PeerTimeout | None:
    """What a rank raises that waited in vain for another, beside ranks of which some did, too."""
    scatter = HierarchicalReduceScatter()
    scatter_ones(scatter, 5)
    engine = scatter.engine_on(CPU)
    if rank not in waited_for:
        dist.barrier()
        return None
    if len(waited_for) > 1:
        faults.GRACE_S = 30.0  # it ends when at most one has not told
    _C.fault_board(engine.boards.address, _C.FaultCode.TIMEOUT, _C.Step.REDUCE_SCATTER, waited_for[rank], 2, 1)
    with pytest.raises(PeerTimeout) as raised:
        scatter.check()
    dist.barrier()
    return raised.value


@pytest.mark.parametrize(
    ("waited_for", "named"),
    [
        ({0: 1, 2: 1}, {0: 1, 2: 1}),
        ({0: 1, 2: 0}, {0: 1, 2: 1}),  # rank 0 pushed nothing to rank 2, since it waited for room at rank 1
        ({0: 2, 2: 0}, {0: 1, 2: 1}),
        ({0: 2}, {0: 2}),
        ({0: 1, 1: 0}, {0: 2, 1: 2}),
        ({0: 0}, {0: 0}),
        ({0: 1, 1: 1}, {0: 1, 1: 1}),
    ],
)
def test_a_rank_that_gave_up_itself_is_not_to_blame(waited_for: dict[int, int], named: dict[int, int]) -> None:
    raised = values(run_ranks(SIZE, _gave_up, waited_for))
    assert {rank: error.rank for rank, error in enumerate(raised) if error is not None} == named
    for rank, error in enumerate(raised):
        if error is not None and named[rank] != waited_for[rank]:
            assert f"Rank {waited_for[rank]} has given up waiting, too, and rank {named[rank]} has not." in str(error)


def _killed_before_allocate(rank: int) -> PeerTimeout:
    gather = HierarchicalAllGather(num_buffers=1)
    kept = [gather.allocate(100, torch.float32)]
    set_deadline(gather.engine_on(CPU), DEADLINE_S)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerTimeout) as caught:
        for _ in range(3):
            kept.append(gather.allocate(100, torch.float32))
    gather.close()
    kept.clear()
    nothing_left_behind()
    return caught.value


@pytest.mark.deadline
def test_a_rank_that_dies_before_it_allocates_is_named() -> None:
    outcomes = run_ranks(SIZE, _killed_before_allocate)
    for error in values([outcomes[0], outcomes[2]]):
        assert (error.rank, error.step) == (1, "allocate")


def _killed_on_another_node(rank: int, name: str) -> EpPluginError:
    kind, operation = OPERATIONS[name]
    comm = kind()
    operation(comm, 10)
    set_deadline(comm.engine_on(CPU), DEADLINE_S)
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(EpPluginError) as caught:
        for _ in range(3):
            operation(comm, BIG)
    assert time.monotonic() - began < DEADLINE_S + GRACE_S
    comm.close()
    nothing_left_behind()
    return caught.value


@pytest.mark.deadline
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_rank_that_dies_on_another_node_ends_the_operation(name: str) -> None:
    outcomes = run_ranks(4, _killed_on_another_node, name, env={"EP_PLUGIN_RANKS_PER_NODE": "2"})
    for error in values(outcomes[:3]):  # rank 1 alone knows that rank 3 is gone, and publishes it on both nodes
        assert isinstance(error, PeerTimeout) and (error.rank, error.step) == (3, "rail"), repr(error)
        assert "for rank 3 at step rail" in str(error)


def _aborts(rank: int) -> str:
    gather = HierarchicalAllGather()
    gather_ones(gather, 10)
    dist.barrier()
    if rank == 1:
        gather.abort("MemoryError: no room")
        with pytest.raises(PeerAborted):
            gather.check()
        return ""
    began = time.monotonic()
    with pytest.raises(PeerAborted, match="rank 1 aborted: MemoryError: no room") as caught:
        gather_ones(gather, 10)
    assert time.monotonic() - began < 5 and caught.value.rank == 1
    gather.close()
    nothing_left_behind()
    return str(caught.value)


def test_an_abort_reaches_every_peer_at_once() -> None:
    assert all(values(run_ranks(SIZE, _aborts))[::2])


def _waits_after_close(rank: int) -> None:
    gather, scatter = HierarchicalAllGather(), HierarchicalReduceScatter()
    out, total = torch.empty(2 * 5), torch.empty(5)
    works = [
        gather(out, torch.full((5,), float(rank)), async_op=True),
        scatter(total, torch.ones(10), async_op=True),
        gather(torch.empty(0), torch.empty(0), async_op=True),
    ]
    gather.close()
    scatter.close()
    for work in works:
        assert work is not None and work.wait() is True
    assert out.tolist() == [0.0] * 5 + [1.0] * 5 and total.tolist() == [2.0] * 5
    with pytest.raises(CommunicatorClosed):
        gather(out, torch.ones(5))


def test_what_was_over_before_close_can_be_waited_for_after_it() -> None:
    values(run_ranks(2, _waits_after_close))


class _Stream:
    """The current stream, and an event, of a device that is not there."""

    def __init__(self) -> None:
        self.waited_for: list[Any] = []

    def wait_event(self, event: Any) -> None:
        self.waited_for.append(event)


def _fails(engine: Any) -> None:
    raise RuntimeError("the device has failed")


def _times_out(engine: Any) -> None:
    _C.fault_board(engine.boards.address, _C.FaultCode.TIMEOUT, _C.Step.ALL_GATHER, 1 - engine.index, 7, 6)


# What happens on the device while close waits for it, and what a wait for the operation raises afterwards.
ENDS: dict[str, tuple[Callable[[Any], None], type[Exception] | None, str]] = {
    "over": (lambda engine: None, None, ""),
    "overdue": (_times_out, PeerTimeout, "waited .* s for rank .* at step all_gather .expected epoch 7, seen 6"),
    "lost": (_fails, EpPluginError, "closed before what was enqueued was over: the device has failed"),
}


def _closed_as_on_gpus(rank: int, name: str) -> None:
    end, error, said = ENDS[name]
    stream = _Stream()
    base.caller_stream = lambda device: stream  # type: ignore[assignment, return-value]
    gather = HierarchicalAllGather()
    out = torch.empty(10)
    gather(out, torch.ones(5))
    dist.barrier()
    work = CollectiveWork([out], gather._check_enqueued, event="event")
    assert work.wait() and stream.waited_for == ["event"]
    engine = gather.engine_on(CPU)
    engine.streams.drain = lambda: end(engine)  # type: ignore[method-assign]
    gather.close()
    if error is None:
        assert work.wait() and stream.waited_for == ["event"] * 2
    else:
        for _ in range(2):
            with pytest.raises(error, match=said):
                work.wait()
            with pytest.raises(error, match=said):
                work.get_future()
        assert stream.waited_for == ["event"]
    with pytest.raises(CommunicatorClosed):
        gather.check()
    nothing_left_behind()


@pytest.mark.parametrize("name", ENDS)
def test_a_wait_after_close_says_how_the_operation_ended(name: str) -> None:
    values(run_ranks(2, _closed_as_on_gpus, name))


class _Event:
    """An event of a device that is not there."""

    over = False

    def query(self) -> bool:
        return self.over


def _works_as_on_gpus(rank: int) -> None:
    base.caller_stream = lambda device: _Stream()  # type: ignore[assignment, return-value]
    gather = HierarchicalAllGather()
    gather_ones(gather, 5)
    early, late = _Event(), _Event()
    works = [CollectiveWork([torch.empty(1)], gather._check_enqueued, event) for event in (early, late)]
    began = time.monotonic()
    with pytest.raises(PeerTimeout, match="expected the operation to end within 0:00:00.200000"):
        works[0].wait(datetime.timedelta(seconds=0.2))
    assert 0.2 <= time.monotonic() - began < 5
    assert works[0].exception() is None and not works[0].is_success()
    early.over = True
    assert works[0].wait(datetime.timedelta(seconds=0.2)) and works[0].is_success()
    dist.barrier()
    gather.abort("no room")
    late.over = True
    assert isinstance(works[1].exception(), PeerAborted) and works[1].is_completed() and not works[1].is_success()
    assert works[0].is_success() and works[0].exception() is None, "it was over before the fault"
    with pytest.raises(PeerAborted):
        works[1].wait(datetime.timedelta(seconds=0.2))
    gather.close()


@pytest.mark.deadline
def test_a_work_keeps_its_timeout_and_says_how_the_operation_ended() -> None:
    values(run_ranks(2, _works_as_on_gpus))


def _different_sizes(rank: int, what: str) -> str:
    gather, scatter = HierarchicalAllGather(), HierarchicalReduceScatter()
    gather_ones(gather, 10)
    scatter_ones(scatter, 10)
    with pytest.raises((DisagreementError, PeerAborted)) as caught:
        if what == "bytes of a shard":
            gather_ones(gather, 20 if rank == 1 else 10)
        elif what == "nothing to gather":
            gather_ones(gather, 0 if rank == 1 else BIG)
        elif what == "nothing to sum":
            scatter_ones(scatter, 0 if rank == 1 else 10)
        elif what == "element":
            dtype = torch.float16 if rank == 1 else torch.bfloat16
            scatter(torch.empty(8, dtype=dtype), torch.ones(8 * SIZE, dtype=dtype))
        else:
            kept = [gather.allocate(50 if rank == 1 else 60, torch.uint8) for _ in range(3)]
            del kept
    gather.close()
    scatter.close()
    nothing_left_behind()
    return str(caught.value)


@pytest.mark.parametrize("what", ["bytes of a shard", "element", "bytes", "nothing to gather", "nothing to sum"])
def test_ranks_that_disagree_on_one_call(what: str) -> None:
    for said in values(run_ranks(SIZE, _different_sizes, what)):
        field = "bytes of a shard" if "nothing" in what else what
        assert "ranks disagree on" in said and f"{field} is" in said and "on rank 1" in said, said


def _different_objects(rank: int) -> list[str]:
    said = []
    odd: list[Any] = [
        HierarchicalAllGather(num_buffers=2 if rank else 3),
        HierarchicalReduceScatter(sms=24 if rank else 64),
    ]
    for made in odd:
        with pytest.raises(DisagreementError) as caught:
            made.allocate(10, torch.uint8)
        said.append(str(caught.value))
    return said


def test_ranks_that_disagree_on_the_object() -> None:
    for said in values(run_ranks(2, _different_objects)):
        assert all("ranks disagree on the device, num_buffers, path and sms: cpu" in one for one in said)
        assert "64" in said[1] and "24" in said[1]


def _unknown_host(rank: int) -> str:
    if rank == 1:
        topology.host_identity = lambda *_: "localhost"
    with pytest.raises(ValueError) as caught:
        gather_ones(HierarchicalAllGather(), 10)
    return str(caught.value)


def test_a_rank_that_does_not_know_its_host() -> None:
    for said in values(run_ranks(2, _unknown_host)):
        assert "expected ranks that know their host, got rank 1 on 'localhost'" in said
        assert "set EP_PLUGIN_RANKS_PER_NODE" in said


def _uneven_nodes(rank: int) -> str:
    topology.host_identity = lambda *_: f"machine{rank // 2}/boot"
    with pytest.raises(NotSupported) as caught:
        gather_ones(HierarchicalAllGather(), 10)
    return str(caught.value)


def test_nodes_of_different_sizes_are_refused_by_name() -> None:
    for said in values(run_ranks(3, _uneven_nodes)):
        assert "nodes with different numbers of ranks are not supported" in said and "machine1" in said
