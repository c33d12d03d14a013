"""Ranks that die in a half of a low-latency call of ``deep_ep.Buffer``, or between its send half and its hook."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from ep_plugin import MoECommunicator, deep_ep
from ep_plugin.errors import PeerTimeout
from tests.faults import test_low_latency as faults
from tests.faults.fault_cases import finish, nothing_left_behind, signal_self
from tests.integrations.deep_ep_cases import Case, make, on
from tests.integrations.deep_ep_low_latency import check_combine, check_dispatch, results_of
from tests.moe.moe_cases import named
from tests.ranks import run_ranks, values

OF_THREE = Case(tokens=(20, 100, 66), hidden=64, experts_per_rank=2, topk=4)  # few and many pairs
OF_FOUR = dataclasses.replace(OF_THREE, tokens=(20, 100, 66, 5))
MOST, PATIENT_S = 100, 60
BETWEEN = ("after the send half of dispatch", "after the send half of combine")
PLACES = {"ll_dispatch_send": 2, "ll_combine_send": 0, BETWEEN[0]: 1, BETWEEN[1]: 2}
"""Where a rank of three dies: at a gate of a kernel, or between two halves. And which rank."""


class Calls:
    """Dispatches and combines in halves, by a Buffer of this rank.

    The rank dies in its second round trip, if `dies` names a place.
    """

    def __init__(self, rank: int, case: Case, device: torch.device | str, dies: str, shrink: bool) -> None:
        self.rank, self.case, self.device = rank, case, device
        self.buffer = deep_ep.Buffer(
            dist.group.WORLD, low_latency_mode=True, explicitly_destroy=True, enable_shrink=shrink
        )
        self._dies = ""
        self.round_trip(0)
        self._dies = dies
        if dies.startswith("ll_"):
            faults._die_in(self.comm, dies)
        self.comm.engine.exchange.barrier("test")  # so that those who die are late alone
        self.set_deadline(faults.DEADLINE_S)

    @property
    def comm(self) -> MoECommunicator:
        return next(iter(self.buffer._low_latency.values()))

    def set_deadline(self, seconds: float) -> None:
        self.comm.engine.comm.timeout_ns = int(seconds * 1e9)

    def round_trip(self, seed: int, gone: tuple[int, ...] = (), lost: tuple[int, ...] = (), exact: bool = True) -> None:
        """A dispatch and a combine. gone: ranks that are masked before it. lost: those whose rows do not come back.
        exact: whether its results are compared."""
        case = dataclasses.replace(self.case, seed=seed)
        case = dataclasses.replace(case, tokens=tuple(0 if r in gone else T for r, T in enumerate(case.tokens)))
        sent, rank = make(case), self.rank
        there = on(str(self.device), sent)
        given = there.x[rank], there.ids[rank]
        results = self.buffer.low_latency_dispatch(*given, MOST, case.num_experts, use_fp8=False, return_recv_hook=True)
        self._receive(results[4], BETWEEN[0])
        y = results_of(case, sent, rank, len(case.tokens) * MOST)
        combine = self.buffer.low_latency_combine(
            y.to(self.device), there.ids[rank], there.weights[rank], results[2], return_recv_hook=True
        )
        self._receive(combine[2], BETWEEN[1])
        if exact:
            check_dispatch(case, sent, rank, MOST, tree_map_only(torch.Tensor, torch.Tensor.cpu, results), None)
            away = torch.tensor([expert // case.experts_per_rank in gone + lost for expert in range(case.num_experts)])
            now = sent.ids[rank].masked_fill(away[sent.ids[rank].clamp(min=0)], -1)
            check_combine(case, sent, rank, len(case.tokens) * MOST, now, combine[0].cpu())

    def _receive(self, hook: Any, place: str) -> None:
        finish(self.comm)
        if self._dies == place:
            signal_self(9)
        hook()
        finish(self.comm)


def killed(rank: int, case: Case, place: str, victims: tuple[int, ...], device: str = "cpu") -> tuple[Any, float]:
    """The rank that a survivor names, and the seconds until then."""
    calls = Calls(rank, case, device, place if rank in victims else "", shrink=False)
    began = time.monotonic()
    with pytest.raises(PeerTimeout) as caught:
        for seed in (1, 2):
            calls.round_trip(seed)
    took = time.monotonic() - began
    with pytest.raises(PeerTimeout):
        calls.round_trip(3)
    calls.buffer.destroy()
    del calls
    nothing_left_behind()
    return caught.value.rank, took


def masked(rank: int, case: Case, place: str, victims: tuple[int, ...], device: str = "cpu") -> list[int]:
    """The ranks that a survivor has masked, once its results are right again: at once, where all has been sent."""
    calls = Calls(rank, case, device, place if rank in victims else "", shrink=True)
    with named("the call in which they die"):
        calls.round_trip(1, lost=victims if place == BETWEEN[0] else (), exact=place in BETWEEN)
    with named("the next call"):
        knows = place == BETWEEN[0]
        calls.round_trip(2, gone=victims if knows else (), exact=knows)
    calls.set_deadline(PATIENT_S)
    for seed in range(3, 6):
        with named(seed):
            calls.round_trip(seed, gone=victims)
    status = torch.zeros(len(case.tokens), dtype=torch.int32, device=device)
    calls.buffer.low_latency_query_mask_buffer(status)
    calls.buffer.destroy()
    return status.tolist()


@pytest.mark.deadline
@pytest.mark.parametrize("place", PLACES)
def test_a_killed_rank_is_named(place: str) -> None:
    victim = PLACES[place]
    outcomes = run_ranks(3, killed, OF_THREE, place, (victim,))
    assert outcomes.pop(victim).exitcode == -9
    for named_rank, seconds in values(outcomes):
        assert named_rank == victim and seconds < faults.DEADLINE_S + faults.GRACE_S


@pytest.mark.deadline
@pytest.mark.parametrize("place", PLACES)
def test_survivors_mask_a_killed_rank_and_go_on(place: str) -> None:
    victim = PLACES[place]
    outcomes = run_ranks(3, masked, OF_THREE, place, (victim,), timeout_s=90)
    assert outcomes.pop(victim).exitcode == -9
    assert values(outcomes) == [[int(rank == victim) for rank in range(3)]] * 2


@pytest.mark.deadline
@pytest.mark.parametrize("place", BETWEEN)
def test_two_ranks_that_die_at_once(place: str) -> None:
    dead = values_of_survivors(run_ranks(4, killed, OF_FOUR, place, (1, 2)), (1, 2))
    for named_rank, seconds in dead:
        assert named_rank in (1, 2) and seconds < faults.DEADLINE_S + faults.GRACE_S
    assert values_of_survivors(run_ranks(4, masked, OF_FOUR, place, (1, 2)), (1, 2)) == [[0, 1, 1, 0]] * 2


def values_of_survivors(outcomes: list[Any], victims: tuple[int, ...]) -> list[Any]:
    """What the others returned. The victims have been killed."""
    assert [outcomes[victim].exitcode for victim in victims] == [-9] * len(victims)
    return values([outcome for rank, outcome in enumerate(outcomes) if rank not in victims])
