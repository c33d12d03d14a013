"""The kernels of dispatch and combine over several nodes on a GPU: the cases of the CPU tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ep_plugin import DispatchLayout
from tests.faults import handle_cases
from tests.faults.fault_cases import on_cuda
from tests.moe import test_node_kernels as cases
from tests.moe import test_one_output as one_output
from tests.moe.moe_cases import LAYOUTS
from tests.ranks import run_ranks, values


@pytest.mark.gpu(1)
@pytest.mark.parametrize("case", [*cases.CASES, cases.refuses_arguments])
def test_kernels(case: Callable[..., None]) -> None:
    values(run_ranks(1, on_cuda, case, 1, timeout_s=120))


@pytest.mark.gpu(1)
@pytest.mark.parametrize("plain", ["0", "1"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_dispatches_fill_one_output(layout: DispatchLayout, plain: str) -> None:
    env = {"EP_PLUGIN_PLAIN_KERNELS": plain}
    for one_kernel in (False, True):
        values(run_ranks(2, on_cuda, one_output.fills_one_output, 2, layout, one_kernel, timeout_s=120, env=env))


@pytest.mark.gpu(1)
@pytest.mark.xdist_group("faults")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rewritten_bases_are_checked(layout: DispatchLayout) -> None:
    values(run_ranks(2, on_cuda, one_output.refuses_bases_outside, 2, layout, timeout_s=120))


@pytest.mark.gpu(1)
@pytest.mark.xdist_group("faults")
def test_pairs_of_a_slot_name_one_row() -> None:
    values(run_ranks(2, on_cuda, handle_cases.rows_apart_are_refused, 2, timeout_s=90))
