"""Low-latency combine: sends weights to the ranks that hold the experts, which return partial rows.

The host waits for nothing.

Shapes: T tokens, H hidden size, K experts per token, R ranks, E_l local experts, N = R * T_max rows of each expert.
"""

from __future__ import annotations

from typing import Any

import torch

from ep_plugin import _C
from ep_plugin.dtypes import DTYPE_CODES, ELEMENTS, name_of, weight_dtype
from ep_plugin.errors import NotSupported
from ep_plugin.moe.arguments import check_beside, check_combine
from ep_plugin.moe.low_latency.dispatch import check_stats
from ep_plugin.moe.low_latency.engine import LowLatencyEngine
from ep_plugin.moe.low_latency.in_flight import LowLatencyCall
from ep_plugin.runtime.tensors import check_kind


class LowLatencyCombine(LowLatencyCall):
    """One combine.

    y: ``[E_l, N, H]``.
    weights: ``[T, K]``; None: all weights are 1.
    bias: ``[T, H]``.
    routing: the ids and the plan of the dispatch. An id that is -1 now leaves its pair out.
    out: ``[T, H]``, receives the sums; None: new memory.
    logfmt: partial rows travel as 10-bit codes where their values are below 1. BF16 only.
    wait_cost: int64 ``[R]``. The kernel adds the nanoseconds that this rank waits for each rank.
    """

    name, kind = "combine", 1

    def __init__(
        self,
        engine: LowLatencyEngine,
        *arguments: Any,
        out: torch.Tensor | None = None,
        logfmt: bool = False,
        wait_cost: torch.Tensor | None = None,
    ) -> None:
        y, self._weights, self._bias, extra, _, routing, _ = arguments
        assert extra is None, "weights travel in combine alone"
        self._engine, self.rows = engine, y
        self._ids, self._plan, *_ = routing
        self._out, self._logfmt, self._wait_cost = out, logfmt, wait_cost

    def check(self) -> None:
        engine, y = self._engine, self.rows
        if self._logfmt and engine.rails.nodes:
            raise NotSupported(
                f"logfmt: expected False over several nodes, got True for {engine.node_map.num_nodes} nodes"
            )
        routing = engine.routing("handle", self._ids, self._plan)
        rows = routing.totals[0]
        local, per_expert = engine.local_experts, rows // engine.local_experts
        check_kind("y", y)  # before its view is taken
        if y.dim() != 3 or y.shape[:2] != (local, per_expert):
            raise ValueError(f"y: expected shape ({local}, {per_expert}, H), got {tuple(y.shape)}")
        if not y.is_contiguous():
            raise ValueError(f"y: expected a contiguous tensor, got strides {tuple(y.stride())}")
        self._align("y", y.view(rows, y.shape[2]))
        check_combine(engine, self.rows.view(rows, y.shape[2]), None, self._bias, None, routing)
        row_bytes, most = y.shape[2] * y.element_size(), engine.config.max_row_bytes
        if most is not None and row_bytes > most:
            raise ValueError(f"y: expected rows of at most max_row_bytes={most} bytes, got {row_bytes}")
        T, K = self._ids.shape
        if self._weights is not None:
            check_beside("weights", self._weights, (T, K), engine)
            if self._weights.dtype is not weight_dtype(y.dtype):
                raise ValueError(f"weights: expected {weight_dtype(y.dtype)}, got {self._weights.dtype}")
        if self._out is not None:
            check_beside("out", self._out, (T, y.shape[2]), engine)
            if self._out.dtype is not y.dtype:
                raise ValueError(f"out: expected the dtype {y.dtype} of y, got {self._out.dtype}")
        group, hidden, widest = _C.ll_logfmt_group, y.shape[2], engine.config.hidden_size
        if self._logfmt and (y.dtype is not torch.bfloat16 or hidden % group or hidden > widest):
            raise ValueError(
                f"y: expected torch.bfloat16 rows of a multiple of {group} elements, at most {widest}, with logfmt, "
                f"got {hidden} of {y.dtype}"
            )
        check_stats("wait_cost", self._wait_cost, engine.size, torch.int64, engine)
        self._max_tokens = engine.tokens_of(per_expert)
        self._become_plain("_weights", "_bias", "_ids", "_plan", "_out", "_wait_cost")

    def for_operator(self) -> tuple[Any, ...]:
        given = self.rows, self._weights, self._bias, self._ids, self._plan, self._out, self._wait_cost
        return *given, self._logfmt

    def remember(self) -> None:
        engine, y = self._engine, self.rows
        (T, K), hidden = self._ids.shape, y.shape[-1]
        header = _C.LlHeader(
            row_bytes=hidden * y.element_size(),
            topk=K,
            dtype=DTYPE_CODES[y.dtype],
            format=_C.LlFormat.LOGFMT if self._logfmt else _C.LlFormat.PLAIN,
            max_tokens=self._max_tokens,
            weight_bytes=weight_dtype(y.dtype).itemsize,
            config_hash=engine.config_hash,
            num_tokens=T,
        )
        of_plan: tuple[torch.Tensor, ...] = (self._plan,)
        settings: tuple[Any, ...] = (True,) if self._logfmt else ()
        if self.buffer_rest is not None:
            of_plan, settings = self.buffer_rest[2:4], self.buffer_rest[6:]
        form = _C.form_of(y, self._weights, self._bias, self._ids, *of_plan, self._out, self._wait_cost)
        assert form is not None, "checked tensors have a form"
        engine.control.remember_combine(
            self.buffer_rest is not None,
            form,
            settings,
            header,
            self._ids.element_size(),
            ELEMENTS[y.dtype],
            hidden,
            name_of(y.dtype),
        )
