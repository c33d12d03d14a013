"""Thin adapters, one per framework; installed as ``ep_plugin.integrations``."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ep_plugin.integrations.rows import Status


def enable(*names: str) -> None:
    """Do what ``EP_PLUGIN=name,name`` does: each integration replaces its part once its framework is imported.

    Call it before the framework builds models. Enabling twice changes nothing.

    Raises:
        ValueError: an unknown name.
        EpPluginError: an integration that is not installed, or a framework that is not served.
    """
    from ep_plugin.integrations import hooks

    hooks.enable(names)


def disable(*names: str) -> None:
    """Restore the very objects that these integrations replaced.

    Dispatchers and hooks of models that are built keep ours. Messages of pipelines, and the collectives of Megatron's
    optimizer and of DeepSpeed, are the framework's again at once.

    Raises:
        ValueError: an unknown name.
    """
    from ep_plugin.integrations import hooks

    hooks.disable(names)


def status() -> Status:
    """The state of every integration in this process, what it replaced, how much it served, left and holds in memory.

    Returns:
        Rows (name, state, detail, served, left, peer_bytes), as `ep_plugin.integrations.rows.Row`. Printed, they are a
        table, with the memory in MiB.
    """
    from ep_plugin.integrations import hooks

    return hooks.status()
