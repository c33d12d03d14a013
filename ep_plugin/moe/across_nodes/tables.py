"""The tables of a communicator over several nodes: which source, node and expert is where.

Nothing here depends on the tokens of an operation.
"""

from __future__ import annotations

from ep_plugin.moe.high_throughput.engine import HighThroughputEngine
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


def counts_of_nodes(engine: HighThroughputEngine) -> list[int]:
    """Returns, for each node, the numbers of the layout kernel's counts: of the node, its ranks and its experts."""
    node_map, local, numbers = engine.node_map, engine.local_experts, []
    experts = engine.size + node_map.num_nodes
    for node in range(node_map.num_nodes):
        ranks = node_map.node_ranks(node)
        numbers += [engine.size + node, *ranks]
        numbers += [experts + rank * local + place for rank in ranks for place in range(local)]
    return numbers


def expert_tables(engine: HighThroughputEngine) -> tuple[list[int], list[int]]:
    """Returns the node of each expert, and its number on this node, both by expert id + 1."""
    node_map, local = engine.node_map, engine.local_experts
    node_of, local_id = [node_map.num_nodes], [-1]
    for expert in range(engine.config.num_experts):
        rank, place = divmod(expert, local)
        node = node_map.node_of(rank)
        node_of.append(node)
        local_id.append(node_map.local_rank_of(rank) * local + place if node == engine.node else -1)
    return [*node_of, node_map.num_nodes], [*local_id, engine.node_experts]
