"""Thin adapters that translate each framework's words into ours; installed as ``ep_plugin.integrations``."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ep_plugin.integrations.hooks import Status


def status() -> Status:
    """What EP_PLUGIN has switched on in this process: "off", "waiting" for its module, "on" or "failed", and why."""
    from ep_plugin.integrations import hooks

    return hooks.Status(hooks.rows())
