"""The blocks of peer memory that `allocate` hands out as tensors, and when a block may be handed out again.

Every rank of a node has each block mapped, so ranks must pick the same one for the same call. Why reuse is safe:

- A block belongs to the tensor that was made of it, its views included: while that storage is alive on a rank, the rank
  does not offer the block. No order of copy-ins, copy-outs, prefetches or pipeline stages is assumed.
- A block is picked only when every rank of the node has it free. In host memory that all of them map a rank counts the
  releases of each block, as the tensor dies, and each `allocate` posts which blocks are free then. All ranks ask the
  same question in the same order: of the blocks that fit, the one used longest ago, was it free on every rank as that
  rank came to this call? A release says yes before the rank has come so far, so nobody waits for a peer's host that has
  released the block and is not here yet: hosts may drift apart by as many calls as there are blocks beyond the tensors
  that are alive. A block that is held somewhere is held for all; where all are, all ranks make another together.
- That a storage is dead says that its last reader has been enqueued, on this rank, before the `allocate` that takes the
  block again; as with any tensor, what reads it on another stream is joined with the stream that allocates next. On top
  of it each operation begins with a handshake on the stream: no rank writes to a peer's block before the peer's stream
  has come to that operation, and so past everything that it had read the block with.
- A tensor may outlive its communicator: then the block stays mapped until the tensor is gone.

Blocks are made once per size and tensor alive at a time, and at least `num_buffers` of a size. In the steady state
there is no exchange between ranks beyond those words. A block that no call has used for long, or one of several of
nearly the size that is needed, is given back when another is made. Numbers are the bits of a post: whoever holds
tensors in 64 blocks gets ordinary memory, and since they decide by the same posts, all ranks do.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch.utils.dlpack import from_dlpack

from ep_plugin import _C
from ep_plugin.collectives.shards import addresses_of, storage_of
from ep_plugin.errors import CaptureRefused, DisagreementError, PeerTimeout
from ep_plugin.runtime.board import Boards
from ep_plugin.runtime.faults import DISAGREE_ON
from ep_plugin.transport.peer import PeerBuffer, PeerMemory
from ep_plugin.transport.shm import ShmMemory

_MOST_WASTE = 2  # a block serves what needs at least so small a part of it
_IDLE_CALLS = 512
_GRAIN = 4096  # blocks are whole pages


class Node(Protocol):
    """This rank among the ranks of its node, as blocks and the operations inside a node see it."""

    @property
    def name(self) -> str: ...

    rank: int
    timeout_s: float
    device: torch.device
    boards: Boards
    lanes: Any

    def check(self) -> None: ...
    def group_rank(self, index: int) -> int: ...


@dataclass
class Block:
    """One block on every rank of the node; `owner` is what the tensors made of it on this rank keep alive."""

    buffer: PeerBuffer
    address: int
    owner: weakref.ref[Any] | None = None
    stream: int | None = None  # on which it was last handed out
    used: int = 0  # the call that last handed it out, or found it held


class Blocks:
    """The blocks of one communicator, by number; kernels have their table, int64 ``[blocks][ranks]``, and sizes."""

    def __init__(self, node: Node, memory: PeerMemory, posts: ShmMemory, num_buffers: int) -> None:
        """posts: host memory of the same ranks."""
        self._node: Any = weakref.proxy(node)
        self._memory = memory
        self._num_buffers = num_buffers
        self._blocks: list[Block | None] = []
        self._by_address: dict[int, int] = {}
        self._calls = 0
        self._captured: list[Any] = []  # owners of blocks that a graph writes to or reads, which may be replayed
        self._requests: tuple[int, ...] = posts.allocate(_C.requests_bytes, "requests").ptrs
        self._own = posts.exchange.rank
        # This rank first: what it holds it knows without waiting.
        self._order = [self._own, *(index for index in range(len(self._requests)) if index != self._own)]
        self._in_order = [self._requests[index] for index in self._order]
        self._uses = (ctypes.c_uint64 * _C.max_blocks)()  # how often each was handed out, alike on all ranks
        # No tensors, which would be where and what the caller's modes say (default device, inference).
        self.table = (ctypes.c_int64 * (_C.max_blocks * _C.max_ranks))()
        self.sizes = (ctypes.c_int64 * _C.max_blocks)()
        self.addresses = ctypes.addressof(self.table), ctypes.addressof(self.sizes)
        self.changes = 0  # of which blocks there are

    def __len__(self) -> int:
        return len(self._blocks)

    def place_of(self, parts: Sequence[torch.Tensor]) -> tuple[int, list[int]] | None:
        """Number of the block that all `parts` lie in, and their offsets there; None unless there is one."""
        address = storage_of(parts)
        number = None if address is None else self._by_address.get(address)
        if number is None:
            return None
        return number, [part - self._block(number).address for part in addresses_of(parts)]

    def address_at(self, rank_index: int, number: int) -> int:
        """Where block `number` of the node's rank of this index is mapped here."""
        return self._block(number).buffer.ptrs[rank_index]

    def allocate(self, nbytes: int) -> torch.Tensor | None:
        """Bytes of a block that is the same on all ranks: uint8 ``[nbytes]``.

        None, on all ranks, while tensors are held in as many blocks as there are numbers.
        """
        number = self._choose(nbytes)
        if number is None:
            return None
        block = self._block(number)
        block.used = self._calls
        self._uses[number] += 1
        block.stream = self._node.lanes.follow(block.stream)
        owner = _Owner()
        # Tells the peers at once, unless this is a forked child's copy. No Python, which a signal could interrupt.
        told = self._requests[self._own], number, self._uses[number], os.getpid()
        block.owner = weakref.ref(owner, partial(_C.release_dead_block, *told))
        self.keep_if_captured(number)
        return tensor_at(block.address, nbytes, self._node.device, owner)

    def keep_if_captured(self, number: int) -> None:
        """A block that a CUDA graph uses belongs to the graph, of whose end nobody is told: it is never given again."""
        block = self._block(number)
        owner = None if block.owner is None else block.owner()
        if owner is not None and self._node.lanes.capturing():
            self._captured.append(owner)

    def close(self) -> None:
        """Gives back what no tensor refers to; the rest goes with the last tensor, on GPUs with the process."""
        for block in filter(None, self._blocks):
            owner = None if block.owner is None else block.owner()
            block.owner = None  # nobody is told of its end any more: the words for that go now
            if owner is not None:
                self._memory.disown(block.buffer)
                if self._node.device.type == "cpu":
                    weakref.finalize(owner, block.buffer.close)
        self._blocks, self._by_address = [], {}

    # -- which block ---------------------------------------------------------------------------------------------

    def _choose(self, nbytes: int) -> int | None:
        """All ranks come to the same number, since they decide by what all of them have read."""
        self._calls += 1
        call = self._calls
        own, fitting = self._requests[self._own], []
        for number, block in enumerate(self._blocks):
            if block is None:
                continue
            if block.owner is not None and block.owner() is None:
                _C.release_block(own, number, self._uses[number])  # in case that nobody was told
            if nbytes <= block.buffer.nbytes <= max(_MOST_WASTE * nbytes, _GRAIN):
                fitting.append(number)
        _C.post_request(own, call, nbytes, ctypes.addressof(self._uses))
        enough = len(fitting) >= self._num_buffers or len(self._near(nbytes)) >= 2 * self._num_buffers
        if enough or self._node.lanes.capturing():
            for number in sorted(fitting, key=lambda number: self._block(number).used):
                if self._was_free(number, call):
                    return number
                self._block(number).used = call  # whoever holds it may do so for long: others are asked about first
        return self._make(nbytes, call)

    def _was_free(self, number: int, call: int) -> bool:
        """Whether every rank had the block free as it came to this call; waits for those that hold it and have not."""
        node = self._node
        free, late = _C.were_free(
            self._in_order, number, self._uses[number], call, node.boards.address, int(node.timeout_s * 1e9)
        )
        self._raise_late(late, call)
        return free

    def _offered(self, call: int, nbytes: int) -> int:
        """The blocks that were free on all ranks as they came to this call, once all have."""
        node = self._node
        late = _C.wait_requests(self._in_order, call, node.boards.address, int(node.timeout_s * 1e9))
        self._raise_late(late, call)
        offered = -1
        for index, requests in enumerate(self._requests):
            theirs, free = _C.read_request(requests, call)
            if theirs != nbytes:
                raise DisagreementError(
                    f"{DISAGREE_ON} one call of {node.name} at step allocate: bytes is {nbytes} on rank "
                    f"{node.rank}, {theirs} on rank {node.group_rank(index)}"
                )
            offered &= free
        return offered

    def _raise_late(self, late: int, call: int) -> None:
        if late < 0:
            return
        node = self._node
        node.check()
        peer = node.group_rank(self._order[late])
        raise PeerTimeout(
            f"{node.name}: rank {node.rank} waited {node.timeout_s:g} s for rank {peer} at step allocate (call {call})",
            peer,
            "allocate",
        )

    def _make(self, nbytes: int, call: int) -> int | None:
        """Collective: another block, under the first number that is not in use; None when there is no such number."""
        node = self._node
        offered = self._offered(call, nbytes)
        if node.lanes.capturing():
            raise CaptureRefused(
                f"{node.name}: expected a free block of {nbytes} bytes, got none, and a CUDA graph is being "
                "captured: run one step of this shape before capturing"
            )
        self._give_back(offered, nbytes, call)
        free = [number for number, block in enumerate(self._blocks) if block is None]
        number = free[0] if free else len(self._blocks)
        if number >= _C.max_blocks:
            return None
        buffer = self._memory.allocate((nbytes + _GRAIN - 1) // _GRAIN * _GRAIN, "output")
        block = Block(buffer, buffer.ptrs[self._own])
        if number == len(self._blocks):
            self._blocks.append(block)
        else:
            self._blocks[number] = block
        self._by_address[block.address] = number
        self._set_row(number, buffer.ptrs)
        self.sizes[number] = buffer.nbytes
        return number

    def _give_back(self, offered: int, nbytes: int, call: int) -> None:
        """Closes blocks that all ranks offer: those idle for long, those that a block of `nbytes` replaces when there
        are many of about its size, and the idlest when all numbers are in use."""
        near = self._near(nbytes)
        surplus = len(near) - 2 * self._num_buffers + 1
        full = len(self._blocks) == _C.max_blocks and None not in self._blocks
        free = [number for number in self._numbers(lambda _: True) if offered >> number & 1]
        for number in sorted(free, key=lambda number: self._block(number).used):
            replaced = surplus > 0 and number in near
            if call - self._block(number).used > _IDLE_CALLS or replaced or full:
                surplus -= number in near
                full = False
                self._drop(number)

    def _drop(self, number: int) -> None:
        block = self._block(number)
        self._blocks[number] = None
        del self._by_address[block.address]
        self._set_row(number, (0,) * len(block.buffer.ptrs))
        block.buffer.close()

    def _set_row(self, number: int, addresses: tuple[int, ...]) -> None:
        self.changes += 1
        first = number * _C.max_ranks
        self.table[first : first + len(addresses)] = list(addresses)

    def _near(self, nbytes: int) -> set[int]:
        """The blocks of about this size."""
        return set(self._numbers(lambda block: nbytes <= _MOST_WASTE * block.buffer.nbytes <= _MOST_WASTE**2 * nbytes))

    def _numbers(self, holds: Callable[[Block], bool]) -> list[int]:
        return [number for number, block in enumerate(self._blocks) if block is not None and holds(block)]

    def _block(self, number: int) -> Block:
        block = self._blocks[number]
        assert block is not None
        return block


class OperatingNode(Node, Protocol):
    """What operations inside a node use, beyond what blocks do."""

    index: int
    node_size: int
    path: str
    sum_sms: int
    state: torch.Tensor
    comm: _C.Comm
    kernels: Any
    memory: PeerMemory
    posts: ShmMemory
    blocks: Blocks


class _Owner:
    """What a tensor keeps alive that was made of a block: it dies with the last of the tensor's views."""


def tensor_at(address: int, nbytes: int, device: torch.device, owner: object = None) -> torch.Tensor:
    """Memory that others own as a tensor, uint8 ``[nbytes]``, which keeps `owner` alive. nbytes: at least 1."""
    index = -1 if device.type == "cpu" else device.index
    return from_dlpack(_C.lend_bytes(address, nbytes, index, owner))
