"""Masks of low-latency communicators: survivors mask a rank that is gone, and go on without it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ep_plugin import _C, MoECommunicator
from ep_plugin.errors import EpPluginError
from tests.faults import test_low_latency as faults
from tests.faults.fault_cases import at_gate
from tests.faults.test_low_latency import CASE, GATES, OF_FOUR, SIZE, TWO
from tests.moe.low_latency_cases import check_rows, check_sums, expert_results, low_latency, round_trip
from tests.moe.moe_cases import Case, Inputs, make_inputs, named
from tests.ranks import run_ranks, values


def _without(inputs: Inputs, *gone: int) -> Inputs:
    """The inputs as survivors should see them: the ranks `gone` have no tokens, and their experts none either."""
    case = inputs.case
    per_rank = case.num_experts // case.size
    tokens = tuple(0 if rank in gone else count for rank, count in enumerate(case.tokens))
    away = torch.tensor([expert // per_rank in gone for expert in range(case.num_experts)])
    ids = [one.masked_fill((one >= 0) & away[one.clamp(min=0)], -1) for one in inputs.ids]
    cut = {
        name: [t[:0] if rank in gone else t for rank, t in enumerate(given)]
        for name, given in {"x": inputs.x, "ids": ids, "weights": inputs.weights, "bias": inputs.bias}.items()
    }
    return Inputs(case=dataclasses.replace(case, tokens=tokens), **cut)


def _check_without(comm: MoECommunicator, left: Inputs, out: Any, handle: Any, weights: torch.Tensor) -> None:
    """A dispatch, and the combine after it, are those of `left`, the inputs without the rank that is gone."""
    check_rows(comm, out, left)
    y = expert_results(left, out.tokens.shape[1])
    check_sums(left, comm.rank, y, comm.combine(y[comm.rank], handle, weights=weights))


def _survive(rank: int, gate: str, *victims: int) -> list[int]:
    case = OF_FOUR
    comm = low_latency(case, timeout_s=60, shrink=True)
    round_trip(comm, make_inputs(case))
    if rank in victims:
        faults._die_in(comm, gate)
    comm.engine.exchange.barrier("test")  # so that the victims alone are late
    patient_ns, comm.engine.comm.timeout_ns = comm.engine.comm.timeout_ns, int(faults.DEADLINE_S * 1e9)
    for number in range(6):
        if number == 2:  # they have been masked
            comm.engine.comm.timeout_ns = patient_ns
        inputs = make_inputs(dataclasses.replace(case, seed=number))
        out, handle = comm.dispatch(inputs.x[rank], inputs.ids[rank])
        y = expert_results(inputs, out.tokens.shape[1])[rank]
        if number < 2:
            comm.combine(torch.nan_to_num(y), handle, weights=inputs.weights[rank])
            continue
        left = _without(inputs, *victims)
        with named((number, comm.rank_mask.tolist())):
            _check_without(comm, left, out, handle, inputs.weights[rank])
    mask = comm.rank_mask.tolist()
    comm.close()
    return mask


@pytest.mark.deadline
@pytest.mark.parametrize(("gate", "victim"), [(gate, 3 - number) for number, gate in enumerate(GATES)])
def test_survivors_mask_a_killed_rank_and_go_on(gate: str, victim: int) -> None:
    outcomes = run_ranks(4, _survive, gate, victim, timeout_s=90)
    expected = [int(rank == victim) for rank in range(4)]
    for rank, outcome in enumerate(outcomes):
        if rank != victim:
            assert outcome.error is None, outcome.trace
            assert outcome.value == expected


@pytest.mark.deadline
@pytest.mark.parametrize("gate", TWO)
def test_survivors_mask_two_killed_ranks_and_go_on(gate: str) -> None:
    outcomes = run_ranks(4, _survive, gate, *TWO[gate], timeout_s=90)
    masks = values([outcome for rank, outcome in enumerate(outcomes) if rank not in TWO[gate]])
    assert masks == [[int(rank in TWO[gate]) for rank in range(4)]] * 2


def _slow_survivor(rank: int) -> list[int]:
    """Rank 2 is dead, and for that rank 0 is late: it comes late to a dispatch in which it waits for rank 2, and so to
    the combine after it, for which rank 1 waits. Returns whom the others mask."""
    inputs = make_inputs(CASE)
    comm = low_latency(CASE, timeout_s=60, shrink=True)
    round_trip(comm, inputs)
    comm.engine.exchange.barrier("test")
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    comm.engine.comm.timeout_ns = int(faults.DEADLINE_S * 1e9)
    time.sleep(0.5 * faults.DEADLINE_S if rank == 0 else 0)
    out, handle = comm.dispatch(inputs.x[rank], inputs.ids[rank])
    time.sleep(0.75 * faults.DEADLINE_S if rank == 0 else 0)  # then rank 1 has waited for longer than its deadline
    _check_without(comm, _without(inputs, 2), out, handle, inputs.weights[rank])
    mask = comm.rank_mask.tolist()
    comm.close()
    return mask


@pytest.mark.deadline
def test_a_rank_that_has_waited_for_a_dead_one_is_not_masked() -> None:
    assert values(run_ranks(SIZE, _slow_survivor)[:2]) == [[0, 0, 1]] * 2


def _wait_for(flag: Path) -> None:
    ends = time.monotonic() + 40
    while not flag.exists():
        assert time.monotonic() < ends, flag
        time.sleep(0.02)


def _late(rank: int, flags: Path) -> tuple[list[float], list[int]] | None:
    """Rank 2 stops in a combine before it sends rows, is masked, and sends them when rank 1's are on their way in a
    later combine. What rank 0 gets then: its sums, and who is masked."""
    case = Case(tokens=(4, 0, 0), num_experts=3, topk=1, dtype=torch.float32, hidden=4096, drop=0.0)
    inputs, ones = make_inputs(case), torch.ones(case.tokens[rank], 1)
    comm = low_latency(case, timeout_s=60, shrink=True)

    def dispatched(to: int) -> tuple[torch.Tensor, Any]:
        out, handle = comm.dispatch(inputs.x[rank], torch.full_like(inputs.ids[rank], to))
        return torch.full_like(out.tokens, 3.0), handle

    def combine(to: int) -> None:
        y, handle = dispatched(to)
        comm.combine(y, handle, weights=ones)

    combine(2)
    y, handle = dispatched(2)
    comm.engine.exchange.barrier("test")  # so that rank 2 alone is late
    if rank == 2:
        comm.engine.comm.gate = _C.Step.LL_COMBINE_SEND
        at_gate(comm, lambda: (_wait_for(flags / "go"), _C.open_gate(comm.engine.boards.address)))  # type: ignore[func-returns-value, arg-type]
        with contextlib.suppress(EpPluginError):
            comm.combine(y + 4, handle, weights=ones)
        (flags / "gone").touch()
        return None
    patient_ns, comm.engine.comm.timeout_ns = comm.engine.comm.timeout_ns, int(faults.DEADLINE_S * 1e9)
    comm.combine(y, handle, weights=ones)
    if rank == 0:  # the other one waits for rank 2 in the dispatch that comes now
        comm.engine.comm.timeout_ns = patient_ns
        (flags / "masked").touch()
    _wait_for(flags / "masked")
    combine(1)
    comm.engine.comm.timeout_ns = patient_ns
    y, handle = dispatched(1)
    work = comm.combine_async(y, handle, ones)
    if rank == 1:
        work.wait()
        (flags / "sent").touch()
        _wait_for(flags / "gone")
        return None
    _wait_for(flags / "sent")
    (flags / "go").touch()
    _wait_for(flags / "gone")
    return work.wait().unique().tolist(), comm.rank_mask.tolist()


@pytest.mark.deadline
def test_a_masked_rank_that_goes_on_changes_no_later_sum(tmp_path: Path) -> None:
    assert values(run_ranks(SIZE, _late, tmp_path, timeout_s=60)) == [([3.0], [0, 0, 1]), None, None]


def _masked_by_hand(rank: int, size: int) -> None:
    """Rank 2 is masked by rank 0 alone. The mask travels to rank 1, and rank 2 masks rank 0, which sends it nothing."""
    inputs = make_inputs(CASE)
    with low_latency(CASE, shrink=True, timeout_s=20) as comm:
        round_trip(comm, inputs)
        comm.engine.exchange.barrier("test")  # a busy machine may take longer than the deadline to construct it
        comm.engine.comm.timeout_ns = int(faults.DEADLINE_S * 1e9)
        if rank == 0:
            comm.rank_mask[2] = 1
        if rank == 2:
            comm.dispatch(inputs.x[rank], inputs.ids[rank])
            assert comm.rank_mask[0] == 1
            return
        comm.dispatch(inputs.x[rank], inputs.ids[rank])
        left = _without(inputs, 2)
        out, _ = comm.dispatch(inputs.x[rank], inputs.ids[rank])
        check_rows(comm, out, left)
        assert comm.rank_mask.tolist() == [0, 0, 1]


@pytest.mark.deadline
def test_masks_travel() -> None:
    values(run_ranks(SIZE, _masked_by_hand, SIZE))
