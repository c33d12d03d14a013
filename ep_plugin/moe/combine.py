"""The control path of combine: push on the send lane, add on the receive lane, the same for CPU and CUDA.

Shapes: T tokens, K experts per token, N rows of the dispatch's output, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ep_plugin import _C
from ep_plugin.moe.engine import COMBINE_POOL, Engine
from ep_plugin.moe.routing import RoutingTensors, address, admit, roomy, routing_struct
from ep_plugin.moe.validate import DTYPES, ELEMENTS


@dataclass
class PendingCombine:
    """A combine whose partial rows are on their way."""

    header: Any
    y: torch.Tensor
    weights: torch.Tensor | None
    bias: torch.Tensor | None
    extra: torch.Tensor | None
    routing: RoutingTensors
    made: tuple[torch.Tensor, torch.Tensor] | None = None  # the sums, where they were there before the rows were sent
    result: tuple[torch.Tensor, torch.Tensor] | None = None


def start_combine(
    engine: Engine,
    y: torch.Tensor,
    weights: torch.Tensor | None,
    bias: torch.Tensor | None,
    extra: torch.Tensor | None,
    routing: RoutingTensors,
) -> PendingCombine:
    """Reduces each slot's rows of `y` ``[N, H]`` and pushes the partial rows to the tokens' owners."""
    header = _C.Header(
        op=_C.Op.COMBINE,
        row_bytes=y.shape[1] * y.element_size(),
        weight_bytes=0 if extra is None else extra.element_size(),
        topk=routing.topk_ids.shape[1],
        dtype=DTYPES.index(y.dtype),
        layout=_C.Layout[engine.config.resolved_layout.name],
        config_hash=engine.config_hash,
        num_tokens=routing.topk_ids.shape[0],
    )
    engine.reserve(COMBINE_POOL, _combine_pool_bytes(engine, header, routing))
    engine.lanes.fork()
    pending = PendingCombine(header, y, weights, bias, extra, routing)
    push = _push_args(engine, pending)
    if engine.sms["add_sms"] == 0:
        pending.made = _empty_sums(pending)
        sms, stream = engine.sms["combine_sms"], engine.lanes.send
        engine.kernels.push_and_add(push, _add_args(engine, pending, pending.made, sms, stream))
    else:
        engine.kernels.push(push)
    return pending


def finish_combine(engine: Engine, pending: PendingCombine) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds the partial rows: ``[T, H]``, and the extra values ``[T, K]`` (empty when none rode back)."""
    made = pending.made
    if made is None:
        made = _empty_sums(pending)
        engine.lanes.fork_receive()
        admit(engine, _C.Step.ADD)
        engine.kernels.add(_add_args(engine, pending, made, engine.sms["add_sms"], engine.lanes.receive))
        engine.lanes.join()
    else:
        engine.lanes.join()
        engine.lanes.hand_over(made)
    engine.check()
    return made


def _empty_sums(pending: PendingCombine) -> tuple[torch.Tensor, torch.Tensor]:
    y, extra = pending.y, pending.extra
    T, K = pending.routing.topk_ids.shape
    return y.new_empty((T, y.shape[1])), y.new_empty(0) if extra is None else extra.new_empty((T, K))


def _push_args(engine: Engine, pending: PendingCombine) -> Any:
    y, routing = pending.y, pending.routing
    return _C.PushArgs(
        comm=engine.comm,
        routing=routing_struct(engine, routing, routing.topk_ids.shape[0]),
        header=pending.header,
        y=address(y),
        rows=y.shape[0],
        weights=address(pending.weights),
        extra=address(pending.extra),
        hidden=y.shape[1],
        element=ELEMENTS[y.dtype],
        num_sms=engine.sms["combine_sms"],
        stream=engine.lanes.send,
    )


def _add_args(
    engine: Engine, pending: PendingCombine, made: tuple[torch.Tensor, torch.Tensor], sms: int, stream: int
) -> Any:
    y, routing = pending.y, pending.routing
    out, extra = made
    return _C.AddArgs(
        comm=engine.comm,
        routing=routing_struct(engine, routing, routing.topk_ids.shape[0]),
        header=pending.header,
        out=address(out),
        bias=address(pending.bias),
        extra=0 if pending.extra is None else address(extra),
        hidden=y.shape[1],
        element=ELEMENTS[y.dtype],
        num_sms=sms,
        stream=stream,
    )


def _combine_pool_bytes(engine: Engine, header: Any, routing: RoutingTensors) -> int:
    partial = _C.partial_bytes(header.row_bytes, header.weight_bytes, header.topk)
    most = engine.config.max_tokens_per_rank
    if most is not None:
        return most * min(engine.size, header.topk) * partial
    return roomy(int(routing.totals[_C.Total.MAX_SENT]) * partial, engine.pool_bytes(COMBINE_POOL))
