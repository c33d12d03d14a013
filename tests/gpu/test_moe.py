"""MoECommunicator on GPUs, one process per rank; several ranks share a GPU where there are more ranks than GPUs."""

from __future__ import annotations

import pytest

from tests.gpu import checks, features
from tests.ranks import run_ranks, values


@pytest.mark.gpu(1)
@pytest.mark.parametrize("size", range(1, 9))
def test_grid(size: int) -> None:
    done = values(run_ranks(size, checks.grid, size, timeout_s=280))
    assert len(done[0]) >= len(checks.CASES) - 1


@pytest.mark.gpu(1)
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("plain", ["0", "1"])
def test_grid_in_one_kernel(size: int, plain: str) -> None:
    environment = {"EP_PLUGIN_PLAIN_KERNELS": plain}
    done = values(run_ranks(size, checks.grid_in_one_kernel, size, timeout_s=280, env=environment))
    assert len(done[0]) >= len(checks.CASES) - 1


@pytest.mark.gpu(1)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_features(size: int) -> None:
    done = values(run_ranks(size, features.features, size, timeout_s=200))
    assert done[0] == list(features.FEATURES)


@pytest.mark.gpu(2)
def test_beside_nccl() -> None:
    import torch

    size = min(4, torch.cuda.device_count())
    values(run_ranks(size, features.beside_nccl, size, timeout_s=200))


@pytest.mark.gpu(1)
def test_more_than_two_gibibytes() -> None:
    values(run_ranks(2, features.large, 2, timeout_s=200))


@pytest.mark.gpu(1)
def test_plain_kernels() -> None:
    done = values(run_ranks(2, checks.grid, 2, timeout_s=280, env={"EP_PLUGIN_PLAIN_KERNELS": "1"}))
    assert len(done[0]) >= len(checks.CASES) - 1
