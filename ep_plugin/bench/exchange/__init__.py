"""Exchanges of tokens: the workloads, the oracle, ep_plugin, its peers, and the cases that the suites time."""
