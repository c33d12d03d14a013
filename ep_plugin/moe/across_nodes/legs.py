"""The legs of an operation over N nodes: who sends which tokens to whom over the rail, and in which order.

Every rank cuts its tokens into C chunks. A leg brings one chunk's rows to one other node. A rank of node n sends to
nodes n + 1, n + 2, ... in turn, and receives from n - 1, n - 2, ..., so that no two nodes send to one at a time. The
legs have the same numbers on all ranks of a node. Inside a node, the rows of each leg are dispatched as a segment of
their own: segment 0 has the tokens of the node's own ranks, segment i + 1 those that leg i brings.
"""

from __future__ import annotations

from typing import NamedTuple

from ep_plugin.moe.high_throughput.load import Source
from ep_plugin.transport.topology import NodeMap

# Few nodes send long messages to each other, and forwarding a chunk overlaps with the next one's way. With many nodes,
# each leg is short, and overlaps with the legs of other nodes.
_CHUNKS_OF_NODES = {1: 1, 2: 4, 3: 2}


class Leg(NamedTuple):
    """The rows of chunk `chunk` go to node `to`; those of the same chunk of node `source` come."""

    chunk: int
    to: int
    source: int


def num_chunks(num_nodes: int, asked: int | None) -> int:
    """C. `asked`: the configuration's; None: by the number of nodes."""
    return asked if asked is not None and num_nodes > 1 else _CHUNKS_OF_NODES.get(num_nodes, 1)


def chunk_bounds(num_tokens: int, chunks: int) -> list[int]:
    """Where each chunk of T tokens begins, and T: C + 1 numbers."""
    return [num_tokens * chunk // chunks for chunk in range(chunks + 1)]


def legs_of(node: int, num_nodes: int, chunks: int) -> list[Leg]:
    """The legs of the ranks of `node`, in their order."""
    return [
        Leg(chunk, (node + step) % num_nodes, (node - step) % num_nodes)
        for chunk in range(chunks)
        for step in range(1, num_nodes)
    ]


def output_order(node_map: NodeMap, node: int, chunks: int) -> list[Source]:
    """The sources of a dispatch's output on `node`, in the order of its rows: by rank, and by chunk."""
    legs = legs_of(node, node_map.num_nodes, chunks)
    segments = {(leg.source, leg.chunk): number for number, leg in enumerate(legs, start=1)}
    order = []
    for rank in range(node_map.num_nodes * node_map.ranks_per_node):
        source, index = node_map.node_of(rank), node_map.local_rank_of(rank)
        if source == node:
            order.append(Source(0, index, rank))
        else:
            order += [Source(segments[source, chunk], index, rank) for chunk in range(chunks)]
    return order
