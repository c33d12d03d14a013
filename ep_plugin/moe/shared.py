"""The communicators that MoECommunicator.shared hands out: one for each group, device and configuration."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from ep_plugin.config import MoECommunicatorConfig
from ep_plugin.transport.exchange import checked_group, is_alive

if TYPE_CHECKING:
    import torch.distributed as dist

    from ep_plugin.moe.communicator import MoECommunicator


class _Shared:
    """What one group shares. Making a communicator waits for the group's ranks, so only its own callers wait too."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.communicators: dict[tuple[torch.device, MoECommunicatorConfig], MoECommunicator] = {}


_groups: dict[weakref.ref[dist.ProcessGroup], _Shared] = {}
_groups_lock = threading.Lock()  # never held while ranks wait for each other


def shared_communicator(
    group: dist.ProcessGroup | None,
    device: Callable[[], torch.device],
    config: MoECommunicatorConfig,
    make: Callable[[], MoECommunicator],
) -> MoECommunicator:
    """The open communicator of (group, device, config), made by `make` if there is none.

    `device` is asked once the group is known to be alive. Communicators whose groups have been destroyed are closed.
    """
    _close_orphans()
    found_group = weakref.ref(checked_group(group))
    key = (device(), config)
    with _groups_lock:
        shared = _groups.setdefault(found_group, _Shared())
    with shared.lock:
        found = shared.communicators.get(key)
        if found is None or found.engine.closed:
            found = shared.communicators[key] = make()
        return found


def _close_orphans() -> None:
    """Closes and drops the communicators of groups that have been destroyed: torch tells nobody when they are.

    Whoever asks for another communicator is not to blame for what goes wrong here: it is a warning.
    """
    with _groups_lock:
        dead = [ref for ref in _groups if (group := ref()) is None or not is_alive(group)]
        orphans = [comm for ref in dead for comm in _groups.pop(ref).communicators.values()]
    for comm in orphans:
        try:
            comm.close()
        except Exception as error:
            warnings.warn(
                f"{comm.engine.name}: close() after the end of its process group: {type(error).__name__}: {error}",
                RuntimeWarning,
                stacklevel=5,  # the caller of MoECommunicator.shared
            )
