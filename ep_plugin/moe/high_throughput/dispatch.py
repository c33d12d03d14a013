"""High-throughput dispatch: the check of its arguments, and what calls alike share. `_C.Dispatch` runs it.

Shapes: T tokens, H hidden size, K experts per token, N output rows.
"""

from __future__ import annotations

from typing import Any

import torch

from ep_plugin import _C
from ep_plugin.dtypes import DTYPE_CODES, ELEMENTS, QUANTIZED, name_of, num_scales
from ep_plugin.moe.arguments import bulk_ready, check_capture, check_dispatch, check_id_values
from ep_plugin.moe.high_throughput.engine import HighThroughputEngine
from ep_plugin.moe.high_throughput.operation import HighThroughputOperation
from ep_plugin.moe.layout import DispatchCall, DispatchHandle
from ep_plugin.moe.statistics import current_layer
from ep_plugin.runtime.tensors import as_plain

_DISPATCH, _CACHED_DISPATCH = int(_C.Op.DISPATCH), int(_C.Op.CACHED_DISPATCH)


class Dispatch(HighThroughputOperation):
    """One dispatch, from its operator's arguments to the rows that this rank receives."""

    name = "dispatch"

    def __init__(self, engine: HighThroughputEngine, *arguments: Any) -> None:
        x, topk_ids, weights, scales, capacity, quantize, previous, comm = arguments
        self._engine, self._comm, self._previous, self._layer = engine, comm, previous, current_layer()
        self.rows = bulk_ready("x", x)
        self._call = DispatchCall(self.rows, topk_ids, weights, scales, None, capacity, quantize)

    def check(self) -> None:
        engine, call = self._engine, self._call
        given = (*call[:4], call.capacity, call.quantize, list(self._previous))
        operation = engine.control.new_dispatch(*as_plain(given))
        if operation.is_known:
            check_capture(engine, call._replace(previous=self._previous or None))
            check_id_values(engine, call.topk_ids)
        else:
            self._learn(operation)
        self.begin(operation)

    def recorded(self, plan: torch.Tensor, topk_ids: torch.Tensor) -> None:
        call = self._call
        given = plan, self._slot(), topk_ids, not self._previous, self._engine.flat, call.capacity
        self._engine.load.dispatched(*given, self._layer)

    def _learn(self, operation: _C.Dispatch) -> None:
        engine, call = self._engine, self._call
        if self._previous:
            handle = DispatchHandle._make((*self._previous, self._comm))
            call = call._replace(previous=engine.routing("previous_handle", handle))
        check_dispatch(engine, call)
        x, scales, quantize, capacity = call.x, call.scales, call.quantize, call.capacity
        (T, K), dtype = call.topk_ids.shape, self._dtype()
        row_bytes, scale_bytes, weight_bytes, _ = self._slot()
        op = _CACHED_DISPATCH if self._previous else _DISPATCH
        columns, scale_dtype = 0, torch.float32
        if quantize is not None:
            columns = int(num_scales(x.shape[1]))
        elif scales is not None:
            columns, scale_dtype = scales.shape[1], scales.dtype
        operation.learn(
            engine.header(op, row_bytes, scale_bytes, weight_bytes, K, DTYPE_CODES[dtype], T),
            engine.dispatch_sms(T, row_bytes + scale_bytes, K, quantize is not None),
            x.shape[1],
            name_of(dtype),
            columns,
            name_of(scale_dtype),
            name_of(call.topk_ids.dtype if engine.config.ids_as_given else torch.int32),
            int(quantize is not None),
            int(ELEMENTS[x.dtype]) if quantize is not None else 0,
            -1 if capacity is None else capacity,
        )

    def _dtype(self) -> torch.dtype:
        """Returns the dtype of rows on the wire."""
        return self._call.x.dtype if self._call.quantize is None else QUANTIZED[self._call.quantize]

    def _slot(self) -> tuple[int, int, int, int]:
        """Returns the bytes of a row, of its scales and of a weight, and K."""
        call, hidden = self._call, self._call.x.shape[1]
        scale_bytes = 0 if call.scales is None else call.scales.shape[1] * call.scales.element_size()
        if call.quantize is not None:
            scale_bytes = int(num_scales(hidden)) * torch.float32.itemsize
        weight_bytes = 0 if call.weights is None else call.weights.element_size()
        return hidden * self._dtype().itemsize, scale_bytes, weight_bytes, call.topk_ids.shape[1]


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
