"""Computes the weighted sum of each token's returned rows, in the fastest of several ways in plain PyTorch.

Shapes: T tokens, K experts per token, H hidden size, N rows.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import torch

Sum = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
_TIMED_CALLS = 5
_fastest: dict[tuple[object, ...], Sum] = {}


def weighted_sums(rows: torch.Tensor, numbers: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Returns `[T, H]`: the sum over k of `rows[numbers[t, k]] * weights[t, k]`.

    The first call of a shape times all ways, and later calls take the fastest one.

    Args:
        rows: `[N, H]`.
        numbers: int64 `[T, K]`, rows of each token.
        weights: `[T, K]`, of the rows' dtype.
    """
    key = (rows.device, rows.dtype, rows.shape[1], numbers.shape)
    if key not in _fastest:
        ways = [by_embedding_bag, by_matrix_product, *([by_compiled_sum] if rows.is_cuda else [])]
        _fastest[key] = min(ways, key=lambda way: _seconds(way, rows, numbers, weights))
    return _fastest[key](rows, numbers, weights)


def by_embedding_bag(rows: torch.Tensor, numbers: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.embedding_bag(numbers, rows, mode="sum", per_sample_weights=weights)


def by_matrix_product(rows: torch.Tensor, numbers: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    gathered = rows.index_select(0, numbers.view(-1)).view(*numbers.shape, -1)
    return torch.bmm(weights.unsqueeze(1), gathered).squeeze(1)


def by_compiled_sum(rows: torch.Tensor, numbers: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Gathers, multiplies and adds in one kernel, which PyTorch's compiler makes."""
    return _compiled()(rows, numbers, weights)


@functools.cache
def _compiled() -> Sum:
    return torch.compile(in_order_of_k, dynamic=True)


def in_order_of_k(rows: torch.Tensor, numbers: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    total = rows[numbers[:, 0]].float() * weights[:, :1].float()
    for k in range(1, numbers.shape[1]):
        total = total + rows[numbers[:, k]].float() * weights[:, k : k + 1].float()
    return total.to(rows.dtype)


def _seconds(way: Sum, rows: torch.Tensor, numbers: torch.Tensor, weights: torch.Tensor) -> float:
    """Times calls in a row, after two calls that compile and warm up."""
    for _ in range(2):
        way(rows, numbers, weights)
    _finish(rows)
    began = time.perf_counter()
    for _ in range(_TIMED_CALLS):
        way(rows, numbers, weights)
    _finish(rows)
    return time.perf_counter() - began


def _finish(rows: torch.Tensor) -> None:
    if rows.is_cuda:
        torch.cuda.synchronize(rows.device)
