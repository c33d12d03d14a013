"""A handle is the caller's memory: kernels check what they compute addresses from, and fail by name."""

from __future__ import annotations

import pytest

from ep_plugin import DispatchLayout
from tests.faults import handle_cases as cases
from tests.ranks import run_ranks, values

LAYOUTS = [DispatchLayout.FLAT, DispatchLayout.TOKEN_MAJOR]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_addresses_outside_are_refused(layout: DispatchLayout) -> None:
    outcomes = run_ranks(cases.SIZE, cases.extremes_are_refused, cases.SIZE, layout, timeout_s=120)
    assert values(outcomes)[0] == cases.NUM_EXTREMES


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ids_beyond_the_last_do_no_harm(layout: DispatchLayout) -> None:
    values(run_ranks(cases.SIZE, cases.ids_beyond_the_last_do_no_harm, cases.SIZE, layout, timeout_s=60))


def test_pairs_of_a_slot_name_one_row() -> None:
    values(run_ranks(cases.SIZE, cases.rows_apart_are_refused, cases.SIZE, timeout_s=60))


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [2, 3])
def test_random_words_end_in_a_result_or_an_error(size: int, layout: DispatchLayout) -> None:
    refused = values(run_ranks(size, cases.anything_goes, size, layout, size, 60, timeout_s=240))
    assert refused[0] > 10
