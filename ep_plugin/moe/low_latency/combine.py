"""Low-latency combine: weights go to the ranks that hold the experts, partial rows come back. The host waits for
nothing.

Shapes: T tokens, H hidden size, K experts per token, R ranks, E_l local experts, N = R * T_max rows of each expert.
"""

from __future__ import annotations

from typing import Any

import torch

from ep_plugin import _C
from ep_plugin.dtypes import DTYPE_CODES, ELEMENTS, weight_dtype
from ep_plugin.moe.arguments import address, bulk_ready, check_beside, check_combine
from ep_plugin.moe.in_flight import Tensors
from ep_plugin.moe.layout import Routing
from ep_plugin.moe.low_latency.dispatch import check_stats, operation
from ep_plugin.moe.low_latency.engine import LowLatencyEngine
from ep_plugin.moe.low_latency.in_flight import RECEIVE, LowLatencyOperation


class LowLatencyCombine(LowLatencyOperation):
    """One combine, from its operator's arguments to the sums.

    y: ``[E_l, N, H]``. weights: ``[T, K]``, or None: 1. bias: ``[T, H]``. topk_ids: int32 or int64 ``[T, K]``, the
    dispatch's ids or, for pairs that are left out now, -1; None: the dispatch's. out: ``[T, H]``, where the sums go.
    logfmt: partial rows travel as 10-bit codes where their values are below 1; BF16 alone. wait_cost: int64 ``[R]``, to
    which the nanoseconds are added that this rank waits for each other.
    """

    name, kind = "combine", 1

    def __init__(
        self,
        engine: LowLatencyEngine,
        *arguments: Any,
        topk_ids: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        logfmt: bool = False,
        wait_cost: torch.Tensor | None = None,
    ) -> None:
        y, weights, bias, extra, routing, comm = arguments
        assert extra is None, "weights travel in combine alone"
        self._engine = engine
        self._routing = routing if isinstance(routing, Routing) else engine.routing("handle", routing, comm)
        self.rows, self._weights, self._bias = y, weights, bias
        self._ids = self._routing.tensors.topk_ids if topk_ids is None else topk_ids
        self._out, self._logfmt, self._wait_cost = out, logfmt, wait_cost

    def check(self) -> None:
        engine, y, routing = self._engine, self.rows, self._routing
        rows = routing.totals[0]
        local, per_expert = engine.local_experts, rows // engine.local_experts
        if y.dim() != 3 or y.shape[:2] != (local, per_expert):
            raise ValueError(f"y: expected shape ({local}, {per_expert}, H), got {tuple(y.shape)}")
        if not y.is_contiguous():
            raise ValueError(f"y: expected a contiguous tensor, got strides {tuple(y.stride())}")
        flat = self.rows = bulk_ready("y", y.view(rows, y.shape[2]))
        check_combine(engine, flat, None, self._bias, None, routing)
        row_bytes, most = flat.shape[1] * flat.element_size(), engine.config.max_row_bytes
        if most is not None and row_bytes > most:
            raise ValueError(f"y: expected rows of at most max_row_bytes={most} bytes, got {row_bytes}")
        T, K = routing.tensors.topk_ids.shape
        if self._weights is not None:
            check_beside("weights", self._weights, (T, K), engine)
            if self._weights.dtype is not weight_dtype(y.dtype):
                raise ValueError(f"weights: expected {weight_dtype(y.dtype)}, got {self._weights.dtype}")
        check_beside("topk_ids", self._ids, (T, K), engine)
        if self._ids.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"topk_ids: expected torch.int32 or torch.int64, got {self._ids.dtype}")
        if self._out is not None:
            check_beside("out", self._out, (T, flat.shape[1]), engine)
            if self._out.dtype is not y.dtype:
                raise ValueError(f"out: expected the dtype {y.dtype} of y, got {self._out.dtype}")
        group, hidden, widest = _C.ll_logfmt_group, flat.shape[1], engine.config.hidden_size
        if self._logfmt and (y.dtype is not torch.bfloat16 or hidden % group or hidden > widest):
            raise ValueError(
                f"y: expected torch.bfloat16 rows of a multiple of {group} elements, at most {widest}, with logfmt, "
                f"got {hidden} of {y.dtype}"
            )
        check_stats("wait_cost", self._wait_cost, engine.size, torch.int64, engine)

    def results(self) -> Tensors:
        return self._sums, None

    def tensors(self) -> Tensors:
        given = self.rows, self._weights, self._bias, self._ids, self._wait_cost
        return *given, self._routing.tensors.plan, self._sums

    def prepare(self) -> None:
        engine, y, handle = self._engine, self.rows, self._routing.tensors
        engine.ensure_memory()
        T, K = handle.topk_ids.shape
        per_expert = self._routing.totals[0] // engine.local_experts
        self._sums = y.new_empty((T, y.shape[1])) if self._out is None else self._out
        header = _C.LlHeader(
            row_bytes=y.shape[1] * y.element_size(),
            topk=K,
            dtype=DTYPE_CODES[y.dtype],
            format=_C.LlFormat.LOGFMT if self._logfmt else _C.LlFormat.PLAIN,
            max_tokens=engine.tokens_of(per_expert),
            weight_bytes=weight_dtype(y.dtype).itemsize,
            config_hash=engine.config_hash,
            num_tokens=T,
        )
        self._args = _C.LlCombineArgs(
            op=operation(engine, header, self.kind, self._wait_cost),
            y=y.data_ptr(),
            ids=self._ids.data_ptr(),
            weights=address(self._weights),
            plan=handle.plan.data_ptr(),
            hidden=y.shape[1],
            id_bytes=self._ids.element_size(),
            element=ELEMENTS[y.dtype],
            out=self._sums.data_ptr(),
            bias=address(self._bias),
        )

    def launch(self, phases: int) -> None:
        engine, op = self._engine, self._args.op
        op.phases, op.stream = phases, engine.streams.enter()
        engine.kernels.ll_combine(self._args)
        if phases & RECEIVE:
            engine.load.combined()
        engine.check()
