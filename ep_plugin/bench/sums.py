"""How a peer's combine adds up the rows of each token, and how a peer chooses among ways to do one thing.

Rows `[N, H]`, position `[T, K]` in them, weights `[T, K]` of the rows' type give `[T, H]`. Products and sums are in
float32 for rows of two bytes.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch

from ep_plugin.bench.exchange import words

Summation = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
_CHUNK_BYTES = 16 << 20  # of gathered rows: they stay in a cache between the gather and the product


def bag_sum(rows: torch.Tensor, position: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Gathers and sums in one pass."""
    return torch.nn.functional.embedding_bag(position, rows, mode="sum", per_sample_weights=weights)


def gathered_sum(rows: torch.Tensor, position: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Gathers, then sums by a product of matrices."""
    return _gathered_sum(rows, position, weights, len(position))


def chunked_sum(rows: torch.Tensor, position: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The same, some tokens at a time, so that what was gathered is read from a cache."""
    token_bytes = position.shape[1] * rows.shape[1] * rows.element_size()
    return _gathered_sum(rows, position, weights, max(1, _CHUNK_BYTES // token_bytes))


def _gathered_sum(rows: torch.Tensor, position: torch.Tensor, weights: torch.Tensor, chunk: int) -> torch.Tensor:
    K, H = position.shape[1], rows.shape[1]
    out = rows.new_empty((len(position), 1, H))
    room = words(rows).new_empty((min(chunk, len(position)) * K, words(rows).shape[1]))
    for first in range(0, len(position), chunk):
        places = position[first : first + chunk]
        gathered = torch.index_select(words(rows), 0, places.reshape(-1), out=room[: places.numel()])
        terms = gathered.view(rows.dtype).view(-1, K, H)
        torch.bmm(weights[first : first + chunk].unsqueeze(1), terms, out=out[first : first + chunk])
    return out.squeeze(1)


class Fastest:
    """Calls the candidate that was fastest here when it was called first: which one that is depends on the device.

    For each number of columns anew: a narrow piece may want another than whole rows.
    """

    def __init__(self, *candidates: Callable[..., torch.Tensor]) -> None:
        self._candidates = candidates
        self._chosen: dict[int, Callable[..., torch.Tensor]] = {}

    def __call__(self, rows: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        width = rows.shape[1]
        if width not in self._chosen:
            seconds = [_seconds(functools.partial(each, rows, *more), rows) for each in self._candidates]
            self._chosen[width] = self._candidates[seconds.index(min(seconds))]
        return self._chosen[width](rows, *more)


def _seconds(run: Callable[[], Any], like: torch.Tensor) -> float:
    """Of some calls after the first."""

    def finished() -> float:
        if like.is_cuda:
            torch.cuda.synchronize(like.device)
        return time.perf_counter()

    run()
    began = finished()
    for _ in range(3):
        run()
    return finished() - began
