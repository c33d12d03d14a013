"""``deep_ep_cpp``: what callers import from DeepEP's extension."""

from __future__ import annotations

from ep_plugin.deep_ep import Config, topk_idx_t
from ep_plugin.deep_ep.utils.event import EventHandle

__all__ = ["Config", "EventHandle", "topk_idx_t"]
