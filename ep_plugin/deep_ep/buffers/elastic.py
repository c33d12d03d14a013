"""``deep_ep.buffers.elastic``."""

from __future__ import annotations

from ep_plugin.deep_ep.elastic import ElasticBuffer
from ep_plugin.deep_ep.elastic_handles import EPHandle

__all__ = ["EPHandle", "ElasticBuffer"]
