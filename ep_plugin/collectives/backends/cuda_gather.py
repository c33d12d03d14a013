"""All-gather inside a node on GPUs: shards are pushed into the peers' outputs.

Outputs that peers have not mapped go through a staging block, piece by piece.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ep_plugin import _C
from ep_plugin.collectives.backends import watchdog
from ep_plugin.collectives.backends.cuda import MOST_KEPT, CudaNode, StreamLanes, is_small, push_ctas, small_ctas
from ep_plugin.collectives.blocks import OperatingNode, tensor_at
from ep_plugin.collectives.shards import addresses_of, key_of
from ep_plugin.transport.exchange import Exchange
from ep_plugin.transport.shm import ShmMemory

STAGING_BYTES = 32 << 20
_STAGED = _C.place_word(_C.staging_block, 0)


class _Launch(NamedTuple):
    """A kernel's arguments but for its stream and what else changes from call to call. place: in peer memory, as peers
    must have it. filled: where it writes here."""

    args: Any
    place: int
    filled: Sequence[int]


def foreign_gather_sms(path: str, nbytes: int, node_size: int) -> int:
    """SMs that a gather of shards of `nbytes` bytes takes, at most, into outputs that peers have not mapped."""
    if is_small(path, nbytes, node_size):
        return small_ctas(nbytes, node_size)
    return push_ctas(_staged_path(path), min(nbytes, _staged_bytes(node_size)), node_size)


def _staged_path(path: str) -> str:
    """What lands in the staging block is copied on, which the kernel that pushes does sooner than copy engines."""
    return "sm" if path == "auto" else path


def _staged_bytes(node_size: int) -> int:
    """Of a shard, that the staging block has room for at a time."""
    return STAGING_BYTES // node_size // 16 * 16


class StreamWords:
    """The words by which streams of a node's ranks signal each other, in host memory that every rank and every device
    maps. Making it is collective over the node. `addresses`: of each rank's words, for this device. `own`: this rank's,
    int64 ``[2 (ready and done), blocks, ranks]``; see StreamWords in collectives.h.
    """

    def __init__(self, node: Exchange, device: torch.device) -> None:
        with contextlib.ExitStack() as made:
            memory = ShmMemory(node)
            made.callback(memory.close)
            block = memory.allocate(_C.stream_words_bytes, "stream words")
            made.callback(block.close)
            self.addresses = [_mapped(made, address, device) for address in block.ptrs]
            self._resources = made.pop_all()
        own = tensor_at(block.ptrs[node.rank], _C.stream_words_bytes, torch.device("cpu"))
        self.own: torch.Tensor = own.view(torch.int64).view(_C.stream_words_shape)

    def close(self) -> None:
        self._resources.close()


def _mapped(made: contextlib.ExitStack, address: int, device: torch.device) -> int:
    mapped = _C.register_host(address, _C.stream_words_bytes, device.index)
    made.callback(_unmap, address)
    return mapped


def _unmap(address: int) -> None:
    with contextlib.suppress(RuntimeError):  # a broken device has forgotten it
        _C.unregister_host(address)


class CudaGatherNode(CudaNode):
    """All ranks pass outputs of the same place in the same block, or all pass other memory."""

    def __init__(self, node: OperatingNode, lanes: StreamLanes, exchange: Exchange) -> None:
        super().__init__(node, lanes)
        self._step = _staged_bytes(node.node_size)
        self.number = 0  # of operations by copy engines outside of graphs
        # Begun and finished, see AllGatherArgs.
        self.words = torch.zeros(2, dtype=torch.int64, device="cpu", pin_memory=True)
        self._kept: dict[tuple[Any, ...], _Launch] = {}
        self._changes = 0  # of the blocks when those were made
        # Of each: number, block, addresses of what it fills here, and bytes of each.
        self.pending: deque[tuple[int, int, Sequence[int], int]] = deque()
        self.stream_words = StreamWords(exchange, node.device)  # last: what is above may want for memory
        watchdog.add(self)

    def gather(self, shard: torch.Tensor, outputs: Sequence[torch.Tensor]) -> None:
        """`shard`, which is this rank's of `outputs`, to every rank."""
        node, nbytes = self._node, shard.numel()
        if nbytes == 0:
            return self._compare(0, None, [])
        if self._is_small(nbytes):
            self._refuse_first_in_graph("words")
            self._compare(nbytes, None, outputs)
            self._exchange_words([shard] * node.node_size, outputs, -1, 1.0)
            return
        key = shard.data_ptr(), nbytes, key_of(outputs)
        push = self._kept_launch(key)
        if push is None:
            place = self._place_of(outputs)
            if place is None:
                self._refuse_first_in_graph("staging")
            self._compare(nbytes, place, outputs)
            if place is None:
                return self._gather_staged(shard, outputs)
            block, _, mine = place
            targets = [node.blocks.address_at(index, block) + mine for index in range(node.node_size)]
            push = self._keep(key, self._push_of(shard, outputs, targets, place, 0))
        else:
            self._calls.compare(_C.Step.ALL_GATHER, nbytes, 0, push.place)
        self._push(push)

    def _gather_staged(self, shard: torch.Tensor, outputs: Sequence[torch.Tensor]) -> None:
        node, staging = self._node, self._workspace("staging", STAGING_BYTES)
        for begin in range(0, shard.numel(), self._step):
            part = shard[begin : begin + self._step]
            targets = [address + node.index * part.numel() for address in staging]
            parts = [output[begin : begin + self._step] for output in outputs]
            place = _C.staging_block, 0, 0
            self._push(self._push_of(part, parts, targets, place, staging[node.index]))

    def close(self) -> None:
        watchdog.remove(self)
        self.stream_words.close()

    def _compare(self, nbytes: int, place: tuple[int, int, int] | None, parts: Sequence[torch.Tensor]) -> None:
        """Raises DisagreementError when a peer has called something else. A graph's calls are no host's, but keep the
        blocks that `parts` lie in."""
        if not self._lanes.capturing():
            self._calls.compare(_C.Step.ALL_GATHER, nbytes, 0, _STAGED if place is None else _C.place_word(*place[:2]))
            return
        blocks = self._node.blocks
        for block in {found[0] for part in parts if (found := blocks.place_of([part])) is not None}:
            blocks.keep_if_captured(block)

    def _kept_launch(self, key: tuple[Any, ...]) -> _Launch | None:
        """What an earlier call with the same memory has been made into; a graph's calls are made anew."""
        if self._changes != self._node.blocks.changes or len(self._kept) > MOST_KEPT:
            self._kept.clear()
            self._changes = self._node.blocks.changes
        return None if self._lanes.capturing() else self._kept.get(key)

    def _keep(self, key: tuple[Any, ...], launch: _Launch) -> _Launch:
        if not self._lanes.capturing():
            self._kept[key] = launch
        return launch

    def _place_of(self, parts: Sequence[torch.Tensor]) -> tuple[int, int, int] | None:
        """The block that all `parts` lie in, the offsets of the first and of this rank's; None for other memory."""
        found = self._node.blocks.place_of(parts)
        if found is None:
            return None
        block, offsets = found
        return block, offsets[0], offsets[self._node.index]

    def _push_of(
        self,
        shard: torch.Tensor,
        outputs: Sequence[torch.Tensor],
        targets: list[int],
        place: tuple[int, int, int],
        landing: int,
    ) -> _Launch:
        node, nbytes = self._node, shard.numel()
        path = _staged_path(self._path) if landing else self._path
        addresses = addresses_of(outputs)
        targets[node.index] = 0  # it lies there
        word = _C.place_word(*place[:2])
        args = _C.AllGatherArgs(
            comm=node.comm,
            input=shard.data_ptr(),
            bytes=nbytes,
            landing=landing,
            place=word,
            block=place[0],
            num_ctas=push_ctas(path, nbytes, node.node_size),
            captured=int(self._lanes.capturing()),
            begun=self.words.data_ptr(),
            finished=self.words.data_ptr() + 8,
        )
        args.set_targets(targets)
        args.set_stream_words(self.stream_words.addresses)
        args.set_outputs(addresses)
        filled = [landing + index * nbytes for index in range(node.node_size)] if landing else list(addresses)
        del filled[node.index]
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
        self._node.kernels.all_gather(args)
        if by_streams:
            watchdog.wake()
