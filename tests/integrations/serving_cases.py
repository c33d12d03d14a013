"""A layer of experts as serving engines run it, its batches, and what its outputs must be.

Expert e multiplies a row by 1 + e / 8, so each rank can tell its own tokens' outputs alone. Shapes: T tokens here, H
hidden size, K experts per token, E experts in all, E_l on this rank, R ranks, N rows received.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch

from ep_plugin.moe.reference import reference_quantize

H, K, EXPERTS_PER_RANK = 2048, 3, 4  # vLLM refuses smaller hidden sizes for low latency
TOKENS_MAX = 16
BLOCK = 128  # elements that share a scale
TOLERANCE = 2.0**-6  # at most four roundings to bfloat16, each of 2**-8
_DONE = object()


class Batch(NamedTuple):
    """One rank's tokens: x bfloat16 ``[T, H]``, ids int64 ``[T, K]``, -1: none, weights float32 ``[T, K]``."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor


def batch_of(tokens: int, num_experts: int, seed: int, drop: float = 0.0) -> Batch:
    """A random batch on the CPU. drop: the share of ids that are -1, as SGLang's padding has them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn((tokens, H), generator=generator).bfloat16()
    ids = torch.rand((tokens, num_experts), generator=generator).topk(K, dim=1).indices
    ids = ids.masked_fill(torch.rand((tokens, K), generator=generator) < drop, -1)
    return Batch(x, ids, torch.rand((tokens, K), generator=generator) + 0.1)


def factors(experts: torch.Tensor) -> torch.Tensor:
    """What experts multiply rows by; 0 for -1."""
    return torch.where(experts < 0, 0.0, 1 + experts / 8)


def is_wrong(batch: Batch, sums: torch.Tensor, fp8: bool = False) -> torch.Tensor:
    """Whether a layer's output differs from the exact one, bool ``[]`` on the batch's device."""
    x = dequantized(*reference_quantize(batch.x)) if fp8 else batch.x
    exact = x.double() * (batch.weights * factors(batch.ids)).double().sum(1, keepdim=True)
    return ~((sums.double() - exact).abs() <= TOLERANCE * exact.abs() + 1e-6).all()


def dequantized(rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """FP8 rows ``[..., H]`` times their scales ``[..., H / 128]``, in bfloat16."""
    blocks = rows.float().unflatten(-1, (-1, BLOCK)) * scales.unsqueeze(-1)
    return blocks.flatten(-2).bfloat16()


def rows_by_token(received: Any, local: torch.Tensor, weights: torch.Tensor, rank: int) -> torch.Tensor:
    """The weighted sum of each row's experts on this rank. local: their numbers here ``[N, K]``, -1: elsewhere."""
    rows = dequantized(*received) if isinstance(received, tuple) else received
    experts = torch.where(local < 0, -1, local + rank * EXPERTS_PER_RANK)
    return (rows.float() * (weights * factors(experts)).sum(1, keepdim=True)).bfloat16()


def rows_by_expert(received: Any, counts: torch.Tensor, rank: int) -> torch.Tensor:
    """The experts' results ``[E_l, N, H]`` without weights; NaN in rows that no token has."""
    rows = dequantized(*received) if isinstance(received, tuple) else received
    local = torch.arange(len(rows), device=rows.device)
    used = torch.arange(rows.shape[1], device=rows.device) < counts[:, None]
    y = rows * factors(local + rank * len(rows)).bfloat16()[:, None, None]
    return y.masked_fill(~used[:, :, None], torch.nan)


@torch.inference_mode()
def _next(micro_batch: Iterator[None]) -> object:
    return next(micro_batch, _DONE)


def in_turns(micro_batches: Iterable[Iterator[None]]) -> None:
    """Run micro-batches as vLLM does: each in a thread of its own, one at a time, in turns at every yield."""
    with contextlib.ExitStack() as stack:
        left = [(stack.enter_context(ThreadPoolExecutor(1)), one) for one in micro_batches]
        while left:
            left = [(thread, one) for thread, one in left if thread.submit(_next, one).result() is not _DONE]
