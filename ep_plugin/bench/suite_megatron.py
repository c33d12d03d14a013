"""The suite `megatron`: forward and backward of Megatron-core's MoE layer, its alltoall dispatcher against ours.

One router and one set of experts serve both layers. `experts alone`: the same experts, forward and backward, on the
rows that the dispatcher gave them, with no exchange. What a layer takes more than that is `above_experts_us`; the
router, which has a row of its own, is in it. First both layers run on two batches in turn, and the outputs and all
gradients of each must agree; the second batch is the one that is timed. `bytes_wire`: of dispatch, combine and the
backward of both, in the busier direction of the busiest rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from ep_plugin.bench import layers as common
from ep_plugin.bench.layers import EXPERTS, OURS, STOCK, LayerSuite, Tensors
from ep_plugin.bench.megatron_layers import build_layers
from ep_plugin.bench.timing import Run
from ep_plugin.bench.workload import Workload

ROUTER = "router alone"
Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class MegatronSuite(LayerSuite):
    """What one run measures. grouped: the experts' products are grouped."""

    name: ClassVar[str] = "megatron"
    layer: ClassVar[str] = "MoE layer"
    grouped: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            import megatron.core  # noqa: F401
        except ImportError as error:
            raise ValueError(f"megatron: expected megatron-core, whose layers are measured: {error}") from error

    def options(self) -> list[str]:
        return [] if self.grouped else ["--sequential"]


def run(suite: MegatronSuite) -> dict[str, Any]:
    """Runs the suite on ranks of its own. Raises WrongResult."""
    return common.run(suite, measure)


def measure(device: torch.device, suite: MegatronSuite) -> dict[str, Any]:
    """One rank's part: the rows, or what was wrong, the same on every rank. Collective."""
    layers, experts = build_layers(suite.workload, suite.ffn, suite.grouped, device)
    batches = [_batch(suite.workload, turn, device) for turn in range(2)]
    largest, wrong = common.compare(layers, _forward_backward, batches)
    if wrong:
        return {"rows": [], "wrong": wrong}
    x, _ = batch = batches[-1]
    runs: dict[str, Run] = {impl: _step(layer, batch) for impl, layer in layers.items()}
    runs |= {EXPERTS: _experts_alone(layers[STOCK], x), ROUTER: _router_alone(layers[STOCK], x)}
    ids = _chosen(layers[STOCK], suite.workload, x)
    comm = layers[OURS].token_dispatcher._communicator
    timed = common.time_layers(suite, device, runs, ids, x.size(-1) * x.element_size(), comm)
    return timed | {"experts": experts, "max_rel_diff": largest}


def _batch(workload: Workload, turn: int, device: torch.device) -> Batch:
    """This rank's tokens and the gradient of what the layer makes of them, ``[T, 1, H]``."""
    generator = torch.Generator(device).manual_seed(turn * workload.ranks + dist.get_rank())
    shape = (workload.tokens, 1, workload.hidden)
    x, dy = (torch.randn(shape, generator=generator, device=device).bfloat16() for _ in range(2))
    return x.requires_grad_(), dy


def _step(layer: Any, batch: Batch) -> Callable[[], torch.Tensor]:
    """Forward and backward; gradients are made anew, as after zero_grad."""
    x, dy = batch

    def step() -> torch.Tensor:
        layer.zero_grad(set_to_none=True)
        x.grad = None
        y, _ = layer(x)
        y.backward(dy)
        return y

    return step


def _forward_backward(layer: Any, batch: Batch) -> Tensors:
    """The output and all gradients, which the layer gives away."""
    x, _ = batch
    y = _step(layer, batch)()
    found = {"y": y.detach(), "x.grad": x.grad}
    found |= {f"{name}.grad": parameter.grad for name, parameter in layer.named_parameters()}
    layer.zero_grad(set_to_none=True)
    x.grad = None
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def _experts_alone(layer: Any, x: torch.Tensor) -> Run:
    """The layer's experts on the rows of this batch, forward and backward."""
    given: list[Any] = []
    hook = layer.experts.register_forward_pre_hook(lambda module, inputs: given.extend(inputs))
    with torch.no_grad():
        layer(x)
    hook.remove()
    rows, counts, probs = given
    rows, probs = (tensor.detach().clone().requires_grad_() for tensor in (rows, probs))
    dy = torch.randn_like(rows)

    def step() -> torch.Tensor:
        layer.zero_grad(set_to_none=True)
        rows.grad = probs.grad = None
        y, _ = layer.experts(rows, counts, probs)
        y.backward(dy)
        return y

    return step


def _router_alone(layer: Any, x: torch.Tensor) -> Run:
    """The layer's router on this batch, forward and backward."""
    gradient = torch.rand_like(layer.router(x)[0].detach())

    def step() -> torch.Tensor:
        layer.zero_grad(set_to_none=True)
        x.grad = None
        probs, _ = layer.router(x)
        probs.backward(gradient)
        return probs

    return step


def _chosen(layer: Any, workload: Workload, x: torch.Tensor) -> list[torch.Tensor]:
    """Each rank's expert ids ``[T, K]``."""
    with torch.no_grad():
        chosen = layer.router(x)[1]  # bool [T, E]
    ids: list[torch.Tensor] = [torch.empty(0)] * workload.ranks
    dist.all_gather_object(ids, chosen.int().topk(workload.topk, dim=1).indices.cpu())
    return ids
