"""Gradients: backward of dispatch is combine, backward of combine is a dispatch over the same routing.

The gradient of ``topk_weights`` rides back beside the partial rows. Every rank must run backward for the same
operations, since each is a collective.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

from ep_plugin import _C
from ep_plugin.dtypes import ELEMENTS, weight_dtype
from ep_plugin.errors import NotSupported
from ep_plugin.moe.arguments import bulk_ready
from ep_plugin.moe.high_throughput.dispatch_args import DispatchResult
from ep_plugin.runtime.base import kernels_for, on_device, stream_of
from ep_plugin.runtime.tensors import PLAIN, is_lazy

_RESULTS = len(DispatchResult._fields)  # of dispatch, before its routing
NUM_TENSORS = 4  # arguments of each operator that may require gradients; the first ones


def differentiable(save: Callable[..., None], backward: Callable[..., tuple[Any, ...]]) -> Callable[..., Any]:
    """A function of (compute, *inputs) that returns compute(*inputs) and, where an input requires it, gradients."""

    class Differentiable(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, compute: Callable[..., Any], *inputs: Any) -> Any:
            output = compute(*inputs)
            save(ctx, inputs, output)
            return output

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
            return None, *backward(ctx, *grads)

    def call(compute: Callable[..., Any], *inputs: Any) -> Any:
        if forward_ad._current_level >= 0:
            _refuse_tangents(inputs[:NUM_TENSORS])
        if torch.is_grad_enabled():
            for tensor in inputs[:NUM_TENSORS]:
                if tensor is not None and tensor.requires_grad:
                    return Differentiable.apply(compute, *inputs)
        return compute(*inputs)

    return call


def _refuse_tangents(tensors: tuple[torch.Tensor | None, ...]) -> None:
    """A tangent would be lost without a word."""
    if any(tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors):
        raise NotSupported("dispatch and combine: expected no tangents, since they have no forward-mode derivative")


def autograd_kernel(op: Any, call: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel of `op` for torch's Autograd key, which is given the dispatcher's keys first; `call`: differentiable.

    It does what that of torch.library.register_autograd does (torch 2.11 to 2.13), which looks through the schema for
    defaults at each call: 30 to 50 us.
    """

    def kernel(keyset: Any, *inputs: Any) -> Any:
        def below(*inputs: Any) -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                return op.redispatch(keyset & torch._C._after_autograd_keyset, *inputs)

        return call(below, *inputs)

    return kernel


def save_dispatch(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    x, _, weights, _, previous, comm, *_ = inputs
    routing = tuple(previous) if previous else tuple(output[_RESULTS:])
    ctx.save_for_backward(*routing)
    ctx.comm = comm
    ctx.hidden, ctx.x_dtype = x.shape[1], x.dtype
    ctx.weight_shape = None if weights is None else weights.shape
    ctx.rows_shape = None if output[2] is None else output[2].shape
    ctx.num_rows = output[0].shape[0]
    ctx.x_needs_grad = x.requires_grad
    ctx.weights_need_grad = weights is not None and weights.requires_grad
    ctx.set_materialize_grads(False)


def dispatch_backward(
    combine: Callable[..., Any], ctx: Any, grad_tokens: torch.Tensor | None, *grads: torch.Tensor | None
) -> tuple[Any, ...]:
    """Gradients of (x, topk_weights): a plain-sum `combine` of the rows' gradients; the weights' ride along."""
    routing = list(ctx.saved_tensors)
    grad_weights = grads[1]
    grad_x: torch.Tensor | None = None
    grad_topk_weights: torch.Tensor | None = None
    if ctx.x_needs_grad or ctx.weights_need_grad:
        y = _rows_to_send_back(ctx, grad_tokens, routing[0])
        extra = None
        if ctx.weights_need_grad:
            dtype = weight_dtype(y.dtype)
            extra = (
                y.new_zeros(ctx.rows_shape, dtype=dtype)
                if grad_weights is None
                else grad_weights.to(dtype).contiguous()
            )
        rows, weights = combine(y, None, None, extra, routing, ctx.comm, False)
        grad_x = rows if ctx.x_needs_grad else None
        grad_topk_weights = weights if ctx.weights_need_grad else None
    return grad_x, None, grad_topk_weights, None, None, None, None, None, None


def _rows_to_send_back(ctx: Any, grad_tokens: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """The rows' gradients; when only the weights need one, the narrowest rows there are."""
    if not ctx.x_needs_grad:
        return like.new_zeros((ctx.num_rows, 8), dtype=ctx.x_dtype if ctx.x_dtype in ELEMENTS else torch.bfloat16)
    if grad_tokens is None:
        return like.new_zeros((ctx.num_rows, ctx.hidden), dtype=ctx.x_dtype)
    return grad_tokens.contiguous()


def save_combine(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    y, weights, bias, extra, routing, comm, _ = inputs
    ctx.weighted = weights is not None
    saved = (y, weights) if weights is not None else ()  # a plain sum does not keep y alive
    ctx.save_for_backward(*routing, *saved)
    ctx.num_routing = len(routing)
    ctx.comm = comm
    ctx.num_rows = y.shape[0]
    ctx.has_bias = bias is not None
    ctx.has_extra = extra is not None
    ctx.rows_need_grad = any(tensor is not None and tensor.requires_grad for tensor in (y, weights, extra))


def combine_backward(
    dispatch: Callable[..., Any], ctx: Any, grad_out: torch.Tensor, grad_extra: torch.Tensor | None
) -> tuple[Any, ...]:
    """Gradients of (y, weights, bias, extra): the outputs' gradients, by `dispatch` over the same routing."""
    saved = list(ctx.saved_tensors)
    routing, rest = saved[: ctx.num_routing], saved[ctx.num_routing :]
    grad_y: torch.Tensor | None = None
    grad_weights: torch.Tensor | None = None
    grad_rode_back: torch.Tensor | None = None
    if ctx.rows_need_grad:
        beside = grad_extra.contiguous() if ctx.has_extra and grad_extra is not None else None
        dispatched = dispatch(
            grad_out.contiguous(), routing[0], beside, None, routing, ctx.comm, ctx.num_rows, None, False
        )
        rows = dispatched[0]
        grad_rode_back = None if beside is None else dispatched[2]
        grad_y = rows
        if ctx.weighted:
            y, weights = rest
            if weights.dim() == 1:
                grad_y, grad_weights = _weighed_back(y, rows, weights)
            else:  # in TOKEN_MAJOR the weights of experts elsewhere do not count
                here = dispatched[3] >= 0
                grad_y, of_rows = _weighed_back(y, rows, torch.where(here, weights, 0).sum(dim=1))
                grad_weights = of_rows.unsqueeze(1) * here
    grad_bias = grad_out if ctx.has_bias else None
    return grad_y, grad_weights, grad_bias, grad_rode_back, None, None, None


def _weighed_back(y: torch.Tensor, rows: torch.Tensor, factors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of `y` ``[N, H]`` and of `factors` ``[N]`` by those of their products, `rows` ``[N, H]``, whose memory
    the first may be."""
    given = (y, rows, factors)
    plain = all(type(tensor) in PLAIN and not is_lazy(tensor) for tensor in given)
    # What was saved may have come back as something else, by the hooks for that.
    same = y.shape == rows.shape and y.dtype is rows.dtype and factors.dtype is weight_dtype(rows.dtype)
    here = all(tensor.device == rows.device for tensor in given)
    watched = torch.is_grad_enabled() or torch._C._len_torch_dispatch_stack()  # differentiated again, or traced
    if watched or not (plain and same and here):
        wide = rows.to(factors.dtype)
        return (wide * factors.unsqueeze(1)).to(y.dtype), (y * wide).sum(dim=1)
    return rows, weight_grad(bulk_ready(y).contiguous(), rows, factors)


def weight_grad(y: torch.Tensor, rows: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """``[N]``: the sum of each row of `y` ``[N, H]`` times that of `rows`; then each of `rows` is times its factor.

    Both of one dtype that combine takes, contiguous, and `rows` no part of `y`; `factors` ``[N]`` and what is returned
    of `weight_dtype`. One kernel on the caller's stream, since PyTorch's operators would want wide copies of both.
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
        stream=stream_of(device),
    )
    with on_device(device):
        kernels_for(device).weight_grad(args)
    return dots
