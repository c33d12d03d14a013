"""Refuses a group long before its first operation, if an integration knows the group early."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable

import torch
import torch.distributed as dist

from ep_plugin.errors import NotSupported
from ep_plugin.integrations.fallback import falls_back
from ep_plugin.runtime.group import find_nodes
from ep_plugin.runtime.streams import kernels_for, resolve_device
from ep_plugin.transport.exchange import Exchange
from ep_plugin.transport.groups import checked_group
from ep_plugin.transport.topology import NodeMap

_node_maps: weakref.WeakKeyDictionary[dist.ProcessGroup, NodeMap | None] = weakref.WeakKeyDictionary()
"""The node maps of the groups that have been checked; None: the framework serves the group."""


def check_group(
    name: str,
    group: dist.ProcessGroup,
    device: str | torch.device,
    check_nodes: Callable[[NodeMap], None] | None = None,
) -> None:
    """Refuses a group that ep_plugin cannot serve, or warns if the framework may serve it instead.

    Collective at the first call for a group.

    Args:
        name: the integration.
        group: the group to check. All its ranks call this together.
        device: the device of the tensors, or its type.
        check_nodes: a function that raises NotSupported for nodes that an operation does not serve.

    Raises:
        NotSupported: the group is not served. All ranks raise it.
        ValueError: this build has no kernels for the device.
    """
    try:
        if group not in _node_maps:
            _node_maps[group] = _node_map_of(checked_group(group), device)
        node_map = _node_maps[group]
        if check_nodes is not None and node_map is not None:
            check_nodes(node_map)
    except NotSupported as error:
        if not falls_back(name, error):
            raise
        _node_maps.setdefault(group, None)


def _node_map_of(group: dist.ProcessGroup, device: str | torch.device) -> NodeMap:
    resolved = resolve_device(group, device)
    kernels_for(resolved)
    with contextlib.closing(Exchange(group)) as exchange:
        return find_nodes(exchange, group, resolved)[0]
