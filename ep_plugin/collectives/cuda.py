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
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ep_plugin import _C
from ep_plugin.collectives import watchdog
from ep_plugin.collectives.blocks import tensor_at
from ep_plugin.collectives.calls import Calls
from ep_plugin.collectives.chunks import addresses_of, key_of
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
_SMALL_BYTES_IN_A_ROUND = 8 << 10  # two words for each thread of a CTA
_MOST_KEPT = 256


def is_small(path: str, nbytes: int, node_size: int) -> bool:
    """Whether words with flags carry shards of `nbytes` bytes."""
    return path == "auto" and nbytes * node_size <= SMALL_BYTES


def small_ctas(nbytes: int, node_size: int) -> int:
    """CTAs of the kernel that exchanges shards of `nbytes` bytes as words with flags: as many for each peer, and no
    more than send the largest in one round."""
    most = SMALL_BYTES // node_size // _SMALL_BYTES_IN_A_ROUND
    return (node_size - 1) * max(1, min(most, nbytes // _SMALL_BYTES_PER_CTA))


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
        self._last: int | None = None

    def join(self) -> None: ...

    def drain(self) -> None:
        torch.cuda.synchronize(self._device)

    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def follow(self, earlier: int | None) -> int:
        """The caller's stream, which goes on after `earlier`. A stream that records a graph waits for none outside.

        Streams are their handles: to make PyTorch's object of one costs the host more than all else here.
        """
        current = torch._C._cuda_getCurrentRawStream(self._device.index)
        if earlier is None or earlier == current:
            return current
        if not self.capturing() or _C.stream_capturing(earlier, self._device.index):
            torch.cuda.current_stream(self._device).wait_stream(self._stream(earlier))
        return current

    def _stream(self, handle: int) -> torch.cuda.Stream:
        if handle == 0:
            return torch.cuda.default_stream(self._device)
        return torch.cuda.ExternalStream(handle, self._device)

    def enter(self) -> int:
        """The caller's stream as kernels take it, after this communicator's earlier operations."""
        self._last = self.follow(self._last)
        return self._last


class _Launch(NamedTuple):
    """A kernel's arguments but for its stream and what else changes from call to call. place: in peer memory, as peers
    must have it. filled: where a gather writes here."""

    args: Any
    place: int
    filled: Sequence[int] = ()


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
        self._kept: dict[tuple[Any, ...], _Launch] = {}
        self._changes = 0  # of the blocks when those were made
        # Of each: number, block, addresses of what it fills here, and bytes of each.
        self.pending: deque[tuple[int, int, Sequence[int], int]] = deque()
        watchdog.add(self)

    @property
    def engine(self) -> CollectiveEngine:
        return self._engine

    def gather(self, shard: torch.Tensor, outputs: Sequence[torch.Tensor]) -> None:
        """`shard`, which is this rank's of `outputs`, to every rank."""
        engine, nbytes = self._engine, shard.numel()
        if nbytes == 0:
            return self._compare(_C.Step.GATHER, 0, 0, None, [])
        if is_small(self._path, nbytes, engine.node_size):
            self._compare(_C.Step.GATHER, nbytes, 0, None, outputs)
            self._exchange_words([shard] * engine.node_size, outputs, -1, 1.0)
            return
        key = _C.Step.GATHER, shard.data_ptr(), nbytes, key_of(outputs)
        push = self._kept_launch(key)
        if push is None:
            place = self._place_of(outputs)
            self._compare(_C.Step.GATHER, nbytes, 0, place, outputs)
            if place is None:
                return self._gather_staged(shard, outputs)
            block, _, mine = place
            targets = [engine.blocks.address_at(index, block) + mine for index in range(engine.node_size)]
            push = self._keep(key, self._push_of(shard, outputs, targets, place, 0))
        else:
            self._calls.compare(_C.Step.GATHER, nbytes, 0, push.place)
        self._push(push)

    def scatter(self, out: torch.Tensor, shards: Sequence[torch.Tensor], element: int, scale: float) -> None:
        """out = scale * the sum over the ranks of their shards for this one."""
        engine, nbytes = self._engine, out.numel()
        if nbytes == 0:
            return self._compare(_C.Step.SCATTER, 0, element, None, [])
        if is_small(self._path, nbytes, engine.node_size):
            self._compare(_C.Step.SCATTER, nbytes, element, None, shards)
            self._exchange_words(shards, [out] * engine.node_size, element, scale)
            return
        key = _C.Step.SCATTER, nbytes, key_of(shards), element, scale
        pull = self._kept_launch(key)
        if pull is None:
            place = self._place_of(shards)
            self._compare(_C.Step.SCATTER, nbytes, element, place, shards)
            if place is None:
                return self._scatter_staged(out, shards, element, scale)
            block, first, mine = place
            sources = [engine.blocks.address_at(index, block) + mine for index in range(engine.node_size)]
            word = _C.place_word(block, first)
            pull = self._keep(key, _Launch(self._pull_args(nbytes, sources, word, element, scale), word))
        else:
            self._calls.compare(_C.Step.SCATTER, nbytes, element, pull.place)
        self._pull(pull.args, out)

    def _gather_staged(self, shard: torch.Tensor, outputs: Sequence[torch.Tensor]) -> None:
        engine = self._engine
        for begin in range(0, shard.numel(), self._step):
            part = shard[begin : begin + self._step]
            targets = [address + engine.index * part.numel() for address in self.staging.ptrs]
            parts = [output[begin : begin + self._step] for output in outputs]
            place = _C.staging_block, 0, 0
            self._push(self._push_of(part, parts, targets, place, self.staging.ptrs[engine.index]))

    def _scatter_staged(self, out: torch.Tensor, shards: Sequence[torch.Tensor], element: int, scale: float) -> None:
        engine = self._engine
        self._lanes.enter()  # the staging block may still be read
        for begin in range(0, out.numel(), self._step):
            part = out[begin : begin + self._step]
            nbytes = part.numel()
            for index, shard in enumerate(shards):
                if index != engine.index:
                    self._staged(index * nbytes, nbytes).copy_(shard[begin : begin + self._step])
            sources = [address + engine.index * nbytes for address in self.staging.ptrs]
            sources[engine.index] = shards[engine.index].data_ptr() + begin
            self._pull(self._pull_args(nbytes, sources, _STAGED, element, scale), part)

    def close(self) -> None:
        watchdog.remove(self)
        self.stream_words.close()

    def _compare(
        self,
        step: _C.Step,
        nbytes: int,
        element: int,
        place: tuple[int, int, int] | None,
        parts: Sequence[torch.Tensor],
    ) -> None:
        """Raises DisagreementError when a peer has called something else. A graph's calls are no host's, but keep the
        blocks that `parts` lie in."""
        if not self._lanes.capturing():
            self._calls.compare(step, nbytes, element, _STAGED if place is None else _C.place_word(*place[:2]))
            return
        blocks = self._engine.blocks
        for block in {found[0] for part in parts if (found := blocks.place_of([part])) is not None}:
            blocks.keep_if_captured(block)

    def _kept_launch(self, key: tuple[Any, ...]) -> _Launch | None:
        """What an earlier call with the same memory has been made into; a graph's calls are made anew."""
        if self._changes != self._engine.blocks.changes or len(self._kept) > _MOST_KEPT:
            self._kept.clear()
            self._changes = self._engine.blocks.changes
        return None if self._lanes.capturing() else self._kept.get(key)

    def _keep(self, key: tuple[Any, ...], launch: _Launch) -> _Launch:
        if not self._lanes.capturing():
            self._kept[key] = launch
        return launch

    def _place_of(self, parts: Sequence[torch.Tensor]) -> tuple[int, int, int] | None:
        """The block that all `parts` lie in, the offsets of the first and of this rank's; None for other memory."""
        found = self._engine.blocks.place_of(parts)
        if found is None:
            return None
        block, offsets = found
        return block, offsets[0], offsets[self._engine.index]

    def _push_of(
        self,
        shard: torch.Tensor,
        outputs: Sequence[torch.Tensor],
        targets: list[int],
        place: tuple[int, int, int],
        landing: int,
    ) -> _Launch:
        engine, nbytes = self._engine, shard.numel()
        # What lands in the staging block is copied on, which the same kernel does sooner than copy engines.
        path = "sm" if landing and self._path == "auto" else self._path
        addresses = addresses_of(outputs)
        targets[engine.index] = 0  # it lies there
        word = _C.place_word(*place[:2])
        args = _C.PushShardArgs(
            comm=engine.comm,
            input=shard.data_ptr(),
            bytes=nbytes,
            landing=landing,
            place=word,
            block=place[0],
            num_ctas=push_ctas(path, nbytes, engine.node_size),
            captured=int(self._lanes.capturing()),
            begun=self.words.data_ptr(),
            finished=self.words.data_ptr() + 8,
        )
        args.set_targets(targets)
        args.set_stream_words(self.stream_words.addresses)
        args.set_outputs(addresses)
        filled = [landing + index * nbytes for index in range(engine.node_size)] if landing else list(addresses)
        del filled[engine.index]
        return _Launch(args, word, filled)

    def _push(self, push: _Launch) -> None:
        args = push.args
        args.stream = self._lanes.enter()
        by_streams = args.num_ctas == 0 and not args.captured
        if by_streams:
            self.number += 1
            args.number = self.number
            finished = int(self.words[1])
            while self.pending and self.pending[0][0] <= finished:
                self.pending.popleft()
            self.pending.append((self.number, args.block, push.filled, args.bytes))
        self._engine.kernels.push_shard(args)
        if by_streams:
            watchdog.wake()

    def _pull_args(self, nbytes: int, sources: list[int], place: int, element: int, scale: float) -> Any:
        args = _C.PullShardsArgs(
            comm=self._engine.comm,
            bytes=nbytes,
            place=place,
            scale=scale,
            element=element,
            num_ctas=pull_ctas(nbytes),
        )
        args.set_sources(sources)
        return args

    def _pull(self, args: Any, out: torch.Tensor) -> None:
        args.output = out.data_ptr()
        args.stream = self._lanes.enter()
        self._engine.kernels.pull_shards(args)

    def _exchange_words(
        self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], element: int, scale: float
    ) -> None:
        """inputs: this rank's shard for each rank. outputs: where theirs go, or this rank's sum. element -1: gather."""
        engine, nbytes = self._engine, inputs[0].numel()
        args = _C.SmallShardsArgs(
            comm=engine.comm,
            bytes=nbytes,
            scale=scale,
            element=element,
            num_ctas=small_ctas(nbytes, engine.node_size),
            stream=self._lanes.enter(),
        )
        args.set_words(list(self._words.ptrs))
        args.set_inputs(addresses_of(inputs))
        args.set_outputs(addresses_of(outputs))
        engine.kernels.small_shards(args)

    def _staged(self, offset: int, nbytes: int) -> torch.Tensor:
        return tensor_at(self.staging.ptrs[self._engine.index] + offset, nbytes, self._engine.device)
