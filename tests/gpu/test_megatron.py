"""Megatron's MoE layer on two GPUs: our dispatcher against its alltoall, outputs and all gradients."""

from __future__ import annotations

import importlib.util

import pytest

from tests.ranks import run_ranks, values

if importlib.util.find_spec("megatron") is None:
    pytest.skip("needs megatron-core", allow_module_level=True)

from tests.gpu import megatron_layers
from tests.integrations import megatron_schedule

LIMITS = {"fp32": 1e-5, "bf16": 2e-2}
SCHEDULE_LIMIT = 5e-2  # BF16 through two layers, some of whose sums have no order


@pytest.mark.gpu(2)
@pytest.mark.parametrize("tp", [1, 2])
def test_matches_alltoall(tp: int) -> None:
    import torch

    size = 4 if torch.cuda.device_count() >= 4 else 2
    for rank, found in enumerate(values(run_ranks(size, megatron_layers.parity, size, tp, timeout_s=280))):
        assert_within_limits(rank, found)


def assert_within_limits(rank: int, found: dict[str, dict[str, float]]) -> None:
    """found: what `megatron_layers.parity` returned."""
    assert found.keys() == {*megatron_layers.CASES, "bf16"}
    for name, difference in found.items():
        worst = max(difference, key=difference.get)
        limit = LIMITS["bf16" if name == "bf16" else "fp32"]
        assert difference[worst] <= limit, f"rank {rank}, {name}: {worst} differs by {difference[worst]}"


@pytest.mark.gpu(2)
def test_the_overlapping_schedule_matches_alltoall() -> None:
    for rank, found in enumerate(values(run_ranks(2, megatron_layers.overlapped_schedule, 2, timeout_s=280))):
        assert found.keys() == megatron_schedule.ARMS.keys()
        for name, arm in found.items():
            worst = max(arm["difference"], key=arm["difference"].get)
            assert arm["difference"][worst] <= SCHEDULE_LIMIT, f"rank {rank}, {name}: {worst}: {arm['difference']}"
        megatron_schedule.every_exchange_is_as_named(found)
