"""ep_plugin: collectives for training mixture-of-experts models, under the frameworks people already use.

The names below are imported when they are first used: ``import ep_plugin`` itself loads neither torch nor the kernels.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ep_plugin.collectives.all_gather import HierarchicalAllGather
    from ep_plugin.collectives.reduce_scatter import HierarchicalReduceScatter
    from ep_plugin.collectives.send_receive import Receive, Send, SendReceive
    from ep_plugin.config import DispatchLayout, MoECommunicatorConfig
    from ep_plugin.errors import (
        CaptureRefused,
        CommunicatorClosed,
        DisagreementError,
        EpPluginError,
        NotSupported,
        PeerAborted,
        PeerTimeout,
    )
    from ep_plugin.moe.communicator import MoECommunicator
    from ep_plugin.moe.layout import DispatchHandle, DispatchOutput
    from ep_plugin.moe.recording import read_stats, record_stats, stats, write_stats
    from ep_plugin.moe.statistics import LoadStats, layer

__version__ = "0.1.0"

_HOMES = {
    "CaptureRefused": "ep_plugin.errors",
    "CommunicatorClosed": "ep_plugin.errors",
    "DisagreementError": "ep_plugin.errors",
    "DispatchHandle": "ep_plugin.moe.layout",
    "DispatchLayout": "ep_plugin.config",
    "DispatchOutput": "ep_plugin.moe.layout",
    "EpPluginError": "ep_plugin.errors",
    "HierarchicalAllGather": "ep_plugin.collectives.all_gather",
    "HierarchicalReduceScatter": "ep_plugin.collectives.reduce_scatter",
    "LoadStats": "ep_plugin.moe.statistics",
    "MoECommunicator": "ep_plugin.moe.communicator",
    "MoECommunicatorConfig": "ep_plugin.config",
    "NotSupported": "ep_plugin.errors",
    "PeerAborted": "ep_plugin.errors",
    "PeerTimeout": "ep_plugin.errors",
    "Receive": "ep_plugin.collectives.send_receive",
    "Send": "ep_plugin.collectives.send_receive",
    "SendReceive": "ep_plugin.collectives.send_receive",
    "layer": "ep_plugin.moe.statistics",
    "read_stats": "ep_plugin.moe.recording",
    "record_stats": "ep_plugin.moe.recording",
    "stats": "ep_plugin.moe.recording",
    "write_stats": "ep_plugin.moe.recording",
}

__all__ = [
    "CaptureRefused",
    "CommunicatorClosed",
    "DisagreementError",
    "DispatchHandle",
    "DispatchLayout",
    "DispatchOutput",
    "EpPluginError",
    "HierarchicalAllGather",
    "HierarchicalReduceScatter",
    "LoadStats",
    "MoECommunicator",
    "MoECommunicatorConfig",
    "NotSupported",
    "PeerAborted",
    "PeerTimeout",
    "Receive",
    "Send",
    "SendReceive",
    "layer",
    "read_stats",
    "record_stats",
    "stats",
    "write_stats",
]


def __getattr__(name: str) -> Any:
    if name == "integrations":
        return import_module("ep_plugin.integrations")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'ep_plugin' has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
