"""``deep_ep.buffers.legacy``."""

from __future__ import annotations

from ep_plugin.deep_ep.buffer import Buffer

__all__ = ["Buffer"]
