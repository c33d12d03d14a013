"""High-throughput combine: the check of its arguments, and what calls alike share. `_C.Combine` runs it.

Shapes: T tokens, K experts per token, N rows of the dispatch's output, H hidden size.
"""

from __future__ import annotations

from typing import Any

import torch

from ep_plugin import _C
from ep_plugin.dtypes import DTYPE_CODES, ELEMENTS, name_of, weight_dtype
from ep_plugin.moe.arguments import bulk_ready, check_combine, is_wide
from ep_plugin.moe.high_throughput.engine import HighThroughputEngine
from ep_plugin.moe.high_throughput.operation import HighThroughputOperation
from ep_plugin.moe.layout import DispatchHandle
from ep_plugin.runtime.tensors import as_plain

_COMBINE = int(_C.Op.COMBINE)


class Combine(HighThroughputOperation):
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
        self._engine, self._handle = engine, DispatchHandle._make((*routing, comm))
        self.rows, self._weights, self._extra, self._per_row = bulk_ready("y", y), weights, extra, per_row
        self._bias = None if bias is None else bulk_ready("bias", bias)

    def check(self) -> None:
        given = self.rows, self._weights, self._bias, self._extra, self._per_row, list(self._handle[:-1])
        operation = self._engine.control.new_combine(*as_plain(given))
        if not operation.is_known:
            self._learn(operation)
        self.begin(operation)

    def recorded(self, plan: torch.Tensor, topk_ids: torch.Tensor) -> None:
        self._engine.load.combined(plan, *self._partial())

    def _learn(self, operation: _C.Combine) -> None:
        engine, y = self._engine, self.rows
        check_combine(engine, y, self._weights, self._bias, self._extra, engine.routing("handle", self._handle))
        T, K = self._handle.topk_ids.shape
        row_bytes, weight_bytes, _ = self._partial()
        operation.learn(
            engine.header(_COMBINE, row_bytes, 0, weight_bytes, K, DTYPE_CODES[y.dtype], T),
            engine.combine_sms(T, row_bytes, K),
            name_of(y.dtype),
            int(ELEMENTS[y.dtype]),
            bool(self._per_row and not engine.flat),
            bool(is_wide(self._bias, y)),
        )

    def _partial(self) -> tuple[int, int, int]:
        """Returns the bytes of a partial row and of an extra value, and K."""
        y = self.rows
        extra = extra_bytes(y, self._extra, self._per_row)
        return y.shape[1] * y.element_size(), extra, self._handle.topk_ids.shape[1]


def extra_bytes(y: torch.Tensor, extra: torch.Tensor | None, per_row: bool) -> int:
    """Returns the bytes of one extra value that travels beside the rows of `y`, or 0 if none travel."""
    return weight_dtype(y.dtype).itemsize if per_row or extra is not None else 0
