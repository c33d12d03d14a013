"""The control path of dispatch: what is launched, in which order, and what the host waits for.

Plan, notify and send go to the send lane; the host reads the totals while the send runs, allocates the output, and
enqueues expand on the receive lane. Rows that have come wait for that, and how long depends on the host: so where
the dispatches before were alike, expand goes ahead of the totals, into an output as large as theirs and a little more.
The same path serves CPU and CUDA; only the kernel table and the lanes differ.

Shapes: T tokens, K experts per token, R ranks, E_l local experts, N output rows, S received slots.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch

from ep_plugin import _C
from ep_plugin.moe.high_throughput.dispatch_args import (
    Counts,
    DispatchCall,
    DispatchResult,
    PendingDispatch,
    allocate,
    known_pool_bytes,
    output_rows,
    pending_dispatch,
    recv_args,
    send_args,
)
from ep_plugin.moe.high_throughput.engine import DISPATCH_POOL, Engine
from ep_plugin.moe.high_throughput.expected import Rows
from ep_plugin.moe.high_throughput.routing import (
    KnownRouting,
    RoutingTensors,
    address,
    remember_routing,
    wait_for_sender,
)

_DISPATCH_RECV = _C.Step.DISPATCH_RECV


class Early(NamedTuple):
    """What an expand ahead of the totals writes to, if `room` is enough."""

    room: Rows
    result: DispatchResult
    recv_rows: torch.Tensor


def start_dispatch(engine: Engine, call: DispatchCall) -> PendingDispatch:
    """Plans, notifies and sends; the payload waits for the host only when the pool has to grow.

    Where the same SMs send and receive, all is enqueued here, and the host waits for what it must know first.
    """
    pending = pending_dispatch(engine, call)
    needed = known_pool_bytes(engine, pending)
    if needed is not None:
        engine.reserve(DISPATCH_POOL, needed)  # before anything is enqueued: a graph's capture may refuse it
        pending.reserved = True
    engine.lanes.fork()
    if call.previous is None:
        _plan_and_notify(engine, pending)
    if pending.sms.receiving == 0:
        _dispatch_in_one(engine, pending)
        return pending
    pending.sent = pending.reserved or engine.pool_bytes(DISPATCH_POOL) > 0
    if pending.sent:  # where the pools turn out to be too small, no rank is told of any row
        engine.kernels.dispatch_send(send_args(engine, pending))
    return pending


def finish_dispatch(engine: Engine, pending: PendingDispatch) -> tuple[DispatchResult, RoutingTensors]:
    """Expands what was sent, and waits for the totals where the host must know them."""
    if pending.made is not None:
        engine.lanes.join(received=False)
        engine.lanes.hand_over(pending.made)
        engine.check()
        return pending.made
    args, counts = recv_args(engine, pending, pending.sms.receiving, engine.lanes.receive)
    if pending.ticket:
        result, recv_rows = _expand_what_is_told(engine, pending, args, counts)
    else:
        result, recv_rows = allocate(engine, pending, args, counts, output_rows(engine, pending))
        _receive(engine, pending, args)
        engine.lanes.join()
    routing = _routing(engine, pending, recv_rows)
    engine.check()
    return result, routing


def whole_dispatch(engine: Engine, call: DispatchCall) -> tuple[DispatchResult, RoutingTensors]:
    return finish_dispatch(engine, start_dispatch(engine, call))


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


def _dispatch_in_one(engine: Engine, pending: PendingDispatch) -> None:
    """The rest of a dispatch whose output is there before it is sent."""
    reserved = pending.reserved
    pending.reserved = True  # before the launch
    send = send_args(engine, pending)
    expand, counts = recv_args(engine, pending, pending.sms.sending, engine.lanes.send)
    if pending.ticket:
        pending.wait_totals(engine, counts)
    if not reserved:
        needed = known_pool_bytes(engine, pending)
        assert needed is not None
        engine.reserve(DISPATCH_POOL, needed)
        send.comm = engine.comm
    result, recv_rows = allocate(engine, pending, expand, counts, output_rows(engine, pending))
    engine.lanes.fork()  # other threads may have used that memory on the caller's stream during the wait
    engine.kernels.dispatch(send, expand)
    pending.made = result, _routing(engine, pending, recv_rows)


def _expand_what_is_told(
    engine: Engine, pending: PendingDispatch, args: Any, counts: Counts
) -> tuple[DispatchResult, torch.Tensor]:
    """Expand of a dispatch whose totals the host waits for: ahead of them where it may, else when they are there.

    What the caller waits for on the host comes behind the totals, so what can be done before them is.
    """
    early = _receive_early(engine, pending, args, counts) if pending.sent else None
    if pending.sent and early is None:
        engine.lanes.fork_receive()
        wait_for_sender(engine, _DISPATCH_RECV, fresh=True)
    pending.wait_totals(engine, counts)
    needed = output_rows(engine, pending)
    engine.expected.saw(pending.call.topk_ids.shape, needed)
    if _make_room(engine, pending):
        engine.lanes.join(received=False)  # behind all of the send, since admit may have let this one in already
    elif early is not None and needed.fit(early.room):
        return _cut(pending, early, needed)
    early = None  # an expand that came too early has left that memory alone
    made = allocate(engine, pending, args, counts, needed)
    engine.lanes.fork_receive()  # as in _receive
    engine.kernels.dispatch_recv(args)
    engine.lanes.join()
    return made


def _make_room(engine: Engine, pending: PendingDispatch) -> bool:
    """Where some rank's pool is too small, makes them grow. Whether it is sent only now, be it again."""
    if pending.reserved:
        return False
    before, needed = engine.pool_bytes(DISPATCH_POOL), known_pool_bytes(engine, pending)
    assert needed is not None
    engine.reserve(DISPATCH_POOL, needed)
    pending.reserved = True
    if pending.sent and engine.pool_bytes(DISPATCH_POOL) == before:
        return False
    engine.kernels.dispatch_send(send_args(engine, pending))
    return True


def _receive_early(engine: Engine, pending: PendingDispatch, args: Any, counts: Counts) -> Early | None:
    """Expand before the totals are there, and the caller's stream behind it; None where they are there, never come, or
    nobody can tell what they will be."""
    if engine.knows(pending.ticket) or not engine.boards.quiet():
        return None
    room = engine.expected.rows(pending.call.topk_ids.shape)
    if room is None:
        return None
    try:
        made = allocate(engine, pending, args, counts, room)
    except torch.OutOfMemoryError:
        return None  # what is needed may be less
    args.optimistic = 1
    _receive(engine, pending, args)
    args.optimistic = 0
    engine.lanes.join()
    return Early(room, *made)


def _receive(engine: Engine, pending: PendingDispatch, args: Any) -> None:
    engine.lanes.fork_receive()  # other threads may have used the output's memory on the caller's stream until now
    wait_for_sender(engine, _DISPATCH_RECV, fresh=pending.call.previous is None)
    engine.kernels.dispatch_recv(args)


def _cut(pending: PendingDispatch, early: Early, needed: Rows) -> tuple[DispatchResult, torch.Tensor]:
    """What was made larger than it `needed` to be, as large as that. The memory stays as it is."""
    result, recv_rows = early.result, early.recv_rows
    for tensor in (result.tokens, result.scales, result.weights, result.ids):
        if tensor is not None:
            tensor.resize_(needed.output, *tensor.shape[1:])
    recv_rows.resize_(needed.slots, recv_rows.shape[1])
    pending.struct.recv_rows, pending.struct.slots = recv_rows.data_ptr(), needed.slots  # no address without slots
    return result, recv_rows


def _routing(engine: Engine, pending: PendingDispatch, recv_rows: torch.Tensor) -> RoutingTensors:
    call = pending.call
    if call.previous is not None:
        return call.previous.tensors
    assert pending.totals is not None
    routing = RoutingTensors(pending.topk_ids, pending.plan, recv_rows, pending.totals)
    remember_routing(engine, KnownRouting(routing, pending.struct, pending.numbers or [cast(int, call.capacity)]))
    return routing
