"""DeepSpeed's ZeRO-3 on GPUs, with its gathers and sums through ep_plugin. Two ranks may share one."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from tests.moe.moe_cases import on_ranks

if importlib.util.find_spec("deepspeed") is None:
    pytest.skip("needs deepspeed", allow_module_level=True)

from tests.gpu import over_nodes
from tests.huggingface.test_deepspeed_zero import trains_like_stock

SIZE = 2


def _case(rank: int, size: int, dtype: torch.dtype) -> None:
    over_nodes.start(rank, size, nodes=1)
    torch.cuda.set_device(rank % torch.cuda.device_count())
    trains_like_stock(rank % torch.cuda.device_count(), size, 3, dtype, "cuda")


@pytest.mark.gpu(1)
@pytest.mark.xdist_group("over nodes")  # its ranks wait for each other on one GPU
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_zero_3_trains_like_stock(dtype: torch.dtype) -> None:
    on_ranks(SIZE, _case, dtype, timeout_s=280)
