"""Low-latency dispatch: one kernel for both halves, or one kernel for each half. The host waits for nothing.

Shapes: T tokens, H hidden size, K experts per token, R ranks, E_l local experts, N = R * T_max rows of each expert, S
scales of a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import Any

import torch

from ep_plugin import _C
from ep_plugin.dtypes import DTYPE_CODES, ELEMENTS, QUANTIZED, num_scales
from ep_plugin.moe.arguments import check_beside, check_dispatch, check_id_values
from ep_plugin.moe.in_flight import Tensors
from ep_plugin.moe.layout import DispatchCall, DispatchResult, Routing
from ep_plugin.moe.low_latency.engine import LowLatencyEngine
from ep_plugin.moe.low_latency.in_flight import RECEIVE, LowLatencyOperation
from ep_plugin.moe.statistics import current_layer

FORMATS = {None: _C.LlFormat.PLAIN} | {name: _C.LlFormat[name.upper()] for name in QUANTIZED}
_EXPONENTS = 4  # exponents of scales in an int32


class LowLatencyDispatch(LowLatencyOperation):
    """One dispatch, from its operator's arguments to the rows that this rank receives.

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
        x, topk_ids, weights, scales, capacity, quantize, previous, _ = arguments
        self._engine, self.rows, self._routing = engine, x, previous[:2]
        # The same ids give the same routing, so the places follow from the ids.
        self._ids = previous[0] if previous else topk_ids
        self._given = x, topk_ids, weights, scales, capacity, quantize
        self._cumulative, self._wait_cost, self._layer = cumulative, wait_cost, current_layer()

    def check(self) -> None:
        x, topk_ids, weights, scales, capacity, quantize = self._given
        form = _C.form_of(x, topk_ids, weights, scales, self._cumulative, self._wait_cost, *self._routing)
        if self._is_known(form, capacity, quantize):
            check_id_values(self._engine, topk_ids)
        else:
            self._check_all()

    def _check_all(self) -> None:
        engine, (x, topk_ids, weights, scales, capacity, quantize) = self._engine, self._given
        for name, given in (("topk_weights", weights), ("scales", scales)):
            if given is not None:
                raise ValueError(f'{name}: expected None in mode="ll", got shape {tuple(given.shape)}: {_ADVICE[name]}')
        previous = engine.routing("previous_handle", *self._routing) if self._routing else None
        self._per_expert = per_expert = check_capacity(engine, capacity, previous)
        self._align("x", x)
        rows = engine.local_experts * per_expert
        check_dispatch(engine, DispatchCall(self.rows, topk_ids, None, None, previous, rows, quantize))
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

    def results(self) -> Tensors:
        """Returns the operator's results. They include the handle's tensors if this dispatch makes the routing."""
        return self._result if self._routing else (*self._result, self._topk_ids, self._plan)

    def tensors(self) -> Tensors:
        return self.rows, self._ids, self._topk_ids, self._plan, *self._result, self._cumulative, self._wait_cost

    def describe(self) -> tuple[Any, int, int]:
        engine, x, quantize = self._engine, self.rows, self._given[-1]
        dtype, groups = QUANTIZED.get(quantize, x.dtype), int(num_scales(x.shape[1]))
        scale_bytes = 0
        if quantize is not None:
            scale_bytes = -(-groups // 4) * 4 if quantize == "e4m3_ue8m0" else 4 * groups
        T, K = self._ids.shape
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
        args = _C.LlDispatchArgs(
            op=operation(engine, header),
            x_stride=x.stride(0) * x.element_size(),
            id_bytes=self._ids.element_size(),
            element=ELEMENTS[x.dtype] if quantize is not None else 0,
        )
        return args, self._per_expert, engine.plan_words(T, K, self._per_expert)

    def remember(self) -> None:
        if self._cumulative is None and self._wait_cost is None:
            self.remember_for(False, self._form, self._given[-2:])

    def remember_for(self, is_for_buffer: bool, form: bytes | None, settings: tuple[Hashable, ...]) -> None:
        engine, x, quantize = self._engine, self.rows, self._given[-1]
        assert form is not None
        args, per_expert, _ = self._known
        dtype, scales, scale_dtype = QUANTIZED.get(quantize, x.dtype), 0, torch.float32
        if quantize is not None:
            scales = int(num_scales(x.shape[1]))
            if quantize == "e4m3_ue8m0":
                scales, scale_dtype = -(-scales // _EXPONENTS), torch.int32
        shape = engine.local_experts, per_expert, x.shape[1]
        rows_of = (shape, dtype) if engine.reuses_rows(math.prod(shape) * dtype.itemsize) else None
        sizes = x.shape[1], named(dtype), scales, named(scale_dtype)
        engine.control.remember_dispatch(is_for_buffer, form, settings, args, *sizes, rows_of)

    def fill(self, args: Any, known: Any) -> None:
        engine, x, ids, (_, per_expert, plan_words) = self._engine, self.rows, self._ids, known
        quantize = self._given[-1]
        self._plan = x.new_empty(plan_words, dtype=torch.int32)
        self._topk_ids = None if self._routing else self._plan.new_empty(ids.shape)
        made = self._result = empty_result(engine, x, quantize, per_expert, engine.rows_of)
        out = made.tokens, made.scales, self._plan, made.expert_counts, made.expert_offsets
        args.point_to(x, ids, self._topk_ids, *out, self._cumulative)

    def launch(self, phases: int) -> None:
        self._engine.kernels.ll_dispatch(self._ready(phases))
        if phases & RECEIVE:
            self._engine.load.dispatched(self._plan, not self._routing, self._layer)
        self._engine.check()


def named(dtype: torch.dtype) -> str:
    """Returns the name of a dtype without that of its module."""
    return str(dtype).removeprefix("torch.")


_ADVICE = {
    "topk_weights": "combine takes the weights of this rank's tokens",
    "scales": "quantize= makes FP8 rows with scales",
}


def operation(engine: LowLatencyEngine, header: Any) -> Any:
    """Returns the arguments that the kernels of dispatch and combine share."""
    return _C.LlOperation(
        shape=engine.shape,
        header=header,
        shrink=int(engine.config.shrink),
        num_sms=engine.num_sms,
        state=engine.ll_state.data_ptr(),
    )


def check_capacity(engine: LowLatencyEngine, capacity: int | None, previous: Routing | None) -> int:
    """Checks `capacity` and returns the rows of each expert's block: R times the most tokens of a rank in this call."""
    per_rank = engine.local_experts
    if previous is not None:
        rows = previous.totals[0] // per_rank
        if capacity is not None and capacity != rows:
            raise ValueError(f"capacity: expected {rows} rows, which previous_handle has, got {capacity!r}")
        return rows
    most = engine.size * engine.max_tokens
    if capacity is None:
        return most
    known = isinstance(capacity, int) and not isinstance(capacity, bool)
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


def empty_result(
    engine: LowLatencyEngine,
    x: torch.Tensor,
    quantize: str | None,
    per_expert: int,
    rows_of: Callable[..., torch.Tensor] | None = None,
) -> DispatchResult:
    """Allocates the results of a dispatch with `per_expert` rows in each expert's block. `x` may be a fake.

    rows_of: allocates the tokens, given a shape and a dtype; None: x.new_empty.
    """
    local, rows_of = engine.local_experts, rows_of or x.new_empty

    def ints(*shape: int) -> torch.Tensor:
        return x.new_empty(shape, dtype=torch.int32)

    scales = None
    if quantize is None:
        tokens = rows_of((local, per_expert, x.shape[1]), dtype=x.dtype)
    else:
        tokens = rows_of((local, per_expert, x.shape[1]), dtype=QUANTIZED[quantize])
        groups = num_scales(x.shape[1])
        if quantize == "e4m3_ue8m0":
            words = (groups + _EXPONENTS - 1) // _EXPONENTS
            scales = x.new_empty((local, words, per_expert), dtype=torch.int32).transpose(1, 2)
        else:
            scales = x.new_empty((local, groups, per_expert), dtype=torch.float32).transpose(1, 2)
    return DispatchResult(tokens, scales, None, None, ints(local), ints(local + 1), None, None)
