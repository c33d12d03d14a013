"""Sizes of an exchange, and inputs that every rank can make for all ranks.

Shapes: R ranks, T tokens per rank, H hidden size, K experts per token, E experts in all, E_l = E / R.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

SCALE_BLOCK = 128  # elements of an FP8 row per scale
HOT_RANK = 0  # of skewed routing
_GOLDEN = 0.6180339887  # whose multiples' fractions lie far apart
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8": torch.float8_e4m3fn,
}
SHORT_NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float8": "fp8"}


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Sizes of one exchange. No token is dropped, and every rank has the same T.

    skew: rows for the experts of HOT_RANK, from every source, as a multiple of the mean over ranks. 1: routing is
    uniformly random.
    """

    ranks: int
    tokens: int
    hidden: int
    topk: int
    experts: int
    seed: int = 0
    skew: float = 1.0

    def __post_init__(self) -> None:
        for name in ("ranks", "tokens", "hidden", "topk", "experts"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if self.experts % self.ranks:
            raise ValueError(f"experts: expected a multiple of the {self.ranks} ranks, got {self.experts}")
        if self.topk > self.experts:
            raise ValueError(f"topk: expected at most the {self.experts} experts, got {self.topk}")
        if self.skew < 1:
            raise ValueError(f"skew: expected at least 1, got {self.skew:g}")
        if self.skew != 1 and self.topk - (self.experts - self.local_experts) > self.skew * self.topk / self.ranks:
            raise ValueError(f"skew: expected more with {self.topk} of {self.experts} experts, got {self.skew:g}")
        if self.skew != 1 and self.skew * self.topk / self.ranks > min(self.topk, self.local_experts):
            most = min(self.topk, self.local_experts) * self.ranks / self.topk
            raise ValueError(f"skew: expected at most {most:g} with these ranks and experts, got {self.skew:g}")

    @property
    def local_experts(self) -> int:
        return self.experts // self.ranks


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One rank's tokens. x: `[T, H]`, ids: int64 `[T, K]`, weights: float32 `[T, K]`, scales: `[T, S]` with FP8.

    Weights are 0.1 to 1.1 and not normalised, so that a result with other weights, or without, is plainly wrong.
    quantize: x arrives as FP8 with scales.
    """

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    scales: torch.Tensor | None
    quantize: bool = False

    @property
    def row_bytes(self) -> int:
        """Bytes of a row and its scales, as they travel."""
        if self.quantize:
            return self.x.shape[1] + -(-self.x.shape[1] // SCALE_BLOCK) * torch.float32.itemsize
        scales = 0 if self.scales is None else self.scales.shape[1] * self.scales.element_size()
        return self.x.shape[1] * self.x.element_size() + scales


def batches(workload: Workload, dtype: torch.dtype, device: torch.device) -> list[Batch]:
    """The tokens of each rank, the same on every rank."""
    random = torch.Generator(device).manual_seed(workload.seed)
    made = []
    for _ in range(workload.ranks):
        x = torch.randn(workload.tokens, workload.hidden, generator=random, device=device).to(dtype)
        scores = torch.rand(workload.tokens, workload.experts, generator=random, device=device)
        ids = _chosen(workload, scores, random)
        weights = torch.rand(ids.shape, generator=random, device=device) + 0.1
        scales = None
        if dtype is DTYPES["float8"]:
            blocks = -(-workload.hidden // SCALE_BLOCK)
            scales = torch.rand(workload.tokens, blocks, generator=random, device=device)
        made.append(Batch(x=x, ids=ids, weights=weights, scales=scales))
    return made


def _chosen(workload: Workload, scores: torch.Tensor, random: torch.Generator) -> torch.Tensor:
    """The experts of each token, `[T, K]`: the highest scores, with as many of the hot rank as the skew asks for."""
    if workload.skew == 1:
        return scores.topk(workload.topk, dim=1).indices
    # Each token has an equal share of the hot rows; the remainder goes to some tokens, one row each.
    T = workload.tokens
    total = round(workload.skew * T * workload.topk / workload.ranks)
    extra = torch.randperm(T, generator=random, device=scores.device) < total % T
    share = total // T + extra.long()
    local = workload.local_experts
    first = HOT_RANK * local
    standing = scores[:, first : first + local].argsort(1, descending=True).argsort(1)
    hot = standing < share.unsqueeze(1)
    biased = scores.clone()
    biased[:, first : first + local] = torch.where(hot, 2.0, -1.0)  # before, and after, all others
    return biased.topk(workload.topk, dim=1).indices


def other_rows(everyone: list[Batch], turn: int, reroute: bool) -> list[Batch]:
    """The batches with each rank's rows, weights and scales in another order for each turn, the same on every rank.

    reroute: the routes too, in an order of their own. Every expert receives as many rows as before.
    """
    random = torch.Generator(everyone[0].x.device).manual_seed(turn)
    return [_reordered(batch, random, reroute) for batch in everyone]


def _reordered(batch: Batch, random: torch.Generator, reroute: bool) -> Batch:
    rows, routes = (torch.randperm(len(batch.x), generator=random, device=batch.x.device) for _ in range(2))
    return replace(
        batch,
        x=batch.x.view(torch.int64)[rows].view(batch.x.dtype),
        ids=batch.ids[routes] if reroute else batch.ids,
        weights=batch.weights[rows],
        scales=None if batch.scales is None else batch.scales[rows],
    )


def expert_rows(
    workload: Workload, rank: int, rows: int, turn: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """`[rows, H]`, as the experts of `rank` might return them: others for each turn, the same on every rank."""
    random = torch.Generator(device).manual_seed((workload.seed + 1 + turn) * workload.ranks + rank)
    return torch.randn(rows, workload.hidden, generator=random, device=device).to(dtype)


def expert_factors(workload: Workload, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """`[E]`, 0.5 to 1.5: a factor for the rows of each expert, which tells it from the others."""
    return (0.5 + (torch.arange(workload.experts, dtype=torch.float64, device=device) * _GOLDEN) % 1).to(dtype)


def rows_on_the_wire(workload: Workload, ids: list[torch.Tensor], dedup: bool) -> int:
    """Rows that cross to or from the busiest rank, in its busier direction. ids: `[T, K]` of each rank.

    dedup: a token crosses once per destination rank, however many of its experts are there.
    """
    sent = torch.stack([_rows_by_rank(workload, chosen, dedup) for chosen in ids])
    sent.fill_diagonal_(0)
    return int(torch.maximum(sent.sum(0), sent.sum(1)).max())


def rows_received(workload: Workload, ids: list[torch.Tensor]) -> list[int]:
    """FLAT rows of each rank."""
    return torch.stack([_rows_by_rank(workload, chosen, dedup=False) for chosen in ids]).sum(0).tolist()


def _rows_by_rank(workload: Workload, ids: torch.Tensor, dedup: bool) -> torch.Tensor:
    """Rows of one source for each rank, int64 `[R]` on the host."""
    owner = ids // workload.local_experts  # [T, K]
    pairs = torch.stack([(owner == rank).sum(1) for rank in range(workload.ranks)], 1)  # [T, R]
    return (pairs.clamp(max=1) if dedup else pairs).sum(0).cpu()


def crossing_per_token(workload: Workload) -> float:
    """The mean number of rows that a token sends to other ranks, with dedup and uniformly random routing."""
    elsewhere = workload.experts - workload.local_experts
    missed = math.comb(elsewhere, workload.topk) / math.comb(workload.experts, workload.topk)
    return (workload.ranks - 1) * (1 - missed)
