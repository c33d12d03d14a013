"""DeepSpeed's AutoEP trains through ElasticBuffer: its transport "deepep", with our deep_ep in place of DeepEP.

`make test-huggingface` runs it, in an environment that has DeepSpeed.
"""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import ep_plugin.deep_ep as deep_ep
from tests.moe.moe_cases import named, on_ranks

pytest.importorskip("deepspeed", reason="needs deepspeed; `make test-huggingface` installs it")

T_MAX, H, K = 24, 64, 2
TOLERANCE = 2e-2  # rows are bfloat16


class Experts:
    """In place of AutoEP's: local expert e multiplies its rows by a factor of its own."""

    def __init__(self, rank: int, local: int) -> None:
        self._factors = factor(torch.arange(rank * local, (rank + 1) * local))

    def __call__(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        return rows * self._factors.repeat_interleave(counts.long())[:, None].to(rows.dtype)


def factor(experts: torch.Tensor) -> torch.Tensor:
    return 0.5 + experts.float() / 8


def _trains(rank: int, size: int) -> None:
    os.environ["DS_ACCELERATOR"] = "cpu"
    sys.modules["deep_ep"] = deep_ep
    from deepspeed.module_inject import auto_ep_comm
    from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer, RouterOutput

    E = 3 * size
    scope, sizes = auto_ep_comm.new_exchange_scope(), dict(num_experts=E, top_k=K, hidden_size=H)
    exchange = auto_ep_comm.shared_exchange(scope, dist.group.WORLD, **sizes, num_max_tokens_per_rank=T_MAX)
    layer: Any = SimpleNamespace(
        _deepep_exchange=exchange,
        _deepep_replay=auto_ep_comm.DeepEPCheckpointReplay(),
        score_apply="post",
        row_weighting_impl="eager",
        num_local_experts=E // size,
        experts=Experts(rank, E // size),
    )

    def route(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return AutoEPMoELayer._deepep_route(layer, x, RouterOutput(weights, ids, torch.empty(0)))

    generator = torch.Generator().manual_seed(rank)
    for step, tokens in enumerate((T_MAX, 5 + rank, 0 if rank == 0 else 7)):
        for recomputes in (None, False, True):  # None: without activation checkpoints; else their use_reentrant
            with named((step, recomputes)):
                x = torch.randn((tokens, H), generator=generator).bfloat16().requires_grad_()
                weights = torch.rand((tokens, K), generator=generator).requires_grad_()
                ids = torch.rand((tokens, E), generator=generator).topk(K, 1).indices
                grad = torch.randn((tokens, H), generator=generator).bfloat16()
                if recomputes is None:
                    out = route(x, weights, ids)
                else:
                    out = checkpoint(route, x, weights, ids, use_reentrant=recomputes)
                out.backward(grad)
                dense, same = x.detach().float().requires_grad_(), weights.detach().requires_grad_()
                expected = dense * (same * factor(ids)).sum(1, keepdim=True)
                expected.backward(grad.float())
                limits = dict(rtol=TOLERANCE, atol=TOLERANCE)
                torch.testing.assert_close(out.float(), expected, **limits)
                torch.testing.assert_close(x.grad.float(), dense.grad, **limits)
                torch.testing.assert_close(weights.grad, same.grad, rtol=TOLERANCE, atol=0.3)  # sums of H products
    exchange.release()
    assert exchange.destroyed


@pytest.mark.parametrize("size", [2, 3])
def test_auto_ep_trains(size: int) -> None:
    on_ranks(size, _trains)
