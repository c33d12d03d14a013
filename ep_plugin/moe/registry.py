"""Finds the communicators of this process: by number, for operators, and by group, for `MoECommunicator.shared`."""

from __future__ import annotations

import hashlib
import itertools
import threading
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch.distributed as dist

from ep_plugin.errors import CommunicatorClosed
from ep_plugin.transport.groups import Group, checked_group, is_alive

# A communicator is Any here, since MoECommunicator's own module imports this one.
_counts: dict[int, Iterator[int]] = {}  # for each hash of sizes, counts its communicators
_communicators: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
# The shared communicators of each group. Making one waits for the group's ranks, so each group has a lock of its own.
_groups: dict[weakref.ref[dist.ProcessGroup], tuple[threading.Lock, dict[Hashable, Any]]] = {}
_groups_lock = threading.Lock()  # never held while ranks wait for each other


def communicator(number: int) -> Any:
    """Returns the MoECommunicator with this number in this process. Raises CommunicatorClosed if it is gone."""
    found = _communicators.get(number)
    if found is None:
        raise CommunicatorClosed(f"expected the number of an open communicator, got {number}")
    return found


def open_communicators() -> list[Any]:
    """Returns the MoECommunicators of this process that are not closed."""
    return [comm for comm in list(_communicators.values()) if not comm.engine.closed]


def register(comm: Any, sizes: str) -> int:
    """Gives `comm` a number by which it is found as long as it lives. Graphs can carry ints, but not objects.

    Torch keeps compiled code on disk, and there this number alone identifies a communicator. So the number follows from
    `sizes`, which holds all that the operators' output sizes depend on, and from the number of earlier communicators
    with the same `sizes`. Then the same program finds its code again, and no other program does.
    """
    hashed = int.from_bytes(hashlib.sha256(sizes.encode()).digest()[:5], "little")
    number = (hashed << 20) + next(_counts.setdefault(hashed, itertools.count(1)))  # below 2**61
    _communicators[number] = comm
    return number


def shared_communicator(
    group: Group, key: Callable[[dist.ProcessGroup], Hashable], make: Callable[[dist.ProcessGroup], Any]
) -> Any:
    """Returns the open communicator of (group, key(group)). Calls `make` if there is none.

    `key` is called after the group is known to be alive. The call closes communicators of destroyed groups.
    """
    _close_orphans()
    known = checked_group(group)
    found_group, wanted = weakref.ref(known), key(known)
    with _groups_lock:
        lock, communicators = _groups.setdefault(found_group, (threading.Lock(), {}))
    with lock:
        found = communicators.get(wanted)
        if found is None or found.engine.closed:
            found = communicators[wanted] = make(known)
        return found


def _close_orphans() -> None:
    """Closes the communicators of destroyed groups, since torch does not report the end of a group.

    An error becomes a warning: the caller asks for another communicator, which the error does not concern.
    """
    with _groups_lock:
        dead = [ref for ref in _groups if (group := ref()) is None or not is_alive(group)]
        orphans = [comm for ref in dead for comm in _groups.pop(ref)[1].values()]
    for comm in orphans:
        try:
            comm.close()
        except Exception as error:
            warnings.warn(
                f"{comm.engine.name}: close() after the end of its process group: {type(error).__name__}: {error}",
                RuntimeWarning,
                stacklevel=5,  # the caller of MoECommunicator.shared
            )
