"""Models and steps that FSDP2 trains in tests, once through its own collectives and once through ours."""

from __future__ import annotations

import dataclasses
import functools
import gc
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.distributed.tensor import Shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

LAYERS, STEPS = 4, 2


@dataclass(frozen=True, kw_only=True)
class Case:
    """How a model is sharded and trained. ``fully_shard``: its keyword arguments; ``replicas``: more than one is HSDP.

    ``frozen``: the type of a frozen parameter that each block has beside its own: types that differ travel as bytes.
    ``divide``: gloo cannot, so PyTorch's own reductions then sum, and FSDP2 divides.
    """

    fully_shard: dict[str, Any] = field(default_factory=dict)
    replicas: int = 1
    frozen: torch.dtype | None = None
    micro_batches: int = 1
    sync_each: bool = False
    checkpointing: bool = False
    compiled: bool = False
    prefetch: int = 0
    unshard: str = ""
    divide: float | None = None
    sums: bool = False
    grouped: bool = False
    vocabulary: int = 61
    sequences: int = 5
    width: int = 40
    limit: float = 1e-6


BF16_ALL = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
CASES: dict[str, Case] = {
    "plain": Case(),
    "kept after forward": Case(fully_shard={"reshard_after_forward": False}),
    "resharded over pairs": Case(fully_shard={"reshard_after_forward": 2}),
    "mixed precision": Case(fully_shard={"mp_policy": BF16}),
    "reduced in bfloat16": Case(fully_shard={"mp_policy": BF16_ALL}, limit=1e-3),
    "float16": Case(fully_shard={"mp_policy": MixedPrecisionPolicy(param_dtype=torch.float16)}, limit=1e-3),
    "frozen fp8": Case(frozen=torch.float8_e4m3fn),
    "mixed types as bytes": Case(frozen=torch.bfloat16),
    "hybrid": Case(replicas=2),
    "hybrid, accumulated": Case(replicas=2, micro_batches=2),
    "sharded over columns": Case(fully_shard={"shard_placement_fn": lambda whole: _columns(whole)}),
    "parameters on the host": Case(fully_shard={"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
    "explicit prefetch": Case(prefetch=3),
    "accumulated unsharded": Case(micro_batches=2),
    "accumulated sharded": Case(micro_batches=2, sync_each=True),
    "checkpointed": Case(checkpointing=True),
    "compiled blocks": Case(compiled=True),
    "unsharded by hand": Case(unshard="wait"),
    "unsharded by hand, asynchronously": Case(unshard="async"),
    "divided by a factor": Case(divide=3.0),
    "sums only": Case(sums=True),
    "two blocks in a group": Case(grouped=True),
    "fewer rows than ranks": Case(width=2),
}  # fmt: skip


def _columns(whole: torch.Tensor) -> Shard | None:
    return Shard(1) if whole.dim() > 1 and whole.size(1) % dist.get_world_size() == 0 else None


class Block(nn.Module):
    """An uneven number of rows in each parameter, so that shards are padded."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        width, inner = case.width, 2 * case.width + 3
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)
        self.checkpointing = case.checkpointing
        self.scale = None
        if case.frozen is not None:
            self.scale = nn.Parameter((torch.rand(width) + 0.5).to(case.frozen), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.checkpointing:
            return x + checkpoint(self._inner, x, use_reentrant=False)
        return x + self._inner(x)

    def _inner(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(torch.tanh(self.up(self.norm(x))))
        return y if self.scale is None else y * self.scale.to(y.dtype)


class Model(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.embed = nn.Embedding(case.vocabulary, case.width)
        self.blocks = nn.ModuleList(Block(case) for _ in range(LAYERS))
        self.head = nn.Linear(case.width, 61)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build(case: Case, *, gloo_reduces: bool = False, mesh: DeviceMesh | None = None, device_type: str = "cpu") -> Model:
    """The sharded model, equal whenever it is built. ``mesh``: None is one over all ranks, of this type of device."""
    torch.manual_seed(0)
    model = Model(case)
    world = dist.get_world_size()
    shape, names = ((world,), ("shard",))
    if case.replicas > 1:
        shape, names = (case.replicas, world // case.replicas), ("replicate", "shard")
    options = {"mesh": mesh or init_device_mesh(device_type, shape, mesh_dim_names=names), **case.fully_shard}
    if case.grouped:
        for first in range(0, LAYERS, 2):
            fully_shard([model.blocks[first], model.blocks[first + 1]], **options)
    else:
        for block in model.blocks:
            fully_shard(block, **options)
    fully_shard(model, **options)
    if case.prefetch:
        for index, block in enumerate(model.blocks):
            block.set_modules_to_forward_prefetch(list(model.blocks[index + 1 : index + 1 + case.prefetch]))
            block.set_modules_to_backward_prefetch(list(model.blocks[max(0, index - case.prefetch) : index][::-1]))
    if case.divide is not None:
        for module in (*model.blocks, model):
            module.set_gradient_divide_factor(case.divide)
    for module in (*model.blocks[:: 2 if case.grouped else 1], model):
        module.set_force_sum_reduction_for_comms(case.sums or (gloo_reduces and case.divide is not None))
    if case.compiled:
        for block in model.blocks[::3]:
            block.compile(backend="aot_eager")
    return model


def build_on_two_meshes() -> Model:
    """One module whose biases are sharded over pairs of ranks and everything else over all: two parameter groups."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
    from torch.distributed.tensor import Shard

    torch.manual_seed(0)
    model = Model(Case())
    world = dist.get_world_size()
    whole = init_device_mesh("cpu", (world,), mesh_dim_names=("all",))
    pairs = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("outer", "pair"))
    infos = [FSDPMeshInfo(mesh, shard_mesh_dim=0) for mesh in (pairs["pair"], whole)]
    fully_shard(
        model, mesh=whole, shard_placement_fn=lambda tensor: ShardPlacementResult(Shard(0), infos[tensor.dim() > 1])
    )
    return model


@dataclass
class Trained:
    """``losses`` of every step and this rank's shard of every parameter after the last."""

    losses: list[float]
    parameters: dict[str, torch.Tensor]


_adamw = functools.partial(torch.optim.AdamW, lr=2e-3, fused=True)  # one operation for all parameters


def train(
    case: Case,
    model: Model,
    *,
    steps: int = STEPS,
    device: torch.device | None = None,
    optimizer_of: Callable[..., torch.optim.Optimizer] = _adamw,
) -> Trained:
    """Batches that only a rank's own seeds decide. ``device``: where they lie, the CPU unless it is given."""
    optimizer = optimizer_of(model.parameters())
    losses = []
    for step in range(steps):
        total = 0.0
        for micro in range(case.micro_batches):
            last = micro == case.micro_batches - 1
            model.set_requires_gradient_sync(last or case.sync_each)
            total += _backward(case, model, 100 * step + micro, device)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total / case.micro_batches)
    shards = {name: parameter.to_local().detach().clone() for name, parameter in model.named_parameters()}
    return Trained(losses, shards)


def _backward(case: Case, model: Model, seed: int, device: torch.device | None) -> float:
    generator = torch.Generator().manual_seed(10_000 * seed + dist.get_rank())
    ids = torch.randint(61, (case.sequences, 7), generator=generator).to(device)
    if case.unshard:
        handle = model.unshard(async_op=case.unshard == "async")
        pending = [block.unshard(async_op=case.unshard == "async") for block in model.blocks[:2]]
        for waiting in (handle, *pending):
            if waiting is not None:
                waiting.wait()
    logits = model(ids)
    loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), ids.flatten())
    loss.backward()
    return float(loss.detach())


@dataclass
class StockCalls:
    all_gathers: int = 0
    reduce_scatters: int = 0


@contextmanager
def counting_stock_calls() -> Iterator[StockCalls]:
    """Counts what FSDP2's own collectives do meanwhile."""
    calls = StockCalls()
    types = {
        "all_gathers": _fsdp_collectives.DefaultAllGather,
        "reduce_scatters": _fsdp_collectives.DefaultReduceScatter,
    }
    saved = {name: stock.__call__ for name, stock in types.items()}

    def counted(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            setattr(calls, name, getattr(calls, name) + 1)
            return saved[name](*args, **kwargs)

        return call

    try:
        for name, stock in types.items():
            stock.__call__ = counted(name)
        yield calls
    finally:
        for name, stock in types.items():
            stock.__call__ = saved[name]


class Copies(TorchDispatchMode):
    """Counts the elements that operations copy or cast."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if any(word in function.name() for word in ("copy", "cat", "clone")):
            copied = result if result is not None else (kwargs or {}).get("out", args[0])
            self.elements += sum(one.numel() for one in (copied if isinstance(copied, list | tuple) else [copied]))
        return result


def peak_bytes(run: Callable[[], Any]) -> int:
    """The most that PyTorch's CPU allocator had given out at once while ``run()`` ran, beyond what it had before."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    gc.collect()  # what an earlier run left would be freed, and subtracted, at any moment of this one
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        run()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(itertools.accumulate(event.nbytes() for event in events))


def collectives_of(model: nn.Module) -> list[object]:
    """What serves the gathers and reductions of every parameter group, in the order of modules."""
    from ep_plugin.integrations.fsdp2.hooks import groups_of

    return [comm for group in groups_of(model) for comm in (group._all_gather_comm, group._reduce_scatter_comm)]


def difference(ours: Trained, theirs: Trained) -> dict[str, float]:
    """``losses``: the largest relative difference; ``parameters``: the largest absolute one."""
    return {
        "losses": max(abs(a - b) / abs(b) for a, b in zip(ours.losses, theirs.losses, strict=True)),
        "parameters": max(
            float((ours.parameters[name].float() - theirs.parameters[name].float()).abs().max())
            for name in theirs.parameters
            if theirs.parameters[name].numel()
        ),
    }


def as_dict(value: Any) -> dict[str, Any]:
    return dataclasses.asdict(value)
