"""The communicators of integrations, whose operations `ep_plugin.integrations.status()` and load statistics count."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ep_plugin import MoECommunicator
from ep_plugin.errors import NotSupported
from ep_plugin.integrations.fallback import falls_back
from ep_plugin.moe.in_flight import untraced
from ep_plugin.moe.low_latency.engine import check_one_node
from ep_plugin.moe.statistics import layer
from ep_plugin.ranges import NOTHING, Opener
from ep_plugin.runtime.group import find_nodes
from ep_plugin.runtime.streams import kernels_for, resolve_device
from ep_plugin.transport.exchange import Exchange
from ep_plugin.transport.topology import NodeMap

_node_maps: weakref.WeakKeyDictionary[dist.ProcessGroup, NodeMap | None] = weakref.WeakKeyDictionary()
"""Of the groups that have been checked; None: the framework serves the group."""


@untraced
def communicator_of(name: str, group: dist.ProcessGroup | None, **settings: Any) -> MoECommunicator:
    """`MoECommunicator.shared(group, **settings)`, with its operations counted as those of the integration `name`.

    The communicator counts, not its caller: the compiler may trace the caller.
    """
    comm = MoECommunicator.shared(group, **settings)
    comm.in_flight.serves = name
    return comm


@untraced
def communicator_or_none(name: str, group: dist.ProcessGroup | None, **settings: Any) -> MoECommunicator | None:
    """The same; None if the framework's own exchange is to serve the group (fallback.py)."""
    try:
        return communicator_of(name, group, **settings)
    except NotSupported as error:
        if not falls_back(name, error):
            raise
        return None


def in_layer(name: str, opens: Opener | None, operation: Callable[..., Any], *args: Any) -> Any:
    """What `operation` returns, called in a range of the layer's name, and counted in its load.

    Code that torch.compile traces opens no range, and counts in no layer.
    """
    if torch.compiler.is_compiling():
        return operation(*args)
    with layer(name), opens(name) if opens else NOTHING:
        return operation(*args)


def check_group(name: str, group: dist.ProcessGroup, device: str, mode: str = "ht") -> None:
    """Refuses a group that communicators cannot serve, or warns if the framework is to serve it instead.

    For integrations that know the group long before the first rows come. Collective at the first call for a group.

    Args:
        name: the integration.
        group: the ranks of the communicators.
        device: the type of device on which rows will be.
        mode: of the communicators.

    Raises:
        NotSupported: the group is not served. All ranks raise it.
        ValueError: this build has no kernels for the device.
    """
    try:
        if group not in _node_maps:
            _node_maps[group] = _node_map_of(group, device)
        node_map = _node_maps[group]
        if mode == "ll" and node_map is not None:
            check_one_node(node_map)
    except NotSupported as error:
        if not falls_back(name, error):
            raise
        _node_maps.setdefault(group, None)


def _node_map_of(group: dist.ProcessGroup, device: str) -> NodeMap:
    resolved = resolve_device(group, device)
    kernels_for(resolved)
    with contextlib.closing(Exchange(group)) as exchange:
        return find_nodes(exchange, group, resolved)[0]
