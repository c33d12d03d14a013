"""FSDP2's parameter groups of one rank, which copy nothing: each use as with stock, to the bit.

A rank alone, whose groups are all such; and two ranks, each with experts of its own beside a model that both share.
"""

from __future__ import annotations

import copy
import functools
import shutil
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

from tests.integrations import fsdp2_cases as cases
from tests.integrations.beside_stock import differing, or_error
from tests.ranks import run_ranks, values

Tensors = list[torch.Tensor]
BF16 = torch.bfloat16
WIDTH, INNER, EXPERTS = 8, 12, 2  # experts on each rank


# -- a rank alone --------------------------------------------------------------------------------------------------

ALONE = [name for name, case in cases.CASES.items() if case.replicas == 1 and name != "resharded over pairs"]


@pytest.fixture(scope="module")
def alone() -> Callable[[], dict[str, Any]]:
    """What differs from stock by case, or what was raised; the rank runs once."""
    return functools.cache(lambda: values(run_ranks(1, _run_alone, timeout_s=200))[0])


def _run_alone(rank: int) -> dict[str, Any]:
    return {name: or_error(functools.partial(_difference, cases.CASES[name])) for name in ALONE}


def _difference(case: cases.Case) -> dict[str, float]:
    from ep_plugin.integrations import fsdp2

    stock = cases.train(case, cases.build(case))
    model = cases.build(case)
    fsdp2.enable(model)
    return cases.difference(cases.train(case, model), stock)


@pytest.mark.parametrize("name", ALONE)
def test_every_case_of_a_rank_alone(alone, name: str) -> None:
    assert alone()[name] == {"losses": 0.0, "parameters": 0.0}


class _Cost(NamedTuple):
    copied: float
    peak: float


def _step_alone(rank: int, policies: list[tuple[torch.dtype, MixedPrecisionPolicy]]) -> list[tuple[_Cost, _Cost]]:
    return [(_cost(False, *policy), _cost(True, *policy)) for policy in policies]


def _cost(enabled: bool, dtype: torch.dtype, policy: MixedPrecisionPolicy) -> _Cost:
    """Of a step after the first: what was copied, and the most memory, both as multiples of the parameters."""
    from ep_plugin.integrations import fsdp2

    model = nn.Linear(2048, 2048, bias=False, dtype=dtype)
    fully_shard(model, mp_policy=policy, reshard_after_forward=False)
    if enabled:
        fsdp2.enable(model)
    rows = torch.ones(2, 2048, dtype=policy.param_dtype or dtype)
    whole = model.weight.numel()

    def step() -> None:
        model(rows).sum().backward()

    step()
    model.zero_grad()
    with cases.Copies() as copies:
        step()
    model.zero_grad()
    return _Cost(copies.elements / whole, cases.peak_bytes(step) / whole / dtype.itemsize)


POLICIES = {
    "one dtype": (torch.float32, MixedPrecisionPolicy(), 0),
    "stored and computed in bfloat16, reduced in float32": (BF16, cases.BF16, 0),
    "stored and reduced in float32, computed in bfloat16": (torch.float32, cases.BF16, 2),
    "stored in float32": (torch.float32, cases.BF16_ALL, 2),
}


def test_a_step_copies_nothing_but_casts() -> None:
    """One cast of the parameters and one of the gradients, where dtypes differ."""
    (costs,) = values(run_ranks(1, _step_alone, [policy[:2] for policy in POLICIES.values()]))
    for (name, (*_, casts)), (stock, ours) in zip(POLICIES.items(), costs, strict=True):
        assert stock.copied >= 3 and ours.copied == casts, (name, stock, ours)
        # A gradient; with casts also the parameters or the gradient in the other dtype, of half the size.
        assert ours.peak <= (1.6 if casts else 1.1) < stock.peak, (name, stock, ours)


# -- experts of each rank's own ------------------------------------------------------------------------------------


class _Experts(nn.Module):
    def __init__(self, mesh: DeviceMesh | None) -> None:
        super().__init__()
        for name, shape in (("up", (EXPERTS, WIDTH, INNER)), ("down", (EXPERTS, INNER, WIDTH))):
            weight = torch.randn(shape) / 3
            whole = weight if mesh is None else DTensor.from_local(weight, mesh, [Shard(0)], run_check=False)
            setattr(self, name, nn.Parameter(whole))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        up, down = _whole(self.up), _whole(self.down)
        return torch.bmm(torch.tanh(torch.bmm(rows.view(EXPERTS, -1, WIDTH), up)), down).view_as(rows) * 0.5


class _Block(nn.Module):
    def __init__(self, mesh: DeviceMesh | None) -> None:
        super().__init__()
        self.dense, self.experts, self.checkpointing = nn.Linear(WIDTH, WIDTH), _Experts(mesh), False

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        rows = self.dense(rows)
        return rows + (
            checkpoint(self.experts, rows, use_reentrant=False) if self.checkpointing else self.experts(rows)
        )


def _build(
    enabled: bool, *, as_dtensors: bool = True, dtype: torch.dtype = torch.float32, layers: int = 2, **options: Any
) -> Any:
    """Blocks that two ranks share, with experts that each rank has alone."""
    from ep_plugin.integrations import fsdp2

    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("experts", "shards"))
    torch.manual_seed(0)
    model = nn.Sequential(*(_Block(mesh["experts"] if as_dtensors else None) for _ in range(layers))).to(dtype)
    for block in model:
        fully_shard(block.experts, mesh=mesh["shards"], **options)
        fully_shard(block, **options)
    fully_shard(model, **options)
    if enabled:
        fsdp2.enable(model)
    return model


def _loss(model: Any, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * seed + dist.get_rank())
    rows = torch.randn(4 * EXPERTS, WIDTH, generator=generator).to(next(model.parameters()).dtype)
    return model(rows).float().pow(2).mean()


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _local(tensor: torch.Tensor | None) -> torch.Tensor:
    if tensor is None:
        return torch.empty(0)
    return _whole(tensor).detach().clone()


def _gradients(model: Any) -> Tensors:
    return [_local(parameter.grad) for parameter in model.parameters()]


def _steps(model: Any, steps: int = 2, *, micro_batches: int = 1, first: int = 0) -> Tensors:
    """All losses and gradients, and the parameters after the last step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)  # meshes differ
    results = []
    for step in range(first, first + steps):
        for micro in range(micro_batches):
            if micro_batches > 1:
                model.set_requires_gradient_sync(micro == micro_batches - 1)
            loss = _loss(model, 100 * step + micro)
            loss.backward()
            results.append(loss.detach())
        results += _gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    return results + [_local(parameter) for parameter in model.parameters()]


def _columns(whole: torch.Tensor) -> Shard:
    return Shard(whole.dim() - 1)


def _experts(model: Any) -> list[Any]:
    return [block.experts for block in model]


def _copied_by_experts(rank: int, as_dtensors: bool, before: bool) -> tuple[int, list[bool]]:
    """Elements copied in a step of experts alone, and whether each parameter is its shard."""
    from ep_plugin.integrations import fsdp2

    if before:
        fsdp2.enable()
    experts = _build(not before, as_dtensors=as_dtensors)[0].experts
    rows = torch.randn(4 * EXPERTS, WIDTH)
    shards = [parameter.to_local().data_ptr() for parameter in experts.parameters()]
    experts(rows).sum().backward()
    with cases.Copies() as copies:
        experts(rows).sum().backward()
    experts.unshard()
    return copies.elements, [_whole(parameter).data_ptr() in shards for parameter in experts.parameters()]


@pytest.mark.parametrize(("as_dtensors", "before"), [(False, False), (True, False), (True, True)])
def test_experts_are_their_shards(as_dtensors: bool, before: bool) -> None:
    """Also if FSDP2 was served before they were sharded. Two backwards, so that gradients are added."""
    assert values(run_ranks(2, _copied_by_experts, as_dtensors, before)) == [(0, [True, True])] * 2


def _clipped(enabled: bool, steps: int = 5, **options: Any) -> Tensors:
    model, results = _build(enabled, **options), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    for step in range(steps):
        loss = _loss(model, step)
        loss.backward()
        for experts in _experts(model):
            results.append(_local(nn.utils.clip_grad_norm_(experts.parameters(), 0.05)))
        results += [loss.detach(), *_gradients(model)]
        optimizer.step()
        optimizer.zero_grad()
    return results


def _accumulated(enabled: bool, **options: Any) -> Tensors:
    return _steps(_build(enabled, **options), micro_batches=3)


def _accumulated_after_reductions(enabled: bool) -> Tensors:
    """Gradients of reductions are added to one another; some parameters stay unsharded between them."""
    model = _build(enabled)
    model.set_reshard_after_backward(False)
    for seed in range(3):
        _loss(model, seed).backward()
    return _gradients(model)


def _divided(enabled: bool, *, sums: bool = False, **options: Any) -> Tensors:
    model = _build(enabled, **options)
    for experts in _experts(model):
        experts.set_gradient_divide_factor(6.0)
        experts.set_force_sum_reduction_for_comms(sums)
    return _steps(model, micro_batches=2)


class _Sum(nn.Module):
    """Autograd makes the gradients of both weights as views of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.randn(2, WIDTH // 2)) for _ in range(2))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows * (self.first.view(-1) + self.second.view(-1))


def _alone(model: nn.Module, *modules: nn.Module, enabled: bool) -> Any:
    """Shards the modules, then the model, over a mesh of one rank."""
    from ep_plugin.integrations import fsdp2

    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("others", "shards"))["shards"]
    for module in (*modules, model):
        fully_shard(module, mesh=mesh)
    if enabled:
        fsdp2.enable(model)
    return model


def _views_of_one_gradient(enabled: bool) -> Tensors:
    torch.manual_seed(0)
    model = _alone(_Sum(), enabled=enabled)
    model.set_gradient_divide_factor(3.0)
    return _steps(model)


def _frozen_and_unused(enabled: bool) -> Tensors:
    """A frozen weight, experts that get no rows, and a weight that is frozen after the first step."""
    model = _build(enabled)
    model[0].experts.up.requires_grad_(False)
    results = _steps(model)
    model[1].experts.down.requires_grad_(False)
    model[0].experts.up.requires_grad_(True)
    results += _steps(model)
    model[0].experts.forward = lambda rows: rows
    return results + _steps(model)


def _shared(enabled: bool) -> Any:
    """One weight in two places, in modules that run twice."""
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    inner[2].weight = inner[0].weight
    return _alone(nn.Sequential(inner, nn.Tanh(), inner), inner, enabled=enabled)


def _steps_in_backward(enabled: bool, build: Callable[[bool], Any] = _build) -> Tensors:
    """Each parameter is changed where its gradient is final, in memory that was assigned."""
    model, seen = build(enabled), []
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)

    def step(parameter: nn.Parameter) -> None:
        seen.append(_local(parameter.grad))
        parameter.to_local().sub_(seen[-1], alpha=0.1)
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    for seed in range(3):
        _loss(model, seed).backward()
    return seen + [_local(parameter) for parameter in model.parameters()]


def _all_reduce_hook(enabled: bool) -> Tensors:
    model = _build(enabled)
    for experts in _experts(model):
        experts.set_all_reduce_hook(dist.all_reduce)
    return _steps(model)


def _unused_as_zeros(enabled: bool) -> Tensors:
    model = _build(enabled)
    if hasattr(model, "set_reduce_scatter_unused_params"):
        model.set_reduce_scatter_unused_params(True)
    model[1].experts.forward = lambda rows: rows
    return _steps(model)


def _unsharded_by_hand(enabled: bool) -> Tensors:
    model, results = _build(enabled), []
    for step in range(2):
        handles = [experts.unshard(async_op=True) for experts in _experts(model)]
        handles[0].wait()
        results += [_local(parameter) for parameter in model[0].experts.parameters()]
        model[0].experts.reshard()
        results += _steps(model, 1, first=step)
    return results


def _prefetched(enabled: bool) -> Tensors:
    model = _build(enabled, layers=4)
    modules = [module for block in model for module in (block, block.experts)]
    for index, module in enumerate(modules):
        module.set_modules_to_forward_prefetch(modules[index + 1 : index + 4])
        module.set_modules_to_backward_prefetch(modules[max(0, index - 3) : index][::-1])
    return _steps(model)


def _checkpointed(enabled: bool) -> Tensors:
    model = _build(enabled)
    for block in model:
        block.checkpointing = True
    return _steps(model)


def _compiled(enabled: bool) -> Tensors:
    model = _build(enabled, layers=1, as_dtensors=False)
    model[0].experts.compile(backend="aot_eager")
    return _steps(model)


def _on_meta(enabled: bool) -> Tensors:
    with torch.device("meta"):
        model = _build(enabled)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            local = parameter.to_local()
            local.copy_(torch.arange(local.numel()).view_as(local).sin())
    return _steps(model)


def _loaded(enabled: bool, *, assign: bool) -> Tensors:
    """States of another model, into one that has trained, also as parts of one block of memory."""
    other, model = _build(False), _build(enabled)
    _steps(other, 3)
    results = _steps(model)
    state = copy.deepcopy(other.state_dict())
    for tensor in state.values():
        block = torch.zeros(tensor.to_local().numel() + 16)
        local = block[16:].view_as(tensor.to_local()).copy_(tensor.to_local())
        tensor._local_tensor = local
    _loss(model).backward()  # parameters of the last block stay unsharded
    model.zero_grad()
    model.load_state_dict(state, assign=assign)
    return results + _steps(model)


def _stored(enabled: bool) -> Tensors:
    """Through a checkpoint into a model of stock."""
    model, other = _build(enabled), _build(False)
    _steps(model)
    state, loaded = model.state_dict(), other.state_dict()
    directory = [tempfile.mkdtemp()]
    dist.broadcast_object_list(directory)
    dcp.save(state, checkpoint_id=directory[0])
    dcp.load(loaded, checkpoint_id=directory[0])
    dist.barrier()
    shutil.rmtree(directory[0], ignore_errors=True)
    return [_local(one) for one in state.values()] + _steps(other) + _steps(model)


def _extended(enabled: bool) -> Tensors:
    """A weight that is gathered in another form, by methods of its own."""
    model = _build(enabled, as_dtensors=False)
    local = model[0].experts.up._local_tensor

    def restored(gathered: Any, _: Any, dtype: torch.dtype, *, out: Any = None) -> Any:
        whole = gathered[0].to(dtype)
        if out is None:
            return whole, ()
        with torch.autograd._unsafe_preserve_version_counter(out), torch.no_grad():
            out.copy_(whole)

    local.fsdp_pre_all_gather = lambda mesh: ((local.to(BF16),), None)
    local.fsdp_post_all_gather = restored
    return _steps(model)


def _replicated(enabled: bool, *, micro_batches: int = 1) -> Tensors:
    """A rank alone in its shard group: gradients are reduced over replicas."""
    from ep_plugin.integrations import fsdp2

    torch.manual_seed(0)
    model = nn.Sequential(*(_Block(None) for _ in range(2)))
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards"))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if enabled:
        fsdp2.enable(model)
    return _steps(model, micro_batches=micro_batches)


def _switched(enabled: bool) -> Tensors:
    """On and off between steps, between forward and backward, and in the middle of an accumulation."""
    from ep_plugin.integrations import fsdp2

    model = _build(False)
    results = []
    for step in range(3):
        if enabled:
            fsdp2.enable(model)
        results += _steps(model, first=step)
        loss = _loss(model)
        if enabled:
            fsdp2.disable(model)
        loss.backward()
        results += _gradients(model)
        model.zero_grad()
        results += _steps(model, 1, first=step)
        model.set_requires_gradient_sync(False)
        _loss(model, 1).backward()
        if enabled:
            (fsdp2.enable if step % 2 else fsdp2.disable)(model)
        model.set_requires_gradient_sync(True)
        _loss(model, 2).backward()
        results += _gradients(model)
        model.zero_grad()
    if enabled:
        fsdp2.disable(model)
    model.load_state_dict({name: tensor * 2 for name, tensor in model.state_dict().items()}, assign=True)
    return results + _steps(model)


def _inference_first(enabled: bool) -> Tensors:
    from ep_plugin.integrations import fsdp2

    model = _build(False)
    with torch.no_grad():
        _loss(model)
    if enabled:
        fsdp2.enable(model)
    with torch.inference_mode():
        _loss(model)
    return _steps(model)


_of = functools.partial
USES: dict[str, Callable[[bool], Tensors]] = {
    "fifty steps": _of(_clipped, steps=50, layers=1),
    "mixed precision": _of(_clipped, mp_policy=cases.BF16),
    "plain tensors in bfloat16": _of(_clipped, dtype=BF16, as_dtensors=False, mp_policy=cases.BF16),
    "reduced in bfloat16": _of(_clipped, mp_policy=MixedPrecisionPolicy(reduce_dtype=BF16)),
    "kept after forward": lambda enabled: _steps(_build(enabled, reshard_after_forward=False)),
    "on the host": lambda enabled: _steps(_build(enabled, offload_policy=CPUOffloadPolicy(pin_memory=False))),
    "sharded over columns": lambda enabled: _steps(
        _build(enabled, shard_placement_fn=lambda whole: Shard(whole.dim() - 1))
    ),
    "accumulated": _accumulated,
    "accumulated in float32": _of(_accumulated, dtype=BF16, mp_policy=cases.BF16),
    "accumulated in bfloat16": _of(_accumulated, mp_policy=cases.BF16_ALL),
    "accumulated after reductions": _accumulated_after_reductions,
    "divided": _divided,
    "divided in float32": _of(_divided, dtype=BF16, mp_policy=cases.BF16),
    "divided in bfloat16": _of(_divided, mp_policy=cases.BF16_ALL),
    "divided in float16": _of(_divided, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16)),
    "summed and divided": _of(_divided, sums=True),
    "views of one gradient": _views_of_one_gradient,
    "frozen and unused": _frozen_and_unused,
    "unused as zeros": _unused_as_zeros,
    "shared": lambda enabled: _steps(_shared(enabled), micro_batches=2),
    "steps in backward": _steps_in_backward,
    "steps in backward of what is shared": _of(_steps_in_backward, build=_shared),
    "all-reduce hook": _all_reduce_hook,
    "unsharded by hand": _unsharded_by_hand,
    "prefetched": _prefetched,
    "checkpointed": _checkpointed,
    "compiled": _compiled,
    "on meta": _on_meta,
    "loaded": _of(_loaded, assign=False),
    "loaded and assigned": _of(_loaded, assign=True),
    "stored": _stored,
    "extended": _extended,
    "replicated": _replicated,
    "replicated, accumulated": _of(_replicated, micro_batches=2),
    "switched": _switched,
    "inference first": _inference_first,
}


@pytest.fixture(scope="module")
def results() -> Callable[[], list[dict[str, Any]]]:
    """Of every rank, by use: which results differ from stock's, or what was raised; the ranks run once."""
    return functools.cache(lambda: values(run_ranks(2, _run_uses, timeout_s=200)))


def _run_uses(rank: int) -> dict[str, Any]:
    return differing(USES)


@pytest.mark.parametrize("name", USES)
def test_experts_train_as_with_stock(results, name: str) -> None:
    for rank in results():
        assert rank[name] == []
