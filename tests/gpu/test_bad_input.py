"""The CPU tests' wrong arguments and disagreements, with tensors on GPUs; two or three ranks may share one."""

from __future__ import annotations

import pytest

from ep_plugin import DispatchLayout
from tests.faults import bad_input_cases as cases
from tests.faults import disagreement_cases as disagreements
from tests.faults import handle_cases as handles
from tests.faults.fault_cases import (
    assert_says_different_order,
    different_order,
    on_cuda,
    open_communicator,
    round_trip,
)
from tests.ranks import run_ranks, values

CHECK_IDS = {"EP_PLUGIN_CHECK_IDS": "1"}
DEADLINE_S = 4.0


@pytest.mark.gpu(1)
@pytest.mark.parametrize("layout", [DispatchLayout.FLAT, DispatchLayout.TOKEN_MAJOR])
def test_wrong_dispatch_arguments(layout: DispatchLayout) -> None:
    outcomes = run_ranks(cases.SIZE, on_cuda, cases.wrong_dispatches, layout, timeout_s=120, env=CHECK_IDS)
    assert values(outcomes) == [len(cases.DISPATCH | cases.DISPATCH_ON_CUDA)] * cases.SIZE


@pytest.mark.gpu(1)
def test_wrong_combine_arguments_and_handles() -> None:
    outcomes = run_ranks(cases.SIZE, on_cuda, cases.wrong_combines, timeout_s=120, env=CHECK_IDS)
    assert values(outcomes) == [len(cases.COMBINE | cases.COMBINE_ON_CUDA)] * cases.SIZE


@pytest.mark.gpu(1)
@pytest.mark.xdist_group("faults")
@pytest.mark.parametrize("plain", ["0", "1"])
@pytest.mark.parametrize("layout", [DispatchLayout.FLAT, DispatchLayout.TOKEN_MAJOR])
def test_contents_of_handles(layout: DispatchLayout, plain: str) -> None:
    env = {"EP_PLUGIN_PLAIN_KERNELS": plain}
    outcomes = run_ranks(2, on_cuda, handles.extremes_are_refused, 2, layout, timeout_s=240, env=env)
    assert values(outcomes)[0] == handles.NUM_EXTREMES
    values(run_ranks(2, on_cuda, handles.ids_beyond_the_last_do_no_harm, 2, layout, timeout_s=90, env=env))


@pytest.mark.gpu(1)
@pytest.mark.xdist_group("faults")
def test_random_words_in_handles() -> None:
    assert values(run_ranks(2, on_cuda, handles.anything_goes, 2, DispatchLayout.FLAT, 9, 30, timeout_s=240))[0] > 5


@pytest.mark.gpu(1)
def test_use_after_close() -> None:
    values(run_ranks(cases.SIZE, on_cuda, cases.use_after_close, timeout_s=90))


def _too_many_experts(rank: int) -> None:
    with pytest.raises(ValueError, match="num_experts: expected at most 7998 on cuda for 2 ranks of a node, got 8000"):
        open_communicator(2, num_experts=8000)
    with open_communicator(2) as comm:
        round_trip(comm)


@pytest.mark.gpu(1)
def test_more_experts_than_a_gpu_counts() -> None:
    values(run_ranks(2, on_cuda, _too_many_experts, timeout_s=90))


@pytest.mark.gpu(1)
def test_ranks_that_disagree_on_the_config() -> None:
    outcomes = run_ranks(disagreements.SIZE, on_cuda, disagreements.configs_differ, timeout_s=120)
    disagreements.assert_configs_named(values(outcomes))


@pytest.mark.gpu(1)
@pytest.mark.xdist_group("faults")
def test_ranks_that_disagree_on_one_call() -> None:
    outcomes = run_ranks(disagreements.SIZE, on_cuda, disagreements.calls_differ, timeout_s=240)
    disagreements.assert_calls_named(values(outcomes))


@pytest.mark.gpu(1)
@pytest.mark.xdist_group("faults")
def test_different_order_on_two_ranks_is_a_timeout_that_says_so() -> None:
    outcomes = run_ranks(2, on_cuda, different_order, DEADLINE_S, timeout_s=90)
    assert_says_different_order(values(outcomes))
