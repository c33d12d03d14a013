"""The tables of a communicator over several nodes: which source and which rank is where.

Nothing here depends on the tokens of an operation.
"""

from __future__ import annotations

import functools

import torch

from ep_plugin.moe.high_throughput.load import Source
from ep_plugin.moe.legs import legs_of
from ep_plugin.transport.topology import NodeMap


def output_order(node_map: NodeMap, node: int, chunks: int) -> list[Source]:
    """Returns the sources of a dispatch's output on `node`, in the order of its rows: by rank, then by chunk."""
    origin_of = {leg.source: number for number, leg in enumerate(legs_of(node, node_map.num_nodes, 1))}
    order = []
    for rank in range(node_map.num_nodes * node_map.ranks_per_node):
        source, index = node_map.node_of(rank), node_map.local_rank_of(rank)
        if source == node:
            order.append(Source(0, index, 0, rank))
        else:
            order += [Source(1 + chunk, index, origin_of[source], rank) for chunk in range(chunks)]
    return order


@functools.lru_cache(maxsize=64)
def places_of_ranks(node_map: NodeMap, device: torch.device) -> torch.Tensor:
    """Returns int32 ``[R]``: node * G + the rank's number on its node, G ranks on each."""
    places = [
        node_map.node_of(rank) * node_map.ranks_per_node + node_map.local_rank_of(rank)
        for rank in range(node_map.num_nodes * node_map.ranks_per_node)
    ]
    return torch.tensor(places, dtype=torch.int32, device=device)
