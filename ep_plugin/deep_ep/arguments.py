"""The forms in which Buffer's calls take rows, biases and what goes beside them: ValueError for any other.

Shapes: T tokens here, K experts per token.
"""

from __future__ import annotations

from typing import Any

import torch

from ep_plugin.deep_ep import routing
from ep_plugin.deep_ep.config import Config
from ep_plugin.deep_ep.utils import EventOverlap
from ep_plugin.dtypes import weight_dtype


def rows_of(x: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows and scales of what dispatch was given."""
    if isinstance(x, torch.Tensor):
        return x, None
    if not isinstance(x, tuple) or not _are_tensors(x, 2):
        raise ValueError(f"x: expected a tensor, or a tuple of rows and scales, got {_described(x)}")
    return x


def biases_of(bias: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """None, one or two, of x's dtype and one shape."""
    biases = () if bias is None else (bias,) if isinstance(bias, torch.Tensor) else bias
    if not isinstance(biases, tuple) or not _are_tensors(biases, 2 if biases is bias else len(biases)):
        raise ValueError(f"bias: expected None, a tensor or a tuple of two, got {_described(bias)}")
    for one in biases:
        if one.dtype is not x.dtype or one.shape != biases[0].shape:
            raise ValueError(
                f"bias: expected {x.dtype} of shape {tuple(biases[0].shape)}, got {one.dtype} of shape "
                f"{tuple(one.shape)}"
            )
    return biases


def check_kind(kind: type, **given: object) -> None:
    """That each is of `kind`, or None."""
    for name, value in given.items():
        if value is not None and not isinstance(value, kind):
            raise ValueError(f"{name}: expected None or an instance of {kind.__name__}, got {type(value).__name__}")


def check_options(config: object, previous_event: object) -> None:
    check_kind(Config, config=config)
    check_kind(EventOverlap, previous_event=previous_event)


def whole(scales: torch.Tensor | None) -> torch.Tensor | None:
    return None if scales is None else scales.contiguous()


def _are_tensors(values: tuple[Any, ...], number: int) -> bool:
    return len(values) == number and all(isinstance(value, torch.Tensor) for value in values)


def _described(value: Any) -> str:
    if not isinstance(value, (tuple, list)):
        return type(value).__name__
    return f"a {type(value).__name__} of ({', '.join(type(one).__name__ for one in value)})"


def sum_of(biases: tuple[torch.Tensor, ...]) -> torch.Tensor | None:
    """What is added: of two, their sum in float32 (float64), rounded."""
    if len(biases) < 2:
        return biases[0].contiguous() if biases else None
    first, second = (bias.to(weight_dtype(bias.dtype)) for bias in biases)
    return (first + second).to(biases[0].dtype)


def layout_given(*given: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """is_token_in_rank and num_tokens_per_expert, once all three of the layout's tensors are known to be there."""
    names = ("num_tokens_per_rank", "is_token_in_rank", "num_tokens_per_expert")
    for name, tensor in zip(names, given, strict=True):
        if tensor is None:
            raise ValueError(f"{name}: expected what get_dispatch_layout returned, or a handle=, got None")
    _, in_rank, per_expert = given
    assert in_rank is not None and per_expert is not None
    return in_rank, per_expert


def check_with_topk(topk_idx: torch.Tensor | None, topk_weights: torch.Tensor | None, expert_alignment: int) -> None:
    if not isinstance(expert_alignment, int) or expert_alignment < 1:
        raise ValueError(f"expert_alignment: expected an integer of at least 1, got {expert_alignment!r}")
    check_kind(torch.Tensor, topk_idx=topk_idx, topk_weights=topk_weights)
    if topk_idx is None and topk_weights is not None:
        raise ValueError("topk_weights: expected None without topk_idx, got a tensor")
    if topk_idx is not None:
        routing.check_topk(topk_idx)
    if topk_weights is not None:
        assert topk_idx is not None
        check_floats("topk_weights", topk_weights, topk_idx.shape[0])


def check_floats(name: str, weights: torch.Tensor, rows: int) -> None:
    if weights.dtype is not torch.float32 or weights.dim() != 2 or weights.shape[0] != rows:
        raise ValueError(
            f"{name}: expected float32 of shape [{rows}, K], got {weights.dtype} of shape {tuple(weights.shape)}"
        )
