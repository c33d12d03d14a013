"""The control path of combine: push on the send lane, add on the receive lane, the same for CPU and CUDA.

Shapes: T tokens, K experts per token, N rows of the dispatch's output, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from ep_plugin import _C
from ep_plugin.dtypes import ELEMENTS
from ep_plugin.moe.high_throughput.engine import COMBINE_POOL, Engine
from ep_plugin.moe.high_throughput.routing import KnownRouting, address, header_of, roomy, wait_for_sender
from ep_plugin.moe.high_throughput.sms import KernelSms

Sums: TypeAlias = tuple[torch.Tensor, torch.Tensor | None]
_COMBINE, _COMBINE_RECV, _MAX_SENT = _C.Op.COMBINE, _C.Step.COMBINE_RECV, _C.Total.MAX_SENT


@dataclass
class PendingCombine:
    """A combine whose partial rows are on their way. It holds every tensor that its kernels read."""

    header: Any
    y: torch.Tensor
    weights: torch.Tensor | None
    bias: torch.Tensor | None
    extra: torch.Tensor | None
    routing: KnownRouting
    sms: KernelSms
    capture: int = 0  # the number of the capture of a CUDA graph in which it was begun
    made: Sums | None = None  # the sums, where they were there before the rows were sent
    result: Sums | None = None


def start_combine(
    engine: Engine,
    y: torch.Tensor,
    weights: torch.Tensor | None,
    bias: torch.Tensor | None,
    extra: torch.Tensor | None,
    routing: KnownRouting,
) -> PendingCombine:
    """Reduces each slot's rows of `y` ``[N, H]`` and pushes the partial rows to the tokens' owners."""
    T, K = routing.tensors.topk_ids.shape
    row_bytes = y.shape[1] * y.element_size()
    weight_bytes = 0 if extra is None else extra.element_size()
    header = header_of(_COMBINE, row_bytes, 0, weight_bytes, K, y.dtype, engine.layout, engine.config_hash, T)
    engine.reserve(COMBINE_POOL, _pool_bytes(engine, routing, _C.partial_bytes(row_bytes, weight_bytes, K)))
    pending = PendingCombine(header, y, weights, bias, extra, routing, engine.combine_sms(T, row_bytes, K))
    push = _send_args(engine, pending)
    if pending.sms.receiving > 0:
        engine.lanes.fork()
        engine.kernels.combine_send(push)
        return pending
    pending.made = _empty_sums(pending)
    add = _recv_args(engine, pending, pending.made, pending.sms.sending, engine.lanes.send)
    engine.lanes.fork()
    engine.kernels.combine(push, add)
    return pending


def finish_combine(engine: Engine, pending: PendingCombine) -> Sums:
    """Adds the partial rows: ``[T, H]``, and the extra values ``[T, K]`` (None when none rode back)."""
    made = pending.made
    if made is None:
        made = _empty_sums(pending)
        engine.lanes.fork_receive()
        wait_for_sender(engine, _COMBINE_RECV)
        engine.kernels.combine_recv(_recv_args(engine, pending, made, pending.sms.receiving, engine.lanes.receive))
        engine.lanes.join()
    else:
        engine.lanes.join(received=False)
        engine.lanes.hand_over(made)
    engine.check()
    return made


def whole_combine(engine: Engine, *call: Any) -> Sums:
    return finish_combine(engine, start_combine(engine, *call))


def _empty_sums(pending: PendingCombine) -> Sums:
    y, extra = pending.y, pending.extra
    T, K = pending.routing.tensors.topk_ids.shape
    return y.new_empty((T, y.shape[1])), None if extra is None else extra.new_empty((T, K))


def _send_args(engine: Engine, pending: PendingCombine) -> Any:
    y = pending.y
    return _C.CombineSendArgs(
        comm=engine.comm,
        routing=pending.routing.struct,
        header=pending.header,
        y=y.data_ptr(),
        rows=y.shape[0],
        weights=address(pending.weights),
        extra=address(pending.extra),
        hidden=y.shape[1],
        element=ELEMENTS[y.dtype],
        num_sms=pending.sms.sending,
        stream=engine.lanes.send,
    )


def _recv_args(engine: Engine, pending: PendingCombine, made: Sums, sms: int, stream: int) -> Any:
    y = pending.y
    out, extra = made
    return _C.CombineRecvArgs(
        comm=engine.comm,
        routing=pending.routing.struct,
        header=pending.header,
        out=out.data_ptr(),
        bias=address(pending.bias),
        extra=address(extra),
        hidden=y.shape[1],
        element=ELEMENTS[y.dtype],
        num_sms=sms,
        stream=stream,
    )


def _pool_bytes(engine: Engine, routing: KnownRouting, partial: int) -> int:
    most = engine.config.max_tokens_per_rank
    if most is not None:
        return most * min(engine.size, routing.tensors.topk_ids.shape[1]) * partial
    return roomy(routing.totals[_MAX_SENT] * partial, engine.pool_bytes(COMBINE_POOL))
