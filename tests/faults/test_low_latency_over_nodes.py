"""Low latency over emulated nodes when ranks die, abort, disagree, or send garbage: every rank of every node raises in
time, names the rank, closes, and leaves nothing behind."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ep_plugin import _C, MoECommunicator
from ep_plugin.errors import EpPluginError, PeerAborted, PeerTimeout
from tests.faults.fault_cases import die_at_gate, nothing_left_behind, set_deadline, signal_self
from tests.faults.test_across_nodes import AT_ONCE_S, DEADLINE_S, PATIENCE_S, TWO_NODES, _assert_all_name
from tests.moe.low_latency_cases import low_latency, round_trip
from tests.moe.moe_cases import Case, make_inputs
from tests.ranks import run_ranks, values

SIZE = 4
CASE = Case(tokens=(20, 12, 66, 90), num_experts=8, topk=4, drop=0.0)
LONG = os.environ.get("EP_TEST_LONG") == "1"
GATES = ("ll_dispatch_send", "ll_dispatch_recv", "ll_combine_send", "ll_combine_recv")
LEGS = ("rows", "weights", "sums")
MOMENTS = [*GATES, *(f"before {leg} {step}" for leg in LEGS for step in ("start", "wait"))]


def _before(comm: MoECommunicator, step: str, number: int, act: Callable[[], None]) -> None:
    """Calls `act` before the call of this number, 0 for the next, of a method of the communicator's legs."""
    legs, calls = comm.engine._legs[0], iter(range(number + 1))
    known = getattr(legs, step)

    def call(*args: Any) -> Any:
        if next(calls, None) == number:
            act()
        return known(*args)

    setattr(legs, step, call)


def _opened(case: Case = CASE) -> tuple[MoECommunicator, Any]:
    comm, inputs = low_latency(case, timeout_s=60), make_inputs(case)
    round_trip(comm, inputs)
    return comm, inputs


def _calls(comm: MoECommunicator, inputs: Any) -> float:
    """Round trips until one raises. Returns when its last call began."""
    rank = comm.rank
    for _ in range(3):
        began = time.monotonic()
        out, handle = comm.dispatch(inputs.x[rank], inputs.ids[rank])
        began = time.monotonic()
        comm.combine(out.tokens, handle, weights=inputs.weights[rank])
    return began


def _ends(comm: MoECommunicator, inputs: Any, error: EpPluginError) -> None:
    """Later calls raise the same error at once, and nothing is left after close."""
    for call in (comm.check, lambda: _calls(comm, inputs)):
        with pytest.raises(type(error)) as again:
            call()
        assert str(again.value) == str(error)
    comm.close()
    nothing_left_behind()


def _loses(rank: int, victim: int, when: str, case: Case = CASE) -> tuple[EpPluginError, float]:
    comm, inputs = _opened(case)
    if rank == victim and when in GATES:
        comm.engine.comm.gate = _C.Step[when.upper()]
        die_at_gate(comm)
    elif rank == victim:
        _, leg, step = when.split()
        _before(comm, step, LEGS.index(leg), lambda: signal_self(signal.SIGKILL))
    dist.barrier()  # the deadline is for what follows
    set_deadline(comm.engine, DEADLINE_S)
    began = time.monotonic()
    with pytest.raises((PeerTimeout, PeerAborted)) as caught:
        began = _calls(comm, inputs)
    error, took = caught.value, time.monotonic() - began
    del caught
    _ends(comm, inputs, error)
    return error, took


@pytest.mark.deadline
@pytest.mark.parametrize("when", MOMENTS)
def test_a_killed_rank_is_named_by_every_survivor(when: str) -> None:
    _assert_all_name(SIZE, 3, run_ranks(SIZE, _loses, 3, when, env=TWO_NODES))


@pytest.mark.deadline
@pytest.mark.parametrize("when", MOMENTS if LONG else ["before rows wait", "before sums start"])
def test_a_killed_node_is_named(when: str) -> None:
    case = dataclasses.replace(CASE, tokens=(20, 66, 90), num_experts=6)
    _assert_all_name(3, 1, run_ranks(3, _loses, 1, when, case, env={"EP_PLUGIN_RANKS_PER_NODE": "1"}))


def _aborts(rank: int, half: str) -> tuple[float, PeerAborted]:
    """Rank 1 aborts while the others wait for it."""
    comm, inputs = _opened()
    set_deadline(comm.engine, PATIENCE_S)
    given = inputs.x[rank], inputs.ids[rank]
    dist.barrier()
    began = time.monotonic()
    if rank == 1:
        threading.Event().wait(0.2)
        comm.abort("MemoryError: no room")
    with pytest.raises(PeerAborted, match="rank 1 aborted: MemoryError: no room") as caught:
        if half == "whole":
            comm.dispatch(*given)
        comm.dispatch_async(*given).wait()
    took = time.monotonic() - began
    error = caught.value
    del caught
    _ends(comm, inputs, error)
    return took, error


@pytest.mark.parametrize("half", ["whole", "halves"])
def test_an_abort_ends_the_waits_of_the_other_node(half: str) -> None:
    for took, error in values(run_ranks(SIZE, _aborts, half, env=TWO_NODES)):
        assert took < AT_ONCE_S and (error.rank, error.reason) == (1, "MemoryError: no room")


def _closes_early(rank: int, first_node: bool) -> None:
    """The memory of un-received operations stays, and another communicator goes on over the same rail.

    first_node: node 0 closes before the other one has sent anything.
    """
    (first, inputs), (second, _) = _opened(), _opened()
    if not first_node or rank < 2:
        works = [first.dispatch_async(inputs.x[rank], inputs.ids[rank]) for _ in range(2)]
        if first_node:
            first.close()
    dist.barrier()
    if first_node and rank >= 2:
        works = [first.dispatch_async(inputs.x[rank], inputs.ids[rank]) for _ in range(2)]
    first.close()
    dist.barrier()
    for _ in range(3):
        round_trip(second, inputs)
    second.close()
    del works


@pytest.mark.parametrize("first_node", [False, True])
def test_a_close_with_operations_under_way(first_node: bool) -> None:
    values(run_ranks(SIZE, _closes_early, first_node, env=TWO_NODES))


# -- disagreement and garbage ------------------------------------------------------------------------------------------

DIFFERENT: dict[str, tuple[str, Callable[[Any, bool], dict[str, Any]]]] = {
    "row bytes": ("row bytes is", lambda x, odd: {"x": x[:, :8].contiguous() if odd else x}),
    "dtype": ("dtype is", lambda x, odd: {"x": x.view(torch.int32) if odd else x}),
    "capacity": ("most tokens of a rank is", lambda x, odd: {"capacity": 4 * (95 if odd else 90)}),
}


def _disagrees(rank: int, name: str, odd_node: int) -> str:
    comm, inputs = _opened(dataclasses.replace(CASE, tokens=(20, 12, 66, 95)))
    set_deadline(comm.engine, PATIENCE_S)
    x = inputs.x[rank][:90]
    given = {"x": x, "topk_ids": inputs.ids[rank][:90]} | DIFFERENT[name][1](x, rank // 2 == odd_node)
    dist.barrier()  # all are open
    began = time.monotonic()
    with pytest.raises(EpPluginError) as caught:
        comm.dispatch(**given)
        while time.monotonic() < began + PATIENCE_S:
            comm.check()
    assert time.monotonic() - began < AT_ONCE_S
    error = caught.value
    del caught
    _ends(comm, inputs, error)
    return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("odd_node", [0, 1])
@pytest.mark.parametrize("name", DIFFERENT)
def test_nodes_that_disagree_all_say_so(name: str, odd_node: int) -> None:
    """Ranks of a node agree, so the difference shows in the legs alone. They may be longer than a rank expects."""
    for said in values(run_ranks(SIZE, _disagrees, name, odd_node, env=TWO_NODES)):
        assert re.search(f"DisagreementError.*{DIFFERENT[name][0]}", said), said


def _other_handle(rank: int) -> str:
    """Node 1 combines by the handle of another dispatch."""
    comm, inputs = _opened()
    set_deadline(comm.engine, PATIENCE_S)
    x, ids = inputs.x[rank], inputs.ids[rank]
    (out, first), (_, second) = comm.dispatch(x, ids), comm.dispatch(x[1:], ids[1:])
    handle = second if rank >= 2 else first
    dist.barrier()
    began = time.monotonic()
    with pytest.raises(EpPluginError) as caught:
        comm.combine(out.tokens, handle)
        while time.monotonic() < began + PATIENCE_S:
            comm.check()
    assert time.monotonic() - began < AT_ONCE_S
    error = caught.value
    del caught
    _ends(comm, inputs, error)
    return f"{type(error).__name__}: {error}"


def test_nodes_that_combine_by_other_handles_say_so() -> None:
    for said in values(run_ranks(SIZE, _other_handle, env=TWO_NODES)):
        assert re.search(r"DisagreementError.*number of tokens is \d+ on rank \d, \d+ on rank \d", said), said


# What comes from rank 2 with its rows: the int32 word of the leg, the value, and what the error says. Words 12 to 15
# are the epoch, the kind and the number of rows. Then come int16 counts of 4 experts, at byte 64, and rows, at byte 80.
GARBAGE: dict[str, tuple[Any, ...]] = {
    "an old epoch": (12, 1),
    "another kind": (14, 2),
    "a negative number of rows": (15, -1, "got -1"),
    "more rows than a rank may have": (15, 91, "expected at most 90, got 91"),
    "more tokens than a rank may have": (8, 5000, "expected at most 90, got 5000"),
    "another count": (16, 7),
    "a large count": (17, -1),
    "a negative token": (20, -1),
    "a token that is not there": (20, 70_000),
    "other experts": (21, 0),
    "other positions": (24, 0x00050005),
    "large positions": (24, -1),
}


def _garbled(rank: int, name: str) -> str:
    comm, inputs = _opened()
    set_deadline(comm.engine, PATIENCE_S)
    if rank == 2:
        word, value, *_ = GARBAGE[name]
        legs = comm.engine._legs[0]
        start = legs.start

        def garbled(leg: int, slot: int, sends: Any, receives: Any) -> Any:
            for _, begin, _ in sends:
                legs._block[begin : begin + 128].view(torch.int32)[word] = value
            return start(leg, slot, sends, receives)

        legs.start = garbled
    dist.barrier()
    began = time.monotonic()
    with pytest.raises(EpPluginError) as caught:
        comm.dispatch(inputs.x[rank], inputs.ids[rank])
        while time.monotonic() < began + PATIENCE_S:
            comm.check()
    assert time.monotonic() - began < AT_ONCE_S, name
    error = caught.value
    del caught
    comm.close()
    nothing_left_behind()
    return str(error)


@pytest.mark.slow
@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_in_a_leg_is_found(name: str) -> None:
    for said in values(run_ranks(SIZE, _garbled, name, env=TWO_NODES)):
        assert re.search(r"rank [02]\b", said) and all(text in said for text in GARBAGE[name][2:]), said
