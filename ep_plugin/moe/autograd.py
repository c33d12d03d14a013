"""Gradients: the backward of dispatch is a combine, the backward of combine a dispatch over the same routing.

The gradient of ``topk_weights`` travels back beside the partial rows. Backward is collective: every rank must run it
for the same operations.

Shapes: T tokens, H hidden size, K experts per token, N output rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch.autograd import forward_ad

from ep_plugin import _C
from ep_plugin.dtypes import ELEMENTS, weight_dtype
from ep_plugin.errors import NotSupported
from ep_plugin.moe.arguments import bulk_ready
from ep_plugin.moe.layout import DispatchResult
from ep_plugin.moe.low_latency.gradients import combine_backward as expert_major_backward
from ep_plugin.moe.registry import communicator
from ep_plugin.runtime.streams import current_stream, kernels_for, on_device
from ep_plugin.runtime.tensors import PLAIN, check_memory, is_lazy

Gradients: TypeAlias = tuple[torch.Tensor | None, ...]
NUM_TENSORS = 4  # the first arguments of each operator may require gradients; this is their number
_NUM_RESULTS = len(DispatchResult._fields)  # results of dispatch that precede its handle's tensors


def differentiable(save: Callable[..., None], backward: Callable[..., Gradients]) -> Callable[..., Any]:
    """Returns a function of (compute, *inputs) that returns compute(*inputs) and records its backward if needed.

    save(ctx, inputs, outputs) runs after compute. backward(ctx, *grads) returns the gradients of the first inputs.
    """

    class Differentiable(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, compute: Callable[..., Any], *inputs: Any) -> Any:
            outputs = compute(*inputs)
            save(ctx, inputs, outputs)
            return outputs

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor | None) -> Gradients:
            found = (None, *backward(ctx, *grads))
            return *found, *(None,) * (len(ctx.needs_input_grad) - len(found))

    def call(compute: Callable[..., Any], *inputs: Any) -> Any:
        tensors = inputs[:NUM_TENSORS]
        if forward_ad._current_level >= 0 and any(
            tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors
        ):
            raise NotSupported("dispatch and combine: expected no tangents, since they have no forward-mode derivative")
        if torch.is_grad_enabled():
            for tensor in tensors:
                if tensor is not None and tensor.requires_grad:
                    return Differentiable.apply(compute, *inputs)
        return compute(*inputs)

    return call


def autograd_kernel(op: Any, call: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the kernel of `op` for torch's Autograd key. call: a function that `differentiable` made.

    The kernel of torch.library.register_autograd (torch 2.11 to 2.13) does the same, but searches the schema for
    defaults at each call, which takes 30 to 50 us.
    """

    def kernel(keyset: Any, *inputs: Any) -> Any:
        def below(*inputs: Any) -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                return op.redispatch(keyset & torch._C._after_autograd_keyset, *inputs)

        return call(below, *inputs)

    return kernel


def save_dispatch(ctx: Any, inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> None:
    x, _, weights, *_, previous, comm, _ = inputs
    tokens, _, row_weights, *_ = outputs
    made = outputs[_NUM_RESULTS:][: communicator(comm).num_routing]  # the same whether torch saw the operator or not
    ctx.save_for_backward(*(previous or made))
    ctx.comm = comm
    ctx.hidden, ctx.x_dtype, ctx.rows = x.shape[1], x.dtype, tokens.shape[:-1]
    ctx.weights_shape = None if row_weights is None else row_weights.shape
    ctx.x_needs_grad = x.requires_grad
    ctx.weights_need_grad = weights is not None and weights.requires_grad
    ctx.set_materialize_grads(False)


def dispatch_backward(combine: Callable[..., Any], ctx: Any, *grads: torch.Tensor | None) -> Gradients:
    """Returns the gradients of (x, topk_ids, topk_weights).

    A combine sums the gradients of the rows. The gradients of the weights travel in it as extra values.
    """
    grad_tokens, _, grad_weights, *_ = grads
    if not (ctx.x_needs_grad or ctx.weights_need_grad):
        return ()
    routing, extra = list(ctx.saved_tensors), None
    y = _rows_to_send_back(ctx, grad_tokens, routing[0])
    if ctx.weights_need_grad:
        dtype = weight_dtype(y.dtype)
        if grad_weights is None:
            extra = y.new_zeros(ctx.weights_shape, dtype=dtype)
        else:
            extra = grad_weights.to(dtype).contiguous()
    rows, weights = combine(y, None, None, extra, False, routing, ctx.comm, 0)
    return rows if ctx.x_needs_grad else None, None, weights if ctx.weights_need_grad else None


def _rows_to_send_back(ctx: Any, grad_tokens: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """Returns the gradients of the rows, ``[N, H]`` or EXPERT_MAJOR ``[E_l, N, H]``.

    If only the weights need a gradient, returns zeros of the smallest width.
    """
    if not ctx.x_needs_grad:
        return like.new_zeros((*ctx.rows, 8), dtype=ctx.x_dtype if ctx.x_dtype in ELEMENTS else torch.bfloat16)
    if grad_tokens is None:
        return like.new_zeros((*ctx.rows, ctx.hidden), dtype=ctx.x_dtype)
    return grad_tokens.contiguous()


def save_combine(ctx: Any, inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> None:
    y, weights, bias, extra, per_row, routing, comm, _ = inputs
    assert extra is None or not (per_row and extra.requires_grad), "only values of pairs are differentiable"
    saved = () if weights is None else (y, weights)  # a plain sum does not keep y alive
    ctx.save_for_backward(*routing, *saved)
    ctx.num_routing, ctx.comm, ctx.num_rows = len(routing), comm, y.shape[0]
    ctx.expert_major = y.dim() == 3
    ctx.weighted, ctx.has_extra = weights is not None, extra is not None and not per_row
    ctx.bias_dtype = None if bias is None else bias.dtype
    if per_row and outputs[1] is not None:
        ctx.mark_non_differentiable(outputs[1])
    ctx.rows_need_grad = any(tensor is not None and tensor.requires_grad for tensor in (y, weights, extra))


def combine_backward(
    dispatch: Callable[..., Any],
    combine: Callable[..., Any],
    ctx: Any,
    grad_out: torch.Tensor,
    grad_extra: torch.Tensor | None,
) -> Gradients:
    """Returns the gradients of (y, weights, bias, extra). `dispatch` sends the outputs' gradients over the same
    routing."""
    grad_bias = None if ctx.bias_dtype is None else grad_out.to(ctx.bias_dtype)
    if not ctx.rows_need_grad:
        return None, None, grad_bias
    saved = list(ctx.saved_tensors)
    routing, rest = saved[: ctx.num_routing], saved[ctx.num_routing :]
    if ctx.expert_major:
        engine = communicator(ctx.comm).engine
        found = expert_major_backward(engine, dispatch, combine, grad_out, routing, rest, ctx.comm)
        return *found, grad_bias, None
    extra = grad_extra.contiguous() if ctx.has_extra and grad_extra is not None else None
    grads = grad_out.contiguous(), routing[0], extra, None
    rows, _, of_extra, ids, *_ = dispatch(*grads, ctx.num_rows, None, routing, ctx.comm, 0)
    grad_y, grad_weights = rows, None
    if ctx.weighted:
        y, weights = rest
        if weights.dim() == 1:
            grad_y, grad_weights = _weighed_back(y, rows, weights)
        else:  # in TOKEN_MAJOR the weights of experts on other ranks do not count
            here = ids >= 0
            grad_y, of_rows = _weighed_back(y, rows, torch.where(here, weights, 0).sum(dim=1))
            grad_weights = of_rows.unsqueeze(1) * here
    return grad_y, grad_weights, grad_bias, None if extra is None else of_extra


def _weighed_back(y: torch.Tensor, rows: torch.Tensor, factors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the gradients of `y` ``[N, H]`` and of `factors` ``[N]``.

    rows: ``[N, H]``, the gradients of the products of `y` and `factors`. The gradient of `y` may use its memory.
    """
    given = (y, rows, factors)
    plain = all(type(tensor) in PLAIN and not is_lazy(tensor) for tensor in given)
    # Hooks on saved tensors may have returned other tensors than were saved.
    same = y.shape == rows.shape and y.dtype is rows.dtype and factors.dtype is weight_dtype(rows.dtype)
    here = all(tensor.device == rows.device for tensor in given)
    watched = torch.is_grad_enabled() or torch._C._len_torch_dispatch_stack()  # differentiated again, or traced
    if watched or not (plain and same and here):
        wide = rows.to(factors.dtype)
        return (wide * factors.unsqueeze(1)).to(y.dtype), (y * wide).sum(dim=1)
    check_memory("y", y)
    check_memory("weights", factors)
    return rows, weight_grad(bulk_ready("y", y).contiguous(), rows, factors)


def weight_grad(y: torch.Tensor, rows: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Returns the dot product of each row of `y` with its row of `rows`. Then multiplies each row of `rows` in place.

    It runs as one kernel on the caller's stream. PyTorch's operators would need float32 copies of `y` and `rows`.

    Args:
        y: ``[N, H]``, contiguous, of a dtype that combine takes.
        rows: ``[N, H]``, like `y`, in other memory. Each row is multiplied by its factor, after the dot product.
        factors: ``[N]``, of ``weight_dtype(y.dtype)``.

    Returns:
        ``[N]``, of the dtype of `factors`.
    """
    dots, device = torch.empty_like(factors), rows.device
    args = _C.WeightGradArgs(
        y=y.data_ptr(),
        rows=rows.data_ptr(),
        factors=factors.data_ptr(),
        dots=dots.data_ptr(),
        num_rows=rows.shape[0],
        hidden=rows.shape[1],
        element=ELEMENTS[rows.dtype],
        stream=current_stream(device),
    )
    with on_device(device):
        kernels_for(device).weight_grad(args)
    return dots
