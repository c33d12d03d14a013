"""Ranges of NVTX on GPUs. Those of the profiler, and the layers around them, are tested on CPUs."""

from __future__ import annotations

import pytest

from tests.gpu import ranges
from tests.ranks import run_ranks, values


@pytest.mark.gpu(1)
def test_nvtx_gets_the_communicator_and_bytes() -> None:
    for names, expected in values(run_ranks(2, ranges.pushed, 2, env={"EP_PLUGIN_RANGES": "nvtx"}, timeout_s=120)):
        assert names == expected
