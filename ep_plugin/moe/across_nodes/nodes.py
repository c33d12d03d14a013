"""The facts about a group of several nodes that dispatch and combine need, and their exchanges over the rail.

Shapes: R ranks, N nodes of G ranks, E experts in all, E_n = E / N on each node, C chunks, L = C * (N - 1) legs, M = C +
1 segments, O = N - 1 origins of a segment (csrc/common/layout.h).
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from ep_plugin import _C
from ep_plugin.errors import CaptureRefused, DisagreementError, EpPluginError, PeerTimeout
from ep_plugin.moe.across_nodes.tables import output_order, places_of_ranks
from ep_plugin.moe.high_throughput.engine import HighThroughputEngine
from ep_plugin.moe.high_throughput.load import HighThroughputLoad
from ep_plugin.moe.legs import legs_of, num_chunks, num_origins, num_segments, padded_rows
from ep_plugin.runtime.faults import DISAGREE_ON
from ep_plugin.transport.rails import Piece, UnderWay

_HEADER = _C.header_fields
_words_of = operator.attrgetter(*_HEADER)  # of a header
_NUM_COMPARED = len(_HEADER) - 1  # all but num_tokens, the last one
_FIRST_COUNT = _C.message_head_words


Copied: TypeAlias = tuple[torch.Tensor, Callable[[], bool] | None]
"""A copy for the host, and a test for its arrival, as `Streams.to_host` returns them."""
RowsOfLegs: TypeAlias = tuple[list[int], list[int]]
"""The rows that each leg sends, and the rows that each leg brings."""


Field: TypeAlias = tuple[torch.Tensor, torch.Tensor, int, int]
"""One part of all rows that cross in an operation, such as their scales: uint8 tensors of one dimension, with the rows
that this rank sends and those that it receives, leg after leg; the bytes of a row; and the first row of those that it
sends among all of the operation."""


def fields_of(
    sent: Sequence[torch.Tensor | None], landed: Sequence[torch.Tensor | None], first_sent: int = 0
) -> list[Field]:
    """Returns the parts of rows that are there. The two of a part are contiguous ``[rows, columns]`` of one dtype."""
    fields = []
    for going, into in zip(sent, landed, strict=True):
        if going is not None and into is not None:
            row_bytes = into.shape[1] * into.element_size()
            fields.append((going.view(-1).view(torch.uint8), into.view(-1).view(torch.uint8), row_bytes, first_sent))
    return fields


class Nodes:
    """The facts that all operations of one communicator over several nodes share. It also serves as HandleSizes."""

    def __init__(self, engine: HighThroughputEngine) -> None:
        self.engine = engine
        node_map, device = engine.node_map, engine.device
        self.num_nodes, self.node = node_map.num_nodes, engine.node
        self.host_waits = device.type == "cpu"
        """Whether the host waits for every message."""
        self.chunks = num_chunks(self.num_nodes, engine.config, device.type)
        self.legs = legs_of(self.node, self.num_nodes, self.chunks)
        per_chunk = self.num_nodes - 1
        self.of_chunks = [slice(chunk * per_chunk, (chunk + 1) * per_chunk) for chunk in range(self.chunks)]
        """The legs of each chunk."""
        most = engine.config.max_tokens_per_rank
        self.padded_rows: list[int] = []
        """The rows of each leg of a dispatch with a capacity."""
        self.padded_slots: list[int] = []
        """The received slots of each segment of such a dispatch."""
        self._padded_tokens = 0  # of its longest segment
        if most is not None:
            self.padded_rows = [padded_rows(self.num_nodes, engine.config, device.type)] * len(self.legs)
            padded_tokens = self.tokens_of(most, self.padded_rows)
            self.padded_slots = [engine.node_size * tokens for tokens in padded_tokens]
            self._padded_tokens = max(padded_tokens)
        if self._padded_tokens > _C.max_tokens:
            raise ValueError(
                f"max_tokens_per_rank: expected at most {_C.max_tokens} tokens of all other nodes in a chunk, got "
                f"{self._padded_tokens} for {most} tokens, {self.num_nodes} nodes and {self.chunks} chunks"
            )
        self.num_segments = num_segments(self.num_nodes, engine.config, device.type)
        self.num_totals = engine.num_totals + 2 * len(self.legs) + self.num_segments
        self.layout = engine.meta_layout
        G, origins = engine.node_size, num_origins(self.num_nodes)
        order = output_order(node_map, self.node, self.chunks)
        places = [(source.segment * G + source.local_rank) * origins + source.origin for source in order]
        unused = sorted(set(range(self.num_segments * G * origins)) - set(places))  # segment 0 has one origin
        self.order = torch.tensor(places + unused, device=device)
        """``[M * G * O]``, (segment * G + local rank) * O + origin of each source, in the order of the output's rows.
        Then the places that no source has."""
        head = _C.waits_head_words
        self._waits = torch.tensor([0] * (head + self.num_nodes), device=device)  # 0 when this returns
        engine.load = HighThroughputLoad(engine, self.layout, engine.local_experts, order, self._waits[head:])
        self._rank_place = places_of_ranks(node_map, device)
        self.struct = _C.Nodes(
            rank_place=self._rank_place.data_ptr(),
            num_ranks=engine.size,
            num_experts=engine.config.num_experts,
            num_chunks=self.chunks,
            node=self.node,
            waits=0 if self.host_waits else self._waits.data_ptr(),
        )
        """This group as kernels see it."""
        self.checked: set[tuple[Any, ...]] = set()
        """The forms of dispatches without a handle that have passed every check, with their capacity and `quantize`."""
        self._message_words = _C.message_words(self.chunks, G, engine.node_experts)

    # -- sizes ---------------------------------------------------------------------------------------------------

    def words_of(self, num_tokens: int, topk: int, received: Sequence[int]) -> int:
        """Returns the int32 words of a plan of T tokens. received: the tokens that each leg brings, in addition."""
        fixed = num_tokens * self.num_nodes + self.num_segments * self.layout.words
        return fixed + (num_tokens + sum(received)) * (2 * topk + self.engine.node_size)

    def plan_words(self, num_tokens: int, topk: int, capacity: int | None) -> int | None:
        return None if capacity is None else self.words_of(num_tokens, topk, self.padded_rows)

    def slots(self, capacity: int | None) -> int | None:
        return None if capacity is None else sum(self.padded_slots)

    def tokens_of(self, num_tokens: int, received: Sequence[int]) -> list[int]:
        """Returns the tokens of each segment. received: the rows that each leg brings."""
        return [num_tokens, *map(sum, map(received.__getitem__, self.of_chunks))]

    def reserve(self, pool: int, row_bytes: int, per_token: int, rows: int | None) -> None:
        """Makes the pool large enough for each segment. It serves one segment after the other.

        per_token: the most rows of a token. rows: as many as the pool must hold; None: the host does not know them.
        """
        engine, most = self.engine, self.engine.config.max_tokens_per_rank
        if rows is None:
            engine.reserve(pool, row_bytes * self._padded_tokens * per_token)
        elif most is not None and rows <= most * per_token:
            engine.reserve(pool, row_bytes * most * per_token)
        else:
            engine.reserve(pool, engine.room_for(pool, row_bytes * rows))

    # -- over the rail -------------------------------------------------------------------------------------------

    def messages(self) -> torch.Tensor:
        """Makes the memory for the messages of one dispatch, int64 ``[2, N, message_words]`` (csrc/common/layout.h).

        The first half is sent, the second one received. Nobody sends this node's message of the second half, of which
        layout writes a part.
        """
        return torch.empty((2, self.num_nodes, self._message_words), dtype=torch.int64, device=self.engine.device)

    def block_counts(self, tokens: Sequence[int]) -> torch.Tensor:
        """Makes memory in which plan counts the blocks of a segment, for segments of so many tokens in turn."""
        engine, words = self.engine, 0
        for each in set(tokens):
            words = max(words, _C.block_count_words(each, engine.node_size, engine.node_experts))
        return torch.empty(words, dtype=torch.int32, device=engine.device)

    def exchange_counts(self, messages: torch.Tensor, reads: bool) -> Copied | None:
        """Exchanges the messages that layout has written on the own stream. Returns their copy for the host if it
        reads them."""
        streams, sends, receives = self.engine.streams, [], []
        going, landed = messages.view(torch.uint8).view(2, -1).unbind()
        size = 8 * self._message_words
        for node in self.engine.rails.nodes:
            sends.append((node, going, node * size, size))
            receives.append((node, landed, node * size, size))
        with streams.on_own():
            self.finish(self._start(sends, receives, "counts"))
            return streams.to_host(messages) if reads else None

    def rows_of_legs(self, header: Any, copied: Copied, padded: bool) -> RowsOfLegs:
        """Waits for the messages of other nodes and checks them. Returns the rows that each leg sends, and those that
        each brings. padded: the legs have the rows of `padded_rows`."""
        mine, theirs = self._read(header, copied)
        self._check_counts(theirs)
        if padded:
            return self.padded_rows, self.padded_rows
        sent, received = [], []
        for leg in self.legs:
            sent.append(mine[leg.to][_FIRST_COUNT + leg.chunk])
            received.append(theirs[leg.source][_FIRST_COUNT + leg.chunk])
        most = max(self.tokens_of(0, received))
        if most > _C.max_tokens:
            raise EpPluginError(
                f"{self.engine.name}: step rail: expected at most {_C.max_tokens} tokens of other nodes in a chunk, "
                f"got {most}"
            )
        return sent, received

    def agree(self, header: Any, sent: Sequence[int], received: Sequence[int]) -> None:
        """Raises DisagreementError unless ranks of other nodes run the same operation with the same rows in each leg.

        sent, received: the rows of each leg, as this rank knows them. On GPUs the host does not wait for peers, and
        this function does nothing.
        """
        if not self.host_waits:
            return
        # Messages as those of a dispatch: of two sizes they would not meet, and no rank would see a difference.
        words, going = _words_of(header), []
        for _ in range(self.num_nodes):
            going.append([*words, *[0] * (self._message_words - len(words))])
        for leg, rows in zip(self.legs, sent, strict=True):
            going[leg.to][_FIRST_COUNT + leg.chunk] = rows
        copied = self.exchange_counts(torch.tensor([going, going], dtype=torch.int64, device="cpu"), reads=True)
        assert copied is not None
        self._check_rows(received, self._read(header, copied)[1])

    def _read(self, header: Any, copied: Copied) -> tuple[list[list[int]], list[list[int]]]:
        """Waits for messages on the host. Returns what this rank has sent to each node, and what each node has sent to
        it. Raises DisagreementError unless the headers are alike."""
        copy, is_there = copied
        if is_there is not None:
            self._wait_until(is_there)
        self.engine.check()  # the wait may have ended because the rail ended
        mine, theirs = copy[..., : _FIRST_COUNT + self.chunks].tolist()
        self._check_headers(list(_words_of(header)), theirs)
        return mine, theirs

    def _wait_until(self, is_there: Callable[[], bool]) -> None:
        """Waits on the host, with a deadline."""
        most_s = 2 * self.engine.timeout_s + 5.0  # the rail's deadline passes first, and its error says more
        until = time.monotonic() + most_s
        while not is_there():
            self.engine.check()
            if time.monotonic() > until:
                raise EpPluginError(f"{self.engine.name}: the device did not finish step rail in {most_s:g} s")
            time.sleep(0)

    def start_chunk(
        self, chunk: int, fields: Sequence[Field], sent: Sequence[int], received: Sequence[int], back: bool = False
    ) -> UnderWay:
        """Begins to send the rows of a chunk's legs, and to receive those that they bring.

        The messages start after the work on torch's current stream. sent, received: the rows of each leg. back: the
        rows are sums, and go from the receivers to the senders of the legs. Both ends leave out empty messages.
        """
        self.engine.check()  # no rows cross after a failure
        legs = self.of_chunks[chunk]
        first_sent, first_received = sum(sent[: legs.start]), sum(received[: legs.start])
        sends, receives = [], []
        for leg, rows_sent, rows_received in zip(self.legs[legs], sent[legs], received[legs], strict=True):
            to, source = (leg.source, leg.to) if back else (leg.to, leg.source)
            for going, landed, row_bytes, before in fields:
                if rows_sent:
                    sends.append((to, going, (first_sent - before) * row_bytes, rows_sent * row_bytes))
                if rows_received:
                    receives.append((source, landed, first_received * row_bytes, rows_received * row_bytes))
            first_sent, first_received = first_sent + rows_sent, first_received + rows_received
        return self._start(sends, receives, f"{'sums' if back else 'rows'} of chunk {chunk}")

    def finish(self, under_way: UnderWay) -> None:
        """Waits for messages that have begun. On CPUs the host waits, with a deadline; on GPUs torch's current stream
        does."""
        try:
            self.engine.rails.wait(under_way)
        except PeerTimeout as error:
            self.engine.raise_of_rail(error)

    def _start(self, sends: Sequence[Piece], receives: Sequence[Piece], what: str) -> UnderWay:
        try:
            return self.engine.rails.start(sends, receives, what)
        except PeerTimeout as error:
            self.engine.raise_of_rail(error)

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

    def _peer(self, node: int) -> int:
        """Returns the rank of node `node` on this rail."""
        return self.engine.node_map.node_ranks(node)[self.engine.index]

    def _disagreement(self, word: str, node: int, mine: str, theirs: str) -> DisagreementError:
        return DisagreementError(
            f"{DISAGREE_ON} one call of {self.engine.name} at step rail: {word} is {mine} on rank {self.engine.rank}, "
            f"{theirs} on rank {self._peer(node)}"
        )

    def _check_headers(self, mine: list[int], theirs: list[list[int]]) -> None:
        """Raises DisagreementError unless the ranks of all nodes run the same operation."""
        for node in self.engine.rails.nodes:
            given = theirs[node]
            if given[:_NUM_COMPARED] == mine[:_NUM_COMPARED]:
                continue
            field = next(field for field in range(_NUM_COMPARED) if given[field] != mine[field])
            word, described = self.engine.described(field, mine[field])
            raise self._disagreement(word, node, described, self.engine.described(field, given[field])[1])

    def _check_rows(self, received: Sequence[int], theirs: list[list[int]]) -> None:
        """Raises DisagreementError unless each leg brings as many rows as this rank expects."""
        for leg, mine in zip(self.legs, received, strict=True):
            rows = theirs[leg.source][_FIRST_COUNT + leg.chunk]
            if mine != rows:
                raise self._disagreement("rows that cross", leg.source, str(mine), str(rows))

    def _check_counts(self, theirs: list[list[int]]) -> None:
        """Raises EpPluginError unless the counts that the ranks of all nodes have sent are possible."""
        engine, chunks = self.engine, self.chunks
        most = engine.config.max_tokens_per_rank
        most = _C.max_tokens if most is None else min(most, _C.max_tokens)
        for node in engine.rails.nodes:
            given = theirs[node]
            tokens = given[_NUM_COMPARED]
            if not 0 <= tokens <= most:
                raise self._impossible(node, f"{tokens} as its number of tokens")
            for chunk in range(chunks):
                rows, of_chunk = given[_FIRST_COUNT + chunk], tokens * (chunk + 1) // chunks - tokens * chunk // chunks
                if not 0 <= rows <= of_chunk:
                    raise self._impossible(node, f"{rows} rows of {of_chunk} tokens")

    def _impossible(self, node: int, sent: str) -> EpPluginError:
        return EpPluginError(f"{self.engine.name}: step rail: rank {self._peer(node)} sent {sent}")
