"""Low-latency dispatch: one kernel for both halves, or one kernel for each half. The host waits for nothing.

Shapes: T tokens, H hidden size, K experts per token, R ranks, E_l local experts, N = R * T_max rows of each expert, S
scales of a row.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ep_plugin import _C
from ep_plugin.dtypes import DTYPE_CODES, ELEMENTS, QUANTIZED, name_of, num_scales
from ep_plugin.moe.arguments import check_beside, check_dispatch
from ep_plugin.moe.layout import DispatchCall, DispatchResult, Routing
from ep_plugin.moe.low_latency.engine import LowLatencyEngine
from ep_plugin.moe.low_latency.in_flight import LowLatencyCall

FORMATS = {None: _C.LlFormat.PLAIN} | {name: _C.LlFormat[name.upper()] for name in QUANTIZED}
_EXPONENTS = 4  # exponents of scales in an int32


class LowLatencyDispatch(LowLatencyCall):
    """One dispatch.

    cumulative: int32 ``[E_l]``. The kernel adds the number of rows that each expert receives.
    wait_cost: int64 ``[R]``. The kernel adds the nanoseconds that this rank waits for each rank.
    """

    name, kind = "dispatch", 0

    def __init__(
        self,
        engine: LowLatencyEngine,
        *arguments: Any,
        cumulative: torch.Tensor | None = None,
        wait_cost: torch.Tensor | None = None,
    ) -> None:
        self.rows, self._ids, weights, scales, self._capacity, self._quantize, previous, _ = arguments
        for name, given in (("topk_weights", weights), ("scales", scales)):
            if given is not None:
                raise ValueError(f'{name}: expected None in mode="ll", got shape {tuple(given.shape)}: {_ADVICE[name]}')
        self._engine, self._routing = engine, tuple(previous[:2])
        self._cumulative, self._wait_cost = cumulative, wait_cost

    def check(self) -> None:
        engine, x, capacity, quantize = self._engine, self.rows, self._capacity, self._quantize
        previous = engine.routing("previous_handle", *self._routing) if self._routing else None
        self._per_expert = per_expert = check_capacity(engine, capacity, previous)
        self._align("x", x)
        rows = engine.local_experts * per_expert
        check_dispatch(engine, DispatchCall(self.rows, self._ids, None, None, previous, rows, quantize))
        hidden, widest = x.shape[1], engine.config.hidden_size
        if quantize is not None and (hidden % _C.scale_block or hidden > widest):
            raise ValueError(
                f"x: expected a multiple of {_C.scale_block} elements, at most {widest}, with "
                f'quantize={quantize!r} in mode="ll", got {hidden}'
            )
        most = engine.tokens_of(per_expert)
        if x.shape[0] > most:
            raise ValueError(f"x: expected at most {most} tokens, by capacity={capacity}, got {x.shape[0]}")
        check_stats("cumulative", self._cumulative, engine.local_experts, torch.int32, engine)
        check_stats("wait_cost", self._wait_cost, engine.size, torch.int64, engine)
        self._become_plain("_ids", "_cumulative", "_wait_cost", "_routing")
        self._capacity, self._quantize = capacity and int(capacity), quantize and str.__str__(quantize)

    def for_operator(self) -> tuple[Any, ...]:
        given = self.rows, self._ids, self._cumulative, self._wait_cost, self._capacity, self._quantize
        return *given, *(self._routing or (None, None))

    def remember(self) -> None:
        engine, x, quantize = self._engine, self.rows, self._quantize
        dtype, groups = QUANTIZED.get(quantize or "", x.dtype), int(num_scales(x.shape[1]))
        scales = scale_bytes = 0
        scale_dtype = torch.float32
        if quantize is not None:
            scales, scale_bytes = groups, 4 * groups
        if quantize == "e4m3_ue8m0":
            scales, scale_dtype = -(-groups // _EXPONENTS), torch.int32
            scale_bytes = _EXPONENTS * scales
        T, K = self._ids.shape
        ids = self._routing[0] if self._routing else self._ids  # the same ids give the same routing
        header = _C.LlHeader(
            row_bytes=x.shape[1] * dtype.itemsize,
            scale_bytes=scale_bytes,
            topk=K,
            dtype=DTYPE_CODES[dtype],
            format=FORMATS[quantize],
            max_tokens=engine.tokens_of(self._per_expert),
            config_hash=engine.config_hash,
            num_tokens=T,
        )
        element = ELEMENTS[x.dtype] if quantize is not None else 0
        shape = engine.local_experts, self._per_expert, x.shape[1]
        rows_of = (shape, dtype) if engine.reuses_rows(math.prod(shape) * dtype.itemsize) else None
        settings = (self._capacity, self._quantize) if self.buffer_rest is None else self.buffer_rest[3:]
        form = _C.form_of(x, self._ids, None, None, self._cumulative, self._wait_cost, *self._routing)
        assert form is not None, "checked tensors have a form"
        engine.control.remember_dispatch(
            self.buffer_rest is not None,
            form,
            settings,
            header,
            x.stride(0) * x.element_size(),
            ids.element_size(),
            element,
            x.shape[1],
            name_of(dtype),
            scales,
            name_of(scale_dtype),
            rows_of,
        )


_ADVICE = {
    "topk_weights": "combine takes the weights of this rank's tokens",
    "scales": "quantize= makes FP8 rows with scales",
}


def check_capacity(engine: LowLatencyEngine, capacity: int | None, previous: Routing | None) -> int:
    """Checks `capacity` and returns the rows of each expert's block: R times the most tokens of a rank in this call."""
    known = isinstance(capacity, int) and not isinstance(capacity, bool)
    if previous is not None:
        rows = previous.totals[0] // engine.local_experts
        if capacity is not None and (not known or capacity != rows):
            raise ValueError(f"capacity: expected {rows} rows, which previous_handle has, got {capacity!r}")
        return rows
    most = engine.size * engine.max_tokens
    if capacity is None:
        return most
    if not known or not 0 < capacity <= most or capacity % engine.size:
        raise ValueError(
            f'capacity: expected a multiple of the {engine.size} ranks, at most {most}, in mode="ll", got {capacity!r}'
        )
    return capacity


def check_stats(
    name: str, tensor: torch.Tensor | None, entries: int, dtype: torch.dtype, engine: LowLatencyEngine
) -> None:
    """Checks counters that a kernel adds to: `entries` numbers of `dtype`, contiguous, on the communicator's device."""
    if tensor is None:
        return
    check_beside(name, tensor, (entries,), engine)
    if tensor.dtype is not dtype:
        raise ValueError(f"{name}: expected {dtype}, got {tensor.dtype}")


def fake_result(engine: LowLatencyEngine, x: torch.Tensor, quantize: str | None, per_expert: int) -> DispatchResult:
    """Returns fakes for the results of a dispatch with `per_expert` rows in each expert's block. x: a fake."""
    local = engine.local_experts

    def ints(*shape: int) -> torch.Tensor:
        return x.new_empty(shape, dtype=torch.int32)

    scales = None
    if quantize is None:
        tokens = x.new_empty((local, per_expert, x.shape[1]))
    else:
        tokens = x.new_empty((local, per_expert, x.shape[1]), dtype=QUANTIZED[quantize])
        groups = num_scales(x.shape[1])
        if quantize == "e4m3_ue8m0":
            words = (groups + _EXPONENTS - 1) // _EXPONENTS
            scales = x.new_empty((local, words, per_expert), dtype=torch.int32).transpose(1, 2)
        else:
            scales = x.new_empty((local, groups, per_expert), dtype=torch.float32).transpose(1, 2)
    return DispatchResult(tokens, scales, None, None, ints(local), ints(local + 1), None, None)
