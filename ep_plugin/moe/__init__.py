"""Mixture-of-experts dispatch and combine: the communicator, what it is made of, and plain-torch oracles."""
