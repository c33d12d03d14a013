"""Boards: a page of host memory per rank that every rank of the group maps.

A rank's kernels and host leave faults, totals and what they are doing on their own board; a rank that fails marks the
boards of its peers. Host memory, so that it can be read whatever a device is doing and whoever has died.
"""

from __future__ import annotations

from ep_plugin import _C
from ep_plugin.memory.exchange import Exchange
from ep_plugin.memory.shm import ShmMemory


class Boards:
    """The boards of a group, one per rank. ``device_address`` is this rank's own as its kernels address it."""

    def __init__(self, exchange: Exchange, local_experts: int, on_cuda: bool) -> None:
        self._memory = ShmMemory(exchange)
        self._block = self._memory.allocate(_C.board_bytes(local_experts), "board")
        self._rank = exchange.rank
        self._local_experts = local_experts
        self._registered = on_cuda
        self.address: int = self._block.ptrs[self._rank]
        self.device_address: int = self.address
        if on_cuda:
            self.device_address = _C.register_host(self.address, _C.board_bytes(local_experts))

    def fault(self) -> tuple[int, int, int, int, int, int] | None:
        """The first fault on this rank: (code, step, peer, field, expected, seen)."""
        return _C.board_fault(self.address)

    def abort(self) -> tuple[int, str] | None:
        """The rank that aborted, and why."""
        return _C.board_abort(self.address)

    def tell_abort(self, reason: str) -> None:
        """Marks every peer's board: their waits end at once."""
        for rank, address in enumerate(self._block.ptrs):
            if rank != self._rank:
                _C.abort_board(address, self._rank, reason)

    def set_activity(self, text: str) -> None:
        _C.set_activity(self.address, text)

    def activity_of(self, rank: int) -> str:
        return _C.board_activity(self._block.ptrs[rank])

    def wait_ticket(self, ticket: int, timeout_s: float) -> bool:
        """Waits for a notify's totals; False when a fault, an abort or the deadline came first."""
        return _C.wait_ticket(self.address, ticket, int(timeout_s * 1e9)) == 0

    def totals(self) -> list[int]:
        """Slots, rows, the largest rank's slots and sent rows, then the rows of each local expert."""
        return _C.board_totals(self.address, self._local_experts)

    def close(self) -> None:
        if self._registered:
            _C.unregister_host(self.address)
            self._registered = False
        self._block.close()
        self._memory.close()
