"""The control path of dispatch: what is launched, in which order, and what the host waits for.

Plan, notify and send go to the send lane; the host reads the totals while the send runs, allocates the output, and
enqueues expand on the receive lane. The same path serves CPU and CUDA; only the kernel table and the lanes differ.

Shapes: T tokens, K experts per token, R ranks, N output rows, S received slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ep_plugin import _C
from ep_plugin.config import DispatchLayout
from ep_plugin.moe.engine import DISPATCH_POOL, Engine
from ep_plugin.moe.routing import RoutingTensors, address, admit, roomy, routing_struct
from ep_plugin.moe.validate import DTYPES, ELEMENTS, QUANTIZED, num_scales


class DispatchResult(NamedTuple):
    """What a dispatch returns, every field a tensor: empty where the layout or the call has none."""

    tokens: torch.Tensor
    scales: torch.Tensor
    weights: torch.Tensor
    topk_ids: torch.Tensor
    row_expert_ids: torch.Tensor
    expert_count: torch.Tensor
    expert_offset: torch.Tensor
    overflow: torch.Tensor


class DispatchCall(NamedTuple):
    """One dispatch as the caller asked for it, already validated."""

    x: torch.Tensor
    topk_ids: torch.Tensor
    weights: torch.Tensor | None
    scales: torch.Tensor | None
    previous: RoutingTensors | None
    capacity: int | None
    quantize: str | None


@dataclass
class PendingDispatch:
    """A dispatch whose rows are on their way. It holds every tensor that its kernels read."""

    call: DispatchCall
    header: Any
    routing: RoutingTensors
    ticket: int
    block_counts: torch.Tensor | None = None
    made: DispatchResult | None = None  # what the rows go to, where it was there before they were sent
    reserved: bool = False  # the pool is known to be large enough
    result: tuple[DispatchResult, RoutingTensors] | None = None


def start_dispatch(engine: Engine, call: DispatchCall) -> PendingDispatch:
    """Plans, notifies and sends; the payload waits for the host only when the pool has to grow.

    Where the same SMs send and receive, all is enqueued here, and the host waits for what it must know first.
    """
    header = _dispatch_header(engine, call)
    engine.lanes.fork()
    if call.previous is not None:
        pending = PendingDispatch(call, header, call.previous, 0)
    else:
        routing = _empty_routing(engine, call)
        ticket = 0 if call.capacity is not None else engine.next_ticket()
        block_counts = _launch_plan_and_notify(engine, call, header, routing, ticket)
        pending = PendingDispatch(call, header, routing, ticket, block_counts)
    if engine.sms["expand_sms"] == 0:
        _send_and_expand(engine, pending)
        return pending
    needed = _known_pool_bytes(engine, pending)
    if needed is not None:
        engine.reserve(DISPATCH_POOL, needed)
        pending.reserved = True
    if pending.reserved or engine.pool_bytes(DISPATCH_POOL) > 0:
        _send(
            engine, pending
        )  # where the pool turns out to be too small, the kernel leaves at once, on all ranks alike
    return pending


def finish_dispatch(engine: Engine, pending: PendingDispatch) -> tuple[DispatchResult, RoutingTensors]:
    """Waits for the totals, grows the pool if it must, allocates the output and expands into it."""
    if pending.made is not None:
        engine.lanes.join()
        engine.lanes.hand_over((pending.made, pending.routing))
        engine.check()
        return pending.made, pending.routing
    engine.lanes.fork_receive()
    if pending.reserved:  # beside the host's wait
        admit(engine, _C.Step.EXPAND)
    if pending.ticket:
        pending.routing = pending.routing._replace(totals=engine.wait_totals(pending.ticket))
    if not pending.reserved:
        _make_room(engine, pending)
        admit(engine, _C.Step.EXPAND)
    result = _allocate(engine, pending)
    engine.lanes.fork_receive()  # other threads may have used that memory on the caller's stream during the wait
    engine.kernels.expand(_expand_args(engine, pending, result, engine.sms["expand_sms"], engine.lanes.receive))
    engine.lanes.join()
    engine.check()
    return result, pending.routing


def _send_and_expand(engine: Engine, pending: PendingDispatch) -> None:
    """The rest of a dispatch whose output is there before it is sent."""
    if pending.ticket:
        pending.routing = pending.routing._replace(totals=engine.wait_totals(pending.ticket))
    needed = _known_pool_bytes(engine, pending)
    assert needed is not None
    engine.reserve(DISPATCH_POOL, needed)
    pending.reserved = True
    pending.made = _allocate(engine, pending)
    sms, stream = engine.sms["dispatch_sms"], engine.lanes.send
    engine.kernels.send_and_expand(
        _send_args(engine, pending), _expand_args(engine, pending, pending.made, sms, stream)
    )


def _allocate(engine: Engine, pending: PendingDispatch) -> DispatchResult:
    """The output, and in the routing what expand writes there."""
    call = pending.call
    rows, slots = _output_rows(engine, pending)
    if call.previous is None and call.capacity is not None:
        pending.routing = pending.routing._replace(totals=torch.tensor([call.capacity], device="cpu"))
    if call.previous is None:
        K = call.topk_ids.shape[1]
        recv_rows = torch.empty((slots, K), dtype=torch.int32, device=engine.device)
        pending.routing = pending.routing._replace(recv_rows=recv_rows)
    return _empty_result(engine, call, rows)


def _make_room(engine: Engine, pending: PendingDispatch) -> None:
    """After an optimistic send: where it found some rank's pool too small, pools grow and it is launched again."""
    before, needed = engine.pool_bytes(DISPATCH_POOL), _known_pool_bytes(engine, pending)
    assert needed is not None
    engine.reserve(DISPATCH_POOL, needed)
    pending.reserved = True
    if before == 0 or engine.pool_bytes(DISPATCH_POOL) > before:
        _send(engine, pending)


def _dispatch_header(engine: Engine, call: DispatchCall) -> Any:
    x, scales, weights = call.x, call.scales, call.weights
    dtype = x.dtype
    scale_bytes = 0 if scales is None else scales.shape[1] * scales.element_size()
    if call.quantize is not None:
        dtype, scale_bytes = QUANTIZED[call.quantize], int(num_scales(x.shape[1])) * torch.float32.itemsize
    return _C.Header(
        op=_C.Op.DISPATCH if call.previous is None else _C.Op.CACHED_DISPATCH,
        row_bytes=x.shape[1] * dtype.itemsize,
        scale_bytes=scale_bytes,
        weight_bytes=0 if weights is None else weights.element_size(),
        topk=call.topk_ids.shape[1],
        dtype=DTYPES.index(dtype),
        layout=_C.Layout[engine.config.resolved_layout.name],
        config_hash=engine.config_hash,
        num_tokens=x.shape[0],
    )


def _empty_routing(engine: Engine, call: DispatchCall) -> RoutingTensors:
    T, K = call.topk_ids.shape

    def ints(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=engine.device)

    return RoutingTensors(
        topk_ids=ints(T, K),
        send_pos=ints(T, engine.size),
        pair_pos=ints(T, K),
        meta=ints(_C.meta_words(engine.size, engine.config.num_experts)),
        recv_rows=ints(0, K),
        totals=torch.empty(0, dtype=torch.int64, device="cpu"),
    )


def _launch_plan_and_notify(
    engine: Engine, call: DispatchCall, header: Any, routing: RoutingTensors, ticket: int
) -> torch.Tensor:
    """Returns what the kernels share, which must outlive them."""
    T = call.x.shape[0]
    words = _C.block_count_words(T, engine.size, engine.config.num_experts)
    block_counts = torch.empty(words, dtype=torch.int32, device=engine.device)
    struct = routing_struct(engine, routing, T)
    engine.kernels.plan(
        _C.PlanArgs(
            comm=engine.comm,
            routing=struct,
            ids=address(call.topk_ids),
            block_counts=address(block_counts),
            id_bytes=call.topk_ids.element_size(),
            stream=engine.lanes.send,
        )
    )
    engine.kernels.notify(
        _C.NotifyArgs(
            comm=engine.comm,
            routing=struct,
            header=header,
            block_counts=address(block_counts),
            ticket=ticket,
            stream=engine.lanes.send,
        )
    )
    return block_counts


def _send(engine: Engine, pending: PendingDispatch) -> None:
    engine.kernels.send(_send_args(engine, pending))


def _send_args(engine: Engine, pending: PendingDispatch) -> Any:
    call = pending.call
    return _C.SendArgs(
        comm=engine.comm,
        routing=routing_struct(engine, pending.routing, call.x.shape[0]),
        header=pending.header,
        x=address(call.x),
        x_stride=call.x.stride(0) * call.x.element_size(),
        scales=address(call.scales),
        scale_stride=0 if call.scales is None else call.scales.stride(0) * call.scales.element_size(),
        weights=address(call.weights),
        num_sms=engine.sms["dispatch_sms"],
        optimistic=int(not pending.reserved),
        quantize=int(call.quantize is not None),
        element=ELEMENTS[call.x.dtype] if call.quantize is not None else 0,
        stream=engine.lanes.send,
    )


def _known_pool_bytes(engine: Engine, pending: PendingDispatch) -> int | None:
    """Bytes that the largest rank's pool needs: a bound from the configuration, else from this dispatch's totals.

    None before those are known.
    """
    call, header, totals = pending.call, pending.header, pending.routing.totals
    slot = _C.slot_bytes(header.row_bytes, header.scale_bytes, header.weight_bytes, header.topk)
    if engine.config.max_tokens_per_rank is not None:
        return engine.size * engine.config.max_tokens_per_rank * slot
    if totals.numel() == 0:
        assert call.capacity is None
        return None
    return roomy(int(totals[_C.Total.MAX_SLOTS]) * slot, engine.pool_bytes(DISPATCH_POOL))


def _output_rows(engine: Engine, pending: PendingDispatch) -> tuple[int, int]:
    """Rows of the output and received slots that the routing has room for."""
    call, totals = pending.call, pending.routing.totals
    flat = engine.config.resolved_layout is DispatchLayout.FLAT
    if call.capacity is not None:
        bound = engine.size * (engine.config.max_tokens_per_rank or 0)
        return call.capacity, pending.routing.recv_rows.shape[0] if call.previous is not None else bound
    return int(totals[_C.Total.ROWS if flat else _C.Total.SLOTS]), int(totals[_C.Total.SLOTS])


def _empty_result(engine: Engine, call: DispatchCall, rows: int) -> DispatchResult:
    x, scales, weights = call.x, call.scales, call.weights
    K = call.topk_ids.shape[1]
    flat = engine.config.resolved_layout is DispatchLayout.FLAT
    device = engine.device

    def ints(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    tokens, row_scales = empty_payload(x, scales, call.quantize, rows)
    return DispatchResult(
        tokens=tokens,
        scales=row_scales,
        weights=x.new_empty(0) if weights is None else weights.new_empty((rows,) if flat else (rows, K)),
        topk_ids=ints(0) if flat else ints(rows, K),
        row_expert_ids=ints(rows) if flat else ints(0),
        expert_count=ints(engine.local_experts),
        expert_offset=ints(engine.local_experts + 1),
        overflow=ints(2) if call.capacity is not None else ints(0),
    )


def empty_payload(
    x: torch.Tensor, scales: torch.Tensor | None, quantize: str | None, rows: int | torch.SymInt
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `rows` rows of an output, and the scales beside them, are written to."""
    shape = (rows, x.shape[1])
    if quantize is not None:
        row_scales = x.new_empty((rows, num_scales(x.shape[1])), dtype=torch.float32)
        return x.new_empty(shape, dtype=QUANTIZED[quantize]), row_scales
    return x.new_empty(shape), x.new_empty(0) if scales is None else scales.new_empty((rows, scales.shape[1]))


def _expand_args(engine: Engine, pending: PendingDispatch, result: DispatchResult, sms: int, stream: int) -> Any:
    call = pending.call
    return _C.ExpandArgs(
        comm=engine.comm,
        routing=routing_struct(engine, pending.routing, call.x.shape[0]),
        header=pending.header,
        tokens=address(result.tokens),
        scales=address(result.scales) if pending.header.scale_bytes else 0,
        weights=0 if call.weights is None else address(result.weights),
        topk_ids=address(result.topk_ids),
        row_expert_ids=address(result.row_expert_ids),
        expert_count=address(result.expert_count),
        expert_offset=address(result.expert_offset),
        overflow=address(result.overflow),
        capacity=result.tokens.shape[0],
        num_sms=sms,
        fresh=int(call.previous is None),
        stream=stream,
    )
