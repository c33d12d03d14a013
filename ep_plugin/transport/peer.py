"""Peer memory: blocks of memory, one per rank, that every rank of a group maps and writes into.

``open_memory`` picks the member that serves a device: shared memory between processes for CPUs, PyTorch's symmetric
memory over NVLink for GPUs. Both keep the same contract, PeerMemory.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ep_plugin import env
from ep_plugin.errors import CommunicatorClosed, DisagreementError, EpPluginError, NotSupported, PeerAborted
from ep_plugin.transport.exchange import Exchange
from ep_plugin.transport.topology import NodeMap, RankReport, discover

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

_TRANSPORT_OF_DEVICE = {"cpu": "shm", "cuda": "nvlink"}


class PeerBuffer:
    """One allocation: a block of ``nbytes`` bytes on every rank.

    The memory lives until ``close``, which affects this process only: peers that still have the blocks mapped, this
    rank's too, go on using them. Dropping a buffer without closing it does not release it safely; close it.
    """

    def __init__(self, *, nbytes: int, ptrs: tuple[int, ...], what: str, release: Callable[[], None]) -> None:
        self.nbytes = nbytes
        self.what = what
        self._ptrs = ptrs
        self._release: Callable[[], None] | None = release

    @property
    def ptrs(self) -> tuple[int, ...]:
        """The address of every rank's block as mapped in this process, by rank; each a multiple of 128."""
        if self._release is None:
            raise CommunicatorClosed(f"{self.what}: expected an open buffer, this one was closed")
        return self._ptrs

    @property
    def closed(self) -> bool:
        return self._release is None

    def close(self) -> None:
        """Unmaps every block from this process. Talks to nobody, so a dead peer is no obstacle; idempotent.

        The caller sees to it that nothing in this process still uses the addresses.
        """
        release, self._release = self._release, None
        if release is not None:
            release()


class PeerMemory(ABC):
    """Memory that the ranks of one node share. Making one is collective, and refuses groups that span nodes."""

    def __init__(self, exchange: Exchange, device: torch.device) -> None:
        self.exchange = exchange
        self.device = device
        self.node_map: NodeMap
        self.node_map, self._reports = discover(exchange, device)
        _refuse_several_nodes(self.node_map, self._reports)
        self._open: list[PeerBuffer] = []
        self._closed = False

    def allocate(self, nbytes: int, what: str) -> PeerBuffer:
        """A block of ``nbytes`` bytes on every rank, zeroed, mapped by all ranks when this returns. Collective.

        All ranks pass the same ``nbytes`` and ``what``, a name for messages. Raises DisagreementError when they do
        not, EpPluginError on a rank that cannot get the memory and PeerAborted on the others, PeerTimeout when a rank
        does not take part. The memory is this object's until the buffer or this object is closed.
        """
        if self._closed:
            raise CommunicatorClosed(f"{what}: expected open peer memory, it was closed")
        if not isinstance(nbytes, int) or isinstance(nbytes, bool) or nbytes < 1:
            raise ValueError(f"nbytes of {what}: expected an integer of at least 1, got {nbytes!r}")
        self._agree_on(nbytes, what)
        ptrs, release = self._map_blocks(nbytes, what)
        if env.settings().log:
            print(
                f"ep_plugin: rank {self.exchange.group_rank}: {what}, {nbytes} bytes on {self.device}", file=sys.stderr
            )
        buffer = PeerBuffer(nbytes=nbytes, ptrs=ptrs, what=what, release=release)
        self._open = [*(other for other in self._open if not other.closed), buffer]
        return buffer

    def disown(self, buffer: PeerBuffer) -> None:
        """Leaves `buffer` open when this object is closed: whoever still uses it closes it."""
        self._open = [other for other in self._open if other is not buffer]

    def close(self) -> None:
        """Closes every buffer that is still open. Talks to nobody; idempotent."""
        self._closed = True
        for buffer in self._open:
            buffer.close()
        self._open = []

    @abstractmethod
    def _map_blocks(self, nbytes: int, what: str) -> tuple[tuple[int, ...], Callable[[], None]]:
        """Collective: gets and maps zeroed blocks; their addresses by rank, and what gives them back."""

    def _agree_on(self, nbytes: int, what: str) -> None:
        for rank, theirs in enumerate(self.exchange.all_gather("allocate", [what, nbytes])):
            if theirs != [what, nbytes]:
                raise DisagreementError(
                    f"ranks disagree on an allocation: {what}, {nbytes} bytes on rank {self.exchange.group_rank}; "
                    f"{theirs[0]}, {theirs[1]} bytes on rank {self.exchange.ranks[rank]}"
                )


def attempt(function: Callable[..., Any], *args: Any) -> tuple[Any, Exception | None]:
    """The function's result, or the error of the system or of PyTorch that peers must be told before it is raised."""
    try:
        return function(*args), None
    except (OSError, ValueError, OverflowError, MemoryError, RuntimeError) as error:
        return None, error


def raise_together(exchange: Exchange, step: str, error: Exception | None) -> None:
    """Collective: returns when no rank brings an error. Else each rank raises, EpPluginError from its own error if it
    has one, PeerAborted with the first failed rank's reason otherwise. The ranks stay in step and may go on."""
    reasons = exchange.all_gather(step, None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise EpPluginError(f"rank {exchange.group_rank}: {step} failed: {error}") from error
    for rank, reason in enumerate(reasons):
        if reason is not None:
            peer = exchange.ranks[rank]
            raise PeerAborted(f"rank {peer} aborted: {step} failed: {reason}", peer, reason)


def transport_for(device: torch.device) -> str:
    """The transport that serves ``device``: "shm" or "nvlink". ValueError when EP_PLUGIN_TRANSPORT contradicts it."""
    expected = _TRANSPORT_OF_DEVICE.get(device.type)
    if expected is None:
        raise ValueError(f"device: expected cpu or cuda, got {device}")
    asked = env.settings().transport
    if asked not in ("auto", expected):
        raise ValueError(f"EP_PLUGIN_TRANSPORT: expected auto or {expected} for device {device}, got {asked!r}")
    return expected


def open_memory(
    group: dist.ProcessGroup | None, device: torch.device | str, timeout_s: float | None = None
) -> PeerMemory:
    """The peer memory of ``group`` (None: the default group) that serves ``device``. Collective.

    ``timeout_s`` bounds every wait for a peer in seconds; None takes the group's timeout. Raises ValueError when
    EP_PLUGIN_TRANSPORT contradicts the device, DisagreementError when ranks are on different kinds of device, and
    NotSupported when the group spans nodes or its GPUs cannot reach each other.
    """
    import torch

    device = torch.device(device)
    transport_for(device)
    return open_memory_of(Exchange(group, timeout_s), device)


def open_memory_of(exchange: Exchange, device: torch.device) -> PeerMemory:
    """The same for the ranks of an exchange, which becomes the memory's own."""
    transport = transport_for(device)
    for rank, theirs in enumerate(exchange.all_gather("open memory", transport)):
        if theirs != transport:
            raise DisagreementError(
                f"ranks disagree on the transport: {transport} on rank {exchange.group_rank} ({device}), {theirs} "
                f"on rank {exchange.ranks[rank]}"
            )
    if transport == "shm":
        from ep_plugin.transport.shm import ShmMemory

        return ShmMemory(exchange)
    from ep_plugin.transport.nvlink import NvlinkMemory

    return NvlinkMemory(exchange, device)


def _refuse_several_nodes(node_map: NodeMap, reports: list[RankReport]) -> None:
    if not node_map.spans_nodes:
        return
    first, other = node_map.node_ranks(0)[0], node_map.node_ranks(1)[0]
    raise NotSupported(
        f"groups that span nodes are not supported in this release: expected all {node_map.size} ranks on one node, "
        f"got {node_map.num_nodes} nodes of {node_map.ranks_per_node}; rank {first} is on {reports[first].host}, rank "
        f"{other} on {reports[other].host} (EP_PLUGIN_RANKS_PER_NODE overrides how a host is split)"
    )
