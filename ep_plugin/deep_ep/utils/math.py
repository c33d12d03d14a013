"""``deep_ep.utils.math``: casts to FP8 and back, comparisons, and shapes of routings, for tests and benchmarks.

Shapes: T tokens, H hidden size, S = ceil(H / 128) scales of a token, K experts per token, E experts in all.
"""

from __future__ import annotations

from typing import Any

import torch

_BLOCK = 128  # elements that share a scale
_LEAST_AMAX = 1e-4
_MOST_E4M3 = 448.0
_FLOAT_MANTISSA_BITS = 23


def calc_diff(x: torch.Tensor, y: torch.Tensor) -> float:
    """Return ``1 - 2ab / (aa + bb)`` with ``a = x + 1`` and ``b = y + 1``, products summed; 0.0 if both are empty."""
    if x.numel() == 0 and y.numel() == 0:
        return 0.0
    a, b = x.double() + 1, y.double() + 1
    return float(1 - 2 * (a * b).sum() / (a * a + b * b).sum())


def safe_div(a: Any, b: Any) -> Any:
    """Return a / b, and 0 for 0 / 0."""
    return 0 if a == 0 and b == 0 else a / b


def ceil_div(x: int, y: int) -> int:
    """Return x / y, rounded up."""
    return -(-x // y)


def align(x: int, y: int) -> int:
    """Round x up to a multiple of y."""
    return ceil_div(x, y) * y


def per_token_cast_to_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cast rows ``[T, H]`` to float8_e4m3fn. Returns them, and float32 scales ``[T, S]`` to multiply them by."""
    T, H = _shape_of(x)
    blocks = _blocks(x.float())
    amax = blocks.abs().amax(dim=2).clamp(min=_LEAST_AMAX)
    rows = (blocks * (_MOST_E4M3 / amax).unsqueeze(2)).to(torch.float8_e4m3fn)
    return rows.view(T, -1)[:, :H].contiguous(), amax / _MOST_E4M3


def per_token_cast_back(x_fp8: torch.Tensor, x_scales: torch.Tensor) -> torch.Tensor:
    """Multiply FP8 rows ``[T, H]`` by their scales. Returns bfloat16.

    x_scales: T rows in any shape: float32 ``[T, S]``, or int32 ``[T, ceil(S / 4)]`` of four exponent bytes each.
    """
    T, H = _shape_of(x_fp8)
    if x_fp8.numel() == 0:
        return x_fp8.to(torch.bfloat16)
    if x_scales.dtype is torch.int32:
        exponents = x_scales.contiguous().flatten().view(torch.uint8).to(torch.int32)
        x_scales = (exponents << _FLOAT_MANTISSA_BITS).view(torch.float32)
    scales = x_scales.reshape(T, -1)[:, : ceil_div(H, _BLOCK)]  # exponent bytes may be padded
    rows = _blocks(x_fp8.float()) * scales.unsqueeze(2)
    return rows.view(T, -1)[:, :H].to(torch.bfloat16).contiguous()


def inplace_unique(x: torch.Tensor, num_slots: int) -> None:
    """Replaces each row of `x` by its distinct values from 0 to num_slots - 1, the largest first, then -1."""
    rows, columns = _shape_of(x)
    present = torch.zeros((rows, num_slots + 1), dtype=torch.bool, device=x.device)
    present.scatter_(1, x.masked_fill(x < 0, num_slots).long(), True)
    values = torch.arange(num_slots, dtype=x.dtype, device=x.device).expand(rows, -1)
    distinct = values.masked_fill(~present[:, :num_slots], -1).sort(dim=1, descending=True).values
    kept = min(num_slots, columns)
    x.fill_(-1)
    x[:, :kept] = distinct[:, :kept]


def create_grouped_scores(scores: torch.Tensor, group_idx: torch.Tensor, num_groups: int) -> torch.Tensor:
    """Return scores ``[T, E]`` with 0 for experts outside of each token's groups, ``[T, chosen groups]``."""
    T, E = _shape_of(scores)
    chosen = torch.zeros((T, num_groups), dtype=torch.bool, device=scores.device).scatter_(1, group_idx, True)
    return scores * chosen.repeat_interleave(E // num_groups, dim=1)


def hash_tensor(t: torch.Tensor) -> int:
    """Return a number that depends on the bytes of `t` alone, so equal tensors have equal numbers."""
    data = t.contiguous().flatten().view(torch.uint8)
    return int((data.view(torch.int32) if data.numel() % 4 == 0 else data).sum())


def hash_tensors(*tensors: Any) -> int:
    """Combine the numbers of all tensors, nested in tuples and lists, by exclusive or."""
    value = 0
    for tensor in _flat(tensors):
        value ^= hash_tensor(tensor)
    return value


def count_bytes(*tensors: Any) -> int:
    """Return the bytes of all tensors, nested in tuples and lists."""
    return sum(tensor.numel() * tensor.element_size() for tensor in _flat(tensors))


def _flat(values: Any) -> list[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        return [values]
    return [tensor for value in values or () for tensor in _flat(value)]


def _shape_of(x: torch.Tensor) -> tuple[int, int]:
    if x.dim() != 2:
        raise ValueError(f"x: expected 2 dimensions, got shape {tuple(x.shape)}")
    return x.shape[0], x.shape[1]


def _blocks(x: torch.Tensor) -> torch.Tensor:
    """Return ``[T, S, 128]``, with zeros after the last element."""
    T, H = x.shape
    return torch.nn.functional.pad(x, (0, -H % _BLOCK)).view(T, ceil_div(H, _BLOCK), _BLOCK)
