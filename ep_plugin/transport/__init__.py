"""Memory that the ranks of a node map from each other, and rails between nodes. ``open_memory`` picks the transport."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ep_plugin import env

if TYPE_CHECKING:
    import torch

    from ep_plugin.transport.exchange import Exchange
    from ep_plugin.transport.peer import PeerMemory

_TRANSPORT_OF_DEVICE = {"cpu": "shm", "cuda": "nvlink"}


def transport_for(device: torch.device) -> str:
    """The transport that serves ``device``: "shm" or "nvlink". ValueError when EP_PLUGIN_TRANSPORT contradicts it."""
    expected = _TRANSPORT_OF_DEVICE.get(device.type)
    if expected is None:
        raise ValueError(f"device: expected cpu or cuda, got {device}")
    asked = env.settings().transport
    if asked not in ("auto", expected):
        raise ValueError(f"EP_PLUGIN_TRANSPORT: expected auto or {expected} for device {device}, got {asked!r}")
    return expected


def open_memory(exchange: Exchange, device: torch.device) -> PeerMemory:
    """Opens the peer memory that serves ``device``. Collective.

    Args:
        exchange: between the ranks that share the memory, all on one node. The memory goes on using it.
        device: this rank's device, of one type on all ranks.

    Returns:
        The memory. The caller closes it, and then the exchange.

    Raises:
        ValueError: EP_PLUGIN_TRANSPORT contradicts the device.
        DisagreementError: ranks have different types of device.
        NotSupported: the ranks are on several nodes, or their GPUs cannot reach each other.
        PeerTimeout, PeerAborted: a peer is late or has failed.
    """
    transport = transport_for(device)
    exchange.agree("the transport", transport)
    if transport == "shm":
        from ep_plugin.transport.shm import ShmMemory

        return ShmMemory(exchange)
    from ep_plugin.transport.nvlink import NvlinkMemory

    return NvlinkMemory(exchange, device)
