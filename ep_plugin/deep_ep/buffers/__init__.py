"""``deep_ep.buffers``: DeepEP 2.x's places of its buffers, `elastic` and `legacy`."""
