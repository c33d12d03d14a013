"""Dispatch and combine over several nodes, composed of operations inside a node and of rails between nodes."""
