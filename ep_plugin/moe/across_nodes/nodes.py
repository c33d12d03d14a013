"""The facts about a group of several nodes that dispatch and combine need, and their exchanges over the rail.

Shapes: R ranks, N nodes of G ranks, E experts in all, E_n = E / N on this node, L legs, M = L + 1 segments.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ep_plugin import _C
from ep_plugin.errors import DisagreementError, EpPluginError
from ep_plugin.moe.across_nodes.legs import Leg, chunk_bounds, legs_of, num_chunks, output_order
from ep_plugin.moe.high_throughput.engine import HighThroughputEngine
from ep_plugin.runtime.faults import DISAGREE_ON
from ep_plugin.transport.rails import UnderWay

_HEADER = _C.header_fields
_NOT_COMPARED = ("num_tokens",)


class Nodes:
    """What is the same for all operations of one communicator over several nodes."""

    def __init__(self, engine: HighThroughputEngine) -> None:
        self.engine = engine
        node_map, device = engine.node_map, engine.device
        self.num_nodes, self.node = node_map.num_nodes, engine.node
        self.chunks = num_chunks(self.num_nodes, engine.config.rail_chunks)
        self.legs = legs_of(self.node, self.num_nodes, self.chunks)
        self.layout = _C.meta_layout(engine.node_size, engine.node_experts)
        order = output_order(node_map, self.node, self.chunks)
        G = engine.node_size
        self.order = torch.tensor([source.segment * G + source.local_rank for source in order], device=device)
        """``[S]``, segment * G + local rank of each source, in the order of the output's rows."""
        node_of, local_id = _expert_tables(engine)
        self.node_of = torch.tensor(node_of, device=device)
        """``[E + 2]`` by expert id + 1: the node that holds the expert; N for -1 and for E."""
        self.local_id = torch.tensor(local_id, dtype=torch.int32, device=device)
        """``[E + 2]`` by expert id + 1: the expert's number among those of this node; -1: not here; E_n: no such id."""

    @property
    def num_segments(self) -> int:
        return len(self.legs) + 1

    def bounds(self, num_tokens: int) -> list[int]:
        return chunk_bounds(num_tokens, self.chunks)

    def table_index(self, ids: torch.Tensor) -> torch.Tensor:
        """Expert ids of any value as indices of the tables."""
        return ids.clamp(-1, self.engine.config.num_experts).long() + 1

    # -- over the rail -------------------------------------------------------------------------------------------

    def exchange_counts(self, header: Any, counts: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
        """Sends every node the header and this rank's rows for it by chunk, and receives theirs.

        counts: ``[C][N]``. Returns the rows that each leg sends, and those that it brings.
        """
        sent = [counts[leg.chunk][leg.to] for leg in self.legs]
        return sent, self._exchange(header, sent, self._check_counts)

    def agree(self, header: Any, sent: Sequence[int], received: Sequence[int]) -> None:
        """Raises DisagreementError unless ranks of other nodes run the same operation, with the rows by leg that this
        rank knows. On GPUs, where the host waits for nothing, it does nothing."""
        if self.engine.device.type != "cpu":
            return
        theirs = self._exchange(header, sent)
        for leg, mine, rows in zip(self.legs, received, theirs, strict=True):
            if mine != rows:
                raise self._disagreement("rows that cross", leg.source, str(mine), str(rows))

    def _exchange(
        self, header: Any, sent: Sequence[int], check: Callable[[int, list[int]], None] | None = None
    ) -> list[int]:
        """Exchanges the header and the rows that each leg sends. Returns the rows that each leg brings."""
        engine = self.engine
        words = [int(getattr(header, name)) for name in _HEADER]
        rows = {node: words + [0] * self.chunks for node in engine.rails.nodes}
        for leg, count in zip(self.legs, sent, strict=True):
            rows[leg.to][len(words) + leg.chunk] = count
        going = {node: torch.tensor(row, device=engine.device) for node, row in rows.items()}
        landed = {node: torch.empty_like(row) for node, row in going.items()}
        self.finish(self._start(_as_bytes(going), _as_bytes(landed)))
        theirs = {node: row.tolist() for node, row in landed.items()}
        for node, row in theirs.items():
            self._check_header(node, words, row)
            if check is not None:
                check(node, row)
        return [theirs[leg.source][len(words) + leg.chunk] for leg in self.legs]

    def start_leg(self, leg: Leg, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], back: bool = False) -> UnderWay:
        """Begins to send the first tensor of each pair and to receive the second. back: from the receiver to the
        sender of `leg`. Empty tensors are left out, on both ends alike."""
        to, source = (leg.source, leg.to) if back else (leg.to, leg.source)
        return self._start(
            [(to, sent.view(-1).view(torch.uint8)) for sent, _ in pairs if sent.numel()],
            [(source, landed.view(-1).view(torch.uint8)) for _, landed in pairs if landed.numel()],
        )

    def finish(self, under_way: UnderWay) -> None:
        """Waits for what has begun: on CPUs the host does, with a deadline."""
        with self._on_rail():
            self.engine.rails.wait(under_way)

    def _start(
        self, sends: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, torch.Tensor]]
    ) -> UnderWay:
        with self._on_rail():
            return self.engine.rails.start(sends, receives)

    @contextlib.contextmanager
    def _on_rail(self) -> Iterator[None]:
        self.engine.check()  # nothing crosses after a failure
        with self.engine.on_rail():
            yield

    def _peer(self, node: int) -> int:
        """The rank of another node on this rail."""
        return self.engine.node_map.node_ranks(node)[self.engine.index]

    def _disagreement(self, word: str, node: int, mine: str, theirs: str) -> DisagreementError:
        return DisagreementError(
            f"{DISAGREE_ON} one call of {self.engine.name} at step rail: {word} is {mine} on rank {self.engine.rank}, "
            f"{theirs} on rank {self._peer(node)}"
        )

    def _check_header(self, node: int, mine: list[int], theirs: list[int]) -> None:
        """That a rank of another node runs the same operation."""
        for field, name in enumerate(_HEADER):
            if mine[field] != theirs[field] and name not in _NOT_COMPARED:
                word, described = self.engine.described(field, mine[field])
                raise self._disagreement(word, node, described, self.engine.described(field, theirs[field])[1])

    def _check_counts(self, node: int, theirs: list[int]) -> None:
        """That a rank of another node has sent counts that can be."""
        engine, rank = self.engine, self._peer(node)
        tokens, counts = theirs[_HEADER.index("num_tokens")], theirs[len(_HEADER) :]
        most = engine.config.max_tokens_per_rank
        if not 0 <= tokens <= (_C.max_tokens if most is None else min(most, _C.max_tokens)):
            raise EpPluginError(f"{engine.name}: step rail: rank {rank} sent {tokens} as its number of tokens")
        bounds = self.bounds(tokens)
        for begin, end, rows in zip(bounds[:-1], bounds[1:], counts, strict=True):
            if not 0 <= rows <= end - begin:
                raise EpPluginError(f"{engine.name}: step rail: rank {rank} sent {rows} rows of {end - begin} tokens")


def _expert_tables(engine: HighThroughputEngine) -> tuple[list[int], list[int]]:
    """The node of each expert, and its number on this node, both by expert id + 1."""
    node_map, local = engine.node_map, engine.local_experts
    node_of, local_id = [node_map.num_nodes], [-1]
    for expert in range(engine.config.num_experts):
        rank, place = divmod(expert, local)
        node = node_map.node_of(rank)
        node_of.append(node)
        local_id.append(node_map.local_rank_of(rank) * local + place if node == engine.node else -1)
    return [*node_of, node_map.num_nodes], [*local_id, engine.node_experts]


def _as_bytes(rows: dict[int, torch.Tensor]) -> list[tuple[int, torch.Tensor]]:
    return [(node, row.view(torch.uint8)) for node, row in rows.items()]
