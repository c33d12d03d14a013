"""The control memory of one group's collectives: boards, host words and control blocks.

Each HierarchicalAllGather, HierarchicalReduceScatter and SendReceive takes a set. The first one of a group allocates
`SETS` of them, so the next ones map no memory for control. When all sets are taken, the next one allocates again.

Collectives share memory, not state: each has its own exchange, board and counters, so an error of one does not reach
another. A set is taken once, since a peer may still write to it when this rank has closed. A construction that fails
wastes its set. A rank frees the memory when its collectives that took a set of it have closed.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ep_plugin import _C
from ep_plugin.transport.exchange import Exchange
from ep_plugin.transport.peer import PeerBuffer, PeerMemory, undo_on_error
from ep_plugin.transport.shm import ShmMemory

SETS = 4
_PAGE_BYTES = mmap.PAGESIZE  # CUDA registers whole pages of host memory
_HOST_PARTS = {
    "board": _C.board_bytes(0),
    "requests": _C.requests_bytes,
    "calls": _C.call_ring_bytes,
    "stream_words": _C.stream_words_bytes,
}


@dataclass(frozen=True)
class ControlSet:
    """The control memory of one collective. A tuple has each rank's address as mapped here, by local rank.

    Attributes:
        board, requests, calls, stream_words: host memory that starts as zeros, each on pages of its own.
        block: the kernels' control block, in the device's memory, which starts as zeros.
        buffers: the blocks that hold this set, and the other sets.
        close: gives the set back. It may be called again.
    """

    board: tuple[int, ...]
    requests: tuple[int, ...]
    calls: tuple[int, ...]
    stream_words: tuple[int, ...]
    block: tuple[int, ...]
    buffers: tuple[PeerBuffer, ...]
    close: Callable[[], None]


def take_set(group: dist.ProcessGroup, exchange: Exchange, memory: PeerMemory) -> ControlSet:
    """Takes a set that no other collective has. Collective over the ranks of a node.

    Args:
        group: the process group of the collective.
        exchange: the collective's, between the ranks of the node.
        memory: the collective's peer memory.

    Raises:
        EpPluginError, PeerAborted, PeerTimeout: a rank cannot get the memory, or is late.
    """
    key = memory.device, exchange.ranks  # another split of the group into nodes has other memory
    with undo_on_error() as held:
        with _lock:
            latest = _latest.get(group, {}).get(key)
            number = None if latest is None else latest.reserve(held)
        mine = None if latest is None or number is None else [latest.ident, number]
        offers = exchange.all_gather("choice of control memory", mine)
        # All ranks use the number of the node's first rank. After a failed construction other ranks may be ahead of it.
        if latest is None or None in offers or len({ident for ident, _ in offers}) > 1:
            held.close()
            latest, number = _ControlMemory(exchange, memory), 0
            held.callback(latest.release)
            with _lock:
                _latest.setdefault(group, {})[key] = latest
        else:
            number = offers[0][1]
        return latest.set_at(number)


class _ControlMemory:
    """An allocation of `SETS` sets on every rank of a node. The collective that makes it takes set 0."""

    def __init__(self, exchange: Exchange, memory: PeerMemory) -> None:
        """Collective."""
        host = memory if memory.device.type == "cpu" else ShmMemory(exchange)
        block_bytes = _C.collective_control_bytes if memory.device.type == "cpu" else _C.device_control_bytes
        self.ident = exchange.ident or secrets.token_hex(8)  # one rank has nobody to agree with
        self._reserved = self._users = 1
        self._host_bytes = sum(map(_pages, _HOST_PARTS.values()))
        self._block_bytes = _pages(block_bytes)
        with undo_on_error() as self._buffers:
            self._host = self._allocate(host, self._host_bytes, "host words")
            self._blocks = self._allocate(memory, self._block_bytes, "control")

    def _allocate(self, memory: PeerMemory, nbytes: int, what: str) -> PeerBuffer:
        buffer = memory.allocate(SETS * nbytes, what)
        memory.disown(buffer)  # it outlives the collective that makes it
        self._buffers.callback(buffer.close)
        return buffer

    def reserve(self, held: contextlib.ExitStack) -> int | None:
        """Takes the next number and keeps the memory, until `release`, which `held` calls; None if it has gone or has
        no set left."""
        with _lock:
            if self._users == 0 or self._reserved == SETS:
                return None
            self._users += 1
            held.callback(self.release)
            self._reserved += 1
            return self._reserved - 1

    def release(self) -> None:
        with _lock:
            self._users -= 1
            unused = self._users == 0
        if unused:
            self._buffers.close()

    def set_at(self, number: int) -> ControlSet:
        if not 0 <= number < SETS:
            raise IndexError(f"expected a set below {SETS}, got {number}")
        parts, begin = {}, number * self._host_bytes
        for name, nbytes in _HOST_PARTS.items():
            parts[name] = tuple(ptr + begin for ptr in self._host.ptrs)
            begin += _pages(nbytes)
        block = tuple(ptr + number * self._block_bytes for ptr in self._blocks.ptrs)
        leaving = contextlib.ExitStack()
        leaving.callback(self.release)
        return ControlSet(**parts, block=block, buffers=(self._host, self._blocks), close=leaving.close)


def _pages(nbytes: int) -> int:
    """Rounds `nbytes` up to whole pages."""
    return -(-nbytes // _PAGE_BYTES) * _PAGE_BYTES


_lock = threading.RLock()
_Key = tuple[torch.device, tuple[int, ...]]  # with the ranks of the node
_latest: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[_Key, _ControlMemory]] = weakref.WeakKeyDictionary()


def _forget() -> None:
    """Makes a forked child forget the sets, which its parent uses."""
    global _lock
    _lock = threading.RLock()
    _latest.clear()


os.register_at_fork(after_in_child=_forget)
