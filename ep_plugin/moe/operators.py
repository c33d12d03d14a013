"""The operators that torch sees: ``ep_plugin::dispatch`` and ``ep_plugin::combine``, with their fakes.

They return plain tensors (empty where a call has none), so that torch.compile, autograd and checkpointing need to know
nothing else. ``comm`` is the communicator's number in this process. The functions of the same names call them, or,
where nobody watches what operators are called, do the same without torch's dispatcher, which takes longer than
all checks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._compile import _disable_dynamo

from ep_plugin.moe import autograd
from ep_plugin.moe.arguments import bulk_ready, check_devices
from ep_plugin.moe.high_throughput.combine import Sums
from ep_plugin.moe.high_throughput.dispatch_args import DispatchCall, DispatchResult, empty_payload
from ep_plugin.moe.high_throughput.routing import RoutingTensors, known_routing
from ep_plugin.moe.registry import communicator
from ep_plugin.runtime.tensors import PLAIN, is_lazy

_library = torch.library.Library("ep_plugin", "DEF")
_library.define(
    "dispatch(Tensor x, Tensor topk_ids, Tensor? topk_weights, Tensor? scales, Tensor[] previous, int comm, "
    "SymInt? capacity, str? quantize, bool pending) -> (Tensor tokens, Tensor scales, Tensor weights, Tensor ids, "
    "Tensor expert_counts, Tensor expert_offsets, Tensor limits, Tensor host_counts, "
    "Tensor h_topk_ids, Tensor h_plan, Tensor h_recv_rows, Tensor h_totals)"
)
_library.define(
    "combine(Tensor y, Tensor? weights, Tensor? bias, Tensor? extra, Tensor[] routing, int comm, "
    "bool pending) -> (Tensor out, Tensor extra_out)"
)


def _dispatch(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor | None,
    scales: torch.Tensor | None,
    previous: Sequence[torch.Tensor],
    comm: int,
    capacity: int | None,
    quantize: str | None,
    pending: bool,
) -> tuple[torch.Tensor | None, ...]:
    here = communicator(comm)
    cached = known_routing(here.engine, "previous_handle", RoutingTensors(*previous)) if previous else None
    call = DispatchCall(bulk_ready(x), topk_ids, topk_weights, scales, cached, capacity, quantize)
    result, routing = here.run_dispatch(call, pending)
    return result if cached is not None else (*result, *routing)


def _combine(
    y: torch.Tensor,
    weights: torch.Tensor | None,
    bias: torch.Tensor | None,
    extra: torch.Tensor | None,
    routing: Sequence[torch.Tensor],
    comm: int,
    pending: bool,
) -> Sums:
    here = communicator(comm)
    known = known_routing(here.engine, "handle", RoutingTensors(*routing))
    bias = None if bias is None else bulk_ready(bias)
    return here.run_combine(bulk_ready(y), weights, bias, extra, known, pending)


def _fake_dispatch(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor | None,
    scales: torch.Tensor | None,
    previous: Sequence[torch.Tensor],
    comm: int,
    capacity: int | None,
    quantize: str | None,
    pending: bool,
) -> tuple[torch.Tensor | None, ...]:
    engine = communicator(comm).engine
    check_devices(
        engine, x=x, topk_ids=topk_ids, topk_weights=topk_weights, scales=scales
    )  # a meta tensor ends up here
    config, size = engine.config, engine.size
    T, K = topk_ids.shape
    flat = engine.flat

    def ints(*shape: int | torch.SymInt) -> torch.Tensor:
        return x.new_empty(shape, dtype=torch.int32)

    def unknown() -> int | torch.SymInt:
        return torch.library.get_ctx().new_dynamic_size()

    most = config.max_tokens_per_rank
    slots: int | torch.SymInt  # a size that no output has must not be asked for
    if previous:
        slots = previous[2].shape[0]
    else:
        slots = size * most if capacity is not None and most is not None else unknown()
    rows: int | torch.SymInt = capacity if capacity is not None else (unknown() if flat else slots)
    beside = (rows,) if flat else (rows, K)
    local = engine.local_experts
    result = (
        *empty_payload(x, scales, quantize, rows),
        None if topk_weights is None else topk_weights.new_empty(beside),
        ints(*beside),
        ints(local),
        ints(local + 1),
        None if capacity is None else ints(2),
        torch.empty(local, dtype=torch.int64, device="cpu") if capacity is None else None,
    )
    if previous:
        return result
    totals = torch.empty(1 if capacity is not None else engine.num_totals, dtype=torch.int64, device="cpu")
    return *result, ints(T, K), ints(engine.plan_words(T, K)), ints(slots, K), totals


def _fake_combine(
    y: torch.Tensor,
    weights: torch.Tensor | None,
    bias: torch.Tensor | None,
    extra: torch.Tensor | None,
    routing: Sequence[torch.Tensor],
    comm: int,
    pending: bool,
) -> Sums:
    check_devices(communicator(comm).engine, y=y, weights=weights, bias=bias, extra=extra)
    T, K = routing[0].shape
    return y.new_empty((T, y.shape[1])), None if extra is None else extra.new_empty((T, K))


def _as_operator(compute: Callable[..., tuple[torch.Tensor | None, ...]], results: int) -> Callable[..., Any]:
    """`compute` as an operator, which returns `results` tensors, none of its inputs, and no tensor twice."""

    def kernel(*inputs: Any) -> tuple[torch.Tensor, ...]:
        made = compute(*inputs)
        missing = (None,) * (results - len(made))
        return tuple(inputs[0].new_empty(0) if part is None else part for part in (*made, *missing))

    return kernel


def dispatch(*inputs: Any) -> Any:
    """The operator's results for its arguments."""
    if _watched(inputs):
        return torch.ops.ep_plugin.dispatch(*inputs)
    return _differentiable_dispatch(_dispatch, *inputs)


def combine(*inputs: Any) -> Any:
    """The operator's results for its arguments."""
    if _watched(inputs):
        return torch.ops.ep_plugin.combine(*inputs)
    return _differentiable_combine(_combine, *inputs)


def _watched(inputs: tuple[Any, ...]) -> bool:
    """Whether somebody must see the operator called: a compiler, a mode, a transform, a profiler, a kind of tensor."""
    if (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._autograd._profiler_enabled()
    ):
        return True
    for tensor in inputs[: autograd.NUM_TENSORS]:
        if tensor is not None and (type(tensor) not in PLAIN or is_lazy(tensor)):
            return True
    return False


_DISPATCH_RESULTS = len((*DispatchResult._fields, *RoutingTensors._fields))
_differentiable_dispatch = autograd.differentiable(
    autograd.save_dispatch, functools.partial(autograd.dispatch_backward, combine)
)
_differentiable_combine = autograd.differentiable(
    autograd.save_combine, functools.partial(autograd.combine_backward, dispatch)
)
# torch.compile calls operators whose sizes it cannot know between its graphs, and would trace their Python as a user's.
for _key in ("CPU", "CUDA"):
    _library.impl("dispatch", _disable_dynamo(_as_operator(_dispatch, _DISPATCH_RESULTS)), _key)
    _library.impl("combine", _disable_dynamo(_as_operator(_combine, 2)), _key)
torch.library.register_fake("ep_plugin::dispatch", _as_operator(_fake_dispatch, _DISPATCH_RESULTS), lib=_library)
torch.library.register_fake("ep_plugin::combine", _as_operator(_fake_combine, 2), lib=_library)
for _name, _call in (("dispatch", _differentiable_dispatch), ("combine", _differentiable_combine)):
    _operator = getattr(torch.ops.ep_plugin, _name).default
    _library.impl(_name, _disable_dynamo(autograd.autograd_kernel(_operator, _call)), "Autograd", with_keyset=True)
