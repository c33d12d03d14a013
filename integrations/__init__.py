"""Thin adapters that translate each framework's words into ours; installed as ``ep_plugin.integrations``."""

from __future__ import annotations

from ep_plugin.hooks import Row, rows


class Status(list[Row]):
    """Rows (name, state, detail), one for each integration; printed, a table."""

    def __repr__(self) -> str:
        cells = [("integration", "state", "detail"), *self]
        widths = [max(len(row[column]) for row in cells) for column in (0, 1)]
        return "\n".join(f"{name:<{widths[0]}}  {state:<{widths[1]}}  {detail}" for name, state, detail in cells)


def status() -> Status:
    """What EP_PLUGIN has switched on in this process: "off", "waiting" for its module, "on" or "failed", and why."""
    return Status(rows())
