"""Low-latency dispatch and combine: fixed slots, no counts to exchange, no host in the way."""
