"""The arguments of the kernels of dispatch and combine, on one node and in each segment of several.

Shapes: T tokens, H hidden size, K experts per token, N rows of the output.
"""

from __future__ import annotations

from typing import Any

import torch

from ep_plugin import _C
from ep_plugin.moe.arguments import address
from ep_plugin.moe.high_throughput.engine import HighThroughputEngine

_TOKEN_MAJOR = int(_C.Layout.TOKEN_MAJOR)


def dispatch_send_args(
    engine: HighThroughputEngine,
    struct: Any,
    header: Any,
    num_sms: int,
    x: torch.Tensor,
    scales: torch.Tensor | None,
    weights: torch.Tensor | None,
    **more: int,
) -> _C.DispatchSendArgs:
    """Returns the arguments of dispatch send. x: ``[T, H]``. scales, weights: the scales and weights of its rows."""
    return _C.DispatchSendArgs(
        comm=engine.comm,
        routing=struct,
        header=header,
        x=x.data_ptr(),
        x_stride=x.stride(0) * x.element_size(),
        scales=address(scales),
        scale_stride=0 if scales is None else scales.stride(0) * scales.element_size(),
        weights=address(weights),
        num_sms=num_sms,
        stream=engine.streams.own,
        **more,
    )


def combine_send_args(
    common: dict[str, Any],
    num_sms: int,
    stream: int,
    y: torch.Tensor,
    weights: torch.Tensor | None,
    extra: torch.Tensor | None,
    per_row: bool,
) -> _C.CombineSendArgs:
    """Returns the arguments of combine send.

    common: the arguments that sending and receiving share. y: ``[N, H]``. weights, extra: the weights and extra values
    of its rows. per_row: as in Combine.
    """
    return _C.CombineSendArgs(
        y=y.data_ptr(),
        rows=y.shape[0],
        weights=address(weights),
        extra=address(extra),
        per_row=int(per_row and common["routing"].layout == _TOKEN_MAJOR),
        num_sms=num_sms,
        stream=stream,
        **common,
    )


def combine_recv_args(
    common: dict[str, Any],
    num_sms: int,
    stream: int,
    out: torch.Tensor,
    extra: torch.Tensor | None,
    bias: torch.Tensor | None = None,
) -> _C.CombineRecvArgs:
    """Returns the arguments of combine receive. out: ``[T, H]``, for the sums of partial rows. extra: ``[T, K]``, for
    the sums of extra values. common: as in `combine_send_args`."""
    return _C.CombineRecvArgs(
        out=out.data_ptr(),
        bias=address(bias),
        wide_bias=is_wide(bias, out),
        extra=address(extra),
        num_sms=num_sms,
        stream=stream,
        **common,
    )


def is_wide(bias: torch.Tensor | None, rows: torch.Tensor) -> int:
    """1 if a bias of rows is of a larger dtype than they are, else 0."""
    return int(bias is not None and bias.dtype is not rows.dtype)
