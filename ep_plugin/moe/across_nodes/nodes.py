"""The facts about a group of several nodes that dispatch and combine need, and their exchanges over the rail.

Shapes: R ranks, N nodes of G ranks, E experts in all, E_n = E / N on this node, L legs, M = L + 1 segments.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import torch

from ep_plugin import _C
from ep_plugin.errors import CaptureRefused, DisagreementError, EpPluginError
from ep_plugin.moe.high_throughput.engine import HighThroughputEngine
from ep_plugin.moe.high_throughput.load import HighThroughputLoad, Source
from ep_plugin.moe.legs import Leg, chunk_bounds, legs_of, num_chunks, num_segments
from ep_plugin.runtime.faults import DISAGREE_ON
from ep_plugin.transport.rails import UnderWay
from ep_plugin.transport.topology import NodeMap

_HEADER = _C.header_fields
_NOT_COMPARED = ("num_tokens",)

Pair: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""A tensor that this rank sends on a leg, and a tensor that receives the message of the leg's source."""


class Nodes:
    """The facts that all operations of one communicator over several nodes share. It also serves as HandleSizes."""

    def __init__(self, engine: HighThroughputEngine) -> None:
        self.engine = engine
        node_map, device = engine.node_map, engine.device
        self.num_nodes, self.node = node_map.num_nodes, engine.node
        self.host_waits = device.type == "cpu"
        """Whether the host waits for every message."""
        self.chunks = num_chunks(self.num_nodes, engine.config.rail_chunks)
        self.legs = legs_of(self.node, self.num_nodes, self.chunks)
        self.num_segments = num_segments(self.num_nodes, engine.config.rail_chunks)
        self.num_totals = engine.num_totals + 2 * len(self.legs) + self.num_segments
        self.layout = engine.meta_layout
        order = _output_order(node_map, self.node, self.chunks)
        G = engine.node_size
        self.order = torch.tensor([source.segment * G + source.local_rank for source in order], device=device)
        """``[S]``, segment * G + local rank of each source, in the order of the output's rows."""
        engine.load = HighThroughputLoad(engine, self.layout, engine.local_experts, order)
        node_of, local_id = _expert_tables(engine)
        self.node_of = torch.tensor(node_of, device=device)
        """``[E + 2]`` by expert id + 1: the node that holds the expert; N for -1 and for E."""
        self.local_id = torch.tensor(local_id, dtype=torch.int32, device=device)
        """``[E + 2]`` by expert id + 1: the expert's number on this node; -1: not on this node; E_n: no such id."""

    def bounds(self, num_tokens: int) -> list[int]:
        return chunk_bounds(num_tokens, self.chunks)

    def table_index(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns the indices of `ids` in the tables. Ids may have any value."""
        return ids.clamp(-1, self.engine.config.num_experts).long() + 1

    # -- sizes ---------------------------------------------------------------------------------------------------

    def words_of(self, num_tokens: int, topk: int, received: Sequence[int]) -> int:
        """Returns the int32 words of a plan of T tokens. received: the tokens that each leg brings, in addition."""
        fixed = num_tokens * self.num_nodes + self.num_segments * self.layout.words
        return fixed + (num_tokens + sum(received)) * (2 * topk + self.engine.node_size)

    def plan_words(self, num_tokens: int, topk: int, capacity: int | None) -> int | None:
        return None if capacity is None else self.words_of(num_tokens, topk, self.padded_rows())

    def slots(self, capacity: int | None) -> int | None:
        return None if capacity is None else sum(self.padded_slots())

    def padded_rows(self) -> list[int]:
        """Returns the rows of each leg if the host knows no counts.

        Each leg has room for the longest chunk of a rank with ``max_tokens_per_rank`` tokens. No rank with fewer tokens
        has a longer chunk, although its i-th chunk may be longer than the i-th chunk of that rank.
        """
        most = self.engine.config.max_tokens_per_rank
        assert most is not None
        return [-(-most // self.chunks)] * len(self.legs)

    def padded_slots(self) -> list[int]:
        """Returns the received slots of each segment if the host knows no counts."""
        most = self.engine.config.max_tokens_per_rank
        assert most is not None
        return [self.engine.node_size * rows for rows in (most, *self.padded_rows())]

    # -- over the rail -------------------------------------------------------------------------------------------

    def exchange_counts(self, header: Any, counts: torch.Tensor) -> tuple[list[int], list[int]]:
        """Exchanges the header and the number of rows in each chunk with every node. The host waits.

        counts: int64 ``[C, N]``, made on the own stream. Returns the rows that each leg sends, and the rows that each
        leg brings.
        """
        mine, theirs = self._exchange(header, counts)
        for node in self.engine.rails.nodes:
            self._check_counts(node, theirs[node])
        first = len(_HEADER)
        sent = [mine[leg.to][first + leg.chunk] for leg in self.legs]
        return sent, [theirs[leg.source][first + leg.chunk] for leg in self.legs]

    def agree(self, header: Any, sent: Sequence[int], received: Sequence[int]) -> None:
        """Raises DisagreementError unless ranks of other nodes run the same operation with the same rows in each leg.

        sent, received: the rows of each leg, as this rank knows them. On GPUs the host does not wait for peers, and
        this function does nothing.
        """
        if not self.host_waits:
            return
        counts = torch.zeros(self.chunks, self.num_nodes, dtype=torch.int64, device="cpu")
        for leg, rows in zip(self.legs, sent, strict=True):
            counts[leg.chunk, leg.to] = rows
        _, theirs = self._exchange(header, counts)
        for leg, mine in zip(self.legs, received, strict=True):
            rows = theirs[leg.source][len(_HEADER) + leg.chunk]
            if mine != rows:
                raise self._disagreement("rows that cross", leg.source, str(mine), str(rows))

    def _exchange(self, header: Any, counts: torch.Tensor) -> tuple[list[list[int]], list[list[int]]]:
        """Exchanges the header and `counts`, ``[C, N]``. Returns the words that this rank sent to each node, and the
        words that each node sent to it."""
        streams = self.engine.streams
        words = [int(getattr(header, name)) for name in _HEADER]
        with streams.on_own():
            known = torch.tensor(words, dtype=torch.int64, device="cpu", pin_memory=counts.is_cuda)
            going = counts.new_empty(self.num_nodes, len(words) + self.chunks)
            going[:, : len(words)].copy_(known.to(counts.device, non_blocking=True))
            going[:, len(words) :].copy_(counts.t())
            both = torch.stack([going, going])  # nobody sends this node's row of the second half
            landed = both[1]
            nodes = self.engine.rails.nodes
            under_way = self._start(
                [(node, going[node].view(torch.uint8)) for node in nodes],
                [(node, landed[node].view(torch.uint8)) for node in nodes],
                "counts",
            )
            self.finish(under_way)
            mine, theirs = self._on_host(both)
        for node in nodes:
            self._check_header(node, words, theirs[node])
        return mine, theirs

    def _on_host(self, tensor: torch.Tensor) -> list[Any]:
        """Returns the values of a tensor that torch's current stream makes. Waits for them with a deadline."""
        copy, is_there = self.engine.streams.to_host(tensor)
        most_s = 2 * self.engine.timeout_s + 5.0  # the rail's deadline passes first, and its error says more
        until = time.monotonic() + most_s
        while not is_there():
            self.engine.check()
            if time.monotonic() > until:
                raise EpPluginError(f"{self.engine.name}: the device did not finish step rail in {most_s:g} s")
            time.sleep(0)
        self.engine.check()  # the wait may have ended because the rail ended
        return list(copy.tolist())

    def start_legs(
        self, legs: Sequence[Leg], pairs: Sequence[Sequence[Pair]], what: str, back: bool = False
    ) -> UnderWay:
        """Begins to send the first tensor of each pair of each leg, and to receive the second one.

        The messages start after the work on torch's current stream. back: the messages go from the receivers to the
        senders of the legs. Both ends leave out empty tensors.
        """
        sends, receives = [], []
        for leg, each in zip(legs, pairs, strict=True):
            to, source = (leg.source, leg.to) if back else (leg.to, leg.source)
            sends += [(to, sent.view(-1).view(torch.uint8)) for sent, _ in each if sent.numel()]
            receives += [(source, landed.view(-1).view(torch.uint8)) for _, landed in each if landed.numel()]
        return self._start(sends, receives, what)

    def start_leg(self, number: int, pairs: Sequence[Pair], back: bool = False) -> UnderWay:
        leg = self.legs[number]
        return self.start_legs([leg], [pairs], f"{'sums' if back else 'rows'} of chunk {leg.chunk}", back)

    def finish(self, under_way: UnderWay) -> None:
        """Waits for messages that have begun. On CPUs the host waits, with a deadline; on GPUs torch's current stream
        does."""
        with self._on_rail():
            self.engine.rails.wait(under_way)

    def _start(
        self, sends: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, torch.Tensor]], what: str
    ) -> UnderWay:
        with self._on_rail():
            return self.engine.rails.start(sends, receives, what)

    def enter(self) -> None:
        """Lets the own stream use memory that was made on the caller's stream, or that the caller has passed."""
        streams = self.engine.streams
        streams.order_after(streams.own, streams.caller())

    def check_capture(self) -> None:
        """Raises CaptureRefused during the capture of a CUDA graph if the rail cannot be captured."""
        engine = self.engine
        if engine.streams.capturing() and not engine.rails.captures:
            raise CaptureRefused(
                f"{engine.name}: expected a rail over NCCL while a CUDA graph is captured, got one over the group's "
                "own backend, which cannot be captured"
            )

    @contextlib.contextmanager
    def _on_rail(self) -> Iterator[None]:
        self.engine.check()  # nothing crosses after a failure
        with self.engine.on_rail():
            yield

    def _peer(self, node: int) -> int:
        """Returns the rank of node `node` on this rail."""
        return self.engine.node_map.node_ranks(node)[self.engine.index]

    def _disagreement(self, word: str, node: int, mine: str, theirs: str) -> DisagreementError:
        return DisagreementError(
            f"{DISAGREE_ON} one call of {self.engine.name} at step rail: {word} is {mine} on rank {self.engine.rank}, "
            f"{theirs} on rank {self._peer(node)}"
        )

    def _check_header(self, node: int, mine: list[int], theirs: list[int]) -> None:
        """Raises DisagreementError unless the rank of node `node` runs the same operation."""
        for field, name in enumerate(_HEADER):
            if mine[field] != theirs[field] and name not in _NOT_COMPARED:
                word, described = self.engine.described(field, mine[field])
                raise self._disagreement(word, node, described, self.engine.described(field, theirs[field])[1])

    def _check_counts(self, node: int, theirs: list[int]) -> None:
        """Raises EpPluginError unless the counts that the rank of node `node` has sent are possible."""
        engine, rank = self.engine, self._peer(node)
        tokens, counts = theirs[_HEADER.index("num_tokens")], theirs[len(_HEADER) :]
        most = engine.config.max_tokens_per_rank
        if not 0 <= tokens <= (_C.max_tokens if most is None else min(most, _C.max_tokens)):
            raise EpPluginError(f"{engine.name}: step rail: rank {rank} sent {tokens} as its number of tokens")
        bounds = self.bounds(tokens)
        for begin, end, rows in zip(bounds[:-1], bounds[1:], counts, strict=True):
            if not 0 <= rows <= end - begin:
                raise EpPluginError(f"{engine.name}: step rail: rank {rank} sent {rows} rows of {end - begin} tokens")


def _output_order(node_map: NodeMap, node: int, chunks: int) -> list[Source]:
    """Returns the sources of a dispatch's output on `node`, in the order of its rows: by rank, then by chunk."""
    legs = legs_of(node, node_map.num_nodes, chunks)
    segments = {(leg.source, leg.chunk): number for number, leg in enumerate(legs, start=1)}
    order = []
    for rank in range(node_map.num_nodes * node_map.ranks_per_node):
        source, index = node_map.node_of(rank), node_map.local_rank_of(rank)
        if source == node:
            order.append(Source(0, index, rank))
        else:
            order += [Source(segments[source, chunk], index, rank) for chunk in range(chunks)]
    return order


def _expert_tables(engine: HighThroughputEngine) -> tuple[list[int], list[int]]:
    """Returns the node of each expert, and its number on this node, both by expert id + 1."""
    node_map, local = engine.node_map, engine.local_experts
    node_of, local_id = [node_map.num_nodes], [-1]
    for expert in range(engine.config.num_experts):
        rank, place = divmod(expert, local)
        node = node_map.node_of(rank)
        node_of.append(node)
        local_id.append(node_map.local_rank_of(rank) * local + place if node == engine.node else -1)
    return [*node_of, node_map.num_nodes], [*local_id, engine.node_experts]
