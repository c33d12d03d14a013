"""What ep_plugin is compared with: the same exchanges over torch.distributed, as well as they can be written there.

`AllToAll` sends a row per (token, expert) by `all_to_all_single`, between a sort and a gather, as Megatron's all-to-all
dispatcher does it; peers_dedup.py has one that sends a row per (token, rank). The counts go first, are exchanged beside
the sort and the gather, and reach the host while the device gathers, so that the exchange of the rows is enqueued in
time. Scales travel in the exchange of their rows. What only indices need is computed while rows are on the wire, and
where that is faster (`tune`) rows go in pieces, one gathered while another is under way. Combine gathers and sums,
without atomic additions. The weights stay with the token's owner, which applies them in combine.

Shapes: R ranks, T tokens here, K experts per token, E_l experts per rank, N rows received.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ep_plugin.bench.exchange import (
    Early,
    Exchange,
    Piece,
    columns,
    gather,
    pieces_of,
    spread,
    width_of,
    words,
)
from ep_plugin.bench.sums import Fastest, bag_sum, chunked_sum, gathered_sum
from ep_plugin.bench.timing import Run, clock_of, time_in_turn
from ep_plugin.bench.workload import SCALE_BLOCK, Batch, Workload

PIECES = (1, 2, 4)  # that `tune` tries


@dataclass(frozen=True, kw_only=True)
class Received:
    """What a dispatch brought. counts: `[E_l]` rows per expert. ids: `[N, K]`, TOKEN_MAJOR only. weights: `[N, K]`, in
    FLAT `[N]`, where they travel. row_experts: `[N]` local experts where the way tells them, -1: no row.

    state: what combine, and a dispatch over the same routing, need.
    """

    tokens: torch.Tensor
    scales: torch.Tensor | None = None
    counts: torch.Tensor | None = None
    ids: torch.Tensor | None = None
    weights: torch.Tensor | None = None
    row_experts: torch.Tensor | None = None
    state: object = None


class Dispatcher(Protocol):
    """One way to bring tokens to their experts. dedup: whether a token crosses once per rank, not once per expert."""

    dedup: bool

    def dispatch(self, batch: Batch, previous: object = None) -> Received:
        """previous: the state of an earlier dispatch, whose routing is used again."""


class Exchanger(Dispatcher, Protocol):
    def combine(self, y: torch.Tensor, state: object) -> torch.Tensor:
        """Weighted sum of each token's rows; state: of the dispatch that brought them."""


class InPieces(Exchanger, Protocol):
    """One whose rows go in pieces, as many as these say."""

    dispatch_pieces: int
    combine_pieces: int


def tune(peer: InPieces, batch: Batch, device: torch.device, choices: tuple[int, ...] = PIECES) -> None:
    """Chooses the pieces that are fastest here, the same on all ranks. Collective."""
    clock = clock_of(device)

    def fastest(what: str, run: Callable[[], Any]) -> int:
        def in_pieces(count: int) -> None:
            setattr(peer, what, count)
            run()

        runs: dict[str, Run] = {str(count): functools.partial(in_pieces, count) for count in choices}
        found = time_in_turn(clock, runs, iterations=7, warmup=2)
        return min(choices, key=lambda count: found[str(count)].median_us)

    peer.dispatch_pieces = fastest("dispatch_pieces", lambda: peer.dispatch(batch))
    if batch.scales is None:
        received = peer.dispatch(batch)
        peer.combine_pieces = fastest("combine_pieces", lambda: peer.combine(received.tokens, received.state))


@dataclass(frozen=True, kw_only=True)
class Routing:
    """token: `[T*K]` that of each pair, pairs by (expert, token); position: where those of each token are, `[T, K]`.
    to_flat: for each FLAT row the received row, from_flat: the inverse. sent, received: rows per rank. weights:
    `[T, K]`."""

    token: torch.Tensor
    position: torch.Tensor
    to_flat: torch.Tensor
    from_flat: torch.Tensor
    sent: list[int]
    received: list[int]
    counts: torch.Tensor
    weights: torch.Tensor


class AllToAll:
    """FLAT dispatch and combine over `all_to_all_single`."""

    dedup = False

    def __init__(self, workload: Workload, device: torch.device) -> None:
        self._ranks, self._experts = workload.ranks, workload.experts
        self._early = Early(device)
        self._sum = Fastest(bag_sum, gathered_sum, chunked_sum)
        self._one = torch.ones(1, dtype=torch.int64, device=device)
        self._most_numbers = torch.arange(workload.tokens * workload.topk, device=device)
        self.dispatch_pieces = self.combine_pieces = 1

    def dispatch(self, batch: Batch, previous: object = None) -> Received:
        """Rows of this rank's experts in FLAT order: by expert, source rank, source token."""
        known = previous if isinstance(previous, Routing) else None
        pieces = pieces_of(batch.x, batch.scales, self.dispatch_pieces)
        if known is not None:
            under_way = self._start_all(pieces, known.token, known.sent, known.received)
            return self._finish(under_way, batch, replace(known, weights=batch.weights))
        pair_ids = batch.ids.reshape(-1)
        self._early.start(functools.partial(self._exchange_counts, pair_ids), _rows_by_rank)
        order = torch.argsort(short_keys(pair_ids, self._experts - 1), stable=True)
        token = order // batch.ids.shape[1]
        first = self._gather(0, pieces[0], token)
        (sent, received), (both,) = self._early.read()
        under_way = self._start_all(pieces, token, sent, received, first)
        arriving = both[1]
        to_flat, from_flat = _permutation(arriving, self._numbers(sum(received)))
        position = torch.empty_like(order).scatter_(0, order, self._numbers(len(order)))
        routing = Routing(
            token=token, position=position.view_as(batch.ids), to_flat=to_flat, from_flat=from_flat,
            sent=sent, received=received, counts=arriving.sum(0), weights=batch.weights,
        )  # fmt: skip
        return self._finish(under_way, batch, routing)

    def combine(self, y: torch.Tensor, state: object) -> torch.Tensor:
        """The weighted sum of each token's rows: `[T, H]`."""
        assert isinstance(state, Routing)
        pieces = pieces_of(y, None, self.combine_pieces)
        under_way = self._start_all(pieces, state.from_flat, state.received, state.sent)
        weights = state.weights.to(y.dtype)
        sums = (self._sum(rows.wait().view(y.dtype), state.position, weights) for rows in under_way)
        return side_by_side(sums, y, len(weights), self.combine_pieces)

    def leaving(self, batch: Batch, routing: Routing) -> torch.Tensor:
        """All rows, and their scales beside them if they have some, in the order in which they leave."""
        (piece,) = pieces_of(batch.x, batch.scales, 1)
        return self._gather(0, piece, routing.token)

    def exchange(self, leaving: torch.Tensor, routing: Routing) -> torch.Tensor:
        """The bare exchange of what `leaving` made, in the order in which it arrives."""
        return self._start(0, leaving, routing.sent, routing.received).wait()

    def arrange(self, arrived: Iterable[torch.Tensor], batch: Batch, routing: Routing, pieces: int = 1) -> Received:
        """What arrived, by piece, in FLAT order."""
        tokens, scales = in_order(arrived, batch, routing.to_flat, pieces)
        return Received(tokens=tokens, scales=scales, counts=routing.counts, state=routing)

    def _finish(self, under_way: list[Exchange], batch: Batch, routing: Routing) -> Received:
        return self.arrange((rows.wait() for rows in under_way), batch, routing, len(under_way))

    def _exchange_counts(self, pair_ids: torch.Tensor) -> tuple[Any, tuple[torch.Tensor]]:
        """Pairs of each expert that leave and arrive: `[2, R, E_l]`."""
        both = torch.zeros((2, self._ranks, self._experts // self._ranks), dtype=torch.int64, device=pair_ids.device)
        both[0].view(-1).scatter_add_(0, pair_ids, self._one.expand_as(pair_ids))
        return dist.all_to_all_single(both[1], both[0], async_op=True), (both,)

    def _numbers(self, count: int) -> torch.Tensor:
        """0, 1, 2, and so on, kept from call to call."""
        if len(self._most_numbers) < count:
            self._most_numbers = torch.arange(count, device=self._most_numbers.device)
        return self._most_numbers[:count]

    def _start_all(
        self,
        pieces: list[Piece],
        index: torch.Tensor,
        sent: list[int],
        received: list[int],
        first: torch.Tensor | None = None,
    ) -> list[Exchange]:
        """Gathers and sends the pieces, one after the other. first: the first one's, gathered already."""
        under_way = []
        for number, piece in enumerate(pieces):
            leaving = first if number == 0 and first is not None else self._gather(number, piece, index)
            under_way.append(self._start(number, leaving, sent, received))
        return under_way

    def _start(self, number: int, leaving: torch.Tensor, sent: list[int], received: list[int]) -> Exchange:
        arriving = self._room(f"arriving {number}", sum(received), leaving.shape[1], leaving)
        return Exchange(leaving, sent, received, arriving)

    def _gather(self, number: int, piece: Piece, index: torch.Tensor) -> torch.Tensor:
        room = self._room(f"leaving {number}", len(index), width_of(piece), piece[0])
        return gather(piece, index, room)

    def _room(self, what: str, rows: int, width: int, like: torch.Tensor) -> torch.Tensor:
        """Memory for rows under way, `[rows, width]` of `like`'s type and device."""
        return like.new_empty((rows, width))


class AllToAllKept(AllToAll):
    """The same with memory for rows under way that is kept from call to call, as no framework does it.

    It matters on CPUs, where fresh memory of many megabytes costs more than the copies into it; torch's CUDA allocator
    keeps memory by itself.
    """

    def __init__(self, workload: Workload, device: torch.device) -> None:
        super().__init__(workload, device)
        self._blocks: dict[str, torch.Tensor] = {}

    def _room(self, what: str, rows: int, width: int, like: torch.Tensor) -> torch.Tensor:
        numel = rows * width
        block = self._blocks.get(what)
        if block is None or block.dtype is not like.dtype or block.numel() < numel:
            block = self._blocks[what] = like.new_empty(numel)
        return block[:numel].view(rows, width)


class QuantizedFirst:
    """Another way to dispatch, of rows that torch quantises before, operation by operation, in float32."""

    def __init__(self, way: Dispatcher) -> None:
        self._way, self.dedup = way, way.dedup

    def dispatch(self, batch: Batch, previous: object = None) -> Received:
        return self._way.dispatch(quantized(batch), previous)


def quantized(batch: Batch) -> Batch:
    """Rows as FP8 with scales, for each block of 128 by its largest magnitude."""
    T, H = batch.x.shape
    whole = torch.nn.functional.pad(batch.x, (0, -H % SCALE_BLOCK)).view(T, -1, SCALE_BLOCK).float()
    amax = whole.abs().amax(2)
    scales = amax / torch.full_like(amax, torch.finfo(torch.float8_e4m3fn).max)  # a number: a product on GPUs
    scales = torch.where(scales == 0, 1.0, scales)
    rows = (whole / scales.unsqueeze(2)).to(torch.float8_e4m3fn).view(T, -1)
    return replace(batch, x=rows[:, :H].contiguous(), scales=scales, quantize=False)


class TokenMajorAllToAll:
    """TOKEN_MAJOR dispatch: a token's row travels once per rank, its ids and weights beside it."""

    dedup = True

    def __init__(self, workload: Workload, device: torch.device) -> None:
        self._ranks, self._local = workload.ranks, workload.experts // workload.ranks
        self._early = Early(device)

    def dispatch(self, batch: Batch, previous: object = None) -> Received:
        """Rows by (source rank, source token), which is the order in which they arrive."""
        T, K = batch.ids.shape
        goes = torch.zeros(T, self._ranks, dtype=torch.bool, device=batch.ids.device)
        goes.scatter_(1, batch.ids // self._local, True)
        self._early.start(functools.partial(self._exchange_counts, goes), _rows_by_rank)
        by_rank = goes.t().reshape(-1)
        order = true_places(by_rank, len(by_rank)) % T
        scales = [] if batch.scales is None else [batch.scales.view(torch.int32)]
        beside = torch.cat((batch.ids.int(), batch.weights.view(torch.int32), *scales), 1)
        (sent, received), _ = self._early.read()
        order = order[: sum(sent)]
        exchanges = []
        for part in (words(batch.x), beside):
            arriving = part.new_empty((sum(received), part.shape[1]))
            exchanges.append(Exchange(part.index_select(0, order), sent, received, arriving))
        tokens, beside = [exchange.wait() for exchange in exchanges]
        ids = beside[:, :K] - dist.get_rank() * self._local
        here = (ids >= 0) & (ids < self._local)
        return Received(
            tokens=tokens.view(batch.x.dtype),
            scales=beside[:, 2 * K :].contiguous().view(torch.float32) if scales else None,
            ids=torch.where(here, ids, -1),
            weights=torch.where(here, beside[:, K : 2 * K].view(torch.float32), 0.0),
        )

    def _exchange_counts(self, goes: torch.Tensor) -> tuple[Any, tuple[torch.Tensor]]:
        """Rows that leave and arrive: `[2, R, 1]`."""
        both = torch.empty((2, self._ranks, 1), dtype=torch.int64, device=goes.device)
        torch.sum(goes, 0, out=both[0, :, 0])
        return dist.all_to_all_single(both[1], both[0], async_op=True), (both,)


def in_order(
    arrived: Iterable[torch.Tensor], batch: Batch, order: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Tokens and scales, row `order[i]` of what arrived as row i. arrived: `count` pieces as `pieces_of` makes them."""
    tokens = batch.x.new_empty((len(order), batch.x.shape[1]))
    scales = None if batch.scales is None else batch.scales.new_empty((len(order), batch.scales.shape[1]))
    for rows, piece in zip(arrived, pieces_of(tokens, scales, count), strict=True):
        spread(rows, order, piece)
    return tokens, scales


def side_by_side(parts: Iterable[torch.Tensor], like: torch.Tensor, rows: int, count: int) -> torch.Tensor:
    """`count` pieces of columns as rows of `like`'s width and type."""
    if count == 1:
        (whole,) = parts
        return whole
    out = like.new_empty((rows, like.shape[1]))
    cuts = columns(words(out), count)
    for part, first, last in zip(parts, cuts[:-1], cuts[1:], strict=True):
        words(out)[:, first:last].copy_(words(part))
    return out


def short_keys(ids: torch.Tensor, most: int) -> torch.Tensor:
    """ids up to `most` in the shortest type that holds them: it makes the radix sort of a GPU short."""
    return ids.to(torch.uint8 if most <= 255 else torch.int16)


def true_places(mask: torch.Tensor, most: int) -> torch.Tensor:
    """Where the mask `[n]` is true, in order: `[most]`, of which no more are defined than are true. No host waits."""
    place = torch.where(mask, mask.cumsum(0) - 1, most)
    found = torch.zeros(most + 1, dtype=torch.int64, device=mask.device)
    return found.scatter_(0, place, torch.arange(len(mask), device=mask.device))[:most]


def _rows_by_rank(both: torch.Tensor) -> torch.Tensor:
    """Counts `[2, R, n]` as rows `[2, R]`."""
    return both.sum(2) if both.shape[2] > 1 else both.squeeze(2)


def _permutation(arriving: torch.Tensor, every: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """arriving: `[R, E_l]` rows, every: their numbers. They arrive by (source, expert) and are wanted by (expert,
    source): for each wanted row where it arrived, and the inverse."""
    ends = arriving.t().reshape(-1).cumsum(0)
    # Each lies as far from its end here as there.
    shift = ends - arriving.view(-1).cumsum(0).view_as(arriving).t().reshape(-1)
    to_flat = every - shift.index_select(0, torch.searchsorted(ends, every, right=True))
    return to_flat, torch.empty_like(to_flat).scatter_(0, to_flat, every)
