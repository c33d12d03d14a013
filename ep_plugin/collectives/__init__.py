"""All-gather and reduce-scatter over the nodes of a group: peer memory inside a node, rails between nodes."""
