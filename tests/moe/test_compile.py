"""The operators under torch.compile and torch.library's own checks, on CPUs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch._functorch.config
import torch._inductor.config
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from ep_plugin import MoECommunicator, MoECommunicatorConfig
from tests.moe.moe_cases import FLAT, LAYOUTS, TOKEN_MAJOR, Case, communicator, make_inputs, named, on_ranks, poisoned
from tests.ranks import run_ranks, values


class MoELayer(torch.nn.Module):
    """A router, an exchange and experts of two matrices, as a user would write them."""

    def __init__(self, comm: MoECommunicator, hidden: int, topk: int, capacity: int | None = None) -> None:
        super().__init__()
        self.comm, self.topk, self.capacity = comm, topk, capacity
        self.router = torch.nn.Linear(hidden, comm.config.num_experts, bias=False)
        self.scale = torch.nn.Parameter(torch.randn(comm.num_local_experts, hidden))
        self.up = torch.nn.Linear(hidden, 2 * hidden)
        self.down = torch.nn.Linear(2 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = self.router(x).softmax(-1).topk(self.topk)
        out, handle = self.comm.dispatch(x, ids, weights, capacity=self.capacity)
        if out.row_expert_ids is not None:
            scale = self.scale[out.row_expert_ids.clamp(min=0).long()]
        else:
            here = (out.topk_ids >= 0).unsqueeze(2)
            scale = (self.scale[out.topk_ids.clamp(min=0).long()] * here).sum(1)
        y = self.down(torch.nn.functional.silu(self.up(out.tokens * scale)))
        return x + self.comm.combine(y, handle, weights=out.weights)


def _step(layer: MoELayer, run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> list[torch.Tensor]:
    """The result and all gradients of one step of `run`, which is `layer` or a compiled `layer`."""
    layer.zero_grad()
    x = x.clone().requires_grad_()
    z = run(x)
    (z * torch.cos(x.detach())).sum().backward()
    return [z.detach(), x.grad, *(parameter.grad for parameter in layer.parameters())]


def _generate_afresh() -> None:
    torch._inductor.config.compile_threads = 1  # no pool of workers for a handful of kernels
    torch._inductor.config.fx_graph_cache = False
    torch._functorch.config.enable_autograd_cache = False


def _compiled(rank: int, size: int, backend: str, tokens_of_steps: list[int]) -> None:
    _generate_afresh()
    torch.manual_seed(rank)
    everything = ((FLAT, None), (TOKEN_MAJOR, None), (FLAT, 400))
    for layout, capacity in everything if backend == "aot_eager" else everything[:1]:
        case = Case(tokens=(1,) * size, num_experts=2 * size, hidden=16)
        with communicator(case, layout, max_tokens_per_rank=None if capacity is None else 64) as comm:
            layer = MoELayer(comm, 16, 2, capacity)
            torch._dynamo.reset()
            compiled = torch.compile(layer, fullgraph=True, backend=backend, dynamic=True)
            for tokens in tokens_of_steps:
                x = torch.randn(max(0, tokens - 3 * rank), 16)
                with named((layout, capacity, tokens)):
                    expected = _step(layer, layer, x)
                    for i, (got, plain) in enumerate(zip(_step(layer, compiled, x), expected, strict=True)):
                        torch.testing.assert_close(got, plain, msg=lambda m, i=i: f"result {i}: {m}")
            with torch.no_grad(), named((layout, capacity, "no_grad")):
                torch.testing.assert_close(compiled(x), layer(x))


@pytest.mark.slow
def test_whole_layer_in_one_graph() -> None:
    on_ranks(2, _compiled, "aot_eager", [20, 37, 3, 64])


@pytest.mark.slow
def test_whole_layer_through_the_code_generator() -> None:
    """Rank 1 takes part in the first step, in which it has no tokens."""
    on_ranks(2, _compiled, "inductor", [3, 20])


def _independent(rank: int, size: int) -> None:
    _generate_afresh()
    case = Case(tokens=(1,) * size, num_experts=2 * size, hidden=16)
    with communicator(case) as comm:

        def both(x: list[torch.Tensor], ids: list[torch.Tensor], weights: list[torch.Tensor]) -> torch.Tensor:
            sums = []
            for given in zip(x, ids, weights, strict=True):
                out, handle = comm.dispatch(*given)
                sums.append(comm.combine(out.tokens.sin(), handle, weights=out.weights).sum())
            return sums[0] * sums[1]

        results = []
        for run in (both, torch.compile(both, fullgraph=True, dynamic=True)):
            generator = torch.Generator().manual_seed(rank)
            tokens = (700, 5) if rank else (5, 700)
            x = [torch.randn(n, 16, generator=generator).requires_grad_() for n in tokens]
            ids = [torch.rand(n, 2 * size, generator=generator).topk(2).indices for n in tokens]
            run(x, ids, [torch.rand(n, 2, generator=generator) for n in tokens]).backward()
            results.append([each.grad for each in x])
        torch.testing.assert_close(*results)


@pytest.mark.slow
def test_exchanges_that_do_not_depend_on_each_other_keep_their_order() -> None:
    """Inductor would order those of the backward by the memory that they free."""
    on_ranks(2, _independent)


def _compiled_in_parts(rank: int, size: int, backend: str, way: str) -> None:
    """A layer compiled without fullgraph: torch.compile may break the graph anywhere."""
    settings = {"num_experts": 2 * size, "hidden_size": 16, "topk": 2}
    torch.manual_seed(rank)

    def layer(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        comm = MoECommunicator.shared(None, **settings)  # made here, in the first call
        if way == "cut":
            torch._dynamo.graph_break()
        if way == "asynchronous":
            out, handle = comm.dispatch_async(x, ids, weights).wait()
            return comm.combine_async(out.tokens.sin(), handle, weights=out.weights).wait()
        out, handle = comm.dispatch(x, ids, weights)
        return comm.combine(out.tokens.sin(), handle, weights=out.weights)

    compiled = torch.compile(layer, backend=backend)
    for tokens in (9, 5):
        x, weights = torch.randn(tokens, 16), torch.rand(tokens, 2)
        ids = torch.rand(tokens, 2 * size).topk(2).indices
        results = []
        for run in (compiled, layer):
            leaves = x.clone().requires_grad_(), weights.clone().requires_grad_()
            z = run(leaves[0], ids, leaves[1])
            (z * x.cos()).sum().backward()
            results.append([z.detach(), leaves[0].grad, leaves[1].grad])
        torch.testing.assert_close(*results)


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "way"), [("eager", "plain"), ("aot_eager", "cut"), ("eager", "asynchronous")])
def test_a_layer_is_compiled_in_parts(backend: str, way: str) -> None:
    on_ranks(2, _compiled_in_parts, backend, way)


def _library_checks(rank: int, size: int) -> None:
    for layout, as_given in (*((layout, False) for layout in LAYOUTS), (TOKEN_MAJOR, True)):
        case = Case(tokens=(6,), num_experts=4, hidden=8, dtype=torch.float64)
        inputs = make_inputs(case)
        x, ids, weights = inputs.x[0], inputs.ids[0], inputs.weights[0]
        with communicator(case, layout, max_tokens_per_rank=8, hidden_size=144, ids_as_given=as_given) as comm:
            number = comm.number
            out, handle = comm.dispatch(x, ids, weights)
            routing = list(handle[:-1])
            live, live_weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
            scales = torch.rand(6, 2)
            y, row_weights = out.tokens.clone().requires_grad_(), out.weights.clone().requires_grad_()
            calls = {
                "dispatch": (torch.ops.ep_plugin.dispatch, (x, ids, weights, scales, None, None, [], number, 0)),
                "rows alone": (torch.ops.ep_plugin.dispatch, (x, ids.int(), None, None, None, None, [], number, 0)),
                "capacity": (torch.ops.ep_plugin.dispatch, (x, ids, weights, None, 20, None, [], number, 0)),
                "cached": (torch.ops.ep_plugin.dispatch, (x, ids, weights, None, None, None, routing, number, 0)),
                "dispatch, gradients": (
                    torch.ops.ep_plugin.dispatch,
                    (live, ids, live_weights, None, None, None, routing, number, 0),
                ),
                "quantised": (
                    torch.ops.ep_plugin.dispatch,
                    (torch.rand(6, 144), ids, weights, None, None, "e4m3", [], number, 0),
                ),
                "combine": (torch.ops.ep_plugin.combine, (out.tokens, None, None, None, False, routing, number, 0)),
                "combine, all of it": (
                    torch.ops.ep_plugin.combine,
                    (y, row_weights, live, out.weights, False, routing, number, 0),
                ),
                "combine, values of rows": (
                    torch.ops.ep_plugin.combine,
                    (y, None, live, out.weights, True, routing, number, 0),
                ),
            }
            for name, (op, args) in calls.items():
                # Unread words of the routing stay unwritten. Poison gives them the same value in each run.
                with named((layout, as_given, name)), poisoned():
                    torch.library.opcheck(op.default, args)


def test_operators_pass_the_checks_of_torch_library() -> None:
    on_ranks(1, _library_checks)


def _cached_in_a_graph(rank: int, size: int) -> None:
    """Two dispatches in one graph, with different rows and the same routing."""
    case = Case(tokens=(9,) * size, num_experts=2 * size, hidden=8)
    inputs = make_inputs(case)
    with communicator(case) as comm:

        def twice(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            out, handle = comm.dispatch(x, ids)
            again, handle = comm.dispatch(2 * x, ids, previous_handle=handle)
            return comm.combine(out.tokens + again.tokens, handle)

        x = inputs.x[rank]
        count = (inputs.ids[rank] >= 0).sum(1, keepdim=True)
        torch.testing.assert_close(
            torch.compile(twice, fullgraph=True, backend="aot_eager")(x, inputs.ids[rank]), 3 * x * count
        )


def test_cached_dispatch_in_a_graph() -> None:
    on_ranks(2, _cached_in_a_graph)


def _round_trip_in_a_graph(rank: int, size: int, num_experts: int) -> None:
    """One compiled function serves any number of experts, although the sizes of handles depend on that number."""
    case = Case(tokens=(9,) * size, num_experts=num_experts, hidden=8)
    inputs = make_inputs(case)
    with communicator(case) as comm:

        def there_and_back(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            out, handle = comm.dispatch(x, ids)
            return comm.combine(out.tokens, handle)

        x, ids = inputs.x[rank], inputs.ids[rank]
        compiled = torch.compile(there_and_back, fullgraph=True)
        torch.testing.assert_close(compiled(x, ids), x * (ids >= 0).sum(1, keepdim=True))


@pytest.mark.slow
def test_code_kept_on_disk_is_not_taken_for_a_communicator_of_other_sizes(tmp_path: Path) -> None:
    """Each process makes its first communicator and compiles the same function."""
    on_disk = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    for num_experts in (8, 16):
        values(run_ranks(1, _round_trip_in_a_graph, 1, num_experts, timeout_s=120, env=on_disk))


@pytest.mark.slow
def test_the_same_program_finds_its_code_again(tmp_path: Path) -> None:
    numbers = [values(run_ranks(2, _numbers))[0] for _ in range(2)]
    assert numbers[0] == numbers[1] and len(set(numbers[0])) == 3


def _numbers(rank: int) -> list[int]:
    """The numbers of two communicators of one kind and one of another."""
    configs = [MoECommunicatorConfig(num_experts=8, hidden_size=hidden, topk=2) for hidden in (8, 8, 16)]
    made = [MoECommunicator(None, config) for config in configs]
    for comm in made:
        comm.close()
    return [comm.number for comm in made]


def _calls_seen(rank: int, size: int) -> None:
    case = Case(tokens=(9,), num_experts=4, hidden=8)
    inputs = make_inputs(case)
    with communicator(case) as comm:

        def round_trip(x: torch.Tensor) -> torch.Tensor:
            out, handle = comm.dispatch(x, inputs.ids[0], inputs.weights[0])
            return comm.combine(out.tokens, handle, weights=out.weights)

        plain = round_trip(inputs.x[0])
        with profile(activities=[ProfilerActivity.CPU]) as run:
            x = inputs.x[0].clone().requires_grad_()
            round_trip(x).sum().backward()
        names = [event.name() for event in run.profiler.kineto_results.events()]
        assert names.count("ep_plugin::dispatch") == names.count("ep_plugin::combine") == 2
        with _Operators() as seen:
            torch.testing.assert_close(round_trip(inputs.x[0]), plain, rtol=0, atol=0)
        assert [name for name in seen.names if "ep_plugin" in name] == ["ep_plugin::dispatch", "ep_plugin::combine"]
        round_trip(torch.nn.Parameter(inputs.x[0]))
        with pytest.raises(NotImplementedError, match="ep_plugin.dispatch"):
            round_trip(_Kind(inputs.x[0]))
        torch.testing.assert_close(round_trip(torch._neg_view(inputs.x[0])), -plain, rtol=0, atol=0)
        with pytest.raises(ValueError, match=r"x: expected contiguous rows .*got strides \(0, 0\)"):
            round_trip(torch._efficientzerotensor(inputs.x[0].shape, dtype=inputs.x[0].dtype))


class _Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


class _Kind(torch.Tensor):
    """A tensor subclass that refuses every operator in its own __torch_dispatch__."""

    @staticmethod
    def __new__(cls, data: torch.Tensor):  # type: ignore[no-untyped-def]
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=data.dtype, strides=data.stride())

    def __init__(self, data: torch.Tensor) -> None: ...

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        raise NotImplementedError(str(func))


def test_whoever_watches_operators_sees_them() -> None:
    on_ranks(1, _calls_seen)
