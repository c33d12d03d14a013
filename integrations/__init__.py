"""Thin adapters, one per framework; installed as ``ep_plugin.integrations``."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ep_plugin.integrations.hooks import Status


def status() -> Status:
    """The state of every integration in this process: "off", "waiting" for its framework, "on" or "failed", and why.

    Returns:
        Rows (name, state, detail). Printed, they are a table.
    """
    from ep_plugin.integrations import hooks

    return hooks.status()
