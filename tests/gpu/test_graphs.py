"""CUDA graphs: a whole step captured once. That it can be captured shows that the host waits for nothing in it."""

from __future__ import annotations

import pytest

from tests.gpu import graphs
from tests.ranks import run_ranks, values


@pytest.mark.gpu(1)
@pytest.mark.parametrize("size", [2, 4])
def test_a_captured_step_is_right_in_every_replay(size: int) -> None:
    done = values(run_ranks(size, graphs.replayed, size, timeout_s=280))
    assert done == [graphs.REPLAYS] * size


@pytest.mark.gpu(1)
def test_a_captured_step_of_kernels_that_send_and_receive() -> None:
    done = values(run_ranks(4, graphs.replayed_in_one_kernel, 4, timeout_s=280))
    assert done == [graphs.REPLAYS] * 4


@pytest.mark.gpu(1)
def test_an_eager_dispatch_is_not_waited_for_in_a_capture() -> None:
    assert values(run_ranks(2, graphs.torn, 2, timeout_s=120)) == [[True] * 3] * 2


@pytest.mark.gpu(1)
def test_a_capture_without_pools_is_refused_and_goes_on() -> None:
    assert values(run_ranks(2, graphs.refused, 2, timeout_s=120)) == [True] * 2


@pytest.mark.gpu(1)
@pytest.mark.parametrize("ranges", ["profiler", "nvtx"])
def test_a_captured_step_with_ranges_for_profilers(ranges: str) -> None:
    done = values(run_ranks(2, graphs.replayed, 2, env={"EP_PLUGIN_RANGES": ranges}, timeout_s=280))
    assert done == [graphs.REPLAYS] * 2
