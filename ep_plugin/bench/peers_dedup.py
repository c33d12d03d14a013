"""A peer that sends a token's row once per destination rank and copies it to its experts there, as ep_plugin does.

Who goes where is known by an all-gather of ids and weights before any row leaves: every rank works out by itself what
it will receive, and the order of its FLAT rows, while the rows are on the wire. Combine sums a token's rows of one rank
there, weighted, sends the sums back, and adds those of all ranks.

Shapes: as in peers.py, and S rows sent, M received, each at most once per (token, rank).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ep_plugin.bench.exchange import Early, Exchange, Piece, gather, pieces_of, width_of
from ep_plugin.bench.peers import Received, in_order, short_keys, side_by_side, true_places
from ep_plugin.bench.sums import Fastest, bag_sum, chunked_sum, gathered_sum
from ep_plugin.bench.workload import Batch, Workload

# Its name from PyTorch 2.13 on, and the one before.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True, kw_only=True)
class Arrivals:
    """to_flat: `[N]` the received row of each FLAT row, weights: `[N]` its weight, counts: `[E_l]` rows per expert.
    by_row: `[N]` FLAT rows by received row, begins: `[M]` where those of each begin."""

    to_flat: torch.Tensor
    weights: torch.Tensor
    counts: torch.Tensor
    by_row: torch.Tensor
    begins: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class DedupRouting:
    """goes: `[T, R]` whether a token's row goes there, position: which of the S sent it is, or 0. sent, received: rows
    per rank."""

    goes: torch.Tensor
    position: torch.Tensor
    sent: list[int]
    received: list[int]
    arrivals: Arrivals


class DedupAllToAll:
    """FLAT dispatch and combine over an all-gather and `all_to_all_single`."""

    dedup = True

    def __init__(self, workload: Workload, device: torch.device) -> None:
        self._ranks, self._local, self._rank = workload.ranks, workload.local_experts, dist.get_rank()
        self._early = Early(device)
        self._sum = Fastest(bag_sum, gathered_sum, chunked_sum)
        self.dispatch_pieces = self.combine_pieces = 1

    def dispatch(self, batch: Batch, previous: object = None) -> Received:
        """Rows in AllToAll's order. The routing is always a new one: `previous` is not looked at."""
        T, K = batch.ids.shape
        self._early.start(functools.partial(self._tell, batch), self._totals)
        goes = self._goes(batch.ids)
        by_rank = goes.t().reshape(-1)
        places = torch.where(by_rank, by_rank.cumsum(0) - 1, 0).view(self._ranks, T)
        tokens = true_places(by_rank, len(by_rank)) % T
        numbers, (everyones, _) = self._early.read()
        sent, received, pairs = numbers[: self._ranks], numbers[self._ranks : -1], numbers[-1]
        tokens = tokens[: sum(sent)]
        pieces = pieces_of(batch.x, batch.scales, self.dispatch_pieces)
        under_way = [_send(piece, tokens, sent, received) for piece in pieces]
        arrivals = self._arrivals(everyones[:, :K], everyones[:, K:].view(torch.float32), sum(received), pairs)
        rows, scales = in_order((part.wait() for part in under_way), batch, arrivals.to_flat, len(pieces))
        return Received(
            tokens=rows,
            scales=scales,
            counts=arrivals.counts,
            weights=arrivals.weights,
            state=DedupRouting(
                goes=goes, position=places.t().contiguous(), sent=sent, received=received, arrivals=arrivals
            ),
        )

    def combine(self, y: torch.Tensor, state: object) -> torch.Tensor:
        """The weighted sum of each token's rows, summed by rank first: `[T, H]`."""
        assert isinstance(state, DedupRouting)
        arrivals, weights = state.arrivals, state.arrivals.weights[state.arrivals.by_row].to(y.dtype)
        under_way = []
        for (rows,) in pieces_of(y, None, self.combine_pieces):
            sums = torch.nn.functional.embedding_bag(
                arrivals.by_row, rows.view(y.dtype), arrivals.begins, mode="sum", per_sample_weights=weights
            )
            under_way.append(_exchange(sums.view(rows.dtype), state.received, state.sent))
        goes = state.goes.to(y.dtype)
        parts = (self._sum(part.wait().view(y.dtype), state.position, goes) for part in under_way)
        return side_by_side(parts, y, len(goes), self.combine_pieces)

    def _goes(self, ids: torch.Tensor) -> torch.Tensor:
        goes = torch.zeros(len(ids), self._ranks, dtype=torch.bool, device=ids.device)
        return goes.scatter_(1, ids // self._local, True)

    def _tell(self, batch: Batch) -> tuple[Any, tuple[torch.Tensor, torch.Tensor]]:
        """Everyone's ids and weights, int32 `[R * T, 2 * K]`."""
        mine = torch.cat((batch.ids.int(), batch.weights.view(torch.int32)), 1)
        everyones = mine.new_empty((self._ranks * len(mine), mine.shape[1]))
        return _all_gather(everyones, mine, async_op=True), (everyones, self._goes(batch.ids))

    def _totals(self, everyones: torch.Tensor, goes: torch.Tensor) -> torch.Tensor:
        """Rows sent to and received from each rank, and FLAT rows: int64 `[2 * R + 1]`."""
        here = self._here(everyones[:, : everyones.shape[1] // 2])
        received = here.any(1).view(self._ranks, -1).sum(1)
        return torch.cat((goes.sum(0), received, here.sum().unsqueeze(0)))

    def _here(self, ids: torch.Tensor) -> torch.Tensor:
        return ids // self._local == self._rank

    def _arrivals(self, ids: torch.Tensor, weights: torch.Tensor, rows: int, pairs: int) -> Arrivals:
        """ids, weights: everyone's, `[R * T, K]`. rows: M, pairs: N."""
        here = self._here(ids)
        experts = torch.where(here, ids - self._rank * self._local, self._local).reshape(-1)
        by_expert = torch.argsort(short_keys(experts, self._local), stable=True)[:pairs]
        comes = here.any(1)
        slot = comes.cumsum(0) - 1
        counts = torch.zeros(self._local + 1, dtype=torch.int64, device=ids.device)
        counts.scatter_add_(0, experts.long(), torch.ones_like(experts, dtype=torch.int64))
        in_flat = torch.zeros_like(experts, dtype=torch.int64)
        in_flat.scatter_(0, by_expert, torch.arange(pairs, device=ids.device))
        each = here.sum(1)
        return Arrivals(
            to_flat=slot[by_expert // ids.shape[1]],
            weights=weights.reshape(-1)[by_expert],
            counts=counts[:-1],
            by_row=in_flat[true_places(here.reshape(-1), pairs)],
            begins=(each.cumsum(0) - each)[true_places(comes, rows)],
        )


def _send(piece: Piece, tokens: torch.Tensor, sent: list[int], received: list[int]) -> Exchange:
    leaving = gather(piece, tokens, piece[0].new_empty((len(tokens), width_of(piece))))
    return _exchange(leaving, sent, received)


def _exchange(leaving: torch.Tensor, sent: list[int], received: list[int]) -> Exchange:
    return Exchange(leaving, sent, received, leaving.new_empty((sum(received), leaving.shape[1])))
