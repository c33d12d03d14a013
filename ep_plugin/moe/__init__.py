"""Mixture-of-experts dispatch and combine: contracts, the communicator, and the oracles that judge it."""
