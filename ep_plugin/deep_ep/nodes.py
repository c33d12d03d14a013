"""The nodes of a group, found once and kept for all of its buffers."""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref

import torch
import torch.distributed as dist

from ep_plugin.transport.exchange import Exchange
from ep_plugin.transport.groups import Group, checked_group
from ep_plugin.transport.topology import NodeMap, discover

_node_maps: weakref.WeakKeyDictionary[dist.ProcessGroup, NodeMap] = weakref.WeakKeyDictionary()


def nodes_of(group: dist.ProcessGroup) -> NodeMap:
    """Return the nodes of a group. Collective for the first buffer of the group."""
    if group not in _node_maps:
        with contextlib.closing(Exchange(group)) as exchange:
            _node_maps[group], _ = discover(exchange, torch.device("cpu"))
    return _node_maps[group]


@functools.lru_cache(maxsize=64)
def ranks_by_node(nodes: NodeMap, device: torch.device) -> torch.Tensor:
    """Return all ranks, node by node, as int64 ``[R]``."""
    return torch.tensor(list(itertools.chain(*nodes.nodes)), device=device)


def get_physical_domain_size(group: Group) -> tuple[int, int]:
    """Return the number of nodes, and the number of ranks on each. Collective for the group's first call or buffer."""
    nodes = nodes_of(checked_group(group))
    return nodes.num_nodes, nodes.ranks_per_node


def get_logical_domain_size(group: Group, allow_hybrid_mode: bool = True) -> tuple[int, int]:
    """Return how `ElasticBuffer.combine` adds up: first over the ranks of each node, then over nodes.

    This is always the physical size. `allow_hybrid_mode` has no effect.
    """
    return get_physical_domain_size(group)
