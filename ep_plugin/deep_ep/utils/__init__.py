"""``deep_ep.utils``: events here and in `event`; for tests and benchmarks `envs`, `math` and `testing`."""

from __future__ import annotations

from ep_plugin.deep_ep.utils.envs import check_nvlink_connections
from ep_plugin.deep_ep.utils.event import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap", "check_nvlink_connections"]
