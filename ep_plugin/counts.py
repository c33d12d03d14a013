"""What the integrations count: operations that ep_plugin has served or left to the framework, and memory that it holds.

`ep_plugin.integrations.status()` shows them. A replay of a CUDA graph counts nothing.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any, Protocol

DISPATCHES, COLLECTIVES, MESSAGES = "dispatches and combines", "gathers and sums", "messages"

num_served: Counter[str] = Counter()
num_left: Counter[str] = Counter()
num_served_of_kind: Counter[tuple[str, str]] = Counter()  # by integration and kind
_holders: dict[str, weakref.WeakSet[Holder]] = {}  # by integration


class Holder(Protocol):
    """Whatever holds peer memory, such as a communicator."""

    def peer_buffers(self) -> Iterable[Any]:
        """The open `PeerBuffer`s of this rank that it holds, those that it shares with others included."""


def served(name: str, n: int = 1, kind: str = "") -> None:
    """Count `n` operations of the integration `name` that ran through ep_plugin. kind: if it has several, in words."""
    num_served[name] += n
    if kind:
        num_served_of_kind[name, kind] += n


def left(name: str, n: int = 1) -> None:
    """Count `n` operations that the integration `name` saw and left to the framework's own code."""
    num_left[name] += n


def holds(name: str, holder: Holder) -> None:
    """Count the peer memory of `holder` as memory of the integration `name`. Keeps a weak reference to it alone."""
    _holders.setdefault(name, weakref.WeakSet()).add(holder)


def peer_bytes(name: str) -> int:
    """The bytes of peer memory that the communicators of the integration `name` hold on this rank now."""
    return held_bytes(holders(name))


def holders(name: str) -> list[Holder]:
    """The communicators of the integration `name`, open or closed."""
    return list(_holders.get(name, ()))


def held_bytes(given: Iterable[Holder]) -> int:
    """The bytes of peer memory that `given` hold on this rank now. A block that several of them share counts once."""
    return sum(buffer.nbytes for buffer in {buffer for one in given for buffer in one.peer_buffers()})
