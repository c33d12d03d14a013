"""What the suites of frameworks' layers have in common: their sizes, and what two layers must agree on before they are
timed."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch

from ep_plugin.bench.timing import Timing
from ep_plugin.bench.workload import Workload, rows_on_the_wire

OURS, STOCK, EXPERTS = "ep_plugin", "alltoall", "experts alone"
WARMUP = 3
LIMIT = 2e-2  # of BF16: the largest difference of a tensor over its largest value
_CROSSINGS = 4  # dispatch, combine, and the backward of both
_CHUNK = 2**24  # elements that are compared at a time

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class LayerSuite:
    """What one run measures. ffn: the experts' intermediate size."""

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
    def sizes(self) -> str:
        """As a case names them."""
        sizes = self.workload
        return f"T {sizes.tokens}, H {sizes.hidden}, {self.ffn} wide, top {sizes.topk} of {sizes.experts}"

    def words(self) -> list[str]:
        """The command's words for the sizes."""
        sizes = asdict(self.workload)
        words = [f"--{name} {sizes[name]}" for name in ("ranks", "tokens", "hidden", "topk", "experts")]
        return [f"--backend {self.backend}", *words, f"--ffn {self.ffn}"]


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
