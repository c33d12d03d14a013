"""Load statistics of high-throughput communicators, from the sums of their operations' routing metadata.

Every word of the metadata (csrc/common/layout.h: MetaLayout) that is read here is a count or a difference of counts. So
the sum of a word over operations is the count of all these operations.

Shapes: R ranks, G ranks on this node, M segments (1 on one node), O origins, E_l local experts, W words of a segment's
metadata.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ep_plugin import _C
from ep_plugin.moe.statistics import LoadStats, Sums
from ep_plugin.runtime.group import GroupEngine

_DISPATCH, _CACHED_DISPATCH, _COMBINE = int(_C.Op.DISPATCH), int(_C.Op.CACHED_DISPATCH), int(_C.Op.COMBINE)
_DROPPED_IDS, _DROPPED_ROWS = "dropped ids", "dropped rows"


class Source(NamedTuple):
    """Tokens of `rank`, all or one chunk of them. `local_rank` sends them in `segment`, as those of this `origin`."""

    segment: int
    local_rank: int
    origin: int
    rank: int


class _Kind(NamedTuple):
    """Operations whose rows are alike.

    row_bytes: bytes of a row as it travels, with its scales, weights and ids. layer: the name of the layer that started
    the operations; only for dispatches that make a routing.
    """

    op: int
    row_bytes: int
    topk: int
    layer: str | None = None


class HighThroughputLoad:
    """Counts the operations of one communicator.

    sources: in the order of their rows in the output; None: the ranks of the one node.
    waited_for: int64 ``[N]``, nanoseconds that kernels have waited for the rank of this rail on each node.
    """

    def __init__(
        self,
        engine: GroupEngine,
        layout: Any,
        local_experts: int,
        sources: Sequence[Source] | None = None,
        waited_for: torch.Tensor | None = None,
    ) -> None:
        self._layout, self._local_experts = layout, local_experts
        self._rank, self._size = engine.rank, engine.size
        self._index, self._node_ranks = engine.index, engine.node_ranks
        self._is_one_node = sources is None
        self._sources = sources or [Source(0, index, 0, rank) for index, rank in enumerate(self._node_ranks)]
        self._num_segments = 1 + max(source.segment for source in self._sources)
        self._sums = Sums(engine.name, engine.streams, engine.kernels)
        self._rails = engine.rails
        in_node = engine.state[_C.waited_offset :][: 8 * engine.node_size].view(torch.int64)
        self._waited = [in_node] if waited_for is None else [in_node, waited_for]
        self._waited_before = torch.cat(self._waited).zero_()
        self._waited_ranks = list(engine.node_ranks)
        if waited_for is not None:
            self._waited_ranks += engine.node_map.rail(engine.index)
        self._before = self._growing()

    def dispatched(
        self,
        plan: torch.Tensor,
        slot: tuple[int, int, int, int],
        topk_ids: torch.Tensor,
        is_fresh: bool,
        is_flat: bool,
        capacity: int | None,
        layer: str | None,
    ) -> None:
        """Adds a dispatch.

        plan: int32, begins with the metadata ``[M, W]``. slot: bytes of a row, of its scales and of a weight, and K.
        topk_ids: ``[T, K]``, with -1 wherever the caller had -1. layer: the layer that has started the dispatch.
        """
        if not Sums.recording:
            return
        row_bytes, topk = _C.sent_slot_bytes(*slot), slot[3]
        kind = _Kind(_DISPATCH, row_bytes, topk, layer) if is_fresh else _Kind(_CACHED_DISPATCH, row_bytes, topk)
        self._sums.add(kind, self._metas(plan))
        if not is_fresh:
            return
        if not self._is_one_node:  # on one node the dropped ids follow from the metadata
            self._sums.add_made(_DROPPED_IDS, lambda: (topk_ids == -1).sum(dtype=torch.int32))
        if capacity is not None:
            at = self._layout
            needed = at.expert_offset + self._local_experts if is_flat else at.token_rows
            self._sums.add_made(_DROPPED_ROWS, lambda: (self._metas(plan)[0, needed] - capacity).clamp_(min=0))

    def combined(self, plan: torch.Tensor, row_bytes: int, extra_bytes: int, topk: int) -> None:
        """Adds a combine.

        plan: as in `dispatched`. row_bytes: bytes of a partial row. extra_bytes: bytes of a value that travels back for
        each pair; 0 if none does.
        """
        if Sums.recording:
            self._sums.add(_Kind(_COMBINE, row_bytes + extra_bytes * topk, topk), self._metas(plan))

    def read(self) -> LoadStats:
        """Returns the load. Waits for the operations that are enqueued."""
        sums, waited = self._sums.read(lambda: torch.cat(self._waited) - self._waited_before)
        at, G = self._layout, len(self._node_ranks)
        sent = received = 0
        dropped = {what: int(sums.pop(what, 0)) for what in (_DROPPED_IDS, _DROPPED_ROWS)}
        tokens = torch.zeros(self._size, self._local_experts, dtype=torch.int64, device="cpu")
        layers: dict[str, torch.Tensor] = {}
        for kind, metas in sums.items():
            ours = metas[:, at.rank_count : at.rank_count + G].sum(0)  # rows of this rank for each rank
            theirs = metas[:, at.recv_offset : at.recv_offset + G + 1].diff(dim=1).sum(0)
            outgoing, incoming = (theirs, ours) if kind.op == _COMBINE else (ours, theirs)
            sent += kind.row_bytes * int(outgoing.sum() - outgoing[self._index])
            received += kind.row_bytes * int(incoming.sum() - incoming[self._index])
            if kind.op != _DISPATCH:
                continue
            found = self._tokens(metas)
            tokens += found
            if kind.layer is not None:
                layers[kind.layer] = layers.get(kind.layer, 0) + found
            if self._is_one_node:
                pairs = metas[0, at.expert_count : at.expert_count + self._size * self._local_experts].sum()
                dropped[_DROPPED_IDS] += int(kind.topk * metas[0, at.src_tokens + self._index] - pairs)
        growing = self._growing() - self._before
        growing[2:].index_add_(0, torch.tensor(self._waited_ranks, device="cpu"), waited)
        counts = {
            op: sum(n for kind, n in self._sums.counts.items() if isinstance(kind, _Kind) and kind.op == op)
            for op in (_DISPATCH, _CACHED_DISPATCH, _COMBINE)
        }
        return LoadStats(
            rank=self._rank,
            num_experts=self._size * self._local_experts,
            dispatches=counts[_DISPATCH],
            cached_dispatches=counts[_CACHED_DISPATCH],
            combines=counts[_COMBINE],
            tokens=tokens,
            layers=layers,
            dropped_ids=dropped[_DROPPED_IDS],
            dropped_rows=dropped[_DROPPED_ROWS],
            link_bytes_sent=sent,
            link_bytes_received=received,
            rail_bytes_sent=int(growing[0]),
            rail_bytes_received=int(growing[1]),
            waited_ns=growing[2:],
        )

    def reset(self) -> None:
        """Starts at zero again. Waits for nothing."""
        self._sums.reset(lambda: self._waited_before.copy_(torch.cat(self._waited)))
        self._before = self._growing()

    def _metas(self, plan: torch.Tensor) -> torch.Tensor:
        """Returns the words of the metadata that no kernel writes after notify, ``[M, W']``."""
        M, W = self._num_segments, self._layout.words
        return plan.as_strided((M, self._layout.send_chunk_end), (W, 1))

    def _tokens(self, metas: torch.Tensor) -> torch.Tensor:
        """Returns the tokens ``[R, E_l]`` from each rank for each local expert."""
        at, local, G = self._layout, self._local_experts, len(self._node_ranks)
        rows = metas[:, at.origin_rows : at.send_chunk_end].view(len(metas), G, -1, local)
        *where, ranks = (torch.tensor(each, device="cpu") for each in zip(*self._sources, strict=True))
        return rows.new_zeros(self._size, local).index_add_(0, ranks, rows[tuple(where)])

    def _growing(self) -> torch.Tensor:
        """Returns what rails count since construction, also while nothing is recorded, int64 ``[2 + R]``: bytes sent,
        bytes received, and nanoseconds waited for each rank."""
        rails = self._rails
        counted = torch.zeros(2 + self._size, dtype=torch.int64, device="cpu")
        counted[0], counted[1] = rails.bytes_sent, rails.bytes_received
        for rank, waited in rails.waited_ns.items():
            counted[2 + rank] = waited
        return counted
