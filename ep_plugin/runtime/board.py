"""Boards: a page of host memory per rank that every rank of the group maps.

A rank's kernels and host write faults, totals and the current operation to the rank's own board. A rank that fails
marks the boards of its peers. Boards are host memory: they can be read whatever state a device or a process is in.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from ep_plugin import _C
from ep_plugin.transport.peer import undo_on_error

T = TypeVar("T")


class Boards:
    """The boards of the ranks of a node, in host memory that its caller has mapped and gives back after `close`.

    Attributes:
        index: this rank's index among the boards.
        size: how many boards there are.
        address: this rank's board.
        device_address: the same board as kernels see it.
    """

    def __init__(self, boards: Sequence[int], index: int, num_totals: int, device: torch.device) -> None:
        """boards: the address here of each rank's board, in zeroed memory. num_totals: how many each has room for.
        device: where kernels run."""
        self.index, self.size = index, len(boards)
        # Another thread, or a signal's handler, may use the boards while this one closes them.
        self._guard = threading.RLock()
        self._closed = False
        with undo_on_error() as self._resources:
            self._ptrs = tuple(boards)
            self.address = self.device_address = self._ptrs[self.index]
            if device.type == "cuda":
                self.device_address = _C.register_host(self.address, _C.board_bytes(num_totals), device.index)
                self._resources.callback(self._unregister)
            self._resources.callback(_C.unlist_board, self.address)
            _C.list_board(self.address)

    def quiet(self) -> bool:
        """Returns whether the board has neither a fault nor an abort."""
        with self._guard:  # as _read does, in the path of every operation
            return self._closed or _C.board_quiet(self.address)

    def fault(self) -> tuple[int, int, int, int, int, int] | None:
        """Returns the first fault on this rank's board, as `fault_of` does."""
        return self.fault_of(self.index)

    def fault_of(self, rank: int) -> tuple[int, int, int, int, int, int] | None:
        """Returns the first fault on the board of `rank`: (code, step, peer, field, expected, seen)."""
        return self._read(_C.board_fault, rank, None)

    def abort(self) -> tuple[int, str] | None:
        """Returns the index of the rank that aborted, and its reason. None: no rank has."""
        return self._read(_C.board_abort, self.index, None)

    def activity_of(self, rank: int) -> str:
        """Returns the operation that `rank` called last."""
        return self._read(_C.board_activity, rank, "")

    def reserved_pools_of(self, rank: int) -> int:
        """Returns the last value that `rank` passed to `set_reserved_pools`."""
        return self._read(_C.reserved_pools, rank, 0)

    def set_reserved_pools(self, count: int) -> None:
        """Publishes the number of operations for which this rank has checked, and if need be grown, its pool."""
        with self._guard:  # as _read does, in the path of every operation
            if not self._closed:
                _C.set_reserved_pools(self.address, count)

    def unlist(self) -> None:
        """Later operations of other communicators are no longer announced here."""
        self._read(_C.unlist_board, self.index, None)

    def tell_abort(self, reason: str) -> None:
        """Marks every rank's board, this one's too: all waits end at once. reason: from `reason_of` or `text_of`."""
        self._mark(self.index, reason)

    def totals(self, segments: int, local_experts: int) -> torch.Tensor:
        """Returns the totals of the first segments, int64 ``[segments, num_totals + local_experts]``: slots, rows, the
        most rows from one rank to another, the most from one rank to all, then the rows of each local expert."""
        copy = torch.empty((segments, _C.num_totals + local_experts), dtype=torch.int64, device="cpu")
        _C.board_totals(self.address, copy.numel(), copy.data_ptr())
        return copy

    def close(self) -> None:
        """Ends all use of the boards: later calls read and write nothing. It may be called again."""
        with self._guard:
            self._closed = True
            self._resources.close()

    def _read(self, function: Callable[[int], T], rank: int, closed: T) -> T:
        """Returns function(address of the board of `rank`), or `closed` after close."""
        with self._guard:
            return closed if self._closed else function(self._ptrs[rank])

    def _mark(self, index: int, reason: str) -> None:
        """Writes an abort by the rank of this index to every board."""
        with self._guard:
            for address in () if self._closed else self._ptrs:
                _C.abort_board(address, index, reason)

    def _unregister(self) -> None:
        with contextlib.suppress(RuntimeError):  # a broken device has forgotten it
            _C.unregister_host(self.address)
