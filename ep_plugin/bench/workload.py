"""What the ranks exchange: shapes, and inputs that every rank can make for all ranks.

Shapes: R ranks, T tokens per rank, H hidden size, K experts per token, E experts in all, E_l = E / R.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

SCALE_BLOCK = 128  # elements of an FP8 row per scale
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8": torch.float8_e4m3fn,
}
SHORT_NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float8": "fp8"}


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Sizes of one exchange. Routing is uniformly random, nothing is dropped, every rank has the same T."""

    ranks: int
    tokens: int
    hidden: int
    topk: int
    experts: int
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("ranks", "tokens", "hidden", "topk", "experts"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if self.experts % self.ranks:
            raise ValueError(f"experts: expected a multiple of the {self.ranks} ranks, got {self.experts}")
        if self.topk > self.experts:
            raise ValueError(f"topk: expected at most the {self.experts} experts, got {self.topk}")


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One rank's tokens. x: `[T, H]`, ids: int64 `[T, K]`, weights: float32 `[T, K]`, scales: `[T, S]` with FP8."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    scales: torch.Tensor | None

    @property
    def row_bytes(self) -> int:
        scales = 0 if self.scales is None else self.scales.shape[1] * self.scales.element_size()
        return self.x.shape[1] * self.x.element_size() + scales


def batches(workload: Workload, dtype: torch.dtype, device: torch.device) -> list[Batch]:
    """What each rank brings, the same on every rank that asks."""
    random = torch.Generator(device).manual_seed(workload.seed)
    made = []
    for _ in range(workload.ranks):
        x = torch.randn(workload.tokens, workload.hidden, generator=random, device=device).to(dtype)
        scores = torch.rand(workload.tokens, workload.experts, generator=random, device=device)
        weights, ids = scores.topk(workload.topk, dim=1)
        scales = None
        if dtype is DTYPES["float8"]:
            blocks = -(-workload.hidden // SCALE_BLOCK)
            scales = torch.rand(workload.tokens, blocks, generator=random, device=device)
        made.append(Batch(x=x, ids=ids, weights=weights / weights.sum(1, keepdim=True), scales=scales))
    return made


def expert_rows(workload: Workload, rows: list[int], dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """`rows[r]` rows of width H for each rank, as its experts might return them; the same on every rank."""
    random = torch.Generator(device).manual_seed(workload.seed + 1)
    return [torch.randn(n, workload.hidden, generator=random, device=device).to(dtype) for n in rows]


def rows_on_the_wire(workload: Workload, ids: list[torch.Tensor], dedup: bool) -> int:
    """Rows that cross to or from the busiest rank, in its busier direction.

    dedup: a token crosses once per destination rank, however many of its experts live there.
    """
    per_rank = workload.experts // workload.ranks
    sent = torch.zeros(workload.ranks, workload.ranks, dtype=torch.int64)
    for source, chosen in enumerate(ids):
        pairs = torch.nn.functional.one_hot(chosen.cpu() // per_rank, workload.ranks).sum(1)  # [T, R]
        sent[source] = (pairs.clamp(max=1) if dedup else pairs).sum(0)
    sent.fill_diagonal_(0)
    return int(torch.maximum(sent.sum(0), sent.sum(1)).max())
