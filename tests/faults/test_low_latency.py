"""Faults of low-latency communicators: ranks that die in each half, what their operations leave, and aborts."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import pytest
import torch

from ep_plugin import _C, MoECommunicator
from ep_plugin.errors import PeerAborted, PeerTimeout
from ep_plugin.moe.layout import DispatchResult
from ep_plugin.moe.low_latency.combine import LowLatencyCombine
from ep_plugin.moe.low_latency.dispatch import LowLatencyDispatch
from tests.faults.fault_cases import at_gate, die_at_gate, finish, nothing_left_behind
from tests.moe.low_latency_cases import low_latency, round_trip
from tests.moe.moe_cases import Case, make_inputs
from tests.ranks import run_ranks, values

DEADLINE_S = 2.0
GRACE_S = 5.0
SIZE = 3
CASE = Case(tokens=(20, 12, 66), num_experts=6, topk=4, drop=0.0)
OF_FOUR = dataclasses.replace(CASE, tokens=(20, 12, 66, 5), num_experts=8)
GATES = ("ll_dispatch_send", "ll_dispatch_recv", "ll_combine_send", "ll_combine_recv")


def _die_in(comm: MoECommunicator, gate: str) -> None:
    """This process ends when a later kernel comes to the gate. The first operation has been before."""
    comm.engine.comm.gate = _C.Step[gate.upper()]
    die_at_gate(comm)


def _killed(rank: int, gate: str, *victims: int, case: Case = CASE) -> PeerTimeout:
    inputs = make_inputs(case)
    comm = low_latency(case, timeout_s=60)
    round_trip(comm, inputs)
    if rank in victims:
        _die_in(comm, gate)
    comm.engine.exchange.barrier("test")  # so that the victims alone are late
    comm.engine.comm.timeout_ns = int(DEADLINE_S * 1e9)
    began = time.monotonic()
    with pytest.raises(PeerTimeout) as caught:
        for _ in range(3):
            began = time.monotonic()
            out, handle = comm.dispatch(inputs.x[rank], inputs.ids[rank])
            began = time.monotonic()
            comm.combine(out.tokens, handle, weights=inputs.weights[rank])
    assert time.monotonic() - began < DEADLINE_S + GRACE_S
    with pytest.raises(PeerTimeout):
        comm.dispatch(inputs.x[rank], inputs.ids[rank])
    comm.close()
    del comm
    nothing_left_behind()
    return caught.value


@pytest.mark.deadline
@pytest.mark.parametrize(("gate", "victim"), [(gate, number % SIZE) for number, gate in enumerate(GATES)])
def test_a_killed_rank_is_named(gate: str, victim: int) -> None:
    outcomes = run_ranks(SIZE, _killed, gate, victim)
    for rank, outcome in enumerate(outcomes):
        if rank == victim:
            assert outcome.exitcode == -9
            continue
        assert outcome.error is None, outcome.trace
        assert outcome.value.rank == victim and outcome.value.step.startswith("ll_"), outcome.value


def _two_killed(rank: int, gate: str, victims: tuple[int, int]) -> PeerTimeout:
    return _killed(rank, gate, *victims, case=OF_FOUR)


TWO = {"ll_dispatch_send": (0, 2), "ll_combine_recv": (1, 3)}


@pytest.mark.deadline
@pytest.mark.parametrize("gate", TWO)
def test_one_of_two_killed_ranks_is_named(gate: str) -> None:
    outcomes = run_ranks(4, _two_killed, gate, TWO[gate])
    for rank, outcome in enumerate(outcomes):
        if rank in TWO[gate]:
            assert outcome.exitcode == -9
            continue
        assert outcome.error is None, outcome.trace
        assert outcome.value.rank in TWO[gate] and outcome.value.step.startswith("ll_"), outcome.value


def _left_by_a_fault(rank: int, gate: str) -> None:
    """Rank 0 dies at the gate. What the others' operations leave says nothing that is wrong."""
    inputs = make_inputs(CASE)
    comm = low_latency(CASE, timeout_s=60)
    round_trip(comm, inputs)
    device = comm.engine.device
    x, ids, weights = (part[rank].to(device) for part in (inputs.x, inputs.ids, inputs.weights))
    given = (x, ids, None, None, None, None, [], comm.number)
    dispatch = LowLatencyDispatch(comm.engine, *given)
    if gate == "ll_dispatch_send":
        started = _fails(comm, dispatch, gate)
        if rank:
            left = DispatchResult(*started.results()[:8])
            assert not left.expert_counts.any() and not left.expert_offsets.any()
        return
    results = comm.in_flight.run(dispatch)
    sums = torch.zeros(CASE.tokens[rank], CASE.hidden, device=device)
    given = (results[0], weights, None, None, False, list(results[8:]), comm.number)
    _fails(comm, LowLatencyCombine(comm.engine, *given, out=sums), gate)
    assert (sums.view(torch.uint8) == 0xFF).all()


def _fails(comm: MoECommunicator, call: Any, gate: str) -> Any:
    if comm.rank == 0:
        _die_in(comm, gate)
    comm.engine.exchange.barrier("test")  # so that the victim alone is late
    comm.engine.comm.timeout_ns = int(DEADLINE_S * 1e9)
    started = None
    with pytest.raises(PeerTimeout):
        started = comm.in_flight.start(call)
        comm.in_flight.collect(started.number)
        finish(comm)
    return started


@pytest.mark.deadline
@pytest.mark.parametrize("gate", ["ll_dispatch_send", "ll_combine_send"])
def test_no_results_after_a_fault(gate: str) -> None:
    outcomes = run_ranks(SIZE, _left_by_a_fault, gate)
    assert outcomes[0].exitcode == -9
    values(outcomes[1:])


def _aborted(rank: int, gate: str) -> str:
    inputs = make_inputs(CASE)
    with low_latency(CASE, timeout_s=60) as comm:
        round_trip(comm, inputs)
        if rank == 0:
            comm.engine.comm.gate = _C.Step[gate.upper()]
            at_gate(comm, lambda: comm.abort("the test says so"))
        began = time.monotonic()
        with pytest.raises(PeerAborted) as caught:
            for _ in range(3):
                out, handle = comm.dispatch(inputs.x[rank], inputs.ids[rank])
                comm.combine(out.tokens, handle, weights=inputs.weights[rank])
        assert time.monotonic() - began < GRACE_S
    return f"{caught.value.rank} {caught.value.reason}"


def test_an_abort_ends_every_wait() -> None:
    for gate in ("ll_dispatch_send", "ll_combine_send"):
        assert values(run_ranks(SIZE, _aborted, gate)) == ["0 the test says so"] * SIZE
