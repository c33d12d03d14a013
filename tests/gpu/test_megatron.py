"""Megatron's MoE layer on two GPUs: our dispatcher against its alltoall, outputs and all gradients."""

from __future__ import annotations

import importlib.util

import pytest

from tests.ranks import run_ranks, values

if importlib.util.find_spec("megatron") is None:
    pytest.skip("needs megatron-core", allow_module_level=True)

from tests.gpu import megatron_layers

LIMITS = {"fp32": 1e-5, "bf16": 2e-2}


@pytest.mark.gpu(2)
@pytest.mark.parametrize("tp", [1, 2])
def test_matches_alltoall(tp: int) -> None:
    import torch

    size = 4 if torch.cuda.device_count() >= 4 else 2
    for rank, found in enumerate(
        values(run_ranks(size, megatron_layers.parity, size, tp, start="spawn", timeout_s=280))
    ):
        assert found.keys() == {*megatron_layers.CASES, "bf16"}
        for name, difference in found.items():
            worst = max(difference, key=difference.get)
            limit = LIMITS["bf16" if name == "bf16" else "fp32"]
            assert difference[worst] <= limit, f"rank {rank}, {name}: {worst} differs by {difference[worst]}"
