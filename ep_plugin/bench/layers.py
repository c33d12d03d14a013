"""What the suites of frameworks' layers have in common: their sizes, what two layers must agree on before they are
timed, and what is said of their times."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, TypeVar

import torch

from ep_plugin.bench import provenance
from ep_plugin.bench.launch import run_on_ranks
from ep_plugin.bench.ours import sms_of
from ep_plugin.bench.results import SMS_ARE, everyones_wrong, result, row
from ep_plugin.bench.specs import ROUNDTRIP
from ep_plugin.bench.timing import Run, Timing, clock_of, time_in_turn
from ep_plugin.bench.workload import Workload, rows_on_the_wire
from ep_plugin.moe.communicator import MoECommunicator

OURS, STOCK, EXPERTS = "ep_plugin", "alltoall", "experts alone"
_WARMUP = 3
LIMIT = 2e-2  # of BF16: the largest difference of a tensor over its largest value
_CROSSINGS = 4  # dispatch, combine, and the backward of both
_CHUNK = 2**24  # elements that are compared at a time

Tensors = dict[str, torch.Tensor]
Batch = TypeVar("Batch")


@dataclass(frozen=True, kw_only=True)
class LayerSuite:
    """What one run measures. ffn: the experts' intermediate size. name: the suite's. layer: what a case calls it."""

    name: ClassVar[str]
    layer: ClassVar[str]
    backend: str
    workload: Workload
    ffn: int
    iterations: int

    def __post_init__(self) -> None:
        if self.workload.ranks < 2:
            raise ValueError(f"ranks: expected at least 2, got {self.workload.ranks}")
        for name in ("ffn", "iterations"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        for name, size in (("hidden", self.workload.hidden), ("ffn", self.ffn)):
            if size % 8:
                raise ValueError(f"{name}: expected a multiple of 8, which 16-byte rows in BF16 are, got {size}")

    @property
    def case(self) -> str:
        sizes = self.workload
        return f"{self.layer}, T {sizes.tokens}, H {sizes.hidden}, {self.ffn} wide, top {sizes.topk} of {sizes.experts}"

    def command(self) -> str:
        sizes = asdict(self.workload)
        words = [f"--{name} {sizes[name]}" for name in ("ranks", "tokens", "hidden", "topk", "experts")]
        words = [f"ep-bench {self.name} --backend {self.backend}", *words, f"--ffn {self.ffn}", *self.options()]
        return " ".join([*words, f"--iterations {self.iterations}"])

    def options(self) -> list[str]:
        """Words of the command that other suites do not have."""
        return []


def run(suite: LayerSuite, measure: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """Runs `measure` on ranks of its own. Raises WrongResult."""
    code_hash = provenance.hash_sources()
    ranks = suite.workload.ranks
    found = run_on_ranks(ranks, suite.backend, measure, suite)
    return result(suite.name, suite.backend, ranks, suite.command(), found, code_hash)


def compare(
    layers: dict[str, Any], forward_backward: Callable[[Any, Batch], Tensors], batches: Iterable[Batch]
) -> tuple[float, list[str]]:
    """The largest difference of what both layers make of the batches; and what was wrong with it, on any rank."""
    difference: dict[str, float] = {}
    for batch in batches:
        theirs, ours = (forward_backward(layers[impl], batch) for impl in (STOCK, OURS))
        for name, value in differences(ours, theirs).items():
            difference[name] = max(value, difference.get(name, 0.0))
        del theirs, ours
    return max(difference.values()), everyones_wrong(judge(difference))


def time_layers(
    suite: LayerSuite,
    device: torch.device,
    runs: dict[str, Run],
    ids: list[torch.Tensor],
    row_bytes: int,
    comm: MoECommunicator,
) -> dict[str, Any]:
    """The rows, and what both layers take above their experts. ids: each rank's, ``[T, K]``. comm: our layer's."""
    timings = time_in_turn(clock_of(device), runs, suite.iterations, _WARMUP)
    wire, sms = bytes_wire(suite.workload, ids, row_bytes), exchange_sms(suite.workload, device, row_bytes, comm)
    rows = [row(suite.case, name, timing, wire.get(name, 0), sms.get(name)) for name, timing in timings.items()]
    return {"rows": rows, "wrong": [], "sms_are": SMS_ARE, **above_experts(timings)}


def exchange_sms(workload: Workload, device: torch.device, row_bytes: int, comm: MoECommunicator) -> dict[str, int]:
    """By implementation, where its exchange is known to run on so many SMs."""
    return {OURS: sms_of(comm, ROUNDTRIP, workload, row_bytes)} if device.type == "cuda" else {}


def differences(ours: Tensors, theirs: Tensors) -> dict[str, float]:
    """The largest difference of each tensor over the largest value of theirs; infinite where a tensor is missing."""
    return {
        name: _difference(ours[name], theirs[name]) if name in ours and name in theirs else float("inf")
        for name in ours.keys() | theirs.keys()
    }


def judge(difference: dict[str, float]) -> list[str]:
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
    """By implementation, of each rank's expert ids ``[T, K]``: an all-to-all sends a row for each expert, ours one for
    each rank."""
    return {
        impl: _CROSSINGS * rows_on_the_wire(workload, ids, dedup) * row_bytes
        for impl, dedup in ((STOCK, False), (OURS, True))
    }


def above_experts(timings: dict[str, Timing]) -> dict[str, object]:
    """What both layers take more than their experts, in microseconds, and ours over theirs."""
    above = {impl: round(timings[impl].median_us - timings[EXPERTS].median_us, 1) for impl in (STOCK, OURS)}
    return {
        "above_experts_us": above,
        "above_ratio": round(above[OURS] / above[STOCK], 3) if above[STOCK] > 0 else None,
    }
