"""Low-latency dispatch: one kernel for both halves, or one for each. The host waits for nothing.

Shapes: T tokens, H hidden size, K experts per token, R ranks, E_l local experts, N = R * T_max rows of each expert, S
scales of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ep_plugin import _C
from ep_plugin.dtypes import DTYPE_CODES, ELEMENTS, QUANTIZED, num_scales
from ep_plugin.moe.arguments import address, bulk_ready, check_beside, check_dispatch
from ep_plugin.moe.in_flight import Tensors
from ep_plugin.moe.layout import DispatchCall, DispatchResult, Routing
from ep_plugin.moe.low_latency.engine import LowLatencyEngine
from ep_plugin.moe.low_latency.in_flight import RECEIVE, LowLatencyOperation
from ep_plugin.moe.statistics import current_layer

FORMATS = {None: _C.LlFormat.PLAIN} | {name: _C.LlFormat[name.upper()] for name in QUANTIZED}
_EXPONENTS = 4  # of scales, in an int32


class LowLatencyDispatch(LowLatencyOperation):
    """One dispatch, from its operator's arguments to the rows that this rank receives.

    cumulative: int32 ``[E_l]``, to which the received rows of each expert are added. wait_cost: int64 ``[R]``, to which
    the nanoseconds are added that this rank waits for each other.
    """

    name, kind = "dispatch", 0

    def __init__(
        self,
        engine: LowLatencyEngine,
        *arguments: Any,
        cumulative: torch.Tensor | None = None,
        wait_cost: torch.Tensor | None = None,
    ) -> None:
        x, topk_ids, weights, scales, capacity, quantize, previous, comm = arguments
        known = engine.routing("previous_handle", previous, comm) if previous else None
        self._engine, self._capacity = engine, capacity
        self.rows = bulk_ready("x", x)
        self._call = DispatchCall(self.rows, topk_ids, weights, scales, known, capacity, quantize)
        self._cumulative, self._wait_cost, self._layer = cumulative, wait_cost, current_layer()

    def check(self) -> None:
        engine, call = self._engine, self._call
        for name, given in (("topk_weights", call.weights), ("scales", call.scales)):
            if given is not None:
                raise ValueError(f'{name}: expected None in mode="ll", got shape {tuple(given.shape)}: {_ADVICE[name]}')
        per_expert = check_capacity(engine, call.capacity, call.previous)
        check_dispatch(engine, call._replace(capacity=engine.local_experts * per_expert))
        hidden, widest = call.x.shape[1], engine.config.hidden_size
        if call.quantize is not None and (hidden % _C.scale_block or hidden > widest):
            raise ValueError(
                f"x: expected a multiple of {_C.scale_block} elements, at most {widest}, with "
                f'quantize={call.quantize!r} in mode="ll", got {hidden}'
            )
        most = engine.tokens_of(per_expert)
        if call.x.shape[0] > most:
            raise ValueError(f"x: expected at most {most} tokens, by capacity={call.capacity}, got {call.x.shape[0]}")
        check_stats("cumulative", self._cumulative, engine.local_experts, torch.int32, engine)
        check_stats("wait_cost", self._wait_cost, engine.size, torch.int64, engine)
        self._per_expert = per_expert

    def results(self) -> Tensors:
        """The operator's results; the handle's tensors are among them if this dispatch makes the routing."""
        if self._call.previous is not None:
            return self._result
        assert self._topk_ids is not None
        return *self._result, *handle_tensors(self._topk_ids, self._plan, self._result.tokens)

    def tensors(self) -> Tensors:
        call = self._call
        return call.x, self._ids, self._topk_ids, self._plan, *self._result, self._cumulative, self._wait_cost

    def prepare(self) -> None:
        engine, call = self._engine, self._call
        engine.ensure_memory()
        x, previous = call.x, call.previous
        # The rows of a routing follow from its ids: the same ids give the same places.
        ids = self._ids = call.topk_ids if previous is None else previous.tensors.topk_ids
        T, K = ids.shape
        self._plan = torch.empty(engine.plan_words(T, K, self._per_expert), dtype=torch.int32, device=engine.device)
        self._topk_ids = self._plan.new_empty((T, K)) if previous is None else None
        self._result = empty_result(engine, call, self._per_expert, engine.rows_of)
        made, quantized = self._result, call.quantize is not None
        row_bytes = made.tokens.shape[2] * made.tokens.element_size()
        scale_bytes = 0
        if made.scales is not None:
            groups = int(num_scales(x.shape[1]))
            scale_bytes = -(-groups // 4) * 4 if call.quantize == "e4m3_ue8m0" else 4 * groups
        header = _C.LlHeader(
            row_bytes=row_bytes,
            scale_bytes=scale_bytes,
            topk=K,
            dtype=DTYPE_CODES[made.tokens.dtype],
            format=FORMATS[call.quantize],
            max_tokens=engine.tokens_of(self._per_expert),
            config_hash=engine.config_hash,
            num_tokens=T,
        )
        self._args = _C.LlDispatchArgs(
            op=operation(engine, header, self.kind, self._wait_cost),
            x=x.data_ptr(),
            x_stride=x.stride(0) * x.element_size(),
            ids=ids.data_ptr(),
            topk_ids=address(self._topk_ids),
            id_bytes=ids.element_size(),
            element=ELEMENTS[x.dtype] if quantized else 0,
            tokens=made.tokens.data_ptr(),
            scales=address(made.scales),
            plan=self._plan.data_ptr(),
            expert_count=made.expert_counts.data_ptr(),
            expert_offset=made.expert_offsets.data_ptr(),
            cumulative=address(self._cumulative),
        )

    def launch(self, phases: int) -> None:
        engine, op = self._engine, self._args.op
        op.phases, op.stream = phases, engine.streams.enter()
        engine.kernels.ll_dispatch(self._args)
        if phases & RECEIVE:
            engine.load.dispatched(self._plan, self._call.previous is None, self._layer)
        engine.check()


_ADVICE = {
    "topk_weights": "combine takes the weights of this rank's tokens",
    "scales": "quantize= makes FP8 rows with scales",
}


def operation(engine: LowLatencyEngine, header: Any, kind: int, wait_cost: torch.Tensor | None) -> Any:
    """What dispatch and combine pass to their kernels alike."""
    counted = engine.load.wait_cost() if wait_cost is None else wait_cost
    return _C.LlOperation(
        comm=engine.comm,
        shape=engine.shape,
        header=header,
        slot=engine.next_slot(kind),
        shrink=int(engine.config.shrink),
        num_sms=engine.num_sms,
        state=engine.ll_state.data_ptr(),
        wait_cost=address(counted),
    )


def check_capacity(engine: LowLatencyEngine, capacity: int | None, previous: Routing | None) -> int:
    """Rows of each expert's block: R times the most tokens of a rank in this call."""
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
    """Counters that a kernel adds to: `entries` of `dtype`, contiguous, here."""
    if tensor is None:
        return
    check_beside(name, tensor, (entries,), engine)
    if tensor.dtype is not dtype:
        raise ValueError(f"{name}: expected {dtype}, got {tensor.dtype}")


def empty_result(
    engine: LowLatencyEngine, call: DispatchCall, per_expert: int, rows_of: Callable[..., torch.Tensor] | None = None
) -> DispatchResult:
    """Memory for the results of a dispatch with `per_expert` rows in each expert's block. Serves fakes, too.

    rows_of: makes the tokens, of a shape and a dtype; None: x.new_empty.
    """
    x, local, rows_of = call.x, engine.local_experts, rows_of or call.x.new_empty

    def ints(*shape: int) -> torch.Tensor:
        return x.new_empty(shape, dtype=torch.int32)

    scales = None
    if call.quantize is None:
        tokens = rows_of((local, per_expert, x.shape[1]), dtype=x.dtype)
    else:
        tokens = rows_of((local, per_expert, x.shape[1]), dtype=QUANTIZED[call.quantize])
        groups = num_scales(x.shape[1])
        if call.quantize == "e4m3_ue8m0":
            words = (groups + _EXPONENTS - 1) // _EXPONENTS
            scales = x.new_empty((local, words, per_expert), dtype=torch.int32).transpose(1, 2)
        else:
            scales = x.new_empty((local, groups, per_expert), dtype=torch.float32).transpose(1, 2)
    return DispatchResult(tokens, scales, None, ints(0), ints(local), ints(local + 1), None, None)


def handle_tensors(topk_ids: torch.Tensor, plan: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A handle's tensors. The plan has all that is known of received rows; `tokens` has one for each row."""
    rows = tokens.shape[0] * tokens.shape[1]
    totals = torch.full((1,), rows, dtype=torch.int64, device="cpu")
    return topk_ids, plan, plan.new_empty((0, topk_ids.shape[1])), totals
