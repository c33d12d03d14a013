"""Peer memory: blocks of memory, one per rank, that every rank of a node maps and writes into.

``PeerMemory`` is the interface of a transport. Shared memory between processes (shm.py) serves CPUs, and PyTorch's
symmetric memory over NVLink (nvlink.py) serves GPUs.
"""

from __future__ import annotations

import contextlib
import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ep_plugin.errors import CommunicatorClosed, EpPluginError, NotSupported, error_of_peer, type_and_text
from ep_plugin.log import log
from ep_plugin.transport.exchange import Exchange
from ep_plugin.transport.topology import discover

if TYPE_CHECKING:
    import torch


class AddressTable:
    """The address of every rank's block as mapped in this process, uint64 ``[ranks]``, for the kernels of a device.

    Kernels find peers by it, so it stays alive and unchanged while a kernel or a CUDA graph may use it. A block that
    replaces another one has a table of its own.

    Attributes:
        address: where it is in the device's memory.
        host_address: where it is in this process's memory.
    """

    def __init__(self, addresses: Sequence[int], device: torch.device | None = None) -> None:
        """device: whose kernels use it; None: the CPU."""
        self._host = (ctypes.c_uint64 * len(addresses))(*addresses)
        self.host_address = self.address = ctypes.addressof(self._host)
        if device is not None and device.type != "cpu":
            import torch  # errors and configs are imported without it

            self._on_device = torch.tensor(addresses, dtype=torch.int64, device=device)
            self.address = self._on_device.data_ptr()


class PeerBuffer:
    """One allocation: a block of ``nbytes`` bytes on every rank. ``what`` names it in messages.

    The memory lives until ``close``, which affects this process only: peers keep their mappings. Close a buffer before
    you drop it: dropping it keeps the memory.
    """

    def __init__(
        self,
        *,
        nbytes: int,
        ptrs: tuple[int, ...],
        what: str,
        release: Callable[[], None],
        device: torch.device | None = None,
    ) -> None:
        """device: whose kernels use the table of addresses; None: the CPU."""
        self.nbytes = nbytes
        self.what = what
        self._ptrs = ptrs
        self.table = AddressTable(ptrs, device)
        self._release: Callable[[], None] | None = release

    @property
    def ptrs(self) -> tuple[int, ...]:
        """The address of every rank's block as mapped in this process, by rank; each a multiple of 128."""
        if self.closed:
            raise CommunicatorClosed(f"{self.what}: expected an open buffer, this one was closed")
        return self._ptrs

    @property
    def closed(self) -> bool:
        return self._release is None

    def abandon(self) -> None:
        """Closes the buffer. The blocks stay mapped until the process ends, since something may write to them."""
        self._release = None

    def close(self) -> None:
        """Unmaps every block from this process. Waits for no peer; idempotent.

        Nothing in this process may still use the addresses.
        """
        release, self._release = self._release, None
        if release is not None:
            release()


class PeerMemory(ABC):
    """Memory that the ranks of one node share. Construction is collective. NotSupported if the ranks span nodes."""

    def __init__(self, exchange: Exchange, device: torch.device) -> None:
        self.exchange = exchange
        self.device = device
        self.node_map, self._reports = discover(exchange, device)
        if self.node_map.num_nodes > 1:
            first, other = (exchange.ranks[ranks[0]] for ranks in self.node_map.nodes[:2])
            hosts = [self._reports[ranks[0]].host for ranks in self.node_map.nodes[:2]]
            raise NotSupported(
                f"nodes share no memory: expected all {exchange.size} ranks on one "
                f"node, got {self.node_map.num_nodes} nodes of {self.node_map.ranks_per_node}; rank {first} is on "
                f"{hosts[0]}, rank {other} on {hosts[1]} (EP_PLUGIN_RANKS_PER_NODE overrides how a host is split)"
            )
        self._open: list[PeerBuffer] = []
        self._closed = False

    def allocate(self, nbytes: int, what: str) -> PeerBuffer:
        """Allocates a zeroed block on every rank. All ranks have mapped all blocks when this returns. Collective.

        Args:
            nbytes: the size of a block, the same on all ranks.
            what: a name for messages, the same on all ranks.

        Returns:
            The blocks, which belong to this object until they or it are closed.

        Raises:
            ValueError, CommunicatorClosed: wrong arguments, or closed memory; no peer is disturbed.
            DisagreementError: ranks pass different arguments.
            EpPluginError: this rank cannot get the memory; the others raise PeerAborted.
            PeerTimeout: a rank does not take part.
        """
        if self._closed:
            raise CommunicatorClosed(f"{what}: expected open peer memory, it was closed")
        if not isinstance(nbytes, int) or isinstance(nbytes, bool) or nbytes < 1:
            raise ValueError(f"nbytes of {what}: expected an integer of at least 1, got {nbytes!r}")
        self.exchange.agree("an allocation", f"{nbytes} bytes for {what}")
        ptrs, release = self._map_blocks(nbytes, what)
        log().info("rank %d: %s, %d bytes on %s", self.exchange.group_rank, what, nbytes, self.device)
        try:
            buffer = PeerBuffer(nbytes=nbytes, ptrs=ptrs, what=what, release=release, device=self.device)
        except BaseException:
            release()
            raise
        self._open = [*(other for other in self._open if not other.closed), buffer]
        return buffer

    def buffers(self) -> list[PeerBuffer]:
        """The open blocks that belong to this object."""
        return [buffer for buffer in self._open if not buffer.closed]

    def disown(self, buffer: PeerBuffer) -> None:
        """Leaves `buffer` open when this object is closed: its user closes it."""
        self._open = [other for other in self._open if other is not buffer]

    def close(self) -> None:
        """Closes every buffer that is still open. Waits for no peer; idempotent."""
        self._closed = True
        with contextlib.ExitStack() as stack:
            for buffer in self._open:
                stack.callback(buffer.close)
            self._open = []

    @abstractmethod
    def _map_blocks(self, nbytes: int, what: str) -> tuple[tuple[int, ...], Callable[[], None]]:
        """Allocates and maps zeroed blocks, collectively. Returns their addresses by rank and what unmaps them."""


@contextlib.contextmanager
def undo_on_error(before: Callable[[BaseException], None] | None = None) -> Iterator[contextlib.ExitStack]:
    """Yields a stack of callbacks that undo what the ``with`` block has made. They run if the block raises.

    The block's error is raised. An error of a callback becomes a note on it, and the other callbacks still run.
    `before` is called first, with the error.
    """
    stack = contextlib.ExitStack()
    try:
        yield stack
    except BaseException as error:
        if before is not None:
            stack.callback(before, error)
        try:
            stack.close()
        except Exception as second:
            error.add_note(f"cleaning up failed, too: {type_and_text(second)}")
        raise


def attempt(function: Callable[..., Any], *args: Any) -> tuple[Any, Exception | None]:
    """Returns the function's result, or the error of the system or of PyTorch, which peers must know of first."""
    try:
        return function(*args), None
    except (OSError, ValueError, OverflowError, MemoryError, RuntimeError) as error:
        return None, error


def raise_together(exchange: Exchange, step: str, error: Exception | None, value: Any = None) -> list[Any]:
    """Gathers `value`, which JSON can hold, if no rank passes an error. Collective; the ranks stay in step and may go
    on after an error.

    Returns:
        The values in the order of the exchange's ranks.

    Raises:
        EpPluginError: from this rank's own error.
        PeerAborted: this rank has none; it names the first rank that has one, and the reason.
    """
    reason = None if error is None else type_and_text(error)
    found = exchange.all_gather(step, [reason, value])
    if error is not None:
        raise EpPluginError(f"rank {exchange.group_rank}: {step} failed: {reason}") from error
    for rank, (theirs, _) in zip(exchange.ranks, found, strict=True):
        if theirs is not None:
            raise error_of_peer(rank, f"{step} failed: {theirs}", exchange.group_rank)
    return [gathered for _, gathered in found]
