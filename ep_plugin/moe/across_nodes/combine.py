"""Combine over several nodes: dispatch backwards.

The rank that has forwarded a segment's tokens combines the segment's rows inside the node. It adds the partial rows of
the node's ranks, in the order of local ranks, in float32, and rounds once. The sums of other nodes' tokens return over
the rail. The owner of a token adds one row per node to the bias, in the order of nodes.

Shapes: T tokens, K experts per token, N rows of the dispatch's output, H hidden size, T_m tokens of a segment.
"""

from __future__ import annotations

from typing import Any

import torch

from ep_plugin import _C
from ep_plugin.dtypes import DTYPE_CODES, ELEMENTS, weight_dtype
from ep_plugin.moe.across_nodes.nodes import Nodes, fields_of
from ep_plugin.moe.across_nodes.routing import routing_of
from ep_plugin.moe.arguments import bulk_ready, check_combine, is_wide
from ep_plugin.moe.high_throughput.combine import extra_bytes
from ep_plugin.moe.high_throughput.engine import COMBINE_POOL
from ep_plugin.moe.in_flight import Operation, Tensors
from ep_plugin.moe.layout import DispatchHandle
from ep_plugin.transport.rails import UnderWay

_COMBINE, _MAX_SENT = int(_C.Op.COMBINE), _C.Total.MAX_SENT


class CombineAcrossNodes(Operation):
    """One combine, from its operator's arguments to the sums. It takes the arguments of `Combine`."""

    name = "combine"

    def __init__(self, nodes: Nodes, *arguments: Any) -> None:
        y, weights, bias, extra, per_row, routing, comm = arguments
        handle = DispatchHandle._make((*routing, comm))
        self._nodes, self._engine = nodes, nodes.engine
        self._known, self._routing = routing_of(nodes, "handle", handle)
        self.rows, self._weights, self._extra, self._per_row = bulk_ready("y", y), weights, extra, per_row
        self._bias = None if bias is None else bulk_ready("bias", bias)
        self._sums: list[torch.Tensor] = []
        self._extras: list[torch.Tensor | None] = []
        self._out: tuple[torch.Tensor, torch.Tensor | None] | None = None

    def check(self) -> None:
        check_combine(self._engine, self.rows, self._weights, self._bias, self._extra, self._known)

    def start(self) -> None:
        """Adds up other nodes' tokens and sends the sums back first, since these travel longest. Then sends this node's
        partial rows."""
        self._nodes.check_capture()
        engine, routing = self._engine, self._routing
        y, K = self.rows, self._routing.topk_ids.shape[1]
        H = y.shape[1]
        row_bytes = H * y.element_size()
        weight_bytes = extra_bytes(y, self._extra, self._per_row)
        words = row_bytes, 0, weight_bytes, K, DTYPE_CODES[y.dtype]
        self._partial = row_bytes, weight_bytes, K
        header = engine.header(_COMBINE, *words, routing.tokens[0])
        self._nodes.agree(header, routing.sent, routing.received)
        totals, partial_bytes = self._known.totals, _C.partial_bytes(row_bytes, weight_bytes, K)
        rows = None if len(totals) == 1 else totals[_MAX_SENT]
        self._nodes.reserve(COMBINE_POOL, partial_bytes, min(engine.node_size, K), rows)
        for tokens in routing.tokens:
            self._sums.append(y.new_empty((tokens, H)))
            self._extras.append(self._new_extra(tokens) if weight_bytes else None)
        self._segments = _C.SegmentedCombine(
            routing=routing.struct,
            header=header,
            rows=_C.CombineSendArgs(
                y=y.data_ptr(),
                rows=y.shape[0],
                weights=_C.address(self._weights),
                extra=_C.address(self._extra),
                hidden=H,
                element=ELEMENTS[y.dtype],
                per_row=int(self._per_row and not engine.flat),
            ),
            sums=list(map(_C.address, self._sums)),
            extras=list(map(_C.address, self._extras)),
        )
        self._sms = engine.combine_sms(routing.tokens[0], row_bytes, K, in_two=True)
        returned = sum(routing.sent)
        self._landed = y.new_empty((returned, H))
        self._landed_extra = self._new_extra(returned) if weight_bytes else None
        self._nodes.enter()
        engine.enter(self._sms)
        self._crossing = []
        for number in range(1, len(routing.tokens)):
            self._segments.send(engine.control, self._sms, number)
            self._segments.receive(engine.control, self._sms, number)
            self._crossing.append(self._return(number - 1))
        self._segments.send(engine.control, self._sms, 0)

    def finish(self) -> Tensors:
        """Adds up this node's tokens, then the rows of all nodes."""
        engine, streams, routing = self._engine, self._engine.streams, self._routing
        engine.enter(self._sms)
        self._segments.receive(engine.control, self._sms, 0)
        with streams.on_own():
            for crossing in self._crossing:
                self._nodes.finish(crossing)
        self._out = self._add()
        streams.join()
        engine.load.combined(routing.metas.view(-1), *self._partial)
        engine.check()
        return self._out

    def tensors(self) -> Tensors:
        given = self.rows, self._weights, self._bias, self._extra, *self._known.tensors[:-1]
        return *given, *self._sums, *self._extras, self._landed, self._landed_extra, *(self._out or ())

    def _return(self, chunk: int) -> UnderWay:
        """Begins to send a chunk's sums back, and to receive the sums of the rows that its legs have sent."""
        routing = self._routing
        first = sum(routing.received[: self._nodes.of_chunks[chunk].start])
        sums, landed = (self._sums[chunk + 1], self._extras[chunk + 1]), (self._landed, self._landed_extra)
        fields = fields_of(sums, landed, first_sent=first)
        with self._engine.streams.on_own():
            return self._nodes.start_chunk(chunk, fields, routing.received, routing.sent, back=True)

    def _add(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        engine, routing = self._engine, self._routing
        T, N = routing.rail_rows.shape
        out = torch.empty_like(self._sums[0])
        own_extra = landed_extra = None  # a rank without extra values returns none
        if self._extra is not None:
            own_extra, landed_extra = self._extras[0], self._landed_extra
        extra_out = None if own_extra is None else torch.empty_like(own_extra)
        engine.streams.order_after(engine.streams.own, engine.streams.caller())  # their memory
        args = _C.CombineAddArgs(
            comm=engine.comm,
            own=self._sums[0].data_ptr(),
            landed=self._landed.data_ptr(),
            rail_rows=routing.rail_rows.data_ptr(),
            bias=_C.address(self._bias),
            wide_bias=is_wide(self._bias, out),
            out=out.data_ptr(),
            own_extra=_C.address(own_extra),
            landed_extra=_C.address(landed_extra),
            extra_out=_C.address(extra_out),
            topk=routing.topk_ids.shape[1],
            hidden=out.shape[1],
            element=ELEMENTS[out.dtype],
            num_tokens=T,
            num_nodes=N,
            node=self._nodes.node,
            num_rows=self._landed.shape[0],
            num_sms=self._sms.receiving,
            stream=engine.streams.own,
        )
        engine.kernels.combine_add(args)
        return out, extra_out

    def _new_extra(self, tokens: int) -> torch.Tensor:
        return self.rows.new_empty((tokens, self._routing.topk_ids.shape[1]), dtype=weight_dtype(self.rows.dtype))
