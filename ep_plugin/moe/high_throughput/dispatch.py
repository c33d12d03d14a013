"""Dispatch: the order of its kernels, and the waits of the host.

A dispatch that makes its routing runs plan, notify and send on the send stream. While rows are sent, the host reads the
totals, allocates the output, and enqueues receive on the receive stream. Rows that have arrived would wait for the host
meanwhile. So if earlier dispatches of that shape all brought about the same number of rows, receive is enqueued
*early*: before the totals are known, into an output with room for a little more. A cached dispatch (previous_handle)
and one with a capacity wait for no totals. The same path serves CPU and CUDA.

Shapes: T tokens, H hidden size, K experts per token, R ranks, E_l local experts, N output rows, S received slots.
"""

from __future__ import annotations

from typing import Any

import torch

from ep_plugin import _C
from ep_plugin.dtypes import DTYPE_CODES, ELEMENTS, QUANTIZED, num_scales
from ep_plugin.moe.arguments import address, bulk_ready, check_capture, check_dispatch, check_id_values
from ep_plugin.moe.high_throughput.engine import DISPATCH_POOL, HighThroughputEngine
from ep_plugin.moe.high_throughput.history import Rows
from ep_plugin.moe.high_throughput.kernels import dispatch_send_args, plan_and_notify
from ep_plugin.moe.in_flight import Operation, Tensors
from ep_plugin.moe.layout import DispatchCall, DispatchResult
from ep_plugin.moe.statistics import current_layer
from ep_plugin.runtime.tensors import call_of

_DISPATCH, _CACHED_DISPATCH = int(_C.Op.DISPATCH), int(_C.Op.CACHED_DISPATCH)
_DISPATCH_RECV = _C.Step.DISPATCH_RECV
_SLOTS, _ROWS, _MAX_ROWS = _C.Total.SLOTS, _C.Total.ROWS, _C.Total.MAX_ROWS


class Dispatch(Operation):
    """One dispatch, from its operator's arguments to the rows that this rank receives."""

    name = "dispatch"

    def __init__(self, engine: HighThroughputEngine, *arguments: Any) -> None:
        x, topk_ids, weights, scales, capacity, quantize, previous, comm = arguments
        known = engine.routing("previous_handle", previous, comm) if previous else None
        self._engine = engine
        self.rows = bulk_ready("x", x)
        self._call = DispatchCall(self.rows, topk_ids, weights, scales, known, capacity, quantize)
        self._ticket = 0  # names the totals that the host waits for; 0: it waits for none
        self._known: list[int] = []  # the totals, once the host knows them
        self._reserved = False  # the pool is known to be large enough
        self._sent = False  # send has been launched; without _reserved it sends nothing into a pool that is too small
        self._layer, self._recorded = current_layer(), False
        self._block_counts: torch.Tensor | None = None
        self._recv_rows: torch.Tensor | None = None
        self._result: DispatchResult | None = None

    def check(self) -> None:
        engine, call = self._engine, self._call
        form = _C.form_of(call.x, call.topk_ids, call.weights, call.scales)
        # With a previous_handle, the bound of the capacity differs between handles. So such a call is always checked.
        alike = None if call.previous is not None else call_of(form, call.capacity, call.quantize)
        if not engine.known.find(alike):
            check_dispatch(engine, call)
            engine.known.remember(alike)
            return
        check_capture(engine, call)
        check_id_values(engine, call.topk_ids)

    def start(self) -> None:
        """Plans, notifies and sends. Rows wait for the host only when the pool has to grow.

        When the same SMs send and receive, everything is enqueued here, after the host has waited for the totals.
        """
        engine, streams = self._engine, self._engine.streams
        self._prepare()
        needed = self._pool_bytes()
        if needed is not None:
            engine.reserve(DISPATCH_POOL, needed)  # before anything is enqueued: a graph's capture may refuse it
            self._reserved = True
        streams.order_after(streams.send, streams.caller())
        engine.take_sms(self._sms)
        if self._call.previous is None:
            assert self._block_counts is not None
            ids, counts = self._call.topk_ids, self._block_counts
            plan_and_notify(engine, self._struct, self._header, ids, counts, self._ticket)
        if self._sms.receiving == 0:
            self._send_and_receive_in_one()
            return
        self._sent = self._reserved or engine.pool_bytes(DISPATCH_POOL) > 0
        if self._sent:
            engine.kernels.dispatch_send(self._send_args())

    def finish(self) -> Tensors:
        """Receives the rows, and waits for the totals if the host must know them."""
        engine, streams = self._engine, self._engine.streams
        if self._result is not None:  # everything is enqueued
            streams.order_after(streams.caller(), streams.send)
            streams.record_caller(*self._outputs())
        else:
            args = self._recv_args(self._sms.receiving, streams.receive)
            if self._ticket:
                self._receive_by_totals(args)
            else:
                self._allocate(args, self._output_rows())
                self._receive(args)
            self._remember_routing()
        engine.check()
        return self._outputs()

    def tensors(self) -> Tensors:
        call = self._call
        given = call.x, call.topk_ids, call.weights, call.scales
        return *given, self._block_counts, *self._routing_tensors(), *(self._result or ())

    # -- what start enqueues -------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        """Sets the words that ranks compare, the SMs, and the memory of the routing that is made or reused."""
        engine, call, previous = self._engine, self._call, self._call.previous
        x, scales, weights = call.x, call.scales, call.weights
        T, K = call.topk_ids.shape
        dtype, scale_bytes = x.dtype, 0 if scales is None else scales.shape[1] * scales.element_size()
        if call.quantize is not None:
            dtype, scale_bytes = QUANTIZED[call.quantize], int(num_scales(x.shape[1])) * torch.float32.itemsize
        row_bytes = x.shape[1] * dtype.itemsize
        weight_bytes = 0 if weights is None else weights.element_size()
        op = _DISPATCH if previous is None else _CACHED_DISPATCH
        self._header = engine.header(op, row_bytes, scale_bytes, weight_bytes, K, DTYPE_CODES[dtype], T)
        self._slot = row_bytes, scale_bytes, weight_bytes, K
        self._slot_bytes: int = _C.slot_bytes(*self._slot)
        self._sms = engine.dispatch_sms(T, row_bytes + scale_bytes, K, call.quantize is not None)
        if previous is not None:
            self._struct, self._known = previous.struct, previous.totals
            self._topk_ids, self._plan, self._recv_rows, self._totals, _ = previous.tensors
            return
        self._plan = torch.empty(engine.plan_words(T, K), dtype=torch.int32, device=engine.device)
        self._topk_ids = self._plan.new_empty((T, K))
        self._block_counts = self._plan.new_empty(_C.block_count_words(T, engine.size, engine.config.num_experts))
        if call.capacity is None:
            self._totals = torch.empty(engine.num_totals, dtype=torch.int64, device="cpu")
            self._ticket = engine.next_ticket()
        else:
            self._totals = torch.full((1,), call.capacity, dtype=torch.int64, device="cpu")
            self._known = [call.capacity]
        self._struct = engine.routing_struct(self._topk_ids, self._plan, None)

    def _send_and_receive_in_one(self) -> None:
        """Sends and receives in one kernel. So the output must exist before anything is sent."""
        engine, streams = self._engine, self._engine.streams
        send = self._send_args()
        recv = self._recv_args(self._sms.sending, streams.send)
        if self._ticket:
            self._wait_totals()
        self._reserve_by_totals()
        send.comm, send.optimistic = engine.comm, 0
        self._allocate(recv, self._output_rows())
        # Other threads may have used the output's memory on the caller's stream until now.
        streams.order_after(streams.send, streams.caller())
        engine.kernels.dispatch(send, recv)
        self._record()
        self._remember_routing()

    # -- what finish enqueues ------------------------------------------------------------------------------------

    def _receive_by_totals(self, args: Any) -> None:
        """Receives early if possible, and waits for the totals. If that failed or had too little room, receives then.

        The host does everything that it can before it waits, since rows may have arrived by the end of the wait.
        """
        engine, streams = self._engine, self._engine.streams
        room = self._receive_early(args) if self._sent else None
        if self._sent and room is None:
            streams.order_after(streams.receive, streams.caller())
            engine.wait_for_sender(_DISPATCH_RECV, fresh=True)
        self._wait_totals()
        needed = self._output_rows()
        engine.expected.saw(self._call.topk_ids.shape, needed)
        if self._reserve_by_totals():
            engine.kernels.dispatch_send(self._send_args())
            # The receive must follow the whole send, since wait_for_sender may have let the receive stream pass.
            streams.order_after(streams.caller(), streams.send)
            engine.take_receiving_sms()
        elif room is not None and needed.fit(room):
            self._cut(needed)
            return
        self._result = None  # a receive that came too early has left that memory alone
        self._allocate(args, needed)
        self._receive(args, wait_for_sender=False)

    def _receive_early(self, args: Any) -> Rows | None:
        """Receives before the totals are known, into an output with the returned room.

        Returns None, and receives nothing, if the totals are known, will never come, or cannot be guessed.
        """
        engine = self._engine
        if engine.has_totals(self._ticket) or not engine.boards.quiet():
            return None
        room = engine.expected.rows(self._call.topk_ids.shape)
        if room is None:
            return None
        try:
            self._allocate(args, room)
        except torch.OutOfMemoryError:
            return None  # the output may need less memory than this room
        args.optimistic = 1
        self._receive(args)
        args.optimistic = 0
        return room

    def _receive(self, args: Any, wait_for_sender: bool = True) -> None:
        engine, streams = self._engine, self._engine.streams
        # Other threads may have used the output's memory on the caller's stream until now.
        streams.order_after(streams.receive, streams.caller())
        if wait_for_sender:
            engine.wait_for_sender(_DISPATCH_RECV, fresh=self._call.previous is None)
        engine.kernels.dispatch_recv(args)
        self._record()
        streams.join()

    def _record(self) -> None:
        """Adds this dispatch to the statistics, once, before the caller's stream is ordered after the send stream."""
        if self._recorded:
            return
        self._recorded, engine, call = True, self._engine, self._call
        is_fresh = call.previous is None
        given = self._plan, self._slot, self._topk_ids, is_fresh, engine.flat, call.capacity
        engine.load.dispatched(*given, self._layer)

    def _reserve_by_totals(self) -> bool:
        """Grows every rank's pool if the pool of any rank is too small. Returns whether rows must be sent (again)."""
        engine = self._engine
        if self._reserved:
            return False
        before, needed = engine.pool_bytes(DISPATCH_POOL), self._pool_bytes()
        assert needed is not None
        engine.reserve(DISPATCH_POOL, needed)
        self._reserved = True
        return not self._sent or engine.pool_bytes(DISPATCH_POOL) != before

    def _cut(self, needed: Rows) -> None:
        """Shrinks an output that has room for more rows to the rows `needed`. The memory behind it keeps its size."""
        result = self._result
        assert result is not None and self._recv_rows is not None
        for tensor in (result.tokens, result.scales, result.weights, result.ids):
            if tensor is not None:
                tensor.resize_(needed.output, *tensor.shape[1:])
        recv_rows = self._recv_rows.resize_(needed.slots, self._recv_rows.shape[1])
        self._struct.recv_rows, self._struct.slots = recv_rows.data_ptr(), needed.slots  # no address without slots

    def _wait_totals(self) -> None:
        assert self._host_counts is not None
        self._known = self._engine.wait_totals(self._ticket, self._totals, self._host_counts)

    def _remember_routing(self) -> None:
        """Remembers the handle that this dispatch makes: while it is among the latest ones, it needs no check."""
        if self._call.previous is None:
            self._engine.routings.remember(self._routing_tensors(), self._struct, self._known)

    def _routing_tensors(self) -> tuple[Any, ...]:
        """Returns the tensors of the handle. recv_rows is None until it is made."""
        return self._topk_ids, self._plan, self._recv_rows, self._totals

    def _outputs(self) -> Tensors:
        """Returns the operator's results. They include the handle's tensors if this dispatch makes the routing."""
        assert self._result is not None
        return self._result if self._call.previous is not None else (*self._result, *self._routing_tensors())

    # -- sizes ---------------------------------------------------------------------------------------------------

    def _pool_bytes(self) -> int | None:
        """Returns the bytes that every rank's pool needs: R regions, each as large as the fullest one.

        The size follows from the configuration's bound, else from the totals. None before the totals are known.
        """
        engine = self._engine
        if engine.config.max_tokens_per_rank is not None:
            return engine.size * engine.config.max_tokens_per_rank * self._slot_bytes
        if not self._known:
            return None
        return engine.room_for(DISPATCH_POOL, engine.size * self._known[_MAX_ROWS] * self._slot_bytes)

    def _output_rows(self) -> Rows:
        """Returns the rows of the output, and the slots of the routing."""
        engine, capacity, totals = self._engine, self._call.capacity, self._known
        if capacity is not None:
            return Rows(capacity, engine.size * (engine.config.max_tokens_per_rank or 0))
        return Rows(totals[_ROWS if engine.flat else _SLOTS], totals[_SLOTS])

    # -- memory and kernels' arguments ---------------------------------------------------------------------------

    def _send_args(self) -> Any:
        call = self._call
        given = self._sms.sending, call.x, call.scales, call.weights
        return dispatch_send_args(
            self._engine,
            self._struct,
            self._header,
            *given,
            optimistic=int(not self._reserved),
            quantize=int(call.quantize is not None),
            element=ELEMENTS[call.x.dtype] if call.quantize is not None else 0,
        )

    def _recv_args(self, num_sms: int, stream: int) -> Any:
        """Returns the arguments of receive that do not depend on the totals. Also allocates the counts."""
        local, call, words = self._engine.local_experts, self._call, self._plan
        self._expert_counts, self._expert_offsets = words.new_empty(local), words.new_empty(local + 1)
        self._limits = self._host_counts = None
        if call.capacity is not None:
            self._limits = words.new_empty(2)
        elif call.previous is not None:
            self._host_counts = self._totals.narrow_copy(0, _C.num_totals, local)
        else:
            self._host_counts = torch.empty(local, dtype=torch.int64, device="cpu")
        return _C.DispatchRecvArgs(
            routing=self._struct,
            header=self._header,
            expert_count=self._expert_counts.data_ptr(),
            expert_offset=self._expert_offsets.data_ptr(),
            overflow=address(self._limits),
            num_sms=num_sms,
            fresh=int(call.previous is None),
            stream=stream,
        )

    def _allocate(self, args: Any, room: Rows) -> None:
        """Makes the output and the routing's recv_rows. Sets their addresses, and the pools' addresses, in `args`."""
        made = empty_rows(self._call, self._engine.flat, self._engine.config.ids_as_given, room.output)
        counts = self._expert_counts, self._expert_offsets, self._limits, self._host_counts
        result = self._result = DispatchResult(*made, *counts)
        args.comm = self._engine.comm
        args.tokens, args.scales, args.weights = map(address, (result.tokens, result.scales, result.weights))
        if self._engine.flat:
            args.row_expert_ids = address(result.ids)
        else:
            args.topk_ids, args.wide_ids = address(result.ids), int(made[-1].dtype is torch.int64)
        args.capacity = room.output
        if self._call.previous is None:
            self._recv_rows = self._plan.new_empty((room.slots, self._topk_ids.shape[1]))
            self._struct.recv_rows, self._struct.slots = self._recv_rows.data_ptr(), room.slots
            args.routing = self._struct


def empty_rows(
    call: DispatchCall, flat: bool, ids_as_given: bool, rows: int | torch.SymInt
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor]:
    """Allocates `rows` output rows: tokens, scales, weights and ids, as in DispatchResult."""
    x, scales, weights = call.x, call.scales, call.weights
    beside = (rows,) if flat else (rows, call.topk_ids.shape[1])
    row_scales: torch.Tensor | None
    if call.quantize is not None:
        tokens = x.new_empty((rows, x.shape[1]), dtype=QUANTIZED[call.quantize])
        row_scales = x.new_empty((rows, num_scales(x.shape[1])), dtype=torch.float32)
    else:
        tokens = x.new_empty((rows, x.shape[1]))
        row_scales = None if scales is None else scales.new_empty((rows, scales.shape[1]))
    row_weights = None if weights is None else weights.new_empty(beside)
    id_dtype = call.topk_ids.dtype if ids_as_given else torch.int32
    return tokens, row_scales, row_weights, x.new_empty(beside, dtype=id_dtype)
