"""What ep_plugin is compared with: the same exchange over `all_to_all_single` of torch.distributed.

`--peer` picks. The all-to-all sends a row per (token, expert), between a sort and a gather, as Megatron's dispatcher
does. The counts are exchanged first, and reach the host while the device sorts and gathers. Combine gathers and sums,
without atomic additions; the weights stay with the token's owner. For another library, DeepEP or NCCL-EP for instance,
write a class as `Peer` says and name it, `--peer module:Class`.

Shapes: R ranks, T tokens here, K experts per token, E_l experts per rank, N rows received.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist

from ep_plugin.bench.exchange.workload import SCALE_BLOCK, Batch, Workload
from ep_plugin.config import DispatchLayout

ALL_TO_ALL, NO_PEER = "all_to_all", "none"


@dataclass(frozen=True, kw_only=True)
class Received:
    """The result of a dispatch, `tokens` `[N, H]` with its scales; a field that an implementation lacks is None.

    counts: `[E_l]` rows per expert, FLAT only. ids: `[N, K]` local experts, TOKEN_MAJOR only. weights: `[N, K]`, in
    FLAT `[N]`. row_experts: `[N]` the local expert of each FLAT row, -1 for padding. state: what a combine, and a
    dispatch over the same routing, take.
    """

    tokens: torch.Tensor
    scales: torch.Tensor | None = None
    counts: torch.Tensor | None = None
    ids: torch.Tensor | None = None
    weights: torch.Tensor | None = None
    row_experts: torch.Tensor | None = None
    state: Any = None


class Peer(Protocol):
    """An implementation of dispatch, and in FLAT of combine.

    It is made of the workload and the device, collectively. layout: of its dispatches. dedup: a token crosses once per
    rank, not once per expert.
    """

    layout: ClassVar[DispatchLayout]
    dedup: ClassVar[bool]

    def dispatch(self, batch: Batch, previous: Any = None) -> Received:
        """Rows by (expert, source rank, source token), or in TOKEN_MAJOR by (source rank, source token).

        previous: the state of an earlier dispatch, whose routing is used again.
        """

    def combine(self, y: torch.Tensor, state: Any) -> torch.Tensor:
        """`[T, H]`: the weighted sum of each token's rows in y `[N, H]`. state: of the dispatch that brought them.

        No case combines TOKEN_MAJOR rows: peers of that layout go without it.
        """


def find_peers(name: str) -> list[Any]:
    """The classes behind a name that `--peer` takes. ValueError for one that cannot be imported."""
    if name == NO_PEER:
        return []
    if name == ALL_TO_ALL:
        return [AllToAll]
    module, _, kind = name.partition(":")
    try:
        return [getattr(importlib.import_module(module), kind)]
    except (ImportError, AttributeError, ValueError) as error:
        expected = f"{ALL_TO_ALL}, {NO_PEER}, or module:Class that can be imported"
        raise ValueError(f"peer: expected {expected}, got {name!r}: {error}") from error


@dataclass(frozen=True, kw_only=True)
class Routing:
    """token: `[T*K]` the token of each pair, by (expert, token). position: `[T, K]` the places of a token's pairs.

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
    """FLAT dispatch and combine."""

    layout, dedup = DispatchLayout.FLAT, False

    def __init__(self, workload: Workload, device: torch.device) -> None:
        self._ranks, self._experts = workload.ranks, workload.experts

    def dispatch(self, batch: Batch, previous: Any = None) -> Received:
        if previous is not None:
            routing = replace(previous, weights=batch.weights)
            return self.arrange(self.exchange(self.leaving(batch, routing.token), routing), batch, routing)
        pair_ids = batch.ids.reshape(-1)
        leaving_counts = torch.zeros(self._experts, dtype=torch.int64, device=pair_ids.device)
        leaving_counts.scatter_add_(0, pair_ids, torch.ones_like(pair_ids))
        arriving_counts, rows_by_rank = _exchange_counts(leaving_counts.view(self._ranks, -1))
        order = torch.argsort(pair_ids.to(torch.int16), stable=True)  # short keys make a GPU's radix sort short
        token = order // batch.ids.shape[1]
        leaving = self.leaving(batch, token)
        sent, received = rows_by_rank()
        to_flat = _flat_order(arriving_counts, sum(received))
        routing = Routing(
            token=token,
            position=_inverse(order).view_as(batch.ids),
            to_flat=to_flat,
            from_flat=_inverse(to_flat),
            sent=sent,
            received=received,
            counts=arriving_counts.sum(0),
            weights=batch.weights,
        )
        return self.arrange(self.exchange(leaving, routing), batch, routing)

    def combine(self, y: torch.Tensor, state: Any) -> torch.Tensor:
        leaving = y.view(torch.int32).index_select(0, state.from_flat)
        rows = _exchange(leaving, state.received, state.sent).view(y.dtype)
        weights = state.weights.to(y.dtype)
        return torch.nn.functional.embedding_bag(state.position, rows, mode="sum", per_sample_weights=weights)

    def leaving(self, batch: Batch, token: torch.Tensor) -> torch.Tensor:
        """The rows of `token` as words, their scales beside them."""
        return _beside_each_other(_words(batch.x, batch.scales)).index_select(0, token)

    def exchange(self, leaving: torch.Tensor, routing: Routing) -> torch.Tensor:
        """The bare exchange of the rows, which is the least that this peer takes."""
        return _exchange(leaving, routing.sent, routing.received)

    def arrange(self, arrived: torch.Tensor, batch: Batch, routing: Routing) -> Received:
        """What arrived, in FLAT order."""
        width = batch.x.view(torch.int32).shape[1]
        tokens = arrived[:, :width].index_select(0, routing.to_flat).view(batch.x.dtype)
        scales = None
        if batch.scales is not None:
            scales = arrived[:, width:].index_select(0, routing.to_flat).view(batch.scales.dtype)
        return Received(tokens=tokens, scales=scales, counts=routing.counts, state=routing)


def quantized(batch: Batch) -> Batch:
    """The batch as torch quantises it, operation by operation: FP8 with a scale per block, by its largest magnitude."""
    T, H = batch.x.shape
    whole = torch.nn.functional.pad(batch.x, (0, -H % SCALE_BLOCK)).view(T, -1, SCALE_BLOCK).float()
    amax = whole.abs().amax(2)
    scales = amax / torch.full_like(amax, torch.finfo(torch.float8_e4m3fn).max)  # GPUs multiply by 1/x for a number
    scales = torch.where(scales == 0, 1.0, scales)
    rows = (whole / scales.unsqueeze(2)).to(torch.float8_e4m3fn).view(T, -1)
    return replace(batch, x=rows[:, :H].contiguous(), scales=scales, quantize=False)


def _words(*parts: torch.Tensor | None) -> list[torch.Tensor]:
    return [part.view(torch.int32) for part in parts if part is not None]


def _beside_each_other(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _exchange(leaving: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
    arriving = leaving.new_empty((sum(received), leaving.shape[1]))
    dist.all_to_all_single(arriving, leaving, received, sent)
    return arriving


def _exchange_counts(leaving: torch.Tensor) -> tuple[torch.Tensor, Callable[[], list[list[int]]]]:
    """Exchanges counts `[R, n]`. Returns those that arrive, and a call that waits for the rows sent to and received
    from each rank."""
    both = torch.stack((leaving, torch.empty_like(leaving)))
    dist.all_to_all_single(both[1], both[0])
    rows = both.sum(2)
    if not rows.is_cuda:
        return both[1], rows.tolist
    host = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
    host.copy_(rows, non_blocking=True)
    copied = torch.cuda.current_stream(rows.device).record_event()

    def wait() -> list[list[int]]:
        copied.synchronize()
        return host.tolist()

    return both[1], wait


def _flat_order(arriving: torch.Tensor, total: int) -> torch.Tensor:
    """For each FLAT row, by (expert, source), the place where it arrived, by (source, expert). arriving: `[R, E_l]`."""
    starts = arriving.view(-1).cumsum(0).view_as(arriving) - arriving
    sizes = arriving.t().reshape(-1)
    before = sizes.cumsum(0) - sizes
    shift = (starts.t().reshape(-1) - before).repeat_interleave(sizes, output_size=total)
    return torch.arange(total, device=arriving.device) + shift


def _inverse(permutation: torch.Tensor) -> torch.Tensor:
    numbers = torch.arange(len(permutation), device=permutation.device)
    return torch.empty_like(permutation).scatter_(0, permutation, numbers)
