"""Combine: partial rows are sent on the send stream and added on the receive stream, the same for CPU and CUDA.

Shapes: T tokens, K experts per token, N rows of the dispatch's output, H hidden size.
"""

from __future__ import annotations

from typing import Any

import torch

from ep_plugin import _C
from ep_plugin.dtypes import DTYPE_CODES, ELEMENTS, weight_dtype
from ep_plugin.moe.arguments import bulk_ready, check_combine, is_bounded, rows_of
from ep_plugin.moe.high_throughput.engine import COMBINE_POOL, HighThroughputEngine
from ep_plugin.moe.high_throughput.kernels import combine_recv_args, combine_send_args
from ep_plugin.moe.in_flight import Operation, Tensors
from ep_plugin.runtime.tensors import call_of

_COMBINE, _COMBINE_RECV, _MAX_SENT = int(_C.Op.COMBINE), _C.Step.COMBINE_RECV, _C.Total.MAX_SENT


class Combine(Operation):
    """One combine, from its operator's arguments to the sums.

    y: ``[N, H]``.
    weights: ``[N]`` or ``[N, K]``, factors of y's rows.
    bias: ``[T, H]``.
    extra: values in the shape of the weights. They travel beside the rows and are added up to ``[T, K]``.
    per_row: False: values of experts on other ranks are left out, and either all ranks have values or none has, as for
        the gradient of dispatch's weights. True: all values of a row count, and a rank without values sends zeros.
    """

    name = "combine"

    def __init__(self, engine: HighThroughputEngine, *arguments: Any) -> None:
        y, weights, bias, extra, per_row, routing, comm = arguments
        self._engine, self._routing = engine, engine.routing("handle", routing, comm)
        self.rows, self._weights, self._extra, self._per_row = bulk_ready("y", y), weights, extra, per_row
        self._bias = None if bias is None else bulk_ready("bias", bias)
        self._sums: tuple[torch.Tensor, torch.Tensor | None] | None = None

    def check(self) -> None:
        engine, routing, given = self._engine, self._routing, (self.rows, self._weights, self._bias, self._extra)
        alike = None
        if is_bounded(routing):  # without a capacity the number of rows differs from call to call
            alike = call_of(_C.form_of(*given), rows_of(engine, routing), *routing.tensors.topk_ids.shape)
        if not engine.known.find(alike):
            check_combine(engine, *given, routing)
            engine.known.remember(alike)

    def start(self) -> None:
        """Reduces each slot's rows of y to a partial row and sends it to the token's owner."""
        engine, streams, y, routing = self._engine, self._engine.streams, self.rows, self._routing
        T, K = routing.tensors.topk_ids.shape
        row_bytes = y.shape[1] * y.element_size()
        weight_bytes = extra_bytes(y, self._extra, self._per_row)
        header = engine.header(_COMBINE, row_bytes, 0, weight_bytes, K, DTYPE_CODES[y.dtype], T)
        self._partial = row_bytes, weight_bytes, K
        self._common = {"comm": engine.comm, "routing": routing.struct, "header": header}
        self._common |= {"hidden": y.shape[1], "element": ELEMENTS[y.dtype]}
        engine.reserve(COMBINE_POOL, self._pool_bytes(_C.partial_bytes(row_bytes, weight_bytes, K)))
        self._sms = engine.combine_sms(T, row_bytes, K)
        given = y, self._weights, self._extra, self._per_row
        send = combine_send_args(self._common, self._sms.sending, streams.send, *given)
        recv = None if self._sms.receiving else self._recv_args(self._sms.sending, streams.send)
        streams.order_after(streams.send, streams.caller())
        engine.take_sms(self._sms)
        if recv is None:
            engine.kernels.combine_send(send)
        else:
            engine.kernels.combine(send, recv)

    def finish(self) -> Tensors:
        """Adds the partial rows. Returns the sums ``[T, H]``, and the sums ``[T, K]`` of the extra values, if any."""
        engine, streams = self._engine, self._engine.streams
        if self._sums is None:
            recv = self._recv_args(self._sms.receiving, streams.receive)
            streams.order_after(streams.receive, streams.caller())
            engine.wait_for_sender(_COMBINE_RECV)
            engine.kernels.combine_recv(recv)
            self._record()
            streams.join()
        else:
            self._record()
            streams.order_after(streams.caller(), streams.send)
            streams.record_caller(*self._sums)
        engine.check()
        assert self._sums is not None
        return self._sums

    def tensors(self) -> Tensors:
        return self.rows, self._weights, self._bias, self._extra, *self._routing.tensors[:-1], *(self._sums or ())

    def _record(self) -> None:
        """Adds this combine to the statistics, before the caller's stream is ordered after the send stream."""
        self._engine.load.combined(self._routing.tensors.plan, *self._partial)

    def _pool_bytes(self, partial_bytes: int) -> int:
        engine, routing = self._engine, self._routing
        most = engine.config.max_tokens_per_rank
        if most is not None:
            return most * min(engine.size, routing.tensors.topk_ids.shape[1]) * partial_bytes
        return engine.room_for(COMBINE_POOL, routing.totals[_MAX_SENT] * partial_bytes)

    def _recv_args(self, num_sms: int, stream: int) -> Any:
        """Returns the receiving kernel's arguments. Also allocates the sums."""
        y, extra = self.rows, self._extra
        T, K = self._routing.tensors.topk_ids.shape
        out, extra_out = y.new_empty((T, y.shape[1])), None if extra is None else extra.new_empty((T, K))
        self._sums = out, extra_out
        return combine_recv_args(self._common, num_sms, stream, out, extra_out, self._bias)


def extra_bytes(y: torch.Tensor, extra: torch.Tensor | None, per_row: bool) -> int:
    """Returns the bytes of one extra value that travels beside the rows of `y`, or 0 if none travel."""
    return weight_dtype(y.dtype).itemsize if per_row or extra is not None else 0
