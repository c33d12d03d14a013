"""Megatron's DistributedOptimizer over our collectives, on 4 CPU ranks: five steps of a model with an MoE layer.

The reference is Megatron itself, gathering through gloo, with a reduce-scatter that adds in float32 in rank order. On
CPUs an operation of ours is over when the call returns. On GPUs it is over when its Work has been waited for; so each
asynchronous operation here begins only then. tests/gpu runs the same cases on GPUs, as they are.

The file is long because it also has the model and the reference, which tests/gpu imports.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ep_plugin import counts
from ep_plugin.errors import NotSupported, PeerTimeout
from tests.collectives.collective_cases import reduced, same_bits
from tests.integrations.logs import logged_warnings
from tests.integrations.megatron_layers import make_config, make_layer
from tests.integrations.on_cpus import make_distributed_optimizer_run_here
from tests.ranks import run_ranks, values

pytest.importorskip("megatron.core", reason="needs megatron-core")

WORLD, STEPS = 4, 5
GATHERED, SUMMED = "dist_all_gather_func", "dist_reduce_scatter_func"
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}


@dataclass(frozen=True)
class Case:
    """options: of DistributedDataParallelConfig."""

    options: dict[str, Any] = field(default_factory=dict)
    instances: int = 1


CASES = {
    "no overlap": Case(),
    "gradients overlap": Case({"overlap_grad_reduce": True}),
    "parameters overlap": Case({"overlap_param_gather": True}),
    "both overlap": Case(OVERLAP),
    "float32 gradients": Case({"grad_reduce_in_fp32": True}),
    "float32 gradients, both overlap": Case({"grad_reduce_in_fp32": True} | OVERLAP),
    "average": Case({"average_in_collective": True}),
    "average, both overlap": Case({"average_in_collective": True} | OVERLAP),
    "two instances": Case(instances=2),
    "two instances, both overlap": Case(OVERLAP, instances=2),
    "float32 accumulation": Case({"reduce_scatter_with_fp32_accumulation": True}),
    "float32 accumulation, both overlap": Case({"reduce_scatter_with_fp32_accumulation": True} | OVERLAP),
}


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    """What every rank found; the world runs once, all of its cases."""
    return values(run_ranks(WORLD, _run_rank, timeout_s=280, framework="megatron"))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_gathers_and_sums_are_the_references_to_the_bit(results, name: str) -> None:
    for rank, found in enumerate(results):
        assert found[name]["steps"] == STEPS and found[name]["tensors"] > 10
        assert found[name]["differ"] == [], f"rank {rank}"


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_gather_and_sum_is_ours(results, name: str) -> None:
    case = CASES[name]
    for found in results:
        calls = found[name]["calls"]
        assert calls["served"] == calls[GATHERED] + calls[SUMMED] >= 2 * 2 * STEPS
        assert calls["left"] == (calls[SUMMED] if case.instances > 1 else 0)  # between instances an all-reduce each
        assert (found[name]["buckets"] > 2) == case.options.get("overlap_grad_reduce", False)
        assert found[name]["parameters are mapped"]


@pytest.mark.slow
def test_float32_accumulation_is_megatrons_own(results) -> None:
    """That Megatron's own function for it, which ours replaces, gives the same bits."""
    for found in results:
        assert found["float32 accumulation, both overlap"]["differ from stock"] == []


@pytest.mark.slow
def test_disable_restores_the_very_objects(results) -> None:
    for found in results:
        assert len(found["replaced"]) == 6
        assert found["restored"] == dict.fromkeys(found["replaced"], True)
        assert found["reassigned"], "what Megatron put there for FP32 accumulation is its own again"
        assert found["open pairs"] == 0


def test_what_is_not_served_is_left_and_said_once() -> None:
    for found in values(
        run_ranks(WORLD, _run_left, env={"EP_PLUGIN_RANKS_PER_NODE": "3"}, timeout_s=100, framework="megatron")
    ):
        assert found["said"] == [
            f"megatron: {what} are left to Megatron's own collectives"
            for what in (
                "reduce-scatters with the operation MAX",
                "reduce-scatters of torch.int32 on cpu",
                "all-reduces of gradients",
                "collectives over ranks [0, 1, 2, 3] (nodes with different numbers of ranks are not supported: "
                "expected the same on every node, got node 0 (HOST) has 3, node 1 (HOST) has 1)",
            )
        ]
        assert found["right"] == {"maximum": True, "integers": True, "all-reduce": True, "gather": True}
        assert found["left"] == 2 * 4 and found["served"] == 0


def test_memory_that_nccl_registers_stays_megatrons() -> None:
    """With `nccl_ub` parameters are not mapped, so gathers of the size from which NCCL is faster stay Megatron's."""
    for found in values(run_ranks(2, _run_nccl_ub, timeout_s=100, framework="megatron")):
        assert found["allocators"] == ["nccl"] and found["mapped"] == [False] and found["right"]
        said = "gathers of 64 MiB and more into memory that peers have not mapped"
        assert found["said"] == [f"megatron: {said} are left to Megatron's own collectives"]
        assert found["left"] == 2 and found["served"] == 2


@pytest.mark.slow
def test_offloading_mapped_parameters_is_refused(results) -> None:
    for found in results:
        with pytest.raises(NotSupported, match="offload_to_cpu.move_params=True.: expected parameters in memory that"):
            raise found["offload"]
        assert found["gradients are offloaded"]


@pytest.mark.deadline
def test_a_dead_peer_raises() -> None:
    victim, deadline_s = 1, 6.0
    outcomes = run_ranks(3, _die_between_steps, victim, deadline_s, timeout_s=100, framework="megatron")
    assert outcomes[victim].exitcode == -signal.SIGKILL
    for blamed, took in values([outcomes[0], outcomes[2]]):
        assert blamed == victim and took < deadline_s + 5


def _initialise(ep: int, instances: int = 1, minutes: float = 2) -> None:
    from megatron.core import parallel_state

    if instances > 1 and not parallel_state.HAVE_EINOPS:
        parallel_state.HAVE_EINOPS, parallel_state.einops = True, SimpleNamespace(rearrange=_rearrange)
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=1,
        num_distributed_optimizer_instances=instances,
        create_gloo_process_groups=False,
        distributed_timeout_minutes=minutes,
    )


def _rearrange(ranks: Any, pattern: str, **sizes: int) -> Any:
    """The one call of einops in Megatron's groups, where that package is missing."""
    assert pattern == "(l s u) -> (l u) s"
    return ranks.reshape([sizes[name] for name in "lsu"]).swapaxes(1, 2).reshape(-1, sizes["s"])


class _Model(torch.nn.Module):
    """Dense and expert parameters. seen: all parameters at the end of each forward, when all were gathered."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.first, self.last = (torch.nn.Linear(32, 32) for _ in range(2))
        self.moe = make_layer(config)
        self.seen: list[list[torch.Tensor]] = []
        self.to(_device(), torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.last(self.moe(self.first(x))[0])
        self.seen.append([parameter.detach().clone() for parameter in self.parameters()])
        return y


def _build(case: Case, ep: int = 2) -> tuple[Any, Any]:
    """The model, wrapped, and its optimizer."""
    config = make_config("alltoall", 1, ep, bf16=True, params_dtype=torch.bfloat16, deterministic_mode=True)
    torch.manual_seed(3)
    if torch.cuda.is_initialized():
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        model_parallel_cuda_manual_seed(3)
    return wrapped(_Model(config), config, case, bucket_size=1000)


def wrapped(module: torch.nn.Module, config: Any, case: Case, bucket_size: int) -> tuple[Any, Any]:
    """The module in Megatron's data parallelism, and its optimizer."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    ours = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        num_distributed_optimizer_instances=case.instances,
        bucket_size=bucket_size,
        **case.options,
    )
    model = DistributedDataParallel(config, ours, module)
    settings = OptimizerConfig(
        optimizer="adam",
        lr=1e-2,
        bf16=True,
        use_distributed_optimizer=True,
        clip_grad=0.0,
        overlap_param_gather=ours.overlap_param_gather,
    )
    return model, get_megatron_optimizer(settings, [model], use_gloo_process_groups=False)


def _step(model: Any, optimizer: Any, rank: int, step: int) -> list[torch.Tensor]:
    """The shards of gradients that this rank has summed."""
    model.zero_grad_buffer()
    optimizer.zero_grad()
    x = torch.randn((6, 2, 32), generator=torch.Generator().manual_seed(WORLD * step + rank))
    model(x.to(_device(), torch.bfloat16)).float().pow(2).mean().backward()
    model.finish_grad_sync()
    shards = []
    for buffer in _buffers(model):
        rank, size = buffer.data_parallel_group.rank(), buffer.data_parallel_group.size()
        shards += [bucket.grad_data.chunk(size)[rank].clone() for bucket in buffer.buckets]
    optimizer.step()
    return shards


def _buffers(model: Any) -> list[Any]:
    return [*model.buffers, *model.expert_parallel_buffers]


def _train(case: Case, rank: int) -> tuple[list[list[torch.Tensor]], Any]:
    """By step what was summed and, from the second on, gathered; and the model."""
    model, optimizer = _build(case)
    summed = [_step(model, optimizer, rank, step) for step in range(STEPS)]
    if case.options.get("overlap_param_gather"):
        model.disable_forward_pre_hook()  # gathers what the last step has left
    last = [parameter.detach().clone() for parameter in model.parameters()]
    gathered = [*model.module.seen[1:], last]
    return [a + b for a, b in zip(summed, gathered, strict=True)], model


def _in_rank_order(
    output: torch.Tensor, whole: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> Any:
    """The oracle in the place of Megatron's reduce-scatter: float32 sums in rank order, rounded once."""
    size = group.size()
    inputs = [torch.empty_like(whole) for _ in range(size)]
    dist.all_gather(inputs, whole, group=group)
    scale = 1 / size if op == dist.ReduceOp.AVG else 1.0
    output.copy_(reduced([each.view(size, -1) for each in inputs], group.rank(), size, scale))
    return _Late(lambda: None)


class _Late:
    """A Work whose operation begins when it is waited for."""

    def __init__(self, run: Callable[[], Any]) -> None:
        self.run: Callable[[], Any] | None = run

    def wait(self) -> None:
        run, self.run = self.run, None
        if run is not None:
            run()


def _late(call: Callable[..., Any]) -> Callable[..., Any]:
    def called(*args: Any, async_op: bool = False, **options: Any) -> Any:
        run = functools.partial(call, *args, **options)
        return _Late(run) if async_op else run()

    return called


def _counted(counts: Counter[str], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        counts[name] += 1
        return function(*args, **kwargs)

    return call


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_initialized() else torch.device("cpu")


def _run_rank(rank: int) -> dict[str, Any]:
    from ep_plugin import HierarchicalAllGather, HierarchicalReduceScatter

    make_distributed_optimizer_run_here()
    for collective in (HierarchicalAllGather, HierarchicalReduceScatter):
        collective.__call__ = _late(collective.__call__)  # type: ignore[method-assign]
    return run_cases(rank, CASES)


def run_cases(rank: int, cases: dict[str, Case]) -> dict[str, Any]:
    import megatron.core.distributed.param_and_grad_buffer as buffers
    import megatron.core.transformer.moe.moe_layer  # noqa: F401  there before the hook: served at once

    from ep_plugin.integrations import hooks, pairs

    before = _replaceable(buffers)
    hooks.enable(["megatron"])
    found: dict[str, Any] = {"replaced": [key for key, now in _replaceable(buffers).items() if now is not before[key]]}
    optimizer = importlib.import_module("ep_plugin.integrations.megatron.optimizer")
    for name, case in cases.items():
        found[name] = _run_case(rank, case, buffers, optimizer)
        if name == "no overlap":
            found |= _offloaded(found[name].pop("model"))
            optimizer.disable()
            found["restored"] = {key: after is before[key] for key, after in _replaceable(buffers).items()}
        found[name].pop("model", None)
    optimizer.disable()
    found["reassigned"] = getattr(buffers, SUMMED) is before["reduce_scatter_with_fp32_accumulation"]
    found["open pairs"] = len(pairs._pairs)
    return found


def _replaceable(buffers: Any) -> dict[str, Any]:
    names = (GATHERED, SUMMED, "_coalescing_manager", "reduce_scatter_with_fp32_accumulation")
    of_class = {name: vars(buffers._ParamAndGradBuffer)[name] for name in ("__init__", "offload_to_cpu")}
    return {name: getattr(buffers, name) for name in names} | of_class


def _run_case(rank: int, case: Case, buffers: Any, optimizer: Any) -> dict[str, Any]:
    optimizer.disable()
    _initialise(2, case.instances)
    accumulates, arms = "reduce_scatter_with_fp32_accumulation", {}
    calls: Counter[str] = Counter()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buffers, SUMMED, _counted(calls, SUMMED, _in_rank_order))
        patch.setattr(buffers, accumulates, _counted(calls, SUMMED, _in_rank_order))
        patch.setattr(buffers, GATHERED, _counted(calls, GATHERED, getattr(buffers, GATHERED)))
        arms["reference"] = _train(case, rank)
    if accumulates in case.options:
        arms["stock"] = _train(case, rank)
    optimizer.enable()
    served, left = counts.num_served["megatron"], counts.num_left["megatron"]
    arms["ours"] = steps, model = _train(case, rank)
    calls["served"], calls["left"] = counts.num_served["megatron"] - served, counts.num_left["megatron"] - left
    gather = [optimizer._user.pair(each.data_parallel_group, _device()).all_gather for each in _buffers(model)]
    return {
        "steps": len(steps),
        "tensors": len(steps[0]),
        "calls": calls,
        "buckets": sum(len(each.buckets) for each in _buffers(model)),
        "parameters are mapped": all(
            one.maps(each.param_data) or each.data_parallel_group.size() == 1
            for one, each in zip(gather, _buffers(model), strict=True)
        ),
        "model": model,
        "differ": _different(steps, arms["reference"][0]),
        "differ from stock": _different(steps, arms.get("stock", arms["reference"])[0]),
    }


def _different(ours: list[list[torch.Tensor]], theirs: list[list[torch.Tensor]]) -> list[tuple[int, int]]:
    """Step and number of each tensor whose bits differ."""
    steps = [list(zip(a, b, strict=True)) for a, b in zip(ours, theirs, strict=True)]
    return [(step, n) for step, pairs in enumerate(steps) for n, pair in enumerate(pairs) if not same_bits(*pair)]


def _offloaded(model: Any) -> dict[str, Any]:
    buffer = model.buffers[0]
    for variables in ({}, {"EP_PLUGIN_FALLBACK": "stock"}):  # no fallback serves it
        with mock.patch.dict(os.environ, variables), pytest.raises(NotSupported) as caught:
            buffer.offload_to_cpu()
    buffer.offload_to_cpu(move_params=False)
    return {"offload": caught.value, "gradients are offloaded": buffer.grad_data.untyped_storage().size() == 0}


def _run_left(rank: int) -> dict[str, Any]:
    """Calls as Megatron makes them, over ranks of nodes of 3 and 1."""
    import megatron.core.distributed.param_and_grad_buffer as buffers

    from ep_plugin.integrations.megatron import optimizer

    optimizer.enable()
    group = dist.group.WORLD
    right: dict[str, bool] = {}
    with logged_warnings() as logged:
        for _ in range(2):
            out, whole = torch.empty(2), torch.arange(8.0) * (rank + 1)
            getattr(buffers, SUMMED)(out, whole, op=dist.ReduceOp.MAX, group=group, async_op=False)
            right["maximum"] = torch.equal(out, torch.arange(8.0).chunk(WORLD)[rank] * WORLD)
            out, whole = torch.empty(2, dtype=torch.int32), torch.arange(8, dtype=torch.int32)
            with buffers._coalescing_manager(group, async_ops=True) as manager:
                getattr(buffers, SUMMED)(out, whole, op=dist.ReduceOp.SUM, group=group, async_op=True)
            manager.wait()
            right["integers"] = torch.equal(out, whole.chunk(WORLD)[rank] * WORLD)
            total = torch.ones(3)
            with buffers._coalescing_manager(group, async_ops=True) as manager:
                dist.all_reduce(total, group=group, async_op=True)
            manager.wait()
            right["all-reduce"] = torch.equal(total, torch.full((3,), float(WORLD)))
            gathered = torch.empty(WORLD)
            with buffers._coalescing_manager(group, async_ops=True) as manager:
                getattr(buffers, GATHERED)(gathered, torch.tensor([float(rank)]), group=group, async_op=True)
            manager.wait()
            right["gather"] = torch.equal(gathered, torch.arange(float(WORLD)))
    said = [re.sub(r"\([^()]+\) has", "(HOST) has", each) for each in logged]
    return {
        "said": said,
        "right": right,
        "left": counts.num_left["megatron"],
        "served": counts.num_served["megatron"],
    }


def _outlives_a_wrapper(rank: int) -> None:
    """Arguments may be given as stock takes them, and somebody may wrap our function while we are disabled below it."""
    make_distributed_optimizer_run_here()
    import megatron.core.distributed.param_and_grad_buffer as buffers

    from ep_plugin.integrations.megatron import optimizer

    optimizer.enable()
    group, whole, total = dist.group.WORLD, torch.empty(2), torch.empty(1)
    gather, scatter = getattr(buffers, GATHERED), getattr(buffers, SUMMED)
    setattr(buffers, GATHERED, lambda *args, **kwargs: gather(*args, **kwargs))
    for served in (4, 4):
        getattr(buffers, GATHERED)(whole, torch.tensor([float(rank)]), group)
        assert whole.tolist() == [0.0, 1.0]
        getattr(buffers, GATHERED)(output_tensor=whole, input_tensor=torch.tensor([float(-rank)]))
        assert whole.tolist() == [0.0, -1.0]
        scatter(total, torch.arange(2.0), dist.ReduceOp.SUM, group)
        assert total.item() == 2.0 * rank
        scatter(output=total, input=torch.arange(2.0), group=group, async_op=False)
        assert total.item() == 2.0 * rank and counts.num_served["megatron"] == served
        optimizer.disable()
    assert counts.num_left["megatron"] == 0


def test_calls_of_any_form_are_served_until_ours_is_disabled() -> None:
    values(run_ranks(2, _outlives_a_wrapper, framework="megatron"))


def _wrapped_twice(rank: int) -> None:
    """Somebody wraps ours, which then is disabled and enabled, so that a second one of ours stands over the wrapper."""
    make_distributed_optimizer_run_here()
    import megatron.core.distributed.param_and_grad_buffer as buffers

    from ep_plugin.integrations.megatron import optimizer

    optimizer.enable()
    for name in (GATHERED, SUMMED, "_coalescing_manager"):
        wrapped = getattr(buffers, name)
        setattr(buffers, name, functools.partial(wrapped))
    optimizer.disable()
    optimizer.enable()
    total, group = torch.empty(1, dtype=torch.int32), dist.group.WORLD
    getattr(buffers, SUMMED)(total, torch.arange(2, dtype=torch.int32), dist.ReduceOp.SUM, group)
    assert total.item() == 2 * rank and (counts.num_served["megatron"], counts.num_left["megatron"]) == (0, 1)
    with buffers._coalescing_manager(group, async_ops=True) as manager:
        dist.all_reduce(total.fill_(1))
    manager.wait()
    assert total.item() == 2 and counts.num_left["megatron"] == 2
    whole = torch.empty(2)
    getattr(buffers, GATHERED)(whole, torch.tensor([float(rank)]), group)
    assert whole.tolist() == [0.0, 1.0] and counts.num_served["megatron"] == 1


def test_a_call_that_comes_to_ours_twice_counts_once() -> None:
    values(run_ranks(2, _wrapped_twice, framework="megatron"))


def _odd_calls(rank: int) -> None:
    """A wrapper that hides parameters was there first; operations are objects; a group is not the rank's own."""
    make_distributed_optimizer_run_here()
    import megatron.core.distributed.param_and_grad_buffer as buffers

    from ep_plugin.integrations.megatron import optimizer

    stock = getattr(buffers, GATHERED)
    setattr(buffers, GATHERED, lambda *args, **kwargs: stock(*args, **kwargs))
    optimizer.enable()
    gather, scatter, whole, total = getattr(buffers, GATHERED), getattr(buffers, SUMMED), torch.empty(2), torch.empty(1)
    gather(whole, input_tensor=torch.tensor([float(rank)]))
    assert whole.tolist() == [0.0, 1.0]
    for op, expected in ((dist._make_nccl_premul_sum(0.5), rank), (dist.ReduceOp(dist.ReduceOp.SUM), 2 * rank)):
        scatter(total, torch.arange(2.0), op)
        assert total.item() == expected
    assert (counts.num_served["megatron"], counts.num_left["megatron"]) == (3, 0)
    gather(whole, torch.ones(1), dist.GroupMember.NON_GROUP_MEMBER)
    assert (counts.num_served["megatron"], counts.num_left["megatron"]) == (3, 0)
    with buffers._coalescing_manager(dist.group.WORLD, async_ops=True) as manager:
        sums = [torch.ones(1) for _ in range(3)]
        for one in sums:
            dist.all_reduce(one)
    manager.wait()
    assert [one.item() for one in sums] == [2.0] * 3 and counts.num_left["megatron"] == 3
    with pytest.raises(RuntimeError, match="ours"), buffers._coalescing_manager(dist.group.WORLD, async_ops=True):
        dist.all_reduce(torch.ones(1))
        raise RuntimeError("an error of ours")
    dist.all_reduce(total.fill_(1))
    assert total.item() == 2.0, "the sum was collected and never made"


def test_calls_of_any_kind_are_served_or_left() -> None:
    values(run_ranks(2, _odd_calls, framework="megatron"))


def _allocates(rank: int) -> list[bool]:
    """Whether parameters are ordinary memory: while ours is enabled, and when it is disabled below a wrapper."""
    make_distributed_optimizer_run_here()
    import megatron.core.distributed.param_and_grad_buffer as buffers

    from ep_plugin.integrations.megatron import optimizer

    def init(self: Any) -> None:
        self.data = torch.zeros(1000, dtype=torch.float32, device="cpu")

    buffer = SimpleNamespace(
        ddp_config=SimpleNamespace(use_distributed_optimizer=True),
        param_dtype=torch.float32,
        nccl_ub=False,
        data_parallel_group=dist.group.WORLD,
    )
    ours, found = optimizer._allocate(init), []
    optimizer.enable()
    of_enabled = buffers._ParamAndGradBuffer.__init__
    buffers._ParamAndGradBuffer.__init__ = lambda *args, **kwargs: of_enabled(*args, **kwargs)
    for _ in range(2):
        ours(buffer)
        found.append(buffer.data.untyped_storage().resizable())
        optimizer.disable()
    return found


def test_parameters_are_ordinary_memory_when_ours_is_disabled() -> None:
    assert values(run_ranks(2, _allocates, framework="megatron")) == [[False, True]] * 2


def _run_nccl_ub(rank: int) -> dict[str, Any]:
    """Two steps. Every gather counts as a large one."""
    make_distributed_optimizer_run_here()
    import megatron.core.distributed.param_and_grad_buffer as buffers

    from ep_plugin.integrations import pairs
    from ep_plugin.integrations.megatron import optimizer

    allocators: list[str] = []
    nccl = SimpleNamespace(
        init=lambda: None,
        create_nccl_mem_pool=lambda **options: allocators.append("nccl"),
        nccl_mem=lambda *args, **options: contextlib.nullcontext(),
    )
    optimizer.enable()
    _initialise(1)
    with (
        mock.patch.object(buffers, "nccl_allocator", nccl),
        mock.patch.dict(pairs.STOCK_FROM_BYTES, {"cpu": 1}),
        logged_warnings() as logged,
    ):
        config = make_config("alltoall", 1, 1, bf16=True, params_dtype=torch.bfloat16)
        torch.manual_seed(3)
        module = torch.nn.Linear(8, 8).to(torch.bfloat16)
        module.config = config
        model, updates = wrapped(module, config, Case({"nccl_ub": True}), bucket_size=1000)
        gathers = [optimizer._user.pair(each.data_parallel_group, _device()).all_gather for each in _buffers(model)]
        for _ in range(2):
            model.zero_grad_buffer()
            updates.zero_grad()
            model(torch.ones(4, 8, dtype=torch.bfloat16)).float().sum().backward()
            model.finish_grad_sync()
            updates.step()
    weight = module.weight.detach().float()
    lowest, highest = weight.clone(), weight.clone()
    dist.all_reduce(lowest, op=dist.ReduceOp.MIN)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    return {
        "allocators": allocators,
        "mapped": [one.maps(each.param_data) for one, each in zip(gathers, _buffers(model), strict=True)],
        "right": torch.equal(lowest, highest),
        "said": logged,
        "left": counts.num_left["megatron"],
        "served": counts.num_served["megatron"],
    }


def _die_between_steps(rank: int, victim: int, deadline_s: float) -> tuple[int | None, float]:
    """Whom a survivor's step blames, and after how long."""
    make_distributed_optimizer_run_here()
    from ep_plugin.integrations.megatron import optimizer

    optimizer.enable()
    _initialise(1, minutes=deadline_s / 60)
    model, updates = _build(Case(OVERLAP), ep=1)
    _step(model, updates, rank, 0)
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(PeerTimeout) as caught:
        _step(model, updates, rank, 1)
    return caught.value.rank, time.monotonic() - began
