"""The CUDA kernels of low-latency dispatch and combine on CPUs, with the cases of the CPU and GPU tests."""

from __future__ import annotations

import dataclasses
import functools
import random
import signal
import unittest.mock
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ep_plugin import MoECommunicator
from ep_plugin.errors import PeerTimeout
from ep_plugin.moe.low_latency import sms
from ep_plugin.moe.low_latency.combine import LowLatencyCombine
from ep_plugin.moe.low_latency.dispatch import LowLatencyDispatch
from tests.bench import test_stand_in
from tests.faults import test_low_latency as faults
from tests.faults import test_low_latency_arguments as fault_arguments
from tests.faults import test_low_latency_hooks as hooks
from tests.faults import test_low_latency_masks as fault_masks
from tests.gpu import low_latency, low_latency_graphs, test_deep_ep
from tests.moe import low_latency_cases as cases
from tests.moe import test_low_latency as whole
from tests.moe import test_low_latency_halves as halves
from tests.moe import test_statistics as statistics
from tests.moe.moe_cases import Case, make_inputs, named, poisoned, same_bits
from tests.ranks import run_ranks, values

SIMT = {"EP_TEST_KERNELS": "simt"}


def _on_ranks(size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    return values(run_ranks(size, function, size, *args, timeout_s=240, env=SIMT))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*low_latency.WHOLE, *low_latency.HALVES])
def test_cases(name: str) -> None:
    size = low_latency.RANKS.get(name, 2)
    _on_ranks(size, low_latency.run_case, name)


def _on_ctas(rank: int, size: int, ctas: int) -> None:
    sms.for_device = lambda device, sharing: ctas
    for name in ("few pairs", "few and many pairs", "groups and few pairs", "many experts of few tokens"):
        with named(name), poisoned(), cases.low_latency(whole.SHAPES[name]) as comm:
            for seed in range(2):
                cases.round_trip(comm, make_inputs(dataclasses.replace(whole.SHAPES[name], seed=seed)))


@pytest.mark.slow
@pytest.mark.parametrize("ctas", [1, 7, 20])
def test_numbers_of_ctas(ctas: int) -> None:
    """Fewer than the ranks, and more."""
    _on_ranks(3, _on_ctas, ctas)


@pytest.mark.slow
def test_no_word_of_a_pair_grows_old() -> None:
    _on_ranks(2, halves._words_stay_young, True)


def _forms(rank: int, size: int, rounds: int) -> None:
    """Two operations of a kind at a time. Each rank runs each of them whole or in halves, which it receives in either
    order, and counts its waits or not."""
    sms.for_device = lambda device, sharing: 3
    mine, shapes = random.Random(rank), random.Random(7)
    case = Case(tokens=(100,) * size, num_experts=2 * size, topk=3, dtype=torch.bfloat16, hidden=40)

    def run(comm: MoECommunicator, made: list[Callable[..., Any]]) -> list[Any]:
        results, halves = {}, []
        for number, make in enumerate(made):
            operation = make(wait_cost=torch.zeros(size, dtype=torch.int64) if mine.random() < 0.3 else None)
            if mine.random() < 0.5:
                results[number] = comm.in_flight.run(operation)
            else:
                halves.append((number, comm.in_flight.start(operation)))
        for number, started in mine.sample(halves, len(halves)):
            results[number] = comm.in_flight.collect(started.number)
        return [results[number] for number in range(len(made))]

    with cases.low_latency(case, timeout_s=60) as comm:
        for number in range(rounds):
            drawn = [tuple(shapes.choice((0, 1, 85, 86, 100)) for _ in range(size)) for _ in range(2)]
            inputs = [make_inputs(dataclasses.replace(case, tokens=tokens, seed=number)) for tokens in drawn]
            with named(number):
                given = [(one.x[rank], one.ids[rank], None, None, None, None, [], comm.number) for one in inputs]
                out = run(comm, [functools.partial(LowLatencyDispatch, comm.engine, *one) for one in given])
                y = [cases.expert_results(one, out[0][0].shape[1]) for one in inputs]
                given = [
                    (y[i][rank], one.weights[rank], None, None, False, list(out[i][8:]), comm.number)
                    for i, one in enumerate(inputs)
                ]
                sums = run(comm, [functools.partial(LowLatencyCombine, comm.engine, *one) for one in given])
                for i, one in enumerate(inputs):
                    rows = cases.expected_rows(one, rank, out[i][0].shape[1])
                    same_bits("tokens", out[i][0].flatten(0, 1)[rows.place], rows.tokens)
                    cases.check_sums(one, rank, y[i], sums[i][0])


@pytest.mark.slow
def test_ranks_run_operations_in_different_forms() -> None:
    _on_ranks(3, _forms, 8)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 5])
def test_routings(size: int) -> None:
    _on_ranks(size, low_latency.run_case, "routings")


@pytest.mark.slow
def test_load_statistics() -> None:
    _on_ranks(4, statistics._low_latency)


@pytest.mark.slow
def test_half_precision() -> None:
    _on_ranks(2, low_latency.half_precision)


@pytest.mark.slow
@pytest.mark.parametrize("case", [halves._counters, halves._logfmt, halves._bytes_of_logfmt, halves._epochs_of_32_bits])
def test_parts_of_the_protocol(case: Callable[[int, int], None]) -> None:
    _on_ranks(3, case)


@pytest.mark.slow
def test_every_row_of_many_operations() -> None:
    _on_ranks(3, low_latency.many, 30)


@pytest.mark.slow
def test_ranks_that_share_a_device() -> None:
    test_stand_in.check_rows(_on_ranks(1, test_stand_in.measure)[0])


@pytest.mark.slow
def test_the_steps_that_graphs_replay() -> None:
    assert _on_ranks(2, low_latency_graphs.replayed, 9) == [9, 9]
    assert _on_ranks(2, low_latency_graphs.compared, 6) == [6, 6]


def _options(rank: int, size: int) -> None:
    for name in low_latency_graphs.OPTIONS:
        with named(name):
            low_latency_graphs.replayed_options(rank, size, name, 2)


@pytest.mark.slow
def test_options_that_graphs_replay() -> None:
    _on_ranks(2, _options)


@pytest.mark.slow
def test_statistics_that_graphs_add_to() -> None:
    added = _on_ranks(3, low_latency_graphs.counted, 2)
    del added[low_latency_graphs.LATE]
    assert min(map(min, added)) > low_latency_graphs.LATE_S / 2, added


def test_no_kernel_waits_between_the_halves() -> None:
    _on_ranks(3, low_latency_graphs.sent_alone)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 3])
def test_deepeps_calls(size: int) -> None:
    _on_ranks(size, test_deep_ep.every_low_latency_call)


def _slowly(rank: int, function: Callable[..., Any], *args: Any) -> Any:
    """Fibers are not as fast as GPUs."""
    with unittest.mock.patch.multiple(faults, DEADLINE_S=5.0, GRACE_S=20.0):
        return function(rank, *args)


def _killed(rank: int, gate: str, victim: int) -> PeerTimeout:
    return _slowly(rank, faults._killed, gate, victim)


@pytest.mark.deadline
@pytest.mark.parametrize(("gate", "victim"), [(gate, number % 3) for number, gate in enumerate(faults.GATES)])
def test_survivors_name_the_dead(gate: str, victim: int) -> None:
    outcomes = run_ranks(3, _killed, gate, victim, timeout_s=120, env=SIMT)
    assert outcomes[victim].exitcode == -signal.SIGKILL
    for caught in values([one for rank, one in enumerate(outcomes) if rank != victim]):
        assert caught.rank == victim and caught.step.startswith("ll_")


def _left(rank: int, gate: str) -> None:
    _slowly(rank, faults._left_by_a_fault, gate)


@pytest.mark.deadline
@pytest.mark.parametrize("gate", ["ll_dispatch_send", "ll_combine_send"])
def test_no_results_after_a_fault(gate: str) -> None:
    outcomes = run_ranks(3, _left, gate, timeout_s=120, env=SIMT)
    assert outcomes[0].exitcode == -signal.SIGKILL
    values(outcomes[1:])


def _survive(rank: int, gate: str, victim: int) -> list[int]:
    return _slowly(rank, fault_masks._survive, gate, victim)


@pytest.mark.deadline
@pytest.mark.parametrize(("gate", "victim"), [("ll_dispatch_send", 3), ("ll_combine_send", 1)])
def test_survivors_mask_the_dead_and_go_on(gate: str, victim: int) -> None:
    outcomes = run_ranks(4, _survive, gate, victim, timeout_s=200, env=SIMT)
    masks = values([one for rank, one in enumerate(outcomes) if rank != victim])
    assert masks == [[int(rank == victim) for rank in range(4)]] * 3


@pytest.mark.deadline
@pytest.mark.parametrize(("case", "place"), [(hooks.masked, hooks.BETWEEN[0]), (hooks.killed, hooks.BETWEEN[1])])
def test_two_ranks_that_die_before_their_hooks(case: Callable[..., Any], place: str) -> None:
    outcomes = run_ranks(4, _slowly, case, hooks.OF_FOUR, place, (1, 2), timeout_s=200, env=SIMT)
    for found in hooks.values_of_survivors(outcomes, (1, 2)):
        assert found == [0, 1, 1, 0] if case is hooks.masked else found[0] in (1, 2), found


def _slow_survivor(rank: int) -> list[int]:
    return _slowly(rank, fault_masks._slow_survivor)


@pytest.mark.deadline
def test_a_rank_that_has_waited_for_a_dead_one_is_not_masked() -> None:
    assert values(run_ranks(3, _slow_survivor, timeout_s=120, env=SIMT)[:2]) == [[0, 0, 1]] * 2


@pytest.mark.deadline
def test_a_masked_rank_that_goes_on_changes_no_later_sum(tmp_path: Path) -> None:
    outcomes = run_ranks(3, _late, tmp_path, timeout_s=100, env=SIMT)
    assert values(outcomes) == [([3.0], [0, 0, 1]), None, None]


def _late(rank: int, flags: Path) -> Any:
    with unittest.mock.patch.multiple(faults, DEADLINE_S=8.0):
        return fault_masks._late(rank, flags)


@pytest.mark.parametrize("change", ["row bytes", "top-k"])
def test_calls_that_differ_are_named(change: str) -> None:
    for said in values(run_ranks(2, fault_arguments._differ, change, timeout_s=120, env=SIMT)):
        assert change in said


def _bad_ids(rank: int, size: int) -> None:
    case = faults.CASE
    inputs = make_inputs(case)
    with cases.low_latency(case, timeout_s=60) as comm:
        _, handle = comm.dispatch(inputs.x[rank], inputs.ids[rank])
        dist.barrier()  # an abort by rank 0 must not end another rank's first dispatch
        if rank == 0:
            handle.topk_ids[5, 1] = case.num_experts  # the host checks the caller's ids alone
        with pytest.raises(Exception, match=r"expert id below 6, got 6 at token 5 of rank 0|rank 0"):
            for _ in range(2):
                comm.dispatch(inputs.x[rank], inputs.ids[rank], previous_handle=handle)


def test_bad_ids() -> None:
    _on_ranks(3, _bad_ids)
