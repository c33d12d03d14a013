"""The peers of ep_plugin: the same exchange over `all_to_all_single` of torch.distributed.

`AllToAll` sends a row per (token, expert), between a sort and a gather, as Megatron's dispatcher does. The counts are
exchanged first, and reach the host while the device sorts and gathers. Combine gathers and sums, without atomic
additions; the weights stay with the token's owner. `RowPerRank` sends a row per (token, rank), with the token's ids and
weights behind it; combine returns one sum for each. `deep_ep` is DeepEP's low-latency mode, in deep_ep.py.

For another library, NCCL-EP for instance, write a class with the members of `AllToAll` and name it: `--peer
module:Class`. Two members are for comparisons alone, and may be missing. `in_order(out, state)` returns the output with
its rows in ep_plugin's order. `exact_fp8 = False` allows FP8 rows and scales that are not rounded as torch rounds them.

Shapes: R ranks, T tokens here, K experts per token, E_l experts per rank, N rows received.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ep_plugin.bench.exchange.workload import SCALE_BLOCK, Batch, Workload
from ep_plugin.config import DispatchLayout
from ep_plugin.moe.layout import DispatchOutput

ALL_TO_ALL, ROW_PER_RANK, RAIL, NO_PEER = "all_to_all", "row_per_rank", "rail", "none"
DEEP_EP = "deep_ep"  # also the name of its package


def received(**fields: Any) -> DispatchOutput:
    """An output whose other fields are None. It needs `tokens`, and where they exist `scales` and `topk_ids`."""
    missing: dict[str, Any] = dict.fromkeys(DispatchOutput._fields)
    return DispatchOutput(**missing | fields)


def find_peers(name: str) -> list[Any]:
    """The classes behind a name that `--peer` takes. ValueError for one that cannot be imported."""
    if name in (RAIL, NO_PEER):  # no exchange of tokens
        return []
    if name in PLAIN:
        return [PLAIN[name]]
    module, _, kind = ("ep_plugin.bench.exchange.deep_ep:DeepEp" if name == DEEP_EP else name).partition(":")
    try:
        return [getattr(importlib.import_module(module), kind)]
    except (ImportError, AttributeError, ValueError) as error:
        expected = f"{', '.join(PLAIN)}, {RAIL}, {NO_PEER}, or module:Class that can be imported"
        raise ValueError(f"peer: expected {expected}, got {name!r}: {error}") from error


def name_in_results(peer: str, backend: str) -> str:
    """backend: of the default group, which carries the plain peers."""
    return f"{backend}_{peer}" if peer in (*PLAIN, RAIL) else peer.rpartition(":")[2]


@dataclass(frozen=True, kw_only=True)
class Routing:
    """token: `[T*K]` the token of each pair, by (expert, token). position: `[T, K]` the positions of a token's pairs.

    to_flat: `[N]` the received row of each FLAT row; from_flat: the inverse. sent, received: rows per rank. counts:
    `[E_l]`. weights: `[T, K]`.
    """

    token: torch.Tensor
    position: torch.Tensor
    to_flat: torch.Tensor
    from_flat: torch.Tensor
    sent: list[int]
    received: list[int]
    counts: torch.Tensor
    weights: torch.Tensor


class AllToAll:
    """FLAT dispatch and combine. dedup: a token crosses once per rank, not once per expert. Made collectively."""

    layout, dedup = DispatchLayout.FLAT, False

    def __init__(self, workload: Workload, device: torch.device) -> None:
        self._ranks, self._experts = workload.ranks, workload.experts

    def dispatch(self, batch: Batch, previous: Any = None) -> tuple[DispatchOutput, Any]:
        """The output, see `received`, with rows in ep_plugin's order, and a state for combine and later dispatches.

        previous: the state of an earlier dispatch, whose routing is used again.
        """
        batch = _quantized(batch) if batch.quantize else batch
        if previous is None:
            leaving, routing = self._route(batch)
        else:
            leaving, routing = _rows(batch, previous.token), replace(previous, weights=batch.weights)
        arrived = _exchange(leaving, routing.sent, routing.received)
        width = batch.x.view(torch.int32).shape[1]
        tokens = arrived[:, :width].index_select(0, routing.to_flat).view(batch.x.dtype)
        scales = None
        if batch.scales is not None:
            scales = arrived[:, width:].index_select(0, routing.to_flat).view(batch.scales.dtype)
        return received(tokens=tokens, scales=scales, num_tokens_per_expert=routing.counts), routing

    def combine(self, y: torch.Tensor, state: Any) -> torch.Tensor:
        """`[T, H]`: the weighted sum of each token's rows in y `[N, H]`. Not called for TOKEN_MAJOR."""
        leaving = y.view(torch.int32).index_select(0, state.from_flat)
        rows = _exchange(leaving, state.received, state.sent).view(y.dtype)
        weights = state.weights.to(y.dtype)
        return torch.nn.functional.embedding_bag(state.position, rows, mode="sum", per_sample_weights=weights)

    def _route(self, batch: Batch) -> tuple[torch.Tensor, Routing]:
        """The rows in the order in which they leave, and their routing."""
        pair_ids = batch.ids.reshape(-1)
        leaving_counts = torch.zeros(self._experts, dtype=torch.int64, device=pair_ids.device)
        leaving_counts.scatter_add_(0, pair_ids, torch.ones_like(pair_ids))
        arriving_counts, rows_by_rank = _exchange_counts(leaving_counts.view(self._ranks, -1))
        order = torch.argsort(pair_ids.to(torch.int16), stable=True)  # short keys make a GPU's radix sort short
        token = order // batch.ids.shape[1]
        leaving = _rows(batch, token)
        sent, received = rows_by_rank()
        to_flat = _flat_order(arriving_counts, sum(received))
        return leaving, Routing(
            token=token,
            position=_inverse(order).view_as(batch.ids),
            to_flat=to_flat,
            from_flat=_inverse(to_flat),
            sent=sent,
            received=received,
            counts=arriving_counts.sum(0),
            weights=batch.weights,
        )


class Bags(NamedTuple):
    """Rows to be summed: the numbers `[n]` of those of all bags, one bag after the other, and where each begins."""

    rows: torch.Tensor
    begins: torch.Tensor

    def sums(self, rows: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
        """weights: `[n]`, by which rows are multiplied; None: by 1."""
        bag = torch.nn.functional.embedding_bag
        return bag(self.rows, rows, self.begins, mode="sum", per_sample_weights=weights)


@dataclass(frozen=True, kw_only=True)
class RankRouting:
    """token: `[M]` the token of each row that leaves, by (rank, token). leaving: those rows in bags of one token.

    here: `[N, K]` bool, the pairs of arrived rows whose experts are here. source: the arrived row of each FLAT row.
    arrived: FLAT rows in bags of one arrived row. weights: of the FLAT rows of `arrived`. sent, received: rows per
    rank. counts: `[E_l]`.
    """

    token: torch.Tensor
    leaving: Bags
    here: torch.Tensor
    source: torch.Tensor
    arrived: Bags
    weights: torch.Tensor
    sent: list[int]
    received: list[int]
    counts: torch.Tensor


class RowPerRank:
    """FLAT dispatch and combine with the members of `AllToAll`. A token crosses once per rank."""

    layout, dedup = DispatchLayout.FLAT, True

    def __init__(self, workload: Workload, device: torch.device) -> None:
        self._ranks, self._local = workload.ranks, workload.local_experts

    def dispatch(self, batch: Batch, previous: Any = None) -> tuple[DispatchOutput, Any]:
        batch = _quantized(batch) if batch.quantize else batch
        words = [batch.x.view(torch.int32), batch.weights.view(torch.int32)]
        if batch.scales is not None:
            words.append(batch.scales.view(torch.int32))
        if previous is None:
            needed = torch.zeros(len(batch.ids), self._ranks, dtype=torch.bool, device=batch.x.device)
            needed.scatter_(1, batch.ids // self._local, True)
            _, rows_by_rank = _exchange_counts(needed.sum(0).unsqueeze(1))
            token = needed.t().nonzero()[:, 1]
            words.append(batch.ids.to(torch.int32))
            leaving = _side_by_side(words, token)
            sent, landed = rows_by_rank()
        else:
            token, sent, landed = previous.token, previous.sent, previous.received
            leaving = _side_by_side(words, token)
        rows, weights, *beside = _exchange(leaving, sent, landed).split([part.shape[1] for part in words], 1)
        weights = weights.contiguous().view(batch.weights.dtype)
        if previous is None:
            routing = self._route(needed, token, beside.pop(), weights, sent, landed)
        else:
            routing = replace(previous, weights=weights[previous.here])
        tokens = rows.index_select(0, routing.source).view(batch.x.dtype)
        scales = beside[0].index_select(0, routing.source).view(torch.float32) if beside else None
        return received(tokens=tokens, scales=scales, num_tokens_per_expert=routing.counts), routing

    def combine(self, y: torch.Tensor, state: Any) -> torch.Tensor:
        partial = state.arrived.sums(y, state.weights.to(y.dtype))
        rows = _exchange(partial.view(torch.int32), state.received, state.sent).view(y.dtype)
        return state.leaving.sums(rows)

    def _route(
        self,
        needed: torch.Tensor,
        token: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        sent: list[int],
        landed: list[int],
    ) -> RankRouting:
        """needed: `[T, R]` bool. ids, weights: `[N, K]`, of the rows that have arrived."""
        local = ids - dist.get_rank() * self._local
        here = (local >= 0) & (local < self._local)
        expert, row = local[here], here.nonzero()[:, 0]
        order = torch.argsort(expert.to(torch.int16), stable=True)
        return RankRouting(
            token=token,
            leaving=Bags(torch.argsort(token, stable=True), _begins(needed.sum(1))),
            here=here,
            source=row[order],
            arrived=Bags(_inverse(order), _begins(here.sum(1))),
            weights=weights[here],
            sent=sent,
            received=landed,
            counts=torch.bincount(expert, minlength=self._local),
        )


PLAIN: dict[str, Any] = {ALL_TO_ALL: AllToAll, ROW_PER_RANK: RowPerRank}
"""The peers that have names."""


def _begins(sizes: torch.Tensor) -> torch.Tensor:
    return sizes.cumsum(0) - sizes


def _quantized(batch: Batch) -> Batch:
    """The batch as torch quantises it, operation by operation: FP8 with a scale per block, by its largest magnitude."""
    T, H = batch.x.shape
    whole = torch.nn.functional.pad(batch.x, (0, -H % SCALE_BLOCK)).view(T, -1, SCALE_BLOCK).float()
    amax = whole.abs().amax(2)
    scales = amax / torch.full_like(amax, torch.finfo(torch.float8_e4m3fn).max)  # GPUs multiply by 1/x for a number
    scales = torch.where(scales == 0, 1.0, scales)
    rows = (whole / scales.unsqueeze(2)).to(torch.float8_e4m3fn).view(T, -1)
    return replace(batch, x=rows[:, :H].contiguous(), scales=scales, quantize=False)


def _rows(batch: Batch, token: torch.Tensor) -> torch.Tensor:
    """The rows of `token` as 4-byte words, each with its scales behind it."""
    words = batch.x.view(torch.int32)
    if batch.scales is not None:
        words = torch.cat((words, batch.scales.view(torch.int32)), 1)
    return words.index_select(0, token)


def _side_by_side(words: list[torch.Tensor], token: torch.Tensor) -> torch.Tensor:
    """The rows of `token` in each of the tensors, `[T, n]` int32, beside each other."""
    rows = words[0].new_empty((len(token), sum(part.shape[1] for part in words)))
    for part, place in zip(words, rows.split([part.shape[1] for part in words], 1), strict=True):
        torch.index_select(part, 0, token, out=place)
    return rows


def _exchange(leaving: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
    arriving = leaving.new_empty((sum(received), leaving.shape[1]))
    dist.all_to_all_single(arriving, leaving, received, sent)
    return arriving


def _exchange_counts(leaving: torch.Tensor) -> tuple[torch.Tensor, Callable[[], list[list[int]]]]:
    """Exchanges counts `[R, n]`.

    Returns the counts that arrive, and a call that waits for the rows sent to and received from each rank.
    """
    both = torch.stack((leaving, torch.empty_like(leaving)))
    dist.all_to_all_single(both[1], both[0])
    rows = both.sum(2).to("cpu", non_blocking=True)
    copied = torch.cuda.current_stream().record_event() if both.is_cuda else None

    def wait() -> list[list[int]]:
        if copied is not None:
            copied.synchronize()
        return rows.tolist()

    return both[1], wait


def _flat_order(arriving: torch.Tensor, total: int) -> torch.Tensor:
    """The index of each FLAT row, by (expert, source), among rows by (source, expert). arriving: `[R, E_l]`."""
    starts = arriving.view(-1).cumsum(0).view_as(arriving) - arriving
    sizes = arriving.t().reshape(-1)
    before = sizes.cumsum(0) - sizes
    shift = (starts.t().reshape(-1) - before).repeat_interleave(sizes, output_size=total)
    return torch.arange(total, device=arriving.device) + shift


def _inverse(permutation: torch.Tensor) -> torch.Tensor:
    numbers = torch.arange(len(permutation), device=permutation.device)
    return torch.empty_like(permutation).scatter_(0, permutation, numbers)
