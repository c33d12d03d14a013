"""Counts, per integration, operations that ep_plugin served or left to the framework, and the memory that it holds.

`ep_plugin.integrations.status()` shows the counts. A replay of a CUDA graph counts nothing.
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
    """Counts `n` operations of the integration `name` that ran through ep_plugin. kind: names their kind, if the
    integration has several."""
    num_served[name] += n
    if kind:
        num_served_of_kind[name, kind] += n


def left(name: str, n: int = 1) -> None:
    """Counts `n` operations that the integration `name` saw and left to the framework's own code."""
    num_left[name] += n


def holds(name: str, holder: Holder) -> None:
    """Counts the peer memory of `holder` as memory of the integration `name`. Keeps a weak reference to it alone."""
    _holders.setdefault(name, weakref.WeakSet()).add(holder)


def leaves(name: str, holder: Holder) -> None:
    """Counts the memory of `holder` for the integration `name` no more. Others may use it still."""
    _holders[name].discard(holder)


def peer_bytes(name: str) -> int:
    """Returns the bytes of peer memory that the communicators of the integration `name` hold on this rank now."""
    return held_bytes(holders(name))


def holders(name: str) -> list[Holder]:
    """Returns the communicators of the integration `name`, open or closed."""
    return list(_holders.get(name, ()))


def held_bytes(given: Iterable[Holder]) -> int:
    """Returns the bytes of peer memory that `given` hold on this rank now. A block that they share counts once."""
    return sum(buffer.nbytes for buffer in {buffer for one in given for buffer in one.peer_buffers()})
