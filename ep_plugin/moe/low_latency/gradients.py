"""Gradients of EXPERT_MAJOR rows, by low-latency dispatches and combines over the same routing.

The backward of dispatch is a combine, and the backward of combine is a dispatch. Only the owner of a token knows its
weights. So weights go to the holders of experts as narrow rows of K values, and their gradients return as rows with one
value that is not 0.

Shapes: T tokens, H hidden size, K experts per token, R ranks, E_l local experts, N = R * T_max rows of each expert.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ep_plugin.config import ROW_ALIGNMENT_BYTES
from ep_plugin.moe.low_latency.engine import LowLatencyEngine


def combine_backward(
    engine: LowLatencyEngine,
    dispatch: Callable[..., Any],
    combine: Callable[..., Any],
    grad_out: torch.Tensor,
    routing: list[torch.Tensor],
    rest: list[torch.Tensor],
    comm: int,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns the gradients of y and of the weights. Rows that no token has get zeros.

    grad_out: ``[T, H]``, the gradient of the sums. rest: y and weights; empty for a combine without weights.
    """
    per_expert = engine.rows_of_plan(routing[1].shape[0], routing[0].shape[1])

    def dispatched(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = dispatch(rows.contiguous(), routing[0], None, None, per_expert, None, routing, comm, 0)
        return out[0], out[4]

    rows, counts = dispatched(grad_out)
    present = torch.arange(per_expert, device=rows.device) < counts.unsqueeze(1)
    if not rest:
        return rows.masked_fill(~present.unsqueeze(2), 0), None
    y, weights = rest
    K = weights.shape[1]
    k_of_row = _k_of_row(engine, routing, per_expert, K)
    factors = dispatched(_padded(weights))[0].gather(2, k_of_row)
    wide = rows.to(weights.dtype)
    grad_y = (wide * factors).to(y.dtype).masked_fill(~present.unsqueeze(2), 0)
    dots = (y * wide).sum(dim=2, keepdim=True, dtype=weights.dtype).masked_fill(~present.unsqueeze(2), 0)
    one_hot = dots.new_zeros((*dots.shape[:2], _padded_width(K, weights))).scatter(2, k_of_row, dots)
    grad_weights = combine(one_hot, None, None, None, False, routing, comm, 0)[0]
    return grad_y, grad_weights[:, :K]


def _k_of_row(engine: LowLatencyEngine, routing: list[torch.Tensor], per_expert: int, topk: int) -> torch.Tensor:
    """Returns the position in top-k of each row's expert, ``[E_l, N, 1]``; 0 for rows that no token has."""
    plan, size = routing[1], engine.size
    most = engine.tokens_of(per_expert)
    lay = engine.plan_layout(most, topk)
    places = plan[lay.rows : lay.sent_rows].view(size, most, topk)
    tokens = plan[lay.src_rows : lay.src_rows + size].view(size, 1, 1)
    written = torch.arange(most, device=plan.device).view(1, most, 1) < tokens
    rows = engine.local_experts * per_expert
    place = places.where(written & (places >= 0), rows).long()  # the last place is nobody's
    k = torch.arange(topk, device=plan.device).expand(size, most, topk)
    of_row = k.new_zeros(rows + 1).scatter(0, place.flatten(), k.flatten())
    return of_row[:rows].view(engine.local_experts, per_expert, 1)


def _padded_width(topk: int, weights: torch.Tensor) -> int:
    unit = ROW_ALIGNMENT_BYTES // weights.element_size()
    return -(-topk // unit) * unit


def _padded(weights: torch.Tensor) -> torch.Tensor:
    """Pads `weights` to rows that dispatch takes."""
    return torch.nn.functional.pad(weights, (0, _padded_width(weights.shape[1], weights) - weights.shape[1]))
