"""What ep_plugin is compared with: the same exchanges over torch.distributed, as well as they can be written there.

Rows travel as opaque 8-byte words, once per (token, expert), by `all_to_all_single` between a sort and a gather, as
Megatron's all-to-all dispatcher does it. The counts go first, travel beside the sort and the gather, and reach the host
while the device gathers, so that the exchange of the rows is enqueued in time; what only indices need is computed while
the rows are on the wire; combine gathers and sums, without atomic additions. The weights stay with the token's owner,
which applies them in combine: less travels than in ep_plugin's dispatch.

Shapes: R ranks, T tokens here, K experts per token, E_l experts per rank, N rows received.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.distributed as dist

from ep_plugin.bench.workload import SCALE_BLOCK, Batch, Workload


@dataclass(frozen=True, kw_only=True)
class Received:
    """What a dispatch brought. counts: `[E_l]` rows per expert. ids, weights: `[N, K]`, TOKEN_MAJOR only.

    state: what combine, and a dispatch over the same routing, need.
    """

    tokens: torch.Tensor
    scales: torch.Tensor | None = None
    counts: torch.Tensor | None = None
    ids: torch.Tensor | None = None
    weights: torch.Tensor | None = None
    state: object = None


class Dispatcher(Protocol):
    """One way to bring tokens to their experts. dedup: whether a token crosses once per rank, not once per expert."""

    dedup: bool

    def dispatch(self, batch: Batch, previous: object = None) -> Received:
        """previous: the state of an earlier dispatch, whose routing is used again."""


@dataclass(frozen=True, kw_only=True)
class Routing:
    """order: `[T*K]` pairs by (expert, token); position: its inverse `[T, K]`. to_flat: for each FLAT row the received
    row, from_flat: the inverse. sent, received: rows per rank. weights: `[T, K]`."""

    order: torch.Tensor
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
        self._counts = _Counts(workload.ranks, device)
        self._sum = Fastest(bag_sum, gathered_sum)
        # Experts are few: short keys make the radix sort of a GPU short.
        self._key = torch.uint8 if workload.experts <= 256 else torch.int16

    def dispatch(self, batch: Batch, previous: object = None) -> Received:
        """Rows of this rank's experts in FLAT order: by expert, source rank, source token."""
        if isinstance(previous, Routing):
            leaving = self.gather(batch, previous.order)
            return self._finish(self._start_all(leaving, previous.sent, previous.received), batch, previous)
        pair_ids = batch.ids.reshape(-1)
        per_expert = torch.zeros(self._experts, dtype=torch.int64, device=pair_ids.device)
        per_expert.scatter_add_(0, pair_ids, torch.ones_like(pair_ids))
        self._counts.start(per_expert.view(self._ranks, -1))
        order = torch.argsort(pair_ids.to(self._key), stable=True)
        leaving = self.gather(batch, order)
        arriving, sent, received = self._counts.read()
        exchanges = self._start_all(leaving, sent, received)
        to_flat, from_flat = _permutation(arriving, sum(received))
        position = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        routing = Routing(
            order=order, position=position.view_as(batch.ids), to_flat=to_flat, from_flat=from_flat,
            sent=sent, received=received, counts=arriving.sum(0), weights=batch.weights,
        )  # fmt: skip
        return self._finish(exchanges, batch, routing)

    def combine(self, y: torch.Tensor, state: object) -> torch.Tensor:
        """The weighted sum of each token's rows: `[T, H]`."""
        assert isinstance(state, Routing)
        (back,) = self._start_all([self._select("leaving", _words(y), state.from_flat)], state.received, state.sent)
        return self._sum(back.wait().view(y.dtype), state.position, state.weights.to(y.dtype))

    def gather(self, batch: Batch, order: torch.Tensor) -> list[torch.Tensor]:
        """The rows, and their scales if they have some, in the order in which they leave."""
        token = order // batch.ids.shape[1]
        rows = self._select("leaving", _words(batch.x), token)
        return [rows] if batch.scales is None else [rows, self._select("leaving scales", batch.scales, token)]

    def exchange(self, leaving: list[torch.Tensor], routing: Routing) -> list[torch.Tensor]:
        """The bare exchange of what `gather` made, in the order in which it arrives."""
        return [exchange.wait() for exchange in self._start_all(leaving, routing.sent, routing.received)]

    def arrange(self, arrived: list[torch.Tensor], batch: Batch, routing: Routing) -> Received:
        """What `exchange` returned, in FLAT order."""
        tokens, *scales = [part.index_select(0, routing.to_flat) for part in arrived]
        return Received(
            tokens=tokens.view(batch.x.dtype),
            scales=scales[0] if scales else None,
            counts=routing.counts,
            state=routing,
        )

    def _start_all(self, leaving: list[torch.Tensor], sent: list[int], received: list[int]) -> list[_Exchange]:
        rows = sum(received)
        arriving = [self._room(f"arriving {part}", rows, like) for part, like in enumerate(leaving)]
        return [_Exchange(part, sent, received, into) for part, into in zip(leaving, arriving, strict=True)]

    def _finish(self, exchanges: list[_Exchange], batch: Batch, routing: Routing) -> Received:
        return self.arrange([exchange.wait() for exchange in exchanges], batch, routing)

    def _select(self, what: str, rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return torch.index_select(rows, 0, index, out=self._room(what, len(index), rows))

    def _room(self, what: str, rows: int, like: torch.Tensor) -> torch.Tensor:
        """Memory for rows under way, `[rows, width]` of `like`'s width, type and device."""
        return like.new_empty((rows, like.shape[1]))


class AllToAllKept(AllToAll):
    """The same with memory for rows under way that is kept from call to call, as no framework does it.

    It matters on CPUs, where fresh memory of many megabytes costs more than the copies into it; torch's CUDA allocator
    keeps memory by itself.
    """

    def __init__(self, workload: Workload, device: torch.device) -> None:
        super().__init__(workload, device)
        self._blocks: dict[str, torch.Tensor] = {}

    def _room(self, what: str, rows: int, like: torch.Tensor) -> torch.Tensor:
        numel = rows * like.shape[1]
        block = self._blocks.get(what)
        if block is None or block.dtype is not like.dtype or block.numel() < numel:
            block = self._blocks[what] = like.new_empty(numel)
        return block[:numel].view(rows, like.shape[1])


class QuantizedFirst:
    """Another way to dispatch, of rows that torch quantises before: for each block of 128 by its largest magnitude."""

    def __init__(self, way: Dispatcher) -> None:
        self._way, self.dedup = way, way.dedup

    def dispatch(self, batch: Batch, previous: object = None) -> Received:
        T, H = batch.x.shape
        whole = torch.nn.functional.pad(batch.x, (0, -H % SCALE_BLOCK)).view(T, -1, SCALE_BLOCK).float()
        amax = whole.abs().amax(2)
        scales = amax / torch.full_like(amax, torch.finfo(torch.float8_e4m3fn).max)  # a number: a product on GPUs
        scales = torch.where(scales == 0, 1.0, scales)
        rows = (whole / scales.unsqueeze(2)).to(torch.float8_e4m3fn).view(T, -1)
        return self._way.dispatch(replace(batch, x=rows[:, :H].contiguous(), scales=scales, quantize=False), previous)


class TokenMajorAllToAll:
    """TOKEN_MAJOR dispatch: a token's row travels once per rank, its ids and weights beside it."""

    dedup = True

    def __init__(self, workload: Workload, device: torch.device) -> None:
        self._ranks, self._local = workload.ranks, workload.experts // workload.ranks
        self._counts = _Counts(workload.ranks, device)

    def dispatch(self, batch: Batch, previous: object = None) -> Received:
        """Rows by (source rank, source token), which is the order in which they arrive."""
        T, K = batch.ids.shape
        goes = torch.zeros(T, self._ranks, dtype=torch.bool, device=batch.ids.device)
        goes.scatter_(1, batch.ids // self._local, True)
        self._counts.start(goes.sum(0).unsqueeze(1))
        by_rank = goes.t().reshape(-1)
        place = torch.where(by_rank, by_rank.cumsum(0) - 1, by_rank.numel())
        token = torch.arange(T, device=place.device).repeat(self._ranks)
        order = torch.empty(by_rank.numel() + 1, dtype=torch.int64, device=place.device).scatter_(0, place, token)
        scales = [] if batch.scales is None else [batch.scales.view(torch.int32)]
        beside = torch.cat((batch.ids.int(), batch.weights.view(torch.int32), *scales), 1)
        _, sent, received = self._counts.read()
        order = order[: sum(sent)]
        exchanges = []
        for part in (_words(batch.x), beside):
            arriving = part.new_empty((sum(received), part.shape[1]))
            exchanges.append(_Exchange(part.index_select(0, order), sent, received, arriving))
        tokens, beside = [exchange.wait() for exchange in exchanges]
        ids = beside[:, :K] - dist.get_rank() * self._local
        here = (ids >= 0) & (ids < self._local)
        return Received(
            tokens=tokens.view(batch.x.dtype),
            scales=beside[:, 2 * K :].contiguous().view(torch.float32) if scales else None,
            ids=torch.where(here, ids, -1),
            weights=torch.where(here, beside[:, K : 2 * K].view(torch.float32), 0.0),
        )


class _Exchange:
    """Rows on their way: `sent` and `received` rows per rank."""

    def __init__(self, leaving: torch.Tensor, sent: list[int], received: list[int], arriving: torch.Tensor) -> None:
        self._leaving, self._arriving = leaving, arriving
        work = dist.all_to_all_single(arriving, leaving, received, sent, async_op=True)
        assert work is not None
        self._work = work

    def wait(self) -> torch.Tensor:
        self._work.wait()
        return self._arriving


class _Counts:
    """The exchange of counts, `[R, n]` leaving and `[R, n]` arriving, and their sums by rank on their way to the host.

    On GPUs all of it runs beside what the caller enqueues meanwhile. One at a time.
    """

    def __init__(self, ranks: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._host = torch.empty(2, ranks, dtype=torch.int64, pin_memory=on_gpu)
        self._stream = torch.cuda.Stream(device) if on_gpu else None

    def start(self, leaving: torch.Tensor) -> None:
        self._leaving, self._arriving = leaving, torch.empty_like(leaving)
        self._work = dist.all_to_all_single(self._arriving, leaving, async_op=True)
        if self._stream is not None:
            with torch.cuda.stream(self._stream):
                self._fetch()
                self._ready = self._stream.record_event()

    def read(self) -> tuple[torch.Tensor, list[int], list[int]]:
        """What arrives, and the rows that leave for and arrive from each rank. The host waits for the counts only."""
        if self._stream is None:
            self._fetch()
        else:
            self._ready.synchronize()
        sent, received = self._host.tolist()
        return self._arriving, sent, received

    def _fetch(self) -> None:
        assert self._work is not None
        self._work.wait()
        self._host.copy_(torch.stack((self._leaving, self._arriving)).sum(2), non_blocking=self._stream is not None)


# What adds up a token's rows: rows `[N, H]`, position `[T, K]` in them, weights `[T, K]` of the rows' type -> `[T, H]`.
Summation = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def bag_sum(rows: torch.Tensor, position: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Gathers and sums in one pass."""
    return torch.nn.functional.embedding_bag(position, rows, mode="sum", per_sample_weights=weights)


def gathered_sum(rows: torch.Tensor, position: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Gathers with wide elements, then sums by a product of matrices."""
    T, K = position.shape
    gathered = _words(rows).index_select(0, position.reshape(-1)).view(rows.dtype).view(T, K, -1)
    return torch.bmm(weights.unsqueeze(1), gathered).squeeze(1)


class Fastest:
    """Calls the candidate that was fastest here when it was called first: which one that is depends on the device."""

    def __init__(self, *candidates: Summation) -> None:
        self._candidates, self._chosen = candidates, candidates[0]
        self._known = False

    def __call__(self, rows: torch.Tensor, position: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if not self._known:
            self._known = True
            seconds = [_seconds(candidate, rows, position, weights) for candidate in self._candidates]
            self._chosen = self._candidates[seconds.index(min(seconds))]
        return self._chosen(rows, position, weights)


def _seconds(run: Summation, rows: torch.Tensor, position: torch.Tensor, weights: torch.Tensor) -> float:
    """Of some calls after the first."""

    def finished() -> float:
        if rows.is_cuda:
            torch.cuda.synchronize(rows.device)
        return time.perf_counter()

    run(rows, position, weights)
    began = finished()
    for _ in range(3):
        run(rows, position, weights)
    return finished() - began


def _permutation(arriving: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """arriving: `[R, E_l]` rows. They arrive by (source, expert) and are wanted by (expert, source): for each wanted
    row where it arrived, and the inverse."""
    in_flat_order = arriving.t().contiguous()
    shift = _exclusive(in_flat_order).t() - _exclusive(arriving)
    every = torch.arange(rows, device=arriving.device)
    to_flat = every - shift.t().reshape(-1).repeat_interleave(in_flat_order.view(-1), output_size=rows)
    from_flat = every + shift.reshape(-1).repeat_interleave(arriving.reshape(-1), output_size=rows)
    return to_flat, from_flat


def _words(rows: torch.Tensor) -> torch.Tensor:
    return rows.view(torch.int64)


def _exclusive(counts: torch.Tensor) -> torch.Tensor:
    """Where each entry's rows start when all entries lie one after the other."""
    flat = counts.reshape(-1)
    return (flat.cumsum(0) - flat).view_as(counts)
