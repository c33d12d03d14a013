"""The suite `torchtitan`: forward and backward of torchtitan's routed experts, its all-to-all dispatcher against ours.

One set of experts serves both. `experts alone`: the same experts, forward and backward, on the rows that our
dispatcher gave them, with no exchange. What the routed experts take more than that is `above_experts_us`. Routing is
uniformly random and given: the router is no part of it. First both run on two batches in turn, and the outputs and all
gradients of each must agree; the second batch is the one that is timed. `bytes_wire`: of dispatch, combine and the
backward of both, in the busier direction of the busiest rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist

from ep_plugin.bench import layers as common
from ep_plugin.bench.layers import EXPERTS, OURS, STOCK, LayerSuite, Tensors
from ep_plugin.bench.timing import Run
from ep_plugin.bench.workload import Workload
from ep_plugin.testing.torchtitan import without_triton


@dataclass(frozen=True, kw_only=True)
class TorchtitanSuite(LayerSuite):
    """What one run measures."""

    name: ClassVar[str] = "torchtitan"
    layer: ClassVar[str] = "routed experts"

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            import torchtitan  # noqa: F401
        except ImportError as error:
            raise ValueError(f"torchtitan: expected torchtitan, whose layers are measured: {error}") from error


class Batch(NamedTuple):
    """What the routed experts are given, and the gradient of what they make of it, ``[1, T, H]`` as x."""

    x: torch.Tensor
    scores: torch.Tensor
    ids: torch.Tensor
    counts: torch.Tensor
    dy: torch.Tensor


def run(suite: TorchtitanSuite) -> dict[str, Any]:
    """Runs the suite on ranks of its own. Raises WrongResult."""
    return common.run(suite, measure)


def measure(device: torch.device, suite: TorchtitanSuite) -> dict[str, Any]:
    """One rank's part: the rows, or what was wrong, the same on every rank. Collective."""
    layers = _build_layers(suite.workload, suite.ffn, device)
    batches = [_batch(suite.workload, turn, device) for turn in range(2)]
    largest, wrong = common.compare(layers, _forward_backward, batches)
    if wrong:
        return {"rows": [], "wrong": wrong}
    batch = batches[-1]
    runs: dict[str, Run] = {impl: _step(layer, batch) for impl, layer in layers.items()}
    runs[EXPERTS] = _experts_alone(layers[OURS], batch)
    ids: list[torch.Tensor] = [torch.empty(0)] * suite.workload.ranks
    dist.all_gather_object(ids, batch.ids[0].cpu())
    comm, row_bytes = layers[OURS].token_dispatcher.communicator, batch.x.size(-1) * batch.x.element_size()
    timed = common.time_layers(suite, device, runs, ids, row_bytes, comm)
    return timed | {"experts": "GroupedExperts, in BF16", "max_rel_diff": largest}


def _build_layers(workload: Workload, ffn: int, device: torch.device) -> dict[str, Any]:
    """torchtitan's RoutedExperts by implementation, with one set of experts: BF16, N(0, 0.02). Collective."""
    without_triton()
    from torch.distributed.device_mesh import init_device_mesh
    from torchtitan.distributed.utils import set_spmd_backend
    from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
    from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

    from ep_plugin.integrations.torchtitan import token_dispatcher

    set_spmd_backend("default")  # the all-to-all then goes over the mesh that it is given
    mesh = init_device_mesh(device.type, (workload.ranks,), mesh_dim_names=("ep",))
    few = GroupedExperts.Config(dim=8, hidden_dim=8, num_experts=1)
    stock = AllToAllTokenDispatcher.Config(num_experts=workload.experts, top_k=workload.topk)
    layers = {
        impl: RoutedExperts.Config(inner_experts=few, token_dispatcher=dispatcher).build()
        for impl, dispatcher in ((STOCK, stock), (OURS, token_dispatcher(stock)))
    }
    all_here = GroupedExperts.Config(dim=workload.hidden, hidden_dim=ffn, num_experts=workload.local_experts)
    with device:
        experts = _in_bfloat16(all_here.build)
    generator = torch.Generator(device).manual_seed(1 + dist.get_rank())
    for parameter in experts.parameters():
        parameter.data.normal_(0.0, 0.02, generator=generator)
    for layer in layers.values():
        layer.inner_experts = experts
        layer.token_dispatcher.wire_meshes(ep_mesh=mesh)
    return layers


def _in_bfloat16(make: Callable[[], Any]) -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        return make()
    finally:
        torch.set_default_dtype(before)


def _batch(workload: Workload, turn: int, device: torch.device) -> Batch:
    generator = torch.Generator(device).manual_seed(turn * workload.ranks + dist.get_rank())
    shape = (1, workload.tokens, workload.hidden)
    x, dy = (torch.randn(shape, generator=generator, device=device).bfloat16() for _ in range(2))
    chances = torch.rand((1, workload.tokens, workload.experts), generator=generator, device=device)
    scores, ids = chances.topk(workload.topk, dim=-1)
    counts = ids.flatten().bincount(minlength=workload.experts)
    return Batch(x.requires_grad_(), scores.requires_grad_(), ids, counts, dy)


def _step(layer: Any, batch: Batch) -> Callable[[], torch.Tensor]:
    """Forward and backward; gradients are made anew, as after zero_grad."""

    def step() -> torch.Tensor:
        layer.zero_grad(set_to_none=True)
        batch.x.grad = batch.scores.grad = None
        y = layer(*batch[:4])
        y.backward(batch.dy)
        return y

    return step


def _forward_backward(layer: Any, batch: Batch) -> Tensors:
    """The output and all gradients, which the layer gives away."""
    y = _step(layer, batch)()
    found = {"y": y.detach(), "x.grad": batch.x.grad, "scores.grad": batch.scores.grad}
    found |= {f"{name}.grad": parameter.grad for name, parameter in layer.named_parameters()}
    layer.zero_grad(set_to_none=True)
    batch.x.grad = batch.scores.grad = None
    missing = [name for name, tensor in found.items() if tensor is None]
    assert not missing, f"no gradients: {missing}"
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def _experts_alone(layer: Any, batch: Batch) -> Run:
    """The layer's experts on the rows of this batch, forward and backward."""
    given: list[Any] = []
    hook = layer.inner_experts.register_forward_pre_hook(lambda module, inputs: given.extend(inputs))
    with torch.no_grad():
        layer(*batch[:4])
    hook.remove()
    rows, counts = given[0].detach().clone().requires_grad_(), given[1]
    dy = torch.randn_like(rows)

    def step() -> torch.Tensor:
        layer.zero_grad(set_to_none=True)
        rows.grad = None
        y = layer.inner_experts(rows, counts)
        y.backward(dy)
        return y

    return step
