"""The blocks of peer memory that `allocate` makes tensors of, and when a block may be used again.

Every rank of a node has each block mapped, so ranks must choose the same one for the same call. Why reuse is safe:

- A block belongs to the tensor that was made of it and to the tensor's views. While that storage is alive on a rank,
  the block is not free there. No order of copies, prefetches or pipeline stages is assumed.
- A block is chosen only if every rank of the node had it free when that rank came to this call. All ranks read the same
  host memory, in which each posts its releases of blocks and, at each call, the blocks that were free. So all come to
  the same block, or make another together. A release answers before the rank has come to the call: hosts may drift
  apart by as many calls as there are blocks beyond the tensors alive.
- When a storage dies, its last reader on this rank has been enqueued before the `allocate` that takes the block again.
  As for any tensor, the caller joins another stream that reads it with the stream that allocates next. Each operation
  also begins with a handshake on the stream: no rank writes to a peer's block before the peer's stream has reached that
  operation, and so has passed every earlier read of the block.
- A tensor may outlive its communicator. The block then stays mapped until the tensor is gone.

In the steady state ranks exchange nothing but those posts. When a block is made, blocks that no call has used for long
are closed, and so is one of several that have nearly the size that is needed. A post has one bit for each of 64 blocks:
while tensors are alive in all of them, further ones are ordinary memory, on all ranks alike.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch.utils.dlpack import from_dlpack

from ep_plugin import _C
from ep_plugin.collectives.control import ControlSet
from ep_plugin.errors import CaptureRefused, DisagreementError, PeerTimeout
from ep_plugin.runtime.faults import DISAGREE_ON, Communicator
from ep_plugin.runtime.streams import Streams
from ep_plugin.transport.peer import PeerBuffer, PeerMemory

_MOST_WASTE = 2  # a block is at most so many times as large as what it serves
_IDLE_CALLS = 512
_PAGE_BYTES = 4096  # blocks are whole pages


class Node(Communicator, Protocol):
    """What blocks and the operations inside a node need to know of a communicator on this rank.

    Attributes:
        rank: this rank in the group.
        index: the local rank, in a node of `node_size` ranks.
        control: the memory that the ranks of the node share besides blocks.
    """

    index: int
    node_size: int
    device: torch.device
    streams: Streams
    state: torch.Tensor
    memory: PeerMemory
    control: ControlSet
    inside: _C.CollectiveNode

    def check(self) -> None: ...
    def set_memory(self, number: int, memory: PeerBuffer) -> None: ...


@dataclass
class Block:
    """One block on every rank of the node."""

    buffer: PeerBuffer
    address: int
    key: int = field(default_factory=itertools.count().__next__)  # in _owners
    stream: int | None = None  # on which it was last made a tensor
    used: int = 0  # the call that last took it, or found it taken

    def live_owner(self) -> Any:
        """What the tensors made of the block on this rank keep alive; None without such tensors."""
        owner = _owners.get(self.key)
        return None if owner is None else owner()

    def forget_owner(self) -> None:
        """From here on the owner's death is posted nowhere."""
        _owners.pop(self.key, None)


_owners: dict[int, weakref.ref[Any]] = {}
"""The owners of blocks. Not in the blocks: the garbage collector clears weak references that it finds in a cycle before
it calls `__del__`, and then `close` would unmap tensors that are alive."""


class Blocks:
    """The blocks of one communicator, by number. Its CollectiveNode has the addresses that kernels need."""

    def __init__(self, node: Node, num_buffers: int) -> None:
        """Collective over the node."""
        self._node: Node = weakref.proxy(node)
        # `close` may run when the node is gone
        self._memory, self._device, self._inside = node.memory, node.device, node.inside
        self._node_size = node.node_size
        self._num_buffers = num_buffers
        self._blocks: dict[int, Block] = {}
        self._calls = 0
        self._captured: list[Any] = []  # owners of the blocks that CUDA graphs use
        requests = node.control.requests
        self._own = requests[node.index]
        # This rank first: it need not wait to know which blocks are taken here.
        self._order = [node.index, *(index for index in range(len(requests)) if index != node.index)]
        self._requests = [requests[index] for index in self._order]
        self._uses = (ctypes.c_uint64 * _C.max_blocks)()  # how often each has been taken, the same on all ranks

    def __len__(self) -> int:
        return len(self._blocks)

    def allocate(self, nbytes: int) -> torch.Tensor | None:
        """Makes a tensor, uint8 ``[nbytes]``, of a block that has the same number on all ranks.

        Returns None, on all ranks, while tensors are alive in as many blocks as there are numbers.
        """
        number = self._choose(nbytes)
        if number is None:
            return None
        block = self._blocks[number]
        block.used = self._calls
        self._uses[number] += 1
        block.stream = self._node.streams.follow(block.stream)
        owner = _Owner()
        # Posts the release at once, but not for a forked child's copy. No Python runs, which a signal could interrupt.
        _owners[block.key] = weakref.ref(
            owner, partial(_C.release_dead_block, self._own, number, self._uses[number], os.getpid())
        )
        self.keep_if_captured(number)
        return tensor_at(block.address, nbytes, self._device, owner)

    def addresses(self, number: int) -> Sequence[int]:
        """Returns the addresses at which this process has mapped the block of each rank of the node."""
        return self._blocks[number].buffer.ptrs

    def keep_if_captured(self, number: int) -> None:
        """A block that a CUDA graph uses is never used again: nothing says when a graph is gone."""
        owner = self._blocks[number].live_owner()
        if owner is not None and self._node.streams.capturing():
            self._captured.append(owner)

    def close(self) -> None:
        """Closes the blocks that no tensor refers to. The others close with that tensor, on GPUs with the process."""
        for number, block in self._blocks.items():
            owner = block.live_owner()
            block.forget_owner()  # the memory for releases goes now
            if owner is not None:
                self._memory.disown(block.buffer)
                if self._device.type == "cpu":
                    weakref.finalize(owner, block.buffer.close)
            self._forget(number)
        self._blocks = {}

    def _choose(self, nbytes: int) -> int | None:
        """Returns the number of a block. All ranks choose the same one, because all decide by the same posts."""
        self._calls += 1
        call = self._calls
        for number, block in self._blocks.items():
            if block.key in _owners and block.live_owner() is None:
                _C.release_block(self._own, number, self._uses[number])  # in case the post at its death was lost
        _C.post_request(self._own, call, nbytes, ctypes.addressof(self._uses))
        largest = max(_MOST_WASTE * nbytes, _PAGE_BYTES)
        fitting = [number for number, block in self._blocks.items() if nbytes <= block.buffer.nbytes <= largest]
        enough = len(fitting) >= self._num_buffers or len(self._near(nbytes)) >= 2 * self._num_buffers
        if enough or self._node.streams.capturing():
            for number in self._longest_unused(fitting):
                free, late = _C.were_free(self._requests, number, self._uses[number], call, *self._waiting())
                self._raise_late(late, call)
                if free:
                    return number
                self._blocks[number].used = call  # it may be taken for long: later calls ask about others first
        return self._make(nbytes, call)

    def _make(self, nbytes: int, call: int) -> int | None:
        """Collective: makes a block under the lowest unused number and returns that; None if there is none."""
        node = self._node
        free = self._free_everywhere(call, nbytes)
        if node.streams.capturing():
            raise CaptureRefused(
                f"{node.name}: expected a free block of {nbytes} bytes, got none, and a CUDA graph is being "
                "captured: run one step of this shape before capturing"
            )
        self._close_unneeded(free, nbytes, call)
        number = next(number for number in itertools.count() if number not in self._blocks)
        if number >= _C.max_blocks:
            return None
        buffer = self._memory.allocate((nbytes + _PAGE_BYTES - 1) // _PAGE_BYTES * _PAGE_BYTES, "output")
        self._blocks[number] = Block(buffer, buffer.ptrs[node.index])
        node.set_memory(number, buffer)
        return number

    def _free_everywhere(self, call: int, nbytes: int) -> int:
        """Waits for the posts of all ranks. Returns a bit for each block: whether every rank had it free as that rank
        came to this call."""
        node = self._node
        self._raise_late(_C.wait_requests(self._requests, call, *self._waiting()), call)
        everywhere = -1
        for index, requests in zip(self._order, self._requests, strict=True):
            theirs, free = _C.read_request(requests, call)
            if theirs != nbytes:
                raise DisagreementError(
                    f"{DISAGREE_ON} one call of {node.name} at step allocate: bytes is {nbytes} on rank "
                    f"{node.rank}, {theirs} on rank {node.group_rank(index)}"
                )
            everywhere &= free
        return everywhere

    def _waiting(self) -> tuple[int, int]:
        """What ends a wait for peers: a fault or an abort on the board, and a time in nanoseconds."""
        return self._node.boards.address, int(self._node.timeout_s * 1e9)

    def _raise_late(self, late: int, call: int) -> None:
        """Raises if a wait ended without the post of the rank at `late` in the order."""
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

    def _close_unneeded(self, free: int, nbytes: int, call: int) -> None:
        """Closes blocks that no rank uses: (1) blocks that have been idle for _IDLE_CALLS calls, (2) blocks of about
        `nbytes` beyond the number to keep, (3) the longest idle block if all numbers are taken.

        free: a bit for each block, set if the block is free on every rank.
        """
        near = self._near(nbytes)
        surplus = len(near) - 2 * self._num_buffers + 1
        full = len(self._blocks) == _C.max_blocks
        for number in self._longest_unused([number for number in self._blocks if free >> number & 1]):
            replaced = surplus > 0 and number in near
            if call - self._blocks[number].used > _IDLE_CALLS or replaced or full:
                surplus -= number in near
                full = False
                block = self._blocks.pop(number)
                self._forget(number)
                block.forget_owner()
                block.buffer.close()

    def _longest_unused(self, numbers: list[int]) -> list[int]:
        return sorted(numbers, key=lambda number: (self._blocks[number].used, number))

    def _near(self, nbytes: int) -> set[int]:
        """The blocks of about this size."""
        return {
            number
            for number, block in self._blocks.items()
            if nbytes <= _MOST_WASTE * block.buffer.nbytes <= _MOST_WASTE**2 * nbytes
        }

    def _forget(self, number: int) -> None:
        """From here on operations do not find the block."""
        self._inside.set_memory(number, [0] * self._node_size, 0, 0, 0)


class _Owner:
    """An object that a tensor made of a block keeps alive. It dies with the last of the tensor's views."""


def tensor_at(address: int, nbytes: int, device: torch.device, owner: object = None) -> torch.Tensor:
    """Returns the memory at `address` as a tensor, uint8 ``[nbytes]`` with nbytes > 0, which keeps `owner` alive."""
    index = -1 if device.type == "cpu" else device.index
    return from_dlpack(_C.dlpack_bytes(address, nbytes, index, owner))
