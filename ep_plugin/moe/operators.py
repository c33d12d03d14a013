"""The operators that torch sees: ``ep_plugin::dispatch`` and ``ep_plugin::combine``, with their fakes.

They take and return plain tensors, so torch.compile, autograd and checkpointing handle them like any operator. A result
that a call does not have is an empty tensor. ``comm`` is the communicator's number in this process. ``started`` is the
number of an operation that has been started: the call collects its result. 0: the call runs the operation.

Shapes: T tokens, H hidden size, K experts per token, N output rows, S received slots.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._compile import _disable_dynamo

from ep_plugin.moe import autograd, inductor
from ep_plugin.moe.arguments import check_devices
from ep_plugin.moe.high_throughput.dispatch import empty_rows
from ep_plugin.moe.in_flight import Tensors
from ep_plugin.moe.layout import NUM_LIMITS, DispatchCall
from ep_plugin.moe.low_latency.dispatch import check_capacity, fake_result
from ep_plugin.moe.low_latency.engine import LowLatencyEngine
from ep_plugin.moe.registry import communicator
from ep_plugin.runtime.tensors import PLAIN, is_traced

_library = torch.library.Library("ep_plugin", "DEF")


def _operator(
    schema: str,
    new: Callable[[Any], Callable[..., Any]],
    fake: Callable[..., Tensors],
    save: Callable[..., None],
    backward: Callable[..., tuple[torch.Tensor | None, ...]],
) -> Callable[..., Any]:
    """Defines an operator that runs the operations of a communicator's `new`. Returns a function that calls it.

    If no compiler, mode or profiler has to see the operator, the function runs the operation without torch's
    dispatcher, which takes longer than all checks.
    """
    name = schema.partition("(")[0]
    _library.define(schema)
    seen = getattr(torch.ops.ep_plugin, name)
    num_results = schema.partition("->")[2].count("Tensor")
    differentiable = autograd.differentiable(save, backward)

    def run(*inputs: Any) -> Tensors:
        *given, comm, started = inputs
        here = communicator(comm)
        made = None if started else getattr(here.operators_in_c, name)(*given)
        return run_by_python(*inputs, here=here) if made is None else made

    def run_by_python(*inputs: Any, here: Any = None, shares_memory: bool = True) -> Tensors:
        *given, started = inputs
        if here is None:
            here = communicator(given[-1])
        if started:
            return here.in_flight.collect(started)
        operation = new(here)(*given)
        operation.shares_memory = shares_memory
        return here.in_flight.run(operation)

    def with_empty(compute: Callable[..., Tensors]) -> Callable[..., tuple[torch.Tensor, ...]]:
        def kernel(*inputs: Any) -> tuple[torch.Tensor, ...]:
            made = compute(*inputs)
            missing = (None,) * (num_results - len(made))
            return tuple(inputs[0].new_empty(0) if part is None else part for part in (*made, *missing))

        return kernel

    def call(*inputs: Any) -> Any:
        return seen(*inputs) if _watched(inputs) else differentiable(run, *inputs)

    def traced(*inputs: Any) -> Tensors:
        inductor.keep(seen.default)
        return fake(*inputs)

    # torch.compile calls operators with unknown sizes between its graphs. Without this it would trace their Python.
    for key in ("CPU", "CUDA"):
        _library.impl(name, _disable_dynamo(with_empty(functools.partial(run_by_python, shares_memory=False))), key)
    recorded = _disable_dynamo(autograd.autograd_kernel(seen.default, differentiable))
    _library.impl(name, recorded, "Autograd", with_keyset=True)
    torch.library.register_fake(f"ep_plugin::{name}", with_empty(traced), lib=_library)
    return call


def _watched(inputs: tuple[Any, ...]) -> bool:
    """Whether torch must see the operator: for a compiler, a mode, a transform, a profiler or a subclass of Tensor."""
    if is_traced() or torch._C._autograd._profiler_enabled():
        return True
    for tensor in inputs[: autograd.NUM_TENSORS]:
        # As is_lazy asks. A call would cost each operation.
        if tensor is not None and (type(tensor) not in PLAIN or tensor.is_neg() or tensor._is_zerotensor()):
            return True
    return False


def _fake_dispatch(*inputs: Any) -> Tensors:
    x, topk_ids, topk_weights, scales, capacity, quantize, previous, comm, _ = inputs
    engine = communicator(comm).engine
    check_devices(engine, x=x, topk_ids=topk_ids, topk_weights=topk_weights, scales=scales)
    T, K = topk_ids.shape
    if isinstance(engine, LowLatencyEngine):
        return _fake_low_latency_dispatch(engine, *inputs)
    local, sizes = engine.local_experts, communicator(comm).handle_sizes

    def ints(*shape: int | torch.SymInt) -> torch.Tensor:
        return x.new_empty(shape, dtype=torch.int32)

    def unknown() -> int | torch.SymInt:
        return torch.library.get_ctx().new_dynamic_size()

    slots: int | torch.SymInt | None  # torch refuses a new symbolic size that no output has
    slots = previous[2].shape[0] if previous else sizes.slots(capacity)
    if slots is None:
        slots = unknown()
    rows: int | torch.SymInt = capacity if capacity is not None else (unknown() if engine.flat else slots)
    call = DispatchCall(x, topk_ids, topk_weights, scales, None, capacity, quantize)
    result = (
        *empty_rows(call, engine.flat, engine.config.ids_as_given, rows),
        ints(local),
        ints(local + 1),
        None if capacity is None else ints(NUM_LIMITS),
        torch.empty(local, dtype=torch.int64, device="cpu") if capacity is None else None,
    )
    if previous:
        return result
    plan_words = sizes.plan_words(T, K, capacity)
    totals = torch.empty(1 if capacity is not None else sizes.num_totals, dtype=torch.int64, device="cpu")
    return *result, ints(T, K), ints(unknown() if plan_words is None else plan_words), ints(slots, K), totals


def _fake_low_latency_dispatch(engine: LowLatencyEngine, *inputs: Any) -> Tensors:
    x, topk_ids, _, _, capacity, quantize, previous, *_ = inputs
    (T, K), per_expert = topk_ids.shape, capacity
    if previous:
        per_expert = engine.rows_of_plan(previous[1].shape[0], K)
    elif capacity is None:
        per_expert = check_capacity(engine, None, None)
    result = fake_result(engine, x, quantize, per_expert)
    if previous:
        return result
    plan = x.new_empty((engine.plan_words(T, K, per_expert),), dtype=torch.int32)
    return *result, x.new_empty((T, K), dtype=torch.int32), plan


def _fake_combine(*inputs: Any) -> Tensors:
    y, weights, bias, extra, _, routing, comm, _ = inputs
    check_devices(communicator(comm).engine, y=y, weights=weights, bias=bias, extra=extra)
    T, K = routing[0].shape
    return y.new_empty((T, y.shape[-1])), None if extra is None else extra.new_empty((T, K))


dispatch: Callable[..., Any] = _operator(
    "dispatch(Tensor x, Tensor topk_ids, Tensor? topk_weights, Tensor? scales, SymInt? capacity, str? quantize, "
    "Tensor[] previous, int comm, int started) -> (Tensor tokens, Tensor scales, Tensor weights, Tensor ids, "
    "Tensor expert_counts, Tensor expert_offsets, Tensor limits, Tensor host_counts, "
    "Tensor h_topk_ids, Tensor h_plan, Tensor h_recv_rows, Tensor h_totals)",
    lambda comm: comm.new_dispatch,
    _fake_dispatch,
    autograd.save_dispatch,
    lambda *given: autograd.dispatch_backward(combine, *given),
)
combine: Callable[..., Any] = _operator(
    "combine(Tensor y, Tensor? weights, Tensor? bias, Tensor? extra, bool per_row, Tensor[] routing, int comm, "
    "int started) -> (Tensor out, Tensor extra_out)",
    lambda comm: comm.new_combine,
    _fake_combine,
    autograd.save_combine,
    lambda *given: autograd.combine_backward(dispatch, combine, *given),
)
