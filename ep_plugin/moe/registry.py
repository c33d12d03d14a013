"""The numbers by which operators name communicators: ints are what torch can carry through graphs."""

from __future__ import annotations

import hashlib
import itertools
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ep_plugin import _C
from ep_plugin.errors import CommunicatorClosed

if TYPE_CHECKING:
    from ep_plugin.moe.communicator import MoECommunicator
    from ep_plugin.moe.high_throughput.engine import Engine

_counts: dict[int, Iterator[int]] = {}  # of the communicators whose numbers have one hash
_communicators: weakref.WeakValueDictionary[int, MoECommunicator] = weakref.WeakValueDictionary()


def communicator(number: int) -> MoECommunicator:
    """The communicator with this number in this process; CommunicatorClosed when it is gone."""
    found = _communicators.get(number)
    if found is None:
        raise CommunicatorClosed(f"expected the number of an open communicator, got {number}")
    return found


def register(comm: MoECommunicator) -> int:
    """Makes a communicator known, for as long as it lives, by the number that is returned."""
    number = _next_number(comm.engine)
    _communicators[number] = comm
    return number


def _next_number(engine: Engine) -> int:
    """A number that no other communicator of this process has had, equal for equal ones in other processes.

    Of a communicator, compiled code that torch keeps on disk is known by this alone: so it stands for all that the
    operators' output sizes depend on, and the same program finds its code again.
    """
    sizes = f"{engine.config_hash} {engine.size} {engine.meta_words} {_C.num_totals}"
    hashed = int.from_bytes(hashlib.sha256(sizes.encode()).digest()[:5], "little")
    return (hashed << 20) + next(_counts.setdefault(hashed, itertools.count(1)))  # below 2**61
