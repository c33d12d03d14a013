"""All-gather and reduce-scatter over the nodes of a group: peer memory inside a node, rails between nodes."""

from ep_plugin.collectives.all_gather import HierarchicalAllGather
from ep_plugin.collectives.reduce_scatter import HierarchicalReduceScatter

__all__ = ["HierarchicalAllGather", "HierarchicalReduceScatter"]
