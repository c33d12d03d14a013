"""Dispatch over several nodes.

Each token crosses once to every node that needs it, over the rail to the rank with the sender's local rank. There it is
dispatched inside the node, in the segment of its chunk. The node's own tokens are a segment, too. All segments write
into one output.

1. Ranks of a rail exchange how many rows they have for each other, for each rank and for each expert. From these counts
   each segment is notified, and gets its places in the output. The host waits once, for all counts and totals.
2. Rows cross chunk by chunk, with their expert ids. Own tokens are dispatched while they cross.
3. When all legs of a chunk have arrived, its tokens are planned and dispatched.

With a capacity, all legs have one size and the host waits for nothing. Tokens without experts pad a leg to that size.
Tokens for which a leg has no room are left out, the last ones first.

The number of kernels, of exchanges and of host waits depends on the number of chunks alone, not on the number of nodes.

Shapes: T tokens, H hidden size, K experts per token, L legs, C chunks, M = C + 1 segments of T_m tokens, N output rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ep_plugin import _C
from ep_plugin.dtypes import DTYPE_CODES, ELEMENTS, QUANTIZED, num_scales
from ep_plugin.errors import EpPluginError
from ep_plugin.moe.across_nodes.nodes import Nodes, fields_of
from ep_plugin.moe.across_nodes.routing import NodesRouting, routing_of
from ep_plugin.moe.arguments import MOST_ROWS, bulk_ready, check_capture, check_dispatch, check_id_values
from ep_plugin.moe.high_throughput.dispatch import empty_rows
from ep_plugin.moe.high_throughput.engine import DISPATCH_POOL
from ep_plugin.moe.high_throughput.sms import KernelSms
from ep_plugin.moe.in_flight import Operation, Tensors
from ep_plugin.moe.layout import NUM_LIMITS, DispatchCall, DispatchHandle, DispatchResult
from ep_plugin.moe.statistics import current_layer
from ep_plugin.runtime.tensors import keep_form
from ep_plugin.transport.rails import UnderWay

_DISPATCH, _CACHED = int(_C.Op.DISPATCH), int(_C.Op.CACHED_DISPATCH)
_CAPACITIES = (int, type(None))  # bool is not among them
_WITH_CAPACITY = int(_C.Op.DISPATCH_WITH_CAPACITY)
_SLOTS, _ROWS, _MAX_ROWS, _MAX_SENT = _C.Total.SLOTS, _C.Total.ROWS, _C.Total.MAX_ROWS, _C.Total.MAX_SENT


class Payload(NamedTuple):
    """Rows ``[T, H]``, and what travels beside them or None: scales ``[T, S]``, weights and int32 ids ``[T, K]``.

    Ids travel only where a routing is made.
    """

    rows: torch.Tensor
    scales: torch.Tensor | None
    weights: torch.Tensor | None
    ids: torch.Tensor | None = None

    def like(self, num_rows: int) -> Payload:
        """Allocates a payload of `num_rows` rows with the same fields."""
        rows, scales, weights, ids = self
        return Payload(
            rows.new_empty((num_rows, rows.shape[1])),
            None if scales is None else scales.new_empty((num_rows, scales.shape[1])),
            None if weights is None else weights.new_empty((num_rows, weights.shape[1])),
            None if ids is None else ids.new_empty((num_rows, ids.shape[1])),
        )

    def sent(self) -> _C.DispatchSendArgs:
        """Returns the rows as dispatch send reads them."""
        rows, scales, weights, _ = self
        return _C.DispatchSendArgs(
            x=rows.data_ptr(),
            x_stride=rows.stride(0) * rows.element_size(),
            scales=_C.address(scales),
            scale_stride=0 if scales is None else scales.stride(0) * scales.element_size(),
            weights=_C.address(weights),
        )


class DispatchAcrossNodes(Operation):
    """One dispatch, from its operator's arguments to the rows that this rank receives."""

    name = "dispatch"

    def __init__(self, nodes: Nodes, *arguments: Any) -> None:
        x, topk_ids, weights, scales, capacity, quantize, previous, comm = arguments
        engine = nodes.engine
        known = self._routing = None
        if previous:
            handle = DispatchHandle._make((*previous, comm))
            known, self._routing = routing_of(nodes, "previous_handle", handle)
        self._nodes, self._engine = nodes, engine
        self.rows = bulk_ready("x", x)
        self._call = DispatchCall(self.rows, topk_ids, weights, scales, known, capacity, quantize)
        self._layer = current_layer()
        self._totals: torch.Tensor | None = None
        self._begun: torch.Tensor | None = None
        self._messages: torch.Tensor | None = None
        self._block_counts: torch.Tensor | None = None
        self._landed_block_counts: torch.Tensor | None = None
        self._segments: Any = None  # a _C.SegmentedDispatch
        self._sms: list[KernelSms] = []  # of each segment
        self._crossing: list[UnderWay] = []
        self._result: DispatchResult | None = None

    def check(self) -> None:
        engine, call = self._engine, self._call
        form = _C.form_of(*call[:4]) if call.previous is None and type(call.capacity) in _CAPACITIES else None
        key = form, call.capacity, call.quantize
        if form is not None and key in self._nodes.checked:
            check_capture(engine, call)
            check_id_values(engine, call.topk_ids)
            return
        check_dispatch(engine, call)
        if form is not None:
            keep_form(self._nodes.checked, key)

    def start(self) -> None:
        """Sends rows to the other nodes and to this one. Without a capacity or a handle, the host waits until it knows
        how many rows come."""
        self._nodes.check_capture()
        call = self._call
        self._payload = self._make_payload()
        headers = self._headers()
        known = None if call.capacity is None else [call.capacity]
        if call.previous is not None:
            known = call.previous.totals
        if known is not None:
            self._reserve(known)  # before anything is enqueued, since it may refuse a capture
        self._quantize()
        totals = self._route(headers) if call.previous is None else call.previous.totals
        if known is None:
            self._reserve(totals)
        routing = self._routing
        assert routing is not None
        if call.previous is not None:
            self._nodes.agree(headers(_CACHED, call.x.shape[0]), routing.sent, routing.received)
        self._allocate(totals, headers)
        self._nodes.enter()
        self._cross(routing)
        self._segments.send(self._engine.control, self._sms[0], 0)

    def finish(self) -> Tensors:
        """Receives this node's tokens. Then forwards and receives other nodes' tokens as they arrive."""
        engine, streams, routing = self._engine, self._engine.streams, self._routing
        assert routing is not None
        control, segments = engine.control, self._segments
        segments.receive(control, self._sms[0], 0)
        for number, crossing in enumerate(self._crossing, start=1):
            with streams.on_own():
                self._nodes.finish(crossing)
            segments.send(control, self._sms[number], number)
            segments.receive(control, self._sms[number], number)
        streams.join()
        is_fresh, capacity = self._call.previous is None, self._call.capacity
        given = routing.metas.view(-1), self._slot, routing.topk_ids, is_fresh, engine.flat, capacity
        engine.load.dispatched(*given, self._layer)
        engine.check()
        assert self._result is not None
        if not is_fresh:
            return self._result
        return *self._result, routing.topk_ids, routing.plan, routing.recv_rows, self._totals

    def tensors(self) -> Tensors:
        call, routing = self._call, self._routing
        assert routing is not None
        given = call.x, call.topk_ids, call.weights, call.scales, *self._payload, *self._packed
        made = routing.topk_ids, routing.plan, routing.recv_rows, self._begun, self._messages
        counts = self._block_counts, self._landed_block_counts
        return *given, *made, *counts, *self._landed, *(self._result or ())

    # -- what start does -----------------------------------------------------------------------------------------

    def _make_payload(self) -> Payload:
        """Returns the rows as they travel. `_quantize` fills those that are quantised."""
        call = self._call
        if call.quantize is None:
            return Payload(call.x, call.scales, call.weights)
        T, H = call.x.shape
        rows = call.x.new_empty((T, H), dtype=QUANTIZED[call.quantize])
        return Payload(rows, call.x.new_empty((T, num_scales(H)), dtype=torch.float32), call.weights)

    def _quantize(self) -> None:
        """Quantises rows once, for all destinations, on the own stream."""
        engine, x, scales = self._engine, self._call.x, self._payload.scales
        if self._call.quantize is None:
            return
        self._nodes.enter()
        args = _C.QuantizeArgs(
            x=x.data_ptr(),
            x_stride=x.stride(0) * x.element_size(),
            rows=self._payload.rows.data_ptr(),
            scales=_C.address(scales),
            num_rows=len(x),
            hidden=x.shape[1],
            element=ELEMENTS[x.dtype],
            stream=engine.streams.own,
        )
        engine.kernels.quantize(args)

    def _headers(self) -> Any:
        """Returns a function of (operation, number of tokens) that makes the words that ranks compare."""
        engine, K = self._engine, self._call.topk_ids.shape[1]
        rows, scales, weights, _ = self._payload
        self._row_bytes = rows.shape[1] * rows.element_size()
        self._scale_bytes = 0 if scales is None else scales.shape[1] * scales.element_size()
        weight_bytes = 0 if weights is None else weights.element_size()
        self._slot = self._row_bytes, self._scale_bytes, weight_bytes, K
        self._slot_bytes: int = _C.slot_bytes(*self._slot)

        def header(op: int, num_tokens: int) -> Any:
            beside = self._scale_bytes, weight_bytes, K, DTYPE_CODES[rows.dtype]
            return engine.header(op, self._row_bytes, *beside, num_tokens)

        return header

    def _reserve(self, totals: list[int]) -> None:
        """Makes the pool large enough. totals: the handle's."""
        G = self._engine.node_size
        rows = None if len(totals) == 1 else G * totals[_MAX_ROWS]
        self._nodes.reserve(DISPATCH_POOL, self._slot_bytes, G, rows)

    def _route(self, headers: Any) -> list[int]:
        """Decides which rows cross to which node, plans this node's tokens, and gives all rows their places in the
        output. Returns the handle's totals. Without a capacity, the host waits for them."""
        nodes, call, engine = self._nodes, self._call, self._engine
        padded, T = call.capacity is not None, call.topk_ids.shape[0]
        self._op = _WITH_CAPACITY if padded else _DISPATCH
        header = headers(self._op, T)
        own_ids = torch.empty(call.topk_ids.shape, dtype=torch.int32, device=engine.device)
        rows = nodes.padded_rows if padded else [0] * len(nodes.legs)
        routing = NodesRouting.empty(nodes, own_ids, rows, rows)
        self._begun = routing.plan  # kernels write to it until the routing is copied
        messages, block_counts = nodes.messages(), nodes.block_counts(routing.tokens)
        self._messages, self._block_counts = messages, block_counts
        segments = self._segments = self._new_segments(routing, header, padded)
        nodes.enter()
        segments.lay_out(engine.control)
        copied = nodes.exchange_counts(messages, reads=nodes.host_waits or not padded)
        legs = None
        if copied is not None and nodes.host_waits:
            legs = nodes.rows_of_legs(header, copied, padded)  # checks that the ranks agree
        sms = engine.dispatch_sms(T, self._row_bytes, nodes.num_nodes, False, in_two=True)
        ticket = 0
        for _ in range(0 if padded else nodes.num_segments):
            ticket = engine.control.next_ticket()  # each segment has one; this is the last one's
        segments.notify(engine.control, sms, ticket)
        if call.capacity is not None:
            totals, slots = [call.capacity], nodes.padded_slots
            self._totals = torch.full((1,), call.capacity, dtype=torch.int64, device="cpu")
        else:
            every = list(zip(*engine.wait_totals(ticket, nodes.num_segments).tolist(), strict=True))
            slots = list(every[_SLOTS])
            assert copied is not None
            routing = routing.extended(*(legs or nodes.rows_of_legs(header, copied, padded)))
            self._landed_block_counts = nodes.block_counts(routing.tokens[1:])
            segments.block_counts = self._landed_block_counts.data_ptr()
            totals = self._add_totals(every) + routing.sent + routing.received + slots
            self._totals = torch.tensor(totals, dtype=torch.int64, device="cpu")
        routing.make_recv_rows(slots)
        self._routing = routing
        self._payload = Payload(*self._payload[:3], ids=own_ids)
        return totals

    def _new_segments(self, routing: NodesRouting, header: Any, padded: bool) -> _C.SegmentedDispatch:
        """Returns what C needs to route tokens."""
        ids = self._call.topk_ids
        assert self._messages is not None and self._block_counts is not None
        return _C.SegmentedDispatch(
            routing=routing.struct,
            header=header,
            ids=ids.data_ptr(),
            id_bytes=ids.element_size(),
            padded=self._nodes.padded_rows[0] if padded else 0,
            own_ids=routing.topk_ids.data_ptr(),
            messages=self._messages.data_ptr(),
            block_counts=self._block_counts.data_ptr(),
        )

    def _add_totals(self, every: list[tuple[int, ...]]) -> list[int]:
        """Returns the totals of all segments together. every: for each total, those of the segments."""
        engine = self._engine
        alignment = engine.config.expert_alignment if engine.flat else 1
        totals = list(map(sum, every))
        totals[_MAX_ROWS], totals[_MAX_SENT], totals[_ROWS] = max(every[_MAX_ROWS]), max(every[_MAX_SENT]), 0
        for count in totals[_C.num_totals :]:
            totals[_ROWS] += -(-count // alignment) * alignment
        if max(totals[_ROWS], totals[_SLOTS]) > MOST_ROWS:
            raise EpPluginError(f"{engine.name}: step plan: expected at most {MOST_ROWS} rows, got {totals[_ROWS]}")
        return totals

    def _cross(self, routing: NodesRouting) -> None:
        """Begins to send the rows that cross, and to receive other nodes' rows, chunk by chunk."""
        engine, streams, (T, N) = self._engine, self._engine.streams, routing.rail_rows.shape
        rows, scales, weights, ids = self._payload
        packed = self._packed
        packing = engine.dispatch_sms(T, self._row_bytes, N, False, in_two=True)
        engine.enter(packing)
        args = _C.PackArgs(
            comm=engine.comm,
            x=rows.data_ptr(),
            x_stride=rows.stride(0) * rows.element_size(),
            row_bytes=self._row_bytes,
            rows=packed.rows.data_ptr(),
            weights=_C.address(weights),
            weight_bytes=0 if weights is None else weights.shape[1] * weights.element_size(),
            packed_weights=_C.address(packed.weights),
            scales=_C.address(scales),
            scale_stride=self._scale_bytes,
            scale_bytes=self._scale_bytes,
            packed_scales=_C.address(packed.scales),
            ids=_C.address(ids),
            packed_ids=_C.address(packed.ids),
            rail_rows=routing.rail_rows.data_ptr(),
            num_rows=packed.rows.shape[0],
            topk=routing.topk_ids.shape[1],
            num_tokens=T,
            num_nodes=N,
            num_sms=packing.sending,
            stream=engine.streams.own,
        )
        engine.kernels.pack(args)
        with streams.on_own():
            fields = fields_of(packed, self._landed)
            for chunk in range(self._nodes.chunks):
                self._crossing.append(self._nodes.start_chunk(chunk, fields, routing.sent, routing.received))

    def _allocate(self, totals: list[int], headers: Any) -> None:
        """Makes the memory of rows that cross, and the output. Completes what C needs to send and receive segments."""
        engine, call, routing, K = self._engine, self._call, self._routing, self._call.topk_ids.shape[1]
        assert routing is not None
        self._packed = self._payload.like(sum(routing.sent))
        self._landed = self._payload.like(sum(routing.received))
        local, words = engine.local_experts, routing.plan
        rows = call.capacity if call.capacity is not None else totals[_ROWS if engine.flat else _SLOTS]
        counts, offsets = words.new_empty(local), words.new_empty(local + 1)
        limits = None if call.capacity is None else words.new_empty(NUM_LIMITS)
        host_counts = None
        if call.capacity is None:
            counted = totals[_C.num_totals : engine.num_totals]
            host_counts = torch.tensor(counted, dtype=torch.int64, device="cpu")
        made = empty_rows(call, engine.flat, engine.config.ids_as_given, rows)
        result = self._result = DispatchResult(*made, counts, offsets, limits, host_counts)
        if self._segments is None:  # the routing is known
            self._segments = _C.SegmentedDispatch(header=headers(_CACHED, call.x.shape[0]))
        segments = self._segments
        segments.routing = routing.struct
        segments.own, segments.landed = self._payload.sent(), self._landed.sent()
        if self._landed.ids is not None:
            segments.landed_ids = self._landed.ids.data_ptr()
        wire_bytes = self._row_bytes + self._scale_bytes
        for tokens in routing.tokens:
            self._sms.append(engine.dispatch_sms(tokens, wire_bytes, K, False, in_two=True))
        segments.output = _C.DispatchRecvArgs(
            tokens=result.tokens.data_ptr(),
            scales=_C.address(result.scales),
            weights=_C.address(result.weights),
            row_expert_ids=_C.address(result.ids) if engine.flat else 0,
            topk_ids=0 if engine.flat else _C.address(result.ids),
            wide_ids=int(made[-1].dtype is torch.int64),
            expert_count=counts.data_ptr(),
            expert_offset=offsets.data_ptr(),
            overflow=_C.address(limits),
            capacity=rows,
            fresh=int(call.previous is None),
        )
