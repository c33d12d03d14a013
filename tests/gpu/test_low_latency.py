"""Low-latency dispatch and combine on GPUs, one process per rank; ranks share a GPU where there are fewer."""

from __future__ import annotations

import os

import pytest

from tests.gpu import low_latency, low_latency_graphs
from tests.ranks import run_ranks, values


@pytest.mark.gpu(1)
@pytest.mark.parametrize("name", [*low_latency.WHOLE, *low_latency.HALVES])
def test_cases(name: str) -> None:
    size = low_latency.RANKS.get(name, 2)
    values(run_ranks(size, low_latency.run_case, size, name, timeout_s=280))


@pytest.mark.gpu(1)
@pytest.mark.parametrize(("name", "size"), [("routings", 1), ("routings", 4), ("quantized", 4)])
def test_cases_of_other_sizes(name: str, size: int) -> None:
    values(run_ranks(size, low_latency.run_case, size, name, timeout_s=280))


@pytest.mark.gpu(1)
def test_half_precision() -> None:
    values(run_ranks(2, low_latency.half_precision, 2, timeout_s=120))


@pytest.mark.gpu(1)
def test_plain_kernels_change_nothing() -> None:
    env = {"EP_PLUGIN_PLAIN_KERNELS": "1"}
    values(run_ranks(3, low_latency.run_case, 3, "shapes of 3 ranks", timeout_s=280, env=env))


@pytest.mark.gpu(1)
def test_every_row_of_hundreds_of_calls() -> None:
    values(run_ranks(3, low_latency.many, 3, 500, timeout_s=280))


@pytest.mark.gpu(1)
@pytest.mark.timeout(1800)
def test_every_row_of_thousands_of_operations() -> None:
    operations = 100_000 if os.environ.get("EP_TEST_LONG") == "1" else 3000
    assert values(run_ranks(2, low_latency_graphs.compared, 2, operations, timeout_s=1700)) == [operations] * 2


@pytest.mark.gpu(1)
@pytest.mark.parametrize("size", [2, 4])
def test_graphs_are_right_in_every_replay(size: int) -> None:
    assert values(run_ranks(size, low_latency_graphs.replayed, size, 1000, timeout_s=280)) == [1000] * size


@pytest.mark.gpu(1)
@pytest.mark.parametrize("name", low_latency_graphs.OPTIONS)
def test_every_option_in_a_graph(name: str) -> None:
    assert values(run_ranks(2, low_latency_graphs.replayed_options, 2, name, 60, timeout_s=120)) == [60] * 2


@pytest.mark.gpu(1)
def test_statistics_grow_in_every_replay() -> None:
    added = values(run_ranks(3, low_latency_graphs.counted, 3, 4, timeout_s=120))
    del added[low_latency_graphs.LATE]
    assert min(map(min, added)) > low_latency_graphs.LATE_S / 2, added


@pytest.mark.gpu(1)
def test_no_kernel_waits_between_the_halves() -> None:
    values(run_ranks(3, low_latency_graphs.sent_alone, 3, timeout_s=120))
