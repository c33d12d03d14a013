"""The control path of dispatch: what is launched, in which order, and what the host waits for.

Plan, notify and send go to the send lane; the host reads the totals while the send runs, allocates the output, and
enqueues expand on the receive lane. Rows that have come wait for that, and how long depends on the host: so where
the dispatches before were alike, expand goes ahead of the totals, into an output as large as theirs and a little more.
The same path serves CPU and CUDA; only the kernel table and the lanes differ.

Shapes: T tokens, K experts per token, R ranks, E_l local experts, N output rows, S received slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch

from ep_plugin import _C
from ep_plugin.moe.engine import DISPATCH_POOL, Engine
from ep_plugin.moe.expected import Rows
from ep_plugin.moe.routing import (
    WORD_BYTES,
    KnownRouting,
    RoutingTensors,
    address,
    admit,
    header_of,
    remember_routing,
    roomy,
    routing_struct,
)
from ep_plugin.moe.validate import ELEMENTS, QUANTIZED, num_scales

_DISPATCH, _CACHED_DISPATCH, _EXPAND = _C.Op.DISPATCH, _C.Op.CACHED_DISPATCH, _C.Step.EXPAND
_SLOTS, _ROWS, _MAX_SLOTS = _C.Total.SLOTS, _C.Total.ROWS, _C.Total.MAX_SLOTS


class DispatchResult(NamedTuple):
    """What a dispatch returns; None where the call has none.

    ids: int32, FLAT: row_expert_ids ``[N]``, TOKEN_MAJOR: topk_ids ``[N, K]``. counts: int32, expert_count ``[E_l]``,
    expert_offset ``[E_l + 1]`` and, with a capacity, overflow ``[2]``, one after the other.
    """

    tokens: torch.Tensor
    scales: torch.Tensor | None
    weights: torch.Tensor | None
    ids: torch.Tensor
    counts: torch.Tensor


class DispatchCall(NamedTuple):
    """One dispatch as the caller asked for it, already validated."""

    x: torch.Tensor
    topk_ids: torch.Tensor
    weights: torch.Tensor | None
    scales: torch.Tensor | None
    previous: KnownRouting | None
    capacity: int | None
    quantize: str | None


class Early(NamedTuple):
    """What an expand ahead of the totals writes to, if `room` is enough."""

    room: Rows
    result: DispatchResult
    recv_rows: torch.Tensor


@dataclass
class PendingDispatch:
    """A dispatch whose rows are on their way. It holds every tensor that its kernels read."""

    call: DispatchCall
    header: Any
    struct: Any
    sms: dict[str, int]
    topk_ids: torch.Tensor
    plan: torch.Tensor
    block_counts: torch.Tensor | None
    totals: torch.Tensor | None  # int64 on the host, of the routing that this makes
    ticket: int = 0  # what the host waits for, or 0
    numbers: list[int] | None = None  # the totals, once the host knows them
    reserved: bool = False  # the pool is known to be large enough
    sent: bool = False  # send has been launched, be it optimistically
    captured: bool = False  # begun while a CUDA graph was being captured
    made: tuple[DispatchResult, RoutingTensors] | None = None  # what the rows go to, if that was there before the send
    result: tuple[DispatchResult, RoutingTensors] | None = None

    def wait_totals(self, engine: Engine) -> None:
        assert self.totals is not None
        self.numbers = engine.wait_totals(self.ticket, self.totals)


def start_dispatch(engine: Engine, call: DispatchCall) -> PendingDispatch:
    """Plans, notifies and sends; the payload waits for the host only when the pool has to grow.

    Where the same SMs send and receive, all is enqueued here, and the host waits for what it must know first.
    """
    pending = _pending(engine, call)
    needed = _known_pool_bytes(engine, pending)
    if needed is not None:
        engine.reserve(DISPATCH_POOL, needed)  # before anything is enqueued: a graph's capture may refuse it
        pending.reserved = True
    engine.lanes.fork()
    if call.previous is None:
        _plan_and_notify(engine, pending)
    if pending.sms["expand_sms"] == 0:
        _send_and_expand(engine, pending)
        return pending
    pending.sent = pending.reserved or engine.pool_bytes(DISPATCH_POOL) > 0
    if pending.sent:  # where the pool turns out to be too small, the kernel leaves at once, on all ranks alike
        engine.kernels.send(_send_args(engine, pending))
    return pending


def finish_dispatch(engine: Engine, pending: PendingDispatch) -> tuple[DispatchResult, RoutingTensors]:
    """Expands what was sent, and waits for the totals where the host must know them."""
    if pending.made is not None:
        engine.lanes.join(received=False)
        engine.lanes.hand_over(pending.made)
        engine.check()
        return pending.made
    args, counts = _expand_args(engine, pending, pending.sms["expand_sms"], engine.lanes.receive)
    if pending.ticket:
        result, recv_rows = _expand_what_is_told(engine, pending, args, counts)
    else:
        result, recv_rows = _allocate(engine, pending, args, counts, _output_rows(engine, pending))
        _expand(engine, args, admits=True)
    engine.lanes.join()
    routing = _routing(engine, pending, recv_rows)
    engine.check()
    return result, routing


def _pending(engine: Engine, call: DispatchCall) -> PendingDispatch:
    previous = call.previous
    header, sms = _dispatch_header(engine, call), engine.sms_for(call.x.shape[0])
    if previous is not None:
        ids, plan, *_ = previous.tensors
        return PendingDispatch(call, header, previous.struct, sms, ids, plan, None, None, numbers=previous.totals)
    T, K = call.topk_ids.shape
    plan = torch.empty(engine.plan_words(T, K), dtype=torch.int32, device=engine.device)
    topk_ids = plan.new_empty((T, K))
    block_counts = plan.new_empty(_C.block_count_words(T, engine.size, engine.config.num_experts))
    if call.capacity is None:
        totals, ticket = torch.empty(engine.num_totals, dtype=torch.int64, device="cpu"), engine.next_ticket()
    else:
        totals, ticket = torch.full((1,), call.capacity, dtype=torch.int64, device="cpu"), 0
    struct = routing_struct(engine, topk_ids, plan, None)
    return PendingDispatch(call, header, struct, sms, topk_ids, plan, block_counts, totals, ticket)


def _dispatch_header(engine: Engine, call: DispatchCall) -> Any:
    x, scales, weights = call.x, call.scales, call.weights
    dtype = x.dtype
    scale_bytes = 0 if scales is None else scales.shape[1] * scales.element_size()
    if call.quantize is not None:
        dtype, scale_bytes = QUANTIZED[call.quantize], int(num_scales(x.shape[1])) * torch.float32.itemsize
    return header_of(
        _DISPATCH if call.previous is None else _CACHED_DISPATCH,
        x.shape[1] * dtype.itemsize,
        scale_bytes,
        0 if weights is None else weights.element_size(),
        call.topk_ids.shape[1],
        dtype,
        engine.layout,
        engine.config_hash,
        x.shape[0],
    )


def _plan_and_notify(engine: Engine, pending: PendingDispatch) -> None:
    ids, block_counts, stream = pending.call.topk_ids, address(pending.block_counts), engine.lanes.send
    engine.kernels.plan(
        _C.PlanArgs(
            comm=engine.comm,
            routing=pending.struct,
            ids=ids.data_ptr(),
            block_counts=block_counts,
            id_bytes=ids.element_size(),
            stream=stream,
        )
    )
    engine.kernels.notify(
        _C.NotifyArgs(
            comm=engine.comm,
            routing=pending.struct,
            header=pending.header,
            block_counts=block_counts,
            ticket=pending.ticket,
            stream=stream,
        )
    )


def _send_and_expand(engine: Engine, pending: PendingDispatch) -> None:
    """The rest of a dispatch whose output is there before it is sent."""
    reserved = pending.reserved
    pending.reserved = True  # before the launch
    send = _send_args(engine, pending)
    expand, counts = _expand_args(engine, pending, _sending_sms(pending), engine.lanes.send)
    if pending.ticket:
        pending.wait_totals(engine)
    if not reserved:
        needed = _known_pool_bytes(engine, pending)
        assert needed is not None
        engine.reserve(DISPATCH_POOL, needed)
        send.comm = engine.comm
    result, recv_rows = _allocate(engine, pending, expand, counts, _output_rows(engine, pending))
    engine.lanes.fork()  # other threads may have used that memory on the caller's stream during the wait
    engine.kernels.send_and_expand(send, expand)
    pending.made = result, _routing(engine, pending, recv_rows)


def _expand_what_is_told(
    engine: Engine, pending: PendingDispatch, args: Any, counts: torch.Tensor
) -> tuple[DispatchResult, torch.Tensor]:
    """Expand of a dispatch whose totals the host waits for: ahead of them where it may, else when they are there."""
    early = None
    if pending.sent:
        engine.lanes.fork_receive()
        admit(engine, _EXPAND)
        early = _expand_early(engine, pending, args, counts)
    pending.wait_totals(engine)
    needed = _output_rows(engine, pending)
    engine.expected.saw(pending.call.topk_ids.shape, needed)
    if _make_room(engine, pending):
        engine.lanes.join(received=False)  # behind all of the send, since admit may have let this one in already
    elif early is not None and needed.fit(early.room):
        return _cut(pending, early, needed)
    early = None  # an expand that came too early has left that memory alone
    made = _allocate(engine, pending, args, counts, needed)
    _expand(engine, args)
    return made


def _make_room(engine: Engine, pending: PendingDispatch) -> bool:
    """Where some rank's pool is too small, makes them grow. Whether it is sent only now, be it again."""
    if pending.reserved:
        return False
    before, needed = engine.pool_bytes(DISPATCH_POOL), _known_pool_bytes(engine, pending)
    assert needed is not None
    engine.reserve(DISPATCH_POOL, needed)
    pending.reserved = True
    if pending.sent and engine.pool_bytes(DISPATCH_POOL) == before:
        return False
    engine.kernels.send(_send_args(engine, pending))
    return True


def _expand_early(engine: Engine, pending: PendingDispatch, args: Any, counts: torch.Tensor) -> Early | None:
    """Expand before the totals are there; None where they are, never come, or nobody can tell what they will be."""
    if engine.knows(pending.ticket) or not engine.boards.quiet():
        return None
    room = engine.expected.rows(pending.call.topk_ids.shape)
    if room is None:
        return None
    try:
        made = _allocate(engine, pending, args, counts, room)
    except torch.OutOfMemoryError:
        return None  # what is needed may be less
    args.optimistic = 1
    _expand(engine, args)
    args.optimistic = 0
    return Early(room, *made)


def _expand(engine: Engine, args: Any, admits: bool = False) -> None:
    engine.lanes.fork_receive()  # other threads may have used the output's memory on the caller's stream until now
    if admits:
        admit(engine, _EXPAND)
    engine.kernels.expand(args)


def _cut(pending: PendingDispatch, early: Early, needed: Rows) -> tuple[DispatchResult, torch.Tensor]:
    """What was made larger than it `needed` to be, as large as that. The memory stays as it is."""
    result, recv_rows = early.result, early.recv_rows
    for tensor in (result.tokens, result.scales, result.weights, result.ids):
        if tensor is not None:
            tensor.resize_(needed.output, *tensor.shape[1:])
    pending.struct.slots = needed.slots
    return result, recv_rows.resize_(needed.slots, recv_rows.shape[1])


def _send_args(engine: Engine, pending: PendingDispatch) -> Any:
    call = pending.call
    x, scales = call.x, call.scales
    return _C.SendArgs(
        comm=engine.comm,
        routing=pending.struct,
        header=pending.header,
        x=x.data_ptr(),
        x_stride=x.stride(0) * x.element_size(),
        scales=address(scales),
        scale_stride=0 if scales is None else scales.stride(0) * scales.element_size(),
        weights=address(call.weights),
        num_sms=_sending_sms(pending),
        optimistic=int(not pending.reserved),
        quantize=int(call.quantize is not None),
        element=ELEMENTS[x.dtype] if call.quantize is not None else 0,
        stream=engine.lanes.send,
    )


def _sending_sms(pending: PendingDispatch) -> int:
    return pending.sms["dispatch_sms" if pending.call.quantize is None else "quantize_sms"]


def _expand_args(engine: Engine, pending: PendingDispatch, sms: int, stream: int) -> tuple[Any, torch.Tensor]:
    """All of expand's arguments that the totals do not decide, and DispatchResult.counts."""
    local, limited = engine.local_experts, pending.call.capacity is not None
    counts = pending.plan.new_empty(2 * local + (3 if limited else 1))
    count = counts.data_ptr()
    args = _C.ExpandArgs(
        routing=pending.struct,
        header=pending.header,
        expert_count=count,
        expert_offset=count + WORD_BYTES * local,
        overflow=count + WORD_BYTES * (2 * local + 1) if limited else 0,
        num_sms=sms,
        fresh=int(pending.call.previous is None),
        stream=stream,
    )
    return args, counts


def _allocate(
    engine: Engine, pending: PendingDispatch, args: Any, counts: torch.Tensor, room: Rows
) -> tuple[DispatchResult, torch.Tensor]:
    """The output and the routing's recv_rows, and both in expand's `args`, beside the pools as they are now."""
    call = pending.call
    rows, slots = room
    result = _empty_result(engine, call, rows, counts)
    args.comm = engine.comm
    args.tokens = result.tokens.data_ptr()
    args.scales = address(result.scales)
    args.weights = address(result.weights)
    if engine.flat:
        args.row_expert_ids = result.ids.data_ptr()
    else:
        args.topk_ids = result.ids.data_ptr()
    args.capacity = rows
    if call.previous is not None:
        return result, call.previous.tensors.recv_rows
    recv_rows = counts.new_empty((slots, call.topk_ids.shape[1]))
    pending.struct.recv_rows = recv_rows.data_ptr()
    pending.struct.slots = slots
    args.routing = pending.struct
    return result, recv_rows


def _known_pool_bytes(engine: Engine, pending: PendingDispatch) -> int | None:
    """Bytes that the largest rank's pool needs: a bound from the configuration, else from this dispatch's totals.

    None before those are known.
    """
    header = pending.header
    slot = _C.slot_bytes(header.row_bytes, header.scale_bytes, header.weight_bytes, header.topk)
    if engine.config.max_tokens_per_rank is not None:
        return engine.size * engine.config.max_tokens_per_rank * slot
    if pending.numbers is None:
        assert pending.call.capacity is None
        return None
    return roomy(pending.numbers[_MAX_SLOTS] * slot, engine.pool_bytes(DISPATCH_POOL))


def _output_rows(engine: Engine, pending: PendingDispatch) -> Rows:
    """What the output and the routing's recv_rows have room for."""
    capacity, numbers = pending.call.capacity, pending.numbers
    if capacity is not None:
        return Rows(capacity, engine.size * (engine.config.max_tokens_per_rank or 0))
    assert numbers is not None
    return Rows(numbers[_ROWS if engine.flat else _SLOTS], numbers[_SLOTS])


def _empty_result(engine: Engine, call: DispatchCall, rows: int, counts: torch.Tensor) -> DispatchResult:
    x, weights = call.x, call.weights
    beside = (rows,) if engine.flat else (rows, call.topk_ids.shape[1])
    tokens, scales = empty_payload(x, call.scales, call.quantize, rows)
    return DispatchResult(
        tokens,
        scales,
        None if weights is None else weights.new_empty(beside),
        counts.new_empty(beside),
        counts,
    )


def empty_payload(
    x: torch.Tensor, scales: torch.Tensor | None, quantize: str | None, rows: int | torch.SymInt
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What `rows` rows of an output, and the scales beside them, are written to; None without scales."""
    shape = (rows, x.shape[1])
    if quantize is not None:
        row_scales = x.new_empty((rows, num_scales(x.shape[1])), dtype=torch.float32)
        return x.new_empty(shape, dtype=QUANTIZED[quantize]), row_scales
    return x.new_empty(shape), None if scales is None else scales.new_empty((rows, scales.shape[1]))


def _routing(engine: Engine, pending: PendingDispatch, recv_rows: torch.Tensor) -> RoutingTensors:
    call = pending.call
    if call.previous is not None:
        return call.previous.tensors
    assert pending.totals is not None
    routing = RoutingTensors(pending.topk_ids, pending.plan, recv_rows, pending.totals)
    remember_routing(engine, KnownRouting(routing, pending.struct, pending.numbers or [cast(int, call.capacity)]))
    return routing
