"""The experts of transformers on rows that are grouped by expert already, as FLAT dispatches return them.

transformers' grouped experts take rows in any order: they sort them, count them, mask those of other ranks, multiply,
and undo the order. Here only the products are left, by the same functions. Shapes: N rows, H hidden size, I
intermediate size, E_l local experts.
"""

from __future__ import annotations

import inspect

import torch
from transformers.integrations import moe


def takes_sorted_rows(experts: torch.nn.Module) -> bool:
    """Whether the forward of `experts` is the one that transformers' decorator gives classes of experts.

    It is not where somebody has put another one in its place, nor where the experts are quantised: the functions of
    those are looked up elsewhere.
    """
    function = getattr(experts.forward, "__func__", None)
    if function is not type(experts).forward or not inspect.isfunction(function):
        return False
    return inspect.getclosurevars(function).nonlocals.get("experts_interface") is moe.ALL_EXPERTS_FUNCTIONS


def is_grouped(experts: torch.nn.Module) -> bool:
    """Whether the experts, as they are configured now, run as transformers' own grouped products of plain matrices."""
    chosen = moe.ALL_EXPERTS_FUNCTIONS.get(experts.config._experts_implementation)
    up = experts.gate_up_proj if experts.has_gate else experts.up_proj
    plain = up.is_floating_point() and up.element_size() > 1 and up.dtype is experts.down_proj.dtype
    return chosen is moe.grouped_mm_experts_forward and plain


def sorted_experts(
    experts: torch.nn.Module, rows: torch.Tensor, expert_ids: torch.Tensor, ends: torch.Tensor
) -> torch.Tensor:
    """What the experts make of `rows`, not weighted: ``[N, H]`` of their dtype, differentiable in rows and parameters.

    rows: ``[N, H]``, grouped by local expert, with N > 0. expert_ids: int32 ``[N]``, of each row. ends: int32
    ``[E_l]``, where each expert's rows end; the last is N.
    """
    up = "gate_up_proj" if experts.has_gate else "up_proj"
    hidden = _product(experts, up, rows, expert_ids, ends)
    hidden = experts._apply_gate(hidden) if experts.has_gate else experts.act_fn(hidden)
    results = _product(experts, "down_proj", hidden, expert_ids, ends)
    if experts.has_post_expert_norm:
        results = experts.post_expert_norm(results)
    return results.to(rows.dtype).contiguous()


def _product(
    experts: torch.nn.Module, name: str, rows: torch.Tensor, expert_ids: torch.Tensor, ends: torch.Tensor
) -> torch.Tensor:
    bias = getattr(experts, f"{name}_bias")[expert_ids] if experts.has_bias else None
    return moe._grouped_linear(rows, getattr(experts, name), ends, bias=bias, is_transposed=experts.is_transposed)
