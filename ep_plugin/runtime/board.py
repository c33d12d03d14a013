"""Boards: a page of host memory per rank that every rank of the group maps.

A rank's kernels and host leave faults, totals and what they are doing on their own board; a rank that fails marks the
boards of its peers. Host memory, so that it can be read whatever a device is doing and whoever has died.
"""

from __future__ import annotations

import contextlib
import threading

import torch

from ep_plugin import _C
from ep_plugin.transport.exchange import Exchange
from ep_plugin.transport.shm import ShmMemory


class Boards:
    """The boards of a group, one per rank. ``device_address`` is this rank's own, ``index`` of them, to its kernels."""

    def __init__(self, exchange: Exchange, local_experts: int, device: torch.device) -> None:
        self._memory = ShmMemory(exchange)
        self._block = self._memory.allocate(_C.board_bytes(local_experts), "board")
        self.index = exchange.rank
        self._local_experts = local_experts
        self._registered = False
        # Another thread, or a signal's handler, may abort or look at what a peer does while this one closes.
        self._guard = threading.RLock()
        self._closed = False
        self.address: int = self._block.ptrs[self.index]
        self.device_address: int = self.address
        if device.type == "cuda":
            try:
                self.device_address = _C.register_host(self.address, _C.board_bytes(local_experts), device.index)
            except BaseException:
                self.close()
                raise
            self._registered = True
        _C.list_board(self.address)

    def quiet(self) -> bool:
        """Whether there is neither a fault nor an abort."""
        with self._guard:
            return self._closed or _C.board_quiet(self.address)

    def fault(self) -> tuple[int, int, int, int, int, int] | None:
        """The first fault on this rank: (code, step, peer, field, expected, seen)."""
        return self.fault_of(self.index)

    def fault_of(self, rank: int) -> tuple[int, int, int, int, int, int] | None:
        """The first fault on the board of `rank`."""
        with self._guard:
            return None if self._closed else _C.board_fault(self._block.ptrs[rank])

    @property
    def size(self) -> int:
        return len(self._block.ptrs)

    def abort(self) -> tuple[int, str] | None:
        """The rank that aborted, and why."""
        with self._guard:
            return None if self._closed else _C.board_abort(self.address)

    def tell_abort(self, reason: str) -> None:
        """Marks every rank's board, this one's too: all waits end at once."""
        with self._guard:
            for address in () if self._closed else self._block.ptrs:
                _C.abort_board(address, self.index, reason)

    def activity_of(self, rank: int) -> str:
        with self._guard:
            return "" if self._closed else _C.board_activity(self._block.ptrs[rank])

    def set_reserved_pools(self, count: int) -> None:
        """Says how many operations of this rank have found their pool large enough, or made it so."""
        with self._guard:
            if not self._closed:
                _C.set_reserved_pools(self.address, count)

    def reserved_pools_of(self, rank: int) -> int:
        with self._guard:
            return 0 if self._closed else _C.reserved_pools(self._block.ptrs[rank])

    def wait_ticket(self, ticket: int, timeout_s: float) -> bool:
        """Waits for a notify's totals; False when a fault, an abort or the deadline came first."""
        return _C.wait_ticket(self.address, ticket, int(timeout_s * 1e9)) == 0

    def totals(self, copy: torch.Tensor, expert_counts: torch.Tensor) -> list[int]:
        """Slots, rows, most rows from any rank to any and from any to all. These, and then the rows of each local
        expert, go to `copy`, the latter to `expert_counts`, too; both int64."""
        return _C.board_totals(self.address, self._local_experts, copy.data_ptr(), expert_counts.data_ptr())

    def unlist(self) -> None:
        """Later operations of other communicators are no longer announced here."""
        with self._guard:
            if not self._closed:
                _C.unlist_board(self.address)

    def close(self) -> None:
        """Gives the memory back. May be called again."""
        with self._guard:
            if self._closed:
                return
            self._closed = True
            _C.unlist_board(self.address)
            if self._registered:
                with contextlib.suppress(RuntimeError):  # a broken device has forgotten it
                    _C.unregister_host(self.address)
            self._block.close()
            self._memory.close()
