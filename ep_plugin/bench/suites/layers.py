"""The suite `layers`: forward and backward of a framework's MoE layer, with its own all-to-all and with ours.

One set of experts (and one router, where the layer has one) serves both layers. `experts alone` are the same experts,
forward and backward, on the rows that a dispatcher gave them, with no exchange: `above_experts_us` is the time that a
layer takes beyond it. First both layers run on two batches in turn, and outputs and all gradients must agree. The
second batch is the one that is timed. `bytes_wire`: of dispatch, combine and the backward of both, in the busier
direction of the busiest rank.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Protocol

import torch
import torch.distributed as dist
import typer

from ep_plugin.bench.exchange.ours import sms_of
from ep_plugin.bench.exchange.sizes import CUDA_SIZES, ExchangeSuite
from ep_plugin.bench.exchange.specs import ROUNDTRIP
from ep_plugin.bench.exchange.workload import Workload, rows_on_the_wire
from ep_plugin.bench.suite import BY_BACKEND, WARMUP, check_names, require_module, require_right, row
from ep_plugin.bench.timing import Run, Timing, clock_of, time_in_turn
from ep_plugin.moe.communicator import MoECommunicator

OURS, STOCK, EXPERTS = "ep_plugin", "alltoall", "experts alone"
FRAMEWORKS = {"megatron": "megatron.core", "torchtitan": "torchtitan"}
LIMIT = 2e-2  # of BF16: the largest difference of a tensor over its largest value
_CROSSINGS = 4  # dispatch, combine, and the backward of both
_CHUNK = 2**24  # elements that are compared at a time
_CPU_SIZES: dict[str, Any] = {"ranks": 2, "tokens": 256, "hidden": 512, "topk": 4, "experts": 16, "ffn": 128}

Tensors = dict[str, torch.Tensor]


class Layers(Protocol):
    """A framework's layers by implementation, STOCK and OURS, with one set of experts, and what is run of them.

    `layers_<framework>.py` has a class of this kind, made of the suite and the device, collectively. BF16, parameters
    N(0, 0.02). layer_name: how cases call the layer. experts: a sentence on them.
    """

    layer_name: ClassVar[str]
    experts: str

    def batch(self, turn: int) -> Any:
        """This rank's tokens and the gradient of the layer's output; others for each turn."""

    def step(self, impl: str, batch: Any) -> Run:
        """Forward and backward, with gradients made anew, as after zero_grad."""

    def forward_backward(self, impl: str, batch: Any) -> Tensors:
        """The output and all gradients of a step, which the layer no longer holds."""

    def alone(self, batch: Any) -> dict[str, Run]:
        """Parts of the layer by themselves, forward and backward: EXPERTS, and others."""

    def ids(self, batch: Any) -> torch.Tensor:
        """This rank's expert ids, `[T, K]`."""

    def communicator(self) -> MoECommunicator:
        """Of our layer, once it has run."""


@dataclass(frozen=True, kw_only=True)
class LayersSuite(ExchangeSuite):
    """A framework's MoE layer, forward and backward: its all-to-all, ours, and its experts alone."""

    command_name: ClassVar[str] = "layers"
    defaults: ClassVar[dict[str, dict[str, Any]]] = {"cpu": _CPU_SIZES, "cuda": CUDA_SIZES | {"ffn": 2048}}
    least: ClassVar[dict[str, int]] = ExchangeSuite.least | {"ffn": 1}

    framework: Annotated[str, typer.Option(help=", ".join(FRAMEWORKS) + ".")]
    ffn: Annotated[int, typer.Option(help="Experts' intermediate size. Default on cuda: 2048.")] = BY_BACKEND
    sequential: Annotated[bool, typer.Option("--sequential", help="megatron: SequentialMLP, no grouped GEMM.")] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_names("framework", tuple(FRAMEWORKS), [self.framework])
        if self.sequential and self.framework != "megatron":
            raise ValueError(f"sequential: expected the framework megatron, got {self.framework!r}")
        for name in ("hidden", "ffn"):
            if getattr(self, name) % 8:
                raise ValueError(
                    f"{name}: expected a multiple of 8, which 16-byte rows in BF16 are, got {getattr(self, name)}"
                )
        require_module(FRAMEWORKS[self.framework], "framework", "whose layers are measured")

    @property
    def name(self) -> str:
        return f"layers_{self.framework}"

    def measure(self, device: torch.device) -> dict[str, Any]:
        module = importlib.import_module(f"ep_plugin.bench.suites.layers_{self.framework}")
        layers: Layers = module.FrameworkLayers(self, device)
        batches = [layers.batch(turn) for turn in range(2)]
        largest = _compare(layers, batches)
        batch = batches[-1]
        runs = {impl: layers.step(impl, batch) for impl in (STOCK, OURS)} | layers.alone(batch)
        timings = time_in_turn(clock_of(device), runs, self.iterations, WARMUP)
        ids: list[torch.Tensor] = [torch.empty(0)] * self.ranks
        dist.all_gather_object(ids, layers.ids(batch).cpu())
        row_bytes = self.hidden * torch.bfloat16.itemsize
        wire = bytes_wire(self.workload, ids, row_bytes)
        sms = exchange_sms(self.workload, device, row_bytes, layers.communicator())
        sizes = self.workload
        case = (
            f"{layers.layer_name}, T {sizes.tokens}, H {sizes.hidden}, {self.ffn} wide, top {sizes.topk} of "
            f"{sizes.experts}"
        )
        rows = [row(case, name, timing, wire.get(name, 0), sms.get(name)) for name, timing in timings.items()]
        found = {"experts": layers.experts, "max_rel_diff": largest, **above_experts(timings)}
        return {"rows": rows, "notes": notes_of(found), **found}


def _compare(layers: Layers, batches: list[Any]) -> float:
    """The largest difference between both layers' tensors. Raises WrongResult where one is too large. Collective."""
    difference: dict[str, float] = {}
    for batch in batches:
        theirs, ours = (layers.forward_backward(impl, batch) for impl in (STOCK, OURS))
        for name, value in differences(ours, theirs).items():
            difference[name] = max(value, difference.get(name, 0.0))
        del theirs, ours
    require_right(too_different(difference))
    return max(difference.values())


def differences(ours: Tensors, theirs: Tensors) -> dict[str, float]:
    """The largest difference of each tensor over the largest value of theirs; infinite where a tensor is missing."""
    return {
        name: _difference(ours[name], theirs[name]) if name in ours and name in theirs else float("inf")
        for name in ours.keys() | theirs.keys()
    }


def too_different(difference: dict[str, float]) -> list[str]:
    """A sentence for each tensor that differs too much."""
    return [
        f"{name}: expected {STOCK}'s within {LIMIT} of its largest value, differs by {value:.2e}"
        for name, value in difference.items()
        if not value <= LIMIT
    ]


def _difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """In pieces: in float32 the gradients of all experts would not fit beside them."""
    if ours.shape != theirs.shape:
        return float("inf")
    most, largest = torch.zeros((), device=ours.device), torch.full((), 1e-12, device=ours.device)
    for mine, other in zip(ours.flatten().split(_CHUNK), theirs.flatten().split(_CHUNK), strict=True):
        if mine.numel():
            most = torch.maximum(most, (mine.float() - other.float()).abs().max())
            largest = torch.maximum(largest, other.float().abs().max())
    return float(most / largest)


def bytes_wire(workload: Workload, ids: list[torch.Tensor], row_bytes: int) -> dict[str, int]:
    """By implementation: an all-to-all sends a row per expert, ours one per rank. ids: `[T, K]` of each rank."""
    return {
        impl: _CROSSINGS * rows_on_the_wire(workload, ids, dedup) * row_bytes
        for impl, dedup in ((STOCK, False), (OURS, True))
    }


def exchange_sms(workload: Workload, device: torch.device, row_bytes: int, comm: MoECommunicator) -> dict[str, int]:
    """By implementation, the SMs of its exchange where they are known."""
    return {OURS: sms_of(comm, ROUNDTRIP, workload, row_bytes)} if device.type == "cuda" else {}


def above_experts(timings: dict[str, Timing]) -> dict[str, Any]:
    """The time of both layers beyond their experts', in microseconds, and ours over theirs."""
    above = {impl: round(timings[impl].median_us - timings[EXPERTS].median_us, 1) for impl in (STOCK, OURS)}
    ratio = round(above[OURS] / above[STOCK], 3) if above[STOCK] > 0 else None
    return {"above_experts_us": above, "above_ratio": ratio}


def notes_of(found: dict[str, Any]) -> list[str]:
    """Sentences on the experts, and on the time beyond them."""
    above = ", ".join(f"{impl} {took:,.0f} µs" for impl, took in found["above_experts_us"].items())
    ratio = "" if found["above_ratio"] is None else f"; ratio {found['above_ratio']:.2f}"
    return [f"experts: {found['experts']}", f"above the experts' own compute: {above}{ratio}"]
