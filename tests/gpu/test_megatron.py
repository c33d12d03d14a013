"""Megatron's MoE layer on GPUs, which ranks may share: our dispatcher against its alltoall, outputs and gradients."""

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


one_at_a_time = pytest.mark.xdist_group("over nodes")  # its ranks wait for each other on one GPU


@pytest.mark.gpu(1)
@one_at_a_time
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_matches_alltoall(tp: int) -> None:
    """Tensor by expert parallelism of 1 x 4, 2 x 2 and 4 x 1."""
    for rank, found in enumerate(values(run_ranks(4, megatron_layers.parity, 4, tp, timeout_s=280))):
        assert_within_limits(rank, found)


def assert_within_limits(rank: int, found: dict[str, dict[str, float]]) -> None:
    """found: what `megatron_layers.parity` returned."""
    assert found.keys() == {*megatron_layers.CASES, "bf16"}
    for name, difference in found.items():
        worst = max(difference, key=difference.get)
        limit = LIMITS["bf16" if name == "bf16" else "fp32"]
        assert difference[worst] <= limit, f"rank {rank}, {name}: {worst} differs by {difference[worst]}"


@pytest.mark.gpu(1)
@one_at_a_time
def test_the_overlapping_schedule_matches_alltoall() -> None:
    for rank, found in enumerate(values(run_ranks(2, megatron_layers.overlapped_schedule, 2, timeout_s=280))):
        assert found.keys() == megatron_schedule.ARMS.keys()
        for name, arm in found.items():
            worst = max(arm["difference"], key=arm["difference"].get)
            assert arm["difference"][worst] <= SCHEDULE_LIMIT, f"rank {rank}, {name}: {worst}: {arm['difference']}"
        megatron_schedule.every_exchange_is_as_named(found)
