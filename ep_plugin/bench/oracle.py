"""What every way to exchange a workload must return, by the oracles of ep_plugin.moe.reference."""

from __future__ import annotations

from dataclasses import replace

import torch

from ep_plugin.bench.peers import Received
from ep_plugin.bench.workload import Batch, Workload, expert_rows
from ep_plugin.config import DispatchLayout
from ep_plugin.moe.reference import reference_combine, reference_dispatch, reference_quantize

# Largest error allowed in combine, relative to the largest value: some roundings of the rows' type.
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


class Oracle:
    """The expectations of one rank. `everyone`: the batches of all ranks."""

    def __init__(self, workload: Workload, everyone: list[Batch], layout: DispatchLayout, rank: int) -> None:
        self._workload, self._everyone, self._rank = workload, everyone, rank
        self._device = everyone[rank].x.device
        with self._device:  # the oracles make their own tensors on the default device
            ids, weights = [batch.ids for batch in everyone], [batch.weights for batch in everyone]
            everyone = [_as_it_arrives(batch) for batch in everyone]
            rows = [batch.x.view(torch.int64) for batch in everyone]  # opaque, as any type
            self._all = reference_dispatch(rows, ids, weights, num_experts=workload.experts, layout=layout)
            self._scales: torch.Tensor | None = None
            scales = [batch.scales for batch in everyone if batch.scales is not None]
            if scales:
                ours = reference_dispatch(scales, ids, weights, num_experts=workload.experts, layout=layout)[rank]
                self._scales = ours.tokens

    @property
    def rows(self) -> int:
        """Rows that this rank receives."""
        return self._all[self._rank].tokens.shape[0]

    def expert_rows(self) -> list[torch.Tensor]:
        """What the experts of each rank return: fresh rows, as many as the rank received."""
        rows = [out.tokens.shape[0] for out in self._all]
        return expert_rows(self._workload, rows, self._everyone[0].x.dtype, self._device)

    def received_rows(self) -> list[torch.Tensor]:
        """What each rank received: what experts return that change nothing."""
        return [out.tokens.view(self._everyone[0].x.dtype) for out in self._all]

    def wrong_dispatch(self, got: Received) -> str | None:
        """How `got` differs from what this rank should have received, bit for bit; None when it does not.

        Weights are compared when they travelled with the rows.
        """
        expected = self._all[self._rank]
        pairs = {
            "tokens": (got.tokens.view(torch.int64), expected.tokens),
            "scales": (got.scales, self._scales),
            "ids": (got.ids, expected.topk_ids),
            "weights": (got.weights, expected.weights if got.weights is not None else None),
            "counts": (got.counts, expected.num_tokens_per_expert if got.counts is not None else None),
        }
        for name, (mine, theirs) in pairs.items():
            problem = _difference(mine, theirs)
            if problem:
                return f"{name}: {problem}"
        return None

    def combined(self, y: list[torch.Tensor]) -> torch.Tensor:
        """This rank's tokens from all ranks' expert rows, weights applied: float64 `[T, H]`."""
        with self._device:
            tokens = [batch.x.shape[0] for batch in self._everyone]
            weights = [out.weights for out in self._all]
            return reference_combine(y, self._all, tokens, weights)[self._rank]


def _as_it_arrives(batch: Batch) -> Batch:
    if not batch.quantize:
        return batch
    rows, scales = reference_quantize(batch.x)
    return replace(batch, x=rows, scales=scales)


def wrong_combine(expected: torch.Tensor, got: torch.Tensor) -> str | None:
    """How `[T, H]` differs from the float64 expectation; None when it is within roundings of it."""
    if got.shape != expected.shape:
        return f"expected shape {tuple(expected.shape)}, got {tuple(got.shape)}"
    error = float((got.double() - expected).abs().max() / expected.abs().max())
    allowed = _TOLERANCE[got.dtype]
    # Written so that NaN is wrong.
    return None if error <= allowed else f"expected a relative error of at most {allowed:g}, got {error:g}"


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
