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
from typing import Any

import torch
import torch.distributed as dist

from ep_plugin.bench import provenance
from ep_plugin.bench.launch import run_on_ranks
from ep_plugin.bench.layers import (
    EXPERTS,
    OURS,
    STOCK,
    WARMUP,
    LayerSuite,
    Tensors,
    above_experts,
    bytes_wire,
    differences,
    judge,
)
from ep_plugin.bench.megatron_layers import build_layers
from ep_plugin.bench.results import everyones_wrong, result, row
from ep_plugin.bench.timing import Run, clock_of, time_in_turn
from ep_plugin.bench.workload import Workload

SUITE = "megatron"
ROUTER = "router alone"


@dataclass(frozen=True, kw_only=True)
class MegatronSuite(LayerSuite):
    """What one run measures. grouped: the experts' products are grouped."""

    grouped: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            import megatron.core  # noqa: F401
        except ImportError as error:
            raise ValueError(f"megatron: expected megatron-core, whose layers are measured: {error}") from error

    @property
    def case(self) -> str:
        return f"MoE layer, {self.sizes}"

    def command(self) -> str:
        words = [*self.words(), *([] if self.grouped else ["--sequential"]), f"--iterations {self.iterations}"]
        return " ".join(["ep-bench megatron", *words])


def run(suite: MegatronSuite) -> dict[str, Any]:
    """Runs the suite on ranks of its own. Raises WrongResult."""
    code_hash = provenance.hash_sources()
    found = run_on_ranks(suite.workload.ranks, suite.backend, measure, suite)
    return result(SUITE, suite.backend, suite.workload.ranks, suite.command(), found, code_hash)


def measure(device: torch.device, suite: MegatronSuite) -> dict[str, Any]:
    """One rank's part: the rows, or what was wrong, the same on every rank. Collective."""
    layers, experts = build_layers(suite.workload, suite.ffn, suite.grouped, device)
    difference: dict[str, float] = {}
    for turn in range(2):
        x, dy = _batch(suite.workload, turn, device)
        theirs, ours = (_forward_backward(layers[impl], x, dy) for impl in (STOCK, OURS))
        for name, value in differences(ours, theirs).items():
            difference[name] = max(value, difference.get(name, 0.0))
        del theirs, ours
    wrong = everyones_wrong(judge(difference))
    if wrong:
        return {"rows": [], "wrong": wrong}
    runs: dict[str, Run] = {impl: _step(layer, x, dy) for impl, layer in layers.items()}
    runs |= {EXPERTS: _experts_alone(layers[STOCK], x), ROUTER: _router_alone(layers[STOCK], x)}
    timings = time_in_turn(clock_of(device), runs, suite.iterations, WARMUP)
    wire = bytes_wire(suite.workload, _chosen(layers[STOCK], suite.workload, x), x.size(-1) * x.element_size())
    return {
        "rows": [row(suite.case, name, timing, wire.get(name, 0), None) for name, timing in timings.items()],
        "wrong": [],
        "experts": experts,
        **above_experts(timings),
        "max_rel_diff": max(difference.values()),
    }


def _batch(workload: Workload, turn: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's tokens and the gradient of what the layer makes of them, ``[T, 1, H]``."""
    generator = torch.Generator(device).manual_seed(turn * workload.ranks + dist.get_rank())
    shape = (workload.tokens, 1, workload.hidden)
    x, dy = (torch.randn(shape, generator=generator, device=device).bfloat16() for _ in range(2))
    return x.requires_grad_(), dy


def _step(layer: Any, x: torch.Tensor, dy: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Forward and backward; gradients are made anew, as after zero_grad."""

    def step() -> torch.Tensor:
        layer.zero_grad(set_to_none=True)
        x.grad = None
        y, _ = layer(x)
        y.backward(dy)
        return y

    return step


def _forward_backward(layer: Any, x: torch.Tensor, dy: torch.Tensor) -> Tensors:
    """The output and all gradients, which the layer gives away."""
    y = _step(layer, x, dy)()
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
