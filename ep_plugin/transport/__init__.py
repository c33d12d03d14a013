"""How ranks reach each other: peer memory inside a node, rails between nodes, and who is where."""
