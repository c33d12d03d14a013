"""The peers of ep_plugin: the same exchange over `all_to_all_single` of torch.distributed.

- `AllToAll` sends a row per (token, expert), between a sort and a gather, as Megatron's dispatcher does. It exchanges
  the counts first. They reach the host while the device sorts and gathers. Combine gathers and sums, without atomic
  additions, in the fastest way of sums.py. The weights stay with the token's owner.
- `RowPerRank` sends a row per (token, rank), with the token's ids and weights behind it. Combine returns one sum for
  each row.
- `RailAllToAll` sends the bytes of the rows that must cross between nodes, and nothing else. It shows the rate that the
  links and the backend allow.
- `deep_ep` is DeepEP, in deep_ep.py.

For another library, for instance NCCL-EP, write a class with the members of `AllToAll` and name it: `--peer
module:Class`. Three members are optional. `dtypes` has the dtypes that the library serves; it takes part in no case of
another dtype. `in_order(out, state)` returns the output with its rows in ep_plugin's order. `exact_fp8 = False` allows
FP8 rows and scales that are not rounded as torch rounds them.

Shapes: R ranks, T tokens here, K experts per token, E_l experts per rank, N rows received (for the rail: N nodes).
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ep_plugin.bench.exchange.sums import weighted_sums
from ep_plugin.bench.exchange.workload import SCALE_BLOCK, Batch, Workload, random_like, seeds
from ep_plugin.bench.suite import Through
from ep_plugin.config import DispatchLayout
from ep_plugin.moe.layout import DispatchOutput

ALL_TO_ALL, ROW_PER_RANK, RAIL, NO_PEER = "all_to_all", "row_per_rank", "rail", "none"
DEEP_EP = "deep_ep"  # also the name of its package
_DEEP_EP = "ep_plugin.bench.exchange.deep_ep:DeepEp,DeepEpThroughput"


def received(**fields: Any) -> DispatchOutput:
    """Returns an output with `fields`; its other fields are None. `tokens` is required, and so are `scales` and
    `topk_ids` if they exist."""
    missing: dict[str, Any] = dict.fromkeys(DispatchOutput._fields)
    return DispatchOutput(**missing | fields)


def find_peers(name: str) -> list[Any]:
    """Returns the classes for a name that `--peer` takes. Raises ValueError if the name cannot be imported."""
    if name in (RAIL, NO_PEER):  # they exchange no tokens
        return []
    if name in PLAIN:
        return [PLAIN[name]]
    module, _, kinds = (_DEEP_EP if name == DEEP_EP else name).partition(":")
    try:
        return [getattr(importlib.import_module(module), kind) for kind in kinds.split(",")]
    except (ImportError, AttributeError, ValueError) as error:
        expected = f"{', '.join(PLAIN)}, {RAIL}, {NO_PEER}, or module:Class that can be imported"
        raise ValueError(f"peer: expected {expected}, got {name!r}: {error}") from error


def name_in_results(peer: str, backend: str) -> str:
    """Returns the name of a peer in results. backend: the backend of the default group, which carries plain peers."""
    return f"{backend}_{peer}" if peer in (*PLAIN, RAIL) else peer.rpartition(":")[2]


class Bags(NamedTuple):
    """Bags of rows. Each bag is summed.

    rows: the row numbers of all bags, one bag after the other, `[n]`.
    starts: where each bag begins in `rows`, `[bags]`.
    """

    rows: torch.Tensor
    starts: torch.Tensor

    def sums(self, rows: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
        """Returns `[bags, H]`. weights: `[n]`, a factor for each row of a bag; None: 1."""
        bag = torch.nn.functional.embedding_bag
        return bag(self.rows, rows, self.starts, mode="sum", per_sample_weights=weights)


@dataclass(frozen=True, kw_only=True)
class Routing:
    """The routing that a dispatch keeps for combine and for later dispatches.

    token: the token of each row that leaves.
    home: the returned rows of each token. With a row per expert: their numbers, `[T, K]`. With a row per rank: a bag
        for each token.
    sent, landed: rows to each rank, and rows from each rank.
    source: the arrived row of each FLAT row.
    there: with a row per expert, the FLAT row of each arrived row. With a row per rank, a bag of FLAT rows for each
        arrived row.
    counts: rows of each local expert, `[E_l]`.
    weights: with a row per expert, the factors of the rows in `home`; with a row per rank, of the rows in `there`.
    here: with a row per rank, `[N, K]` bool: whether the expert of an arrived row's pair is on this rank.
    """

    token: torch.Tensor
    home: Any
    sent: list[int]
    landed: list[int]
    source: torch.Tensor
    there: Any
    counts: torch.Tensor
    weights: torch.Tensor
    here: torch.Tensor | None = None


class AllToAll:
    """FLAT dispatch and combine with a row per (token, expert). Made collectively.

    Attributes:
        layout: the layout of the output.
        dedup: whether a token crosses once per rank (True) or once per expert (False).
    """

    layout, dedup = DispatchLayout.FLAT, False

    def __init__(self, workload: Workload, device: torch.device) -> None:
        self._ranks, self._experts, self._local = workload.ranks, workload.experts, workload.local_experts

    def dispatch(self, batch: Batch, previous: Any = None) -> tuple[DispatchOutput, Any]:
        """Dispatches a batch. Returns the output and a state for combine and later dispatches.

        The output is as `received` returns it, with rows in ep_plugin's order. previous: the state of an earlier
        dispatch, whose routing is used again.
        """
        batch = _quantized(batch) if batch.quantize else batch
        words = [part.view(torch.int32) for part in (batch.x, batch.scales) if part is not None]
        words += self._beside(batch, fresh=previous is None)
        if previous is None:
            counts, order = self._route(batch)
            arriving_counts, rows_by_rank = _exchange_counts(counts)
            token, home = order()
            leaving = _leaving(words, token)
            sent, landed = rows_by_rank()
        else:
            leaving, sent, landed = _leaving(words, previous.token), previous.sent, previous.landed
        arrived, *beside = _exchange(leaving, sent, landed).split([part.shape[1] for part in words], 1)
        scales = None if batch.scales is None else beside.pop(0)
        if previous is None:
            found = self._arrived(batch, arriving_counts, sum(landed), beside)
            routing = Routing(token=token, home=home, sent=sent, landed=landed, **found)
        else:
            routing = replace(previous, weights=self._weights(batch, previous.here, beside))
        tokens = arrived.index_select(0, routing.source).view(batch.x.dtype)
        if scales is not None:
            scales = scales.index_select(0, routing.source).view(torch.float32)
        return received(tokens=tokens, scales=scales, num_tokens_per_expert=routing.counts), routing

    def combine(self, y: torch.Tensor, state: Any) -> torch.Tensor:
        """Returns the weighted sum of each token's rows in y `[N, H]`, as `[T, H]`. Not called for TOKEN_MAJOR."""
        leaving = y.view(torch.int32).index_select(0, state.there)
        rows = _exchange(leaving, state.landed, state.sent).view(y.dtype)
        return weighted_sums(rows, state.home, state.weights.to(y.dtype))

    def _beside(self, batch: Batch, fresh: bool) -> list[torch.Tensor]:
        """Returns the 4-byte words that travel behind rows. fresh: the routing is new."""
        return []

    def _route(self, batch: Batch) -> tuple[torch.Tensor, Callable[[], tuple[torch.Tensor, Any]]]:
        """Returns the counts `[R, n]` of the rows that leave, and a call that makes `token` and `home`."""
        pair_ids = batch.ids.reshape(-1)
        counts = torch.zeros(self._experts, dtype=torch.int64, device=pair_ids.device)
        counts.scatter_add_(0, pair_ids, torch.ones_like(pair_ids))

        def order() -> tuple[torch.Tensor, torch.Tensor]:
            by_expert = torch.argsort(pair_ids.to(torch.int16), stable=True)  # short keys make a GPU's radix sort short
            return by_expert // batch.ids.shape[1], _inverse(by_expert).view_as(batch.ids)

        return counts.view(self._ranks, -1), order

    def _arrived(self, batch: Batch, counts: torch.Tensor, total: int, beside: list[torch.Tensor]) -> dict[str, Any]:
        """Returns the fields of the routing that depend on the arrived counts `[R, n]` and on the words beside rows."""
        source = _flat_order(counts, total)
        return {"source": source, "there": _inverse(source), "counts": counts.sum(0), "weights": batch.weights}

    def _weights(self, batch: Batch, here: torch.Tensor | None, beside: list[torch.Tensor]) -> torch.Tensor:
        return batch.weights


class RowPerRank(AllToAll):
    """FLAT dispatch and combine. A token crosses once per rank."""

    dedup = True

    def combine(self, y: torch.Tensor, state: Any) -> torch.Tensor:
        partial = state.there.sums(y, state.weights.to(y.dtype))
        return state.home.sums(_exchange(partial.view(torch.int32), state.landed, state.sent).view(y.dtype))

    def _beside(self, batch: Batch, fresh: bool) -> list[torch.Tensor]:
        return [batch.weights.view(torch.int32), *([batch.ids.to(torch.int32)] if fresh else [])]

    def _route(self, batch: Batch) -> tuple[torch.Tensor, Callable[[], tuple[torch.Tensor, Any]]]:
        needed = torch.zeros(len(batch.ids), self._ranks, dtype=torch.bool, device=batch.x.device)
        needed.scatter_(1, batch.ids // self._local, True)

        def order() -> tuple[torch.Tensor, Bags]:
            token = needed.t().nonzero()[:, 1]
            return token, Bags(torch.argsort(token, stable=True), _starts(needed.sum(1)))

        return needed.sum(0).unsqueeze(1), order

    def _arrived(self, batch: Batch, counts: torch.Tensor, total: int, beside: list[torch.Tensor]) -> dict[str, Any]:
        local = beside[1] - dist.get_rank() * self._local
        here = (local >= 0) & (local < self._local)
        expert, row = local[here], here.nonzero()[:, 0]
        order = torch.argsort(expert.to(torch.int16), stable=True)
        return {
            "source": row[order],
            "there": Bags(_inverse(order), _starts(here.sum(1))),
            "counts": torch.bincount(expert, minlength=self._local),
            "weights": self._weights(batch, here, beside),
            "here": here,
        }

    def _weights(self, batch: Batch, here: torch.Tensor | None, beside: list[torch.Tensor]) -> torch.Tensor:
        return beside[0].contiguous().view(batch.weights.dtype)[here]


class _Bytes(NamedTuple):
    """One all-to-all of bytes. received, sent: bytes from and to the rail's rank on each node."""

    arriving: torch.Tensor
    leaving: torch.Tensor
    received: list[int]
    sent: list[int]


class RailAllToAll:
    """A call makes one or two all-to-alls between the ranks of this rank's rail: there, back, or both.

    rows: `[R, N]`, rows of each rank for each other node, see `rows_over_rails`. there, back: bytes of a row in each
    direction; 0: no row goes in that direction. The constructor is collective over the default group.
    """

    def __init__(self, rows: torch.Tensor, there: int, back: int, device: torch.device) -> None:
        R, per_node = len(rows), len(rows) // rows.shape[1]
        self._rank = dist.get_rank()
        self._rail = list(range(self._rank % per_node, R, per_node))
        self._own = self._rank // per_node
        self._group = _rail_group(R, per_node)
        sent, received = rows[self._rank].tolist(), rows[self._rail, self._own].tolist()
        self._legs = []
        for leaving, arriving, size in ((sent, received, there), (received, sent, back)):
            sizes = [[rows * size for rows in side] for side in (arriving, leaving)]
            into, out = (torch.empty(sum(side), dtype=torch.uint8, device=device) for side in sizes)
            self._legs += [_Bytes(into, out, *sizes)] if size else []

    def __call__(self) -> None:
        for leg in self._legs:
            dist.all_to_all_single(*leg, group=self._group)

    def check(self, through: Through) -> str | None:
        """Sends bytes that no call has sent before. Returns the error in words if other bytes arrive. Collective."""
        turn = next(seeds)

        def content(number: int, rank: int, node: int, like: torch.Tensor) -> torch.Tensor:
            """Returns the bytes that a rank sends to a node in an all-to-all."""
            return random_like(((2 * turn + number) * 4096 + rank) * 4096 + node, like)

        for number, leg in enumerate(self._legs):
            for node, part in enumerate(leg.leaving.split(leg.sent)):
                part.copy_(content(number, self._rank, node, part))
            leg.arriving.fill_(0xA5)
        through(self)
        for number, leg in enumerate(self._legs):
            parts = zip(self._rail, leg.arriving.split(leg.received), strict=True)
            if not all(torch.equal(part, content(number, rank, self._own, part)) for rank, part in parts):
                return "expected the bytes that the other nodes have sent, got others"
        return None


@functools.cache
def _rail_group(ranks: int, per_node: int) -> dist.ProcessGroup:
    """Returns the group of this rank's rail. The first call is collective."""
    made = [dist.new_group(list(range(local, ranks, per_node))) for local in range(per_node)]
    return made[dist.get_rank() % per_node]


PLAIN: dict[str, Any] = {ALL_TO_ALL: AllToAll, ROW_PER_RANK: RowPerRank}
"""The peers of this module by their names for `--peer`."""


def _starts(sizes: torch.Tensor) -> torch.Tensor:
    return sizes.cumsum(0) - sizes


def _quantized(batch: Batch) -> Batch:
    """Quantises a batch with torch's operators: FP8 with a scale per block, from the block's largest magnitude."""
    T, H = batch.x.shape
    whole = torch.nn.functional.pad(batch.x, (0, -H % SCALE_BLOCK)).view(T, -1, SCALE_BLOCK).float()
    amax = whole.abs().amax(2)
    scales = amax / torch.full_like(amax, torch.finfo(torch.float8_e4m3fn).max)  # GPUs multiply by 1/x for a number
    scales = torch.where(scales == 0, 1.0, scales)
    rows = (whole / scales.unsqueeze(2)).to(torch.float8_e4m3fn).view(T, -1)
    return replace(batch, x=rows[:, :H].contiguous(), scales=scales, quantize=False)


def _leaving(words: list[torch.Tensor], token: torch.Tensor) -> torch.Tensor:
    """Returns the rows `token` of all tensors, `[T, n]` int32, beside each other."""
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
    """Returns, for each FLAT row, its index among rows in the order (source, expert). FLAT rows have the order (expert,
    source). arriving: `[R, E_l]`, rows that arrive."""
    starts = arriving.view(-1).cumsum(0).view_as(arriving) - arriving
    sizes = arriving.t().reshape(-1)
    before = sizes.cumsum(0) - sizes
    shift = (starts.t().reshape(-1) - before).repeat_interleave(sizes, output_size=total)
    return torch.arange(total, device=arriving.device) + shift


def _inverse(permutation: torch.Tensor) -> torch.Tensor:
    numbers = torch.arange(len(permutation), device=permutation.device)
    return torch.empty_like(permutation).scatter_(0, permutation, numbers)
