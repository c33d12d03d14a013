"""What the kernels of a dispatch are given: its arguments, what it brings, and the memory for that.

Shapes: T tokens, K experts per token, R ranks, E_l local experts, N output rows, S received slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ep_plugin import _C
from ep_plugin.dtypes import ELEMENTS, QUANTIZED, num_scales
from ep_plugin.moe.high_throughput.engine import DISPATCH_POOL, Engine
from ep_plugin.moe.high_throughput.expected import Rows
from ep_plugin.moe.high_throughput.routing import (
    KnownRouting,
    RoutingTensors,
    address,
    header_of,
    roomy,
    routing_struct,
)
from ep_plugin.moe.high_throughput.sms import KernelSms

_DISPATCH, _CACHED_DISPATCH = _C.Op.DISPATCH, _C.Op.CACHED_DISPATCH
_SLOTS, _ROWS, _MAX_ROWS = _C.Total.SLOTS, _C.Total.ROWS, _C.Total.MAX_ROWS


class DispatchResult(NamedTuple):
    """What a dispatch returns; None where the call has none. From expert_counts on, see Counts.

    ids: int32, FLAT: row_expert_ids ``[N]``, TOKEN_MAJOR: topk_ids ``[N, K]``.
    """

    tokens: torch.Tensor
    scales: torch.Tensor | None
    weights: torch.Tensor | None
    ids: torch.Tensor
    expert_counts: torch.Tensor
    expert_offsets: torch.Tensor
    limits: torch.Tensor | None
    host_counts: torch.Tensor | None


class Counts(NamedTuple):
    """The parts of a DispatchResult whose sizes are known before the totals.

    expert_counts: int32 ``[E_l]``; host_counts: the same as int64 in host memory, None with a capacity. expert_offsets:
    int32 ``[E_l + 1]``. limits: int32 ``[2]``, whether rows were dropped and how many are required; None without a
    capacity.
    """

    expert_counts: torch.Tensor
    expert_offsets: torch.Tensor
    limits: torch.Tensor | None
    host_counts: torch.Tensor | None


class DispatchCall(NamedTuple):
    """One dispatch as the caller asked for it, already validated."""

    x: torch.Tensor
    topk_ids: torch.Tensor
    weights: torch.Tensor | None
    scales: torch.Tensor | None
    previous: KnownRouting | None
    capacity: int | None
    quantize: str | None


@dataclass
class PendingDispatch:
    """A dispatch whose rows are on their way. It holds every tensor that its kernels read."""

    call: DispatchCall
    header: Any
    struct: Any
    sms: KernelSms
    topk_ids: torch.Tensor
    plan: torch.Tensor
    block_counts: torch.Tensor | None
    totals: torch.Tensor | None  # int64 on the host, of the routing that this makes
    ticket: int = 0  # what the host waits for, or 0
    numbers: list[int] | None = None  # the totals, once the host knows them
    reserved: bool = False  # the pool is known to be large enough
    sent: bool = False  # send has been launched, be it optimistically
    capture: int = 0  # the number of the capture of a CUDA graph in which it was begun
    made: tuple[DispatchResult, RoutingTensors] | None = None  # what the rows go to, if that was there before the send
    result: tuple[DispatchResult, RoutingTensors] | None = None

    def wait_totals(self, engine: Engine, counts: Counts) -> None:
        assert self.totals is not None and counts.host_counts is not None
        self.numbers = engine.wait_totals(self.ticket, self.totals, counts.host_counts)


def pending_dispatch(engine: Engine, call: DispatchCall) -> PendingDispatch:
    previous = call.previous
    header = _dispatch_header(engine, call)
    on_the_wire = header.row_bytes + header.scale_bytes
    sms = engine.dispatch_sms(call.x.shape[0], on_the_wire, header.topk, call.quantize is not None)
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


def send_args(engine: Engine, pending: PendingDispatch) -> Any:
    call = pending.call
    x, scales = call.x, call.scales
    return _C.DispatchSendArgs(
        comm=engine.comm,
        routing=pending.struct,
        header=pending.header,
        x=x.data_ptr(),
        x_stride=x.stride(0) * x.element_size(),
        scales=address(scales),
        scale_stride=0 if scales is None else scales.stride(0) * scales.element_size(),
        weights=address(call.weights),
        num_sms=pending.sms.sending,
        optimistic=int(not pending.reserved),
        quantize=int(call.quantize is not None),
        element=ELEMENTS[x.dtype] if call.quantize is not None else 0,
        stream=engine.lanes.send,
    )


def recv_args(engine: Engine, pending: PendingDispatch, sms: int, stream: int) -> tuple[Any, Counts]:
    """All of expand's arguments that the totals do not decide."""
    counts = _empty_counts(engine, pending)
    args = _C.DispatchRecvArgs(
        routing=pending.struct,
        header=pending.header,
        expert_count=counts.expert_counts.data_ptr(),
        expert_offset=counts.expert_offsets.data_ptr(),
        overflow=address(counts.limits),
        num_sms=sms,
        fresh=int(pending.call.previous is None),
        stream=stream,
    )
    return args, counts


def _empty_counts(engine: Engine, pending: PendingDispatch) -> Counts:
    """Those on the host are there already where the routing is known."""
    local, call, words = engine.local_experts, pending.call, pending.plan
    if call.capacity is not None:
        return Counts(words.new_empty(local), words.new_empty(local + 1), words.new_empty(2), None)
    if call.previous is not None:
        host_counts = call.previous.tensors.totals.narrow_copy(0, _C.num_totals, local)
    else:
        host_counts = torch.empty(local, dtype=torch.int64, device="cpu")
    return Counts(words.new_empty(local), words.new_empty(local + 1), None, host_counts)


def allocate(
    engine: Engine, pending: PendingDispatch, args: Any, counts: Counts, room: Rows
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
    recv_rows = pending.plan.new_empty((slots, call.topk_ids.shape[1]))
    pending.struct.recv_rows = recv_rows.data_ptr()
    pending.struct.slots = slots
    args.routing = pending.struct
    return result, recv_rows


def known_pool_bytes(engine: Engine, pending: PendingDispatch) -> int | None:
    """Bytes that every rank's pool needs, for R regions as large as the fullest.

    By the configuration's bound, else by this dispatch's totals; None before those are known.
    """
    header = pending.header
    slot = _C.slot_bytes(header.row_bytes, header.scale_bytes, header.weight_bytes, header.topk)
    if engine.config.max_tokens_per_rank is not None:
        return engine.size * engine.config.max_tokens_per_rank * slot
    if pending.numbers is None:
        assert pending.call.capacity is None
        return None
    return roomy(engine.size * pending.numbers[_MAX_ROWS] * slot, engine.pool_bytes(DISPATCH_POOL))


def output_rows(engine: Engine, pending: PendingDispatch) -> Rows:
    """What the output and the routing's recv_rows have room for."""
    capacity, numbers = pending.call.capacity, pending.numbers
    if capacity is not None:
        return Rows(capacity, engine.size * (engine.config.max_tokens_per_rank or 0))
    assert numbers is not None
    return Rows(numbers[_ROWS if engine.flat else _SLOTS], numbers[_SLOTS])


def _empty_result(engine: Engine, call: DispatchCall, rows: int, counts: Counts) -> DispatchResult:
    x, weights = call.x, call.weights
    beside = (rows,) if engine.flat else (rows, call.topk_ids.shape[1])
    tokens, scales = empty_payload(x, call.scales, call.quantize, rows)
    return DispatchResult(
        tokens,
        scales,
        None if weights is None else weights.new_empty(beside),
        counts.expert_counts.new_empty(beside),
        *counts,
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
