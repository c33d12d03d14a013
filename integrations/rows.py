"""What `ep_plugin.integrations.status()` returns: a row for each integration, and the table that they print as."""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    """One integration.

    state: "off"; "waiting" for its framework; "ready", replaced but without an operation yet; "on", has served some;
        "stock", left to the framework (EP_PLUGIN_FALLBACK); or "failed".
    detail: what is replaced, or the reason. First the number of each kind that was served, if there are several.
    served, left: operations that ran through ep_plugin, and that it left to the framework's own code.
    peer_bytes: of the memory that this rank's communicators hold now and that peers map. A communicator that two
        integrations use counts for both.
    """

    name: str
    state: str
    detail: str
    served: int = 0
    left: int = 0
    peer_bytes: int = 0


class Status(list[Row]):
    """A row for each integration; printed, a table."""

    def __repr__(self) -> str:
        cells = [("integration", "state", "served", "left", "MiB", "detail")]
        for row in self:
            mib = f"{row.peer_bytes / 2**20:.1f}" if row.peer_bytes else "0"
            cells.append((row.name, row.state, str(row.served), str(row.left), mib, row.detail))
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        one, two, *numbers, _ = widths
        return "\n".join(
            "  ".join([f"{name:<{one}}", f"{state:<{two}}", *map(str.rjust, counted, numbers), detail])
            for name, state, *counted, detail in cells
        )
