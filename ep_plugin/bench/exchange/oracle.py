"""Compares the results of every implementation with the oracles of ep_plugin.moe.reference.

The oracle holds routes, not rows: it looks a row up at its source when it compares it.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from ep_plugin.bench.exchange.peers import Received
from ep_plugin.bench.exchange.workload import Batch, Workload
from ep_plugin.config import DispatchLayout
from ep_plugin.moe.reference import ReferenceOutput, reference_combine, reference_dispatch, reference_quantize


@dataclass(frozen=True)
class Sum:
    """A combine in float64, `[T, H]`: exact, and magnitude: the sum of its terms' magnitudes."""

    exact: torch.Tensor
    magnitude: torch.Tensor


class Oracle:
    """The expectations of one rank. `everyone`: the batches of all ranks, each of T tokens."""

    def __init__(self, workload: Workload, everyone: list[Batch], layout: DispatchLayout, rank: int) -> None:
        self._workload, self._everyone, self._rank = workload, everyone, rank
        self._device, T = everyone[rank].x.device, len(everyone[rank].x)
        with self._device:  # the oracles make their own tensors on the default device
            ids, weights = [batch.ids for batch in everyone], [batch.weights for batch in everyone]
            numbers = list(torch.arange(len(everyone) * T).unsqueeze(1).split(T))
            self._all = reference_dispatch(numbers, ids, weights, num_experts=workload.experts, layout=layout)

    def rows(self, rank: int | None = None) -> int:
        """Rows that a rank receives, this one by default."""
        return len(self._all[self._rank if rank is None else rank].tokens)

    def wrong_dispatch(self, got: Received) -> str | None:
        """How `got` differs from the rows that belong to this rank, bit for bit; None when it does not.

        Weights, row_experts and counts are compared where `got` has them.
        """
        expected = self._all[self._rank]
        arriving = [_as_it_arrives(batch) for batch in self._everyone]
        source = expected.tokens.squeeze(1)
        rows = [batch.x.view(torch.int64) for batch in arriving]  # opaque, as any type
        scales = [batch.scales for batch in arriving if batch.scales is not None]
        pairs = {
            "tokens": (got.tokens.view(torch.int64), torch.cat(rows)[source]),
            "scales": (got.scales, torch.cat(scales)[source] if scales else None),
            "ids": (got.ids, expected.topk_ids),
            "weights": (got.weights, expected.weights if got.weights is not None else None),
            "row_experts": (got.row_experts, expected.row_expert_ids if got.row_experts is not None else None),
            "counts": (got.counts, expected.num_tokens_per_expert if got.counts is not None else None),
        }
        for name, (mine, theirs) in pairs.items():
            problem = _difference(mine, theirs)
            if problem:
                return f"{name}: {problem}"
        return None

    def combined(self, rows_of: Callable[[int], torch.Tensor]) -> Sum:
        """This rank's tokens from the rows `[N, H]` of each rank's experts, weights applied. FLAT only."""
        batch = self._everyone[self._rank]
        T, sums = len(batch.x), []
        with self._device:
            for rank, out in enumerate(self._all):
                y, part = _pairs_of(out, rows_of(rank), self._rank * T, T)
                sums += [[reference_combine([rows], [part], [T], [part.weights])[0] for rows in (y, y.abs())]]
        return Sum(*(torch.stack(each).sum(0) for each in zip(*sums, strict=True)))

    def scaled_rows(self, rank: int, factors: torch.Tensor) -> torch.Tensor:
        """The rows `[N, H]` of `rank`, each multiplied by the factor of its expert, factors `[E]`. FLAT only."""
        out = self._all[rank]
        assert out.row_expert_ids is not None
        rows = torch.cat([batch.x for batch in self._everyone])[out.tokens.squeeze(1)]
        experts = rank * self._workload.local_experts + out.row_expert_ids.long()
        return rows * factors[experts].unsqueeze(1)


def _pairs_of(out: ReferenceOutput, y: torch.Tensor, first: int, count: int) -> tuple[torch.Tensor, ReferenceOutput]:
    """The rows of `y` that belong to `count` tokens from `first` on, and their routes and weights."""
    mine = ((out.pair_token >= first) & (out.pair_token < first + count)).nonzero().squeeze(1)
    rows = out.pair_row[mine]
    part = replace(
        out,
        weights=out.weights[rows],
        pair_token=out.pair_token[mine] - first,
        pair_k=out.pair_k[mine],
        pair_row=torch.arange(len(mine)),
    )
    return y[rows].double(), part


def _as_it_arrives(batch: Batch) -> Batch:
    if not batch.quantize:
        return batch
    rows, scales = reference_quantize(batch.x)
    return replace(batch, x=rows, scales=scales)


def wrong_combine(expected: Sum, got: torch.Tensor) -> str | None:
    """How `[T, H]` differs from the expectation; None when every element is within roundings of it.

    Four roundings to the rows' type are allowed (weights, a product, a rank's sum, the result), and those of float32
    sums, relative to the magnitude of the terms.
    """
    if got.shape != expected.exact.shape:
        return f"expected shape {tuple(expected.exact.shape)}, got {tuple(got.shape)}"
    allowed = 2 * torch.finfo(got.dtype).eps + 32 * torch.finfo(torch.float32).eps
    least = torch.finfo(got.dtype).smallest_normal
    errors = (got.double() - expected.exact).abs() / (expected.magnitude + least)
    wrong = ~(errors <= allowed)  # written so that NaN is wrong
    if not bool(wrong.any()):
        return None
    worst, rows = float(errors.max()), int(wrong.any(1).sum())
    return f"expected relative errors of at most {allowed:g}, got {worst:g}, and more in {rows} of {len(got)} rows"


def _difference(got: torch.Tensor | None, expected: torch.Tensor | None) -> str | None:
    if expected is None or got is None:
        return None if got is expected else f"expected {'none' if expected is None else 'some'}, got the opposite"
    if got.shape != expected.shape:
        return f"expected shape {tuple(expected.shape)}, got {tuple(got.shape)}"
    wrong = got != expected
    differing = (wrong if wrong.dim() == 1 else wrong.any(1)).nonzero()
    if len(differing) == 0:
        return None
    first = int(differing[0])
    return f"expected the oracle's values, got others in {len(differing)} of {got.shape[0]} rows, first row {first}"


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Fills memory that torch allocates inside with NaN, or with the largest integers.

    PyTorch ties this setting to deterministic algorithms. The warnings of operations that have none are left out.
    """
    settings: Any = torch.utils.deterministic  # its annotations leave the setting out
    mode, fill = torch.get_deterministic_debug_mode(), settings.fill_uninitialized_memory
    torch.set_deterministic_debug_mode("warn")  # use_deterministic_algorithms would import the compiler
    settings.fill_uninitialized_memory = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        settings.fill_uninitialized_memory = fill
