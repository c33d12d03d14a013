"""Inside a node on GPUs: shards are pushed into the peers' outputs, and pulled from their inputs to be summed.

Everything is enqueued on the caller's stream; the host waits for nothing. Operations of one communicator on several
streams follow each other in the order in which they are called. Gathers of SM_BELOW_BYTES and more go by copy engines,
which leave all SMs to the model; smaller ones take a kernel of few CTAs, which is done sooner. Outputs and inputs that
peers have not mapped go through a staging block, piece by piece, by such kernels. Up to SMALL_BYTES, of all ranks
together, each word carries a flag, and any memory will do.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import TYPE_CHECKING

import torch

from ep_plugin import _C
from ep_plugin.collectives import watchdog
from ep_plugin.collectives.blocks import bytes_at
from ep_plugin.collectives.calls import Calls
from ep_plugin.collectives.stream_words import StreamWords
from ep_plugin.memory.exchange import Exchange

if TYPE_CHECKING:
    from ep_plugin.collectives.engine import CollectiveEngine

CONTROL_BYTES = _C.device_control_bytes
SM_BELOW_BYTES = 32 << 20  # gathered
SMALL_BYTES = _C.small_bytes  # gathered, or of the input that is scattered
STAGING_BYTES = 32 << 20
_STAGED = _C.place_word(_C.staging_block, 0)
_BYTES_PER_CTA = 16 << 10  # of a shard
# More of them load no faster, since links are full, and store unevenly where they are no power of two.
_MOST_PUSH_CTAS = 64
_MOST_PULL_CTAS = 20
_SMALL_BYTES_PER_CTA = 4 << 10  # to or from one peer
_MOST_SMALL_CTAS = 96


def is_small(path: str, nbytes: int, node_size: int) -> bool:
    """Whether words with flags carry shards of `nbytes` bytes."""
    return path == "auto" and nbytes * node_size <= SMALL_BYTES


def small_ctas(nbytes: int, node_size: int) -> int:
    """CTAs of the kernel that exchanges shards of `nbytes` bytes as words with flags: as many for each peer."""
    peers = node_size - 1
    return peers * max(1, min(_MOST_SMALL_CTAS // peers, nbytes // _SMALL_BYTES_PER_CTA))


def push_ctas(path: str, nbytes: int, node_size: int) -> int:
    """CTAs of the kernel that pushes shards of `nbytes` bytes; 0: copy engines do it."""
    if path == "copy_engine" or (path == "auto" and nbytes * node_size >= SM_BELOW_BYTES):
        return 0
    return max(1, min(_MOST_PUSH_CTAS, nbytes // _BYTES_PER_CTA))


def pull_ctas(nbytes: int) -> int:
    """CTAs of the kernel that sums shards of `nbytes` bytes."""
    return max(1, min(_MOST_PULL_CTAS, nbytes // _BYTES_PER_CTA))


def gather_sms(path: str, nbytes: int, node_size: int) -> int:
    """SMs that a gather of shards of `nbytes` bytes takes, at most."""
    if is_small(path, nbytes, node_size):
        return small_ctas(nbytes, node_size)
    return push_ctas(path, nbytes, node_size)


def scatter_sms(path: str, nbytes: int, node_size: int) -> int:
    return small_ctas(nbytes, node_size) if is_small(path, nbytes, node_size) else pull_ctas(nbytes)


class StreamLanes:
    """The caller's streams, one operation after the other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last: torch.cuda.Stream | None = None

    def join(self) -> None: ...

    def drain(self) -> None:
        torch.cuda.synchronize(self._device)

    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def follow(self, earlier: torch.cuda.Stream | None) -> torch.cuda.Stream:
        """The caller's stream, which goes on after `earlier`. A stream that records a graph waits for none outside."""
        current = torch.cuda.current_stream(self._device)
        if earlier is None or earlier == current:
            return current
        if not self.capturing() or _C.stream_capturing(earlier.cuda_stream, self._device.index):
            current.wait_stream(earlier)
        return current

    def enter(self) -> int:
        """The caller's stream as kernels take it, after this communicator's earlier operations."""
        self._last = self.follow(self._last)
        return self._last.cuda_stream


class CudaNode:
    """The operations of one communicator. `shards` and `outputs` are uint8 ``[bytes]``, one for each rank of the node.

    All ranks pass outputs (inputs) of the same place in the same block, or all pass other memory. What they pass is
    compared by the hosts as they call, and in graphs by the kernels; copy engines compare nothing.
    """

    def __init__(self, engine: CollectiveEngine, lanes: StreamLanes, path: str, node: Exchange) -> None:
        self._engine = weakref.proxy(engine)
        self._lanes = lanes
        self._path = path
        self.staging = engine.memory.allocate(STAGING_BYTES, "staging")
        self._step = STAGING_BYTES // engine.node_size // 16 * 16
        self._calls = Calls(engine)
        self._words = engine.memory.allocate(_C.small_words_bytes(engine.node_size), "words")
        self.stream_words = StreamWords(node, engine.device)
        self.number = 0  # of operations by copy engines outside of graphs
        # Begun and finished, see PushShardArgs.
        self.words = torch.zeros(2, dtype=torch.int64, device="cpu", pin_memory=True)
        # Of each: number, block, addresses of what it fills here, and bytes of each.
        self.pending: deque[tuple[int, int, list[int], int]] = deque()
        watchdog.add(self)

    @property
    def engine(self) -> CollectiveEngine:
        return self._engine

    def gather(self, shard: torch.Tensor, outputs: list[torch.Tensor]) -> None:
        """`shard`, which is this rank's of `outputs`, to every rank."""
        engine, nbytes = self._engine, len(shard)
        if nbytes == 0:
            return self._compare(_C.Step.GATHER, 0, 0, None, [])
        if is_small(self._path, nbytes, engine.node_size):
            self._compare(_C.Step.GATHER, nbytes, 0, None, outputs)
            self._exchange_words([shard] * engine.node_size, outputs, -1, 1.0)
            return
        place = self._place_of(outputs)
        self._compare(_C.Step.GATHER, nbytes, 0, place, outputs)
        if place is not None:
            block, first, mine = place
            targets = [engine.blocks.address_at(index, block) + mine for index in range(engine.node_size)]
            self._push(shard, outputs, targets, block, first, 0)
            return
        for begin in range(0, nbytes, self._step):
            part = shard[begin : begin + self._step]
            targets = [address + engine.index * len(part) for address in self.staging.ptrs]
            parts = [output[begin : begin + self._step] for output in outputs]
            self._push(part, parts, targets, _C.staging_block, 0, self.staging.ptrs[engine.index])

    def scatter(self, out: torch.Tensor, shards: list[torch.Tensor], element: int, scale: float) -> None:
        """out = scale * the sum over the ranks of their shards for this one."""
        engine = self._engine
        if len(out) == 0:
            return self._compare(_C.Step.SCATTER, 0, element, None, [])
        if is_small(self._path, len(out), engine.node_size):
            self._compare(_C.Step.SCATTER, len(out), element, None, shards)
            self._exchange_words(shards, [out] * engine.node_size, element, scale)
            return
        place = self._place_of(shards)
        self._compare(_C.Step.SCATTER, len(out), element, place, shards)
        self._lanes.enter()  # the staging block may still be read
        if place is not None:
            block, first, mine = place
            sources = [engine.blocks.address_at(index, block) + mine for index in range(engine.node_size)]
            self._pull(out, sources, _C.place_word(block, first), element, scale)
            return
        for begin in range(0, len(out), self._step):
            part = out[begin : begin + self._step]
            for index, shard in enumerate(shards):
                if index != engine.index:
                    self._staged(index * len(part), len(part)).copy_(shard[begin : begin + self._step])
            sources = [address + engine.index * len(part) for address in self.staging.ptrs]
            sources[engine.index] = shards[engine.index].data_ptr() + begin
            self._pull(part, sources, _C.place_word(_C.staging_block, 0), element, scale)

    def close(self) -> None:
        watchdog.remove(self)
        self.stream_words.close()

    def _compare(
        self,
        step: _C.Step,
        nbytes: int,
        element: int,
        place: tuple[int, int, int] | None,
        parts: list[torch.Tensor],
    ) -> None:
        """Raises DisagreementError when a peer has called something else. A graph's calls are no host's, but keep the
        blocks that `parts` lie in."""
        if not self._lanes.capturing():
            self._calls.compare(step, nbytes, element, _STAGED if place is None else _C.place_word(*place[:2]))
            return
        blocks = self._engine.blocks
        for block in {found[0] for part in parts if (found := blocks.place_of([part])) is not None}:
            blocks.keep_if_captured(block)

    def _place_of(self, parts: list[torch.Tensor]) -> tuple[int, int, int] | None:
        """The block that all `parts` lie in, the offsets of the first and of this rank's; None for other memory."""
        found = self._engine.blocks.place_of(parts)
        if found is None:
            return None
        block, offsets = found
        return block, offsets[0], offsets[self._engine.index]

    def _push(
        self,
        shard: torch.Tensor,
        outputs: list[torch.Tensor],
        targets: list[int],
        block: int,
        offset: int,
        landing: int,
    ) -> None:
        engine, nbytes = self._engine, len(shard)
        stream, captured = self._lanes.enter(), self._lanes.capturing()
        # What lands in the staging block is copied on, which the same kernel does sooner than copy engines.
        path = "sm" if landing and self._path == "auto" else self._path
        ctas = push_ctas(path, nbytes, engine.node_size)
        by_streams = ctas == 0 and not captured
        targets[engine.index] = 0  # it lies there
        if by_streams:
            self.number += 1
            finished = int(self.words[1])
            while self.pending and self.pending[0][0] <= finished:
                self.pending.popleft()
            filled = [output.data_ptr() for output in outputs]
            if landing:
                filled = [landing + index * nbytes for index in range(engine.node_size)]
            del filled[engine.index]
            self.pending.append((self.number, block, filled, nbytes))
        args = _C.PushShardArgs(
            comm=engine.comm,
            input=shard.data_ptr(),
            bytes=nbytes,
            landing=landing,
            place=_C.place_word(block, offset),
            block=block,
            num_ctas=ctas,
            captured=int(captured),
            number=self.number,
            begun=self.words.data_ptr(),
            finished=self.words.data_ptr() + 8,
            stream=stream,
        )
        args.set_targets(targets)
        args.set_stream_words(self.stream_words.addresses)
        args.set_outputs([output.data_ptr() for output in outputs])
        engine.kernels.push_shard(args)
        if by_streams:
            watchdog.wake()

    def _pull(self, out: torch.Tensor, sources: list[int], place: int, element: int, scale: float) -> None:
        engine = self._engine
        args = _C.PullShardsArgs(
            comm=engine.comm,
            output=out.data_ptr(),
            bytes=len(out),
            place=place,
            scale=scale,
            element=element,
            num_ctas=pull_ctas(len(out)),
            stream=self._lanes.enter(),
        )
        args.set_sources(sources)
        engine.kernels.pull_shards(args)

    def _exchange_words(
        self, inputs: list[torch.Tensor], outputs: list[torch.Tensor], element: int, scale: float
    ) -> None:
        """inputs: this rank's shard for each rank. outputs: where theirs go, or this rank's sum. element -1: gather."""
        engine, nbytes = self._engine, len(inputs[0])
        args = _C.SmallShardsArgs(
            comm=engine.comm,
            bytes=nbytes,
            scale=scale,
            element=element,
            num_ctas=small_ctas(nbytes, engine.node_size),
            stream=self._lanes.enter(),
        )
        args.set_words(list(self._words.ptrs))
        args.set_inputs([tensor.data_ptr() for tensor in inputs])
        args.set_outputs([tensor.data_ptr() for tensor in outputs])
        engine.kernels.small_shards(args)

    def _staged(self, offset: int, nbytes: int) -> torch.Tensor:
        return bytes_at(self.staging.ptrs[self._engine.index] + offset, nbytes, self._engine.device)
