"""The SendReceive objects of the integrations: one for each integration, process group and device."""

from __future__ import annotations

import contextlib
import threading

import torch
import torch.distributed as dist

from ep_plugin import counts
from ep_plugin.collectives.send_receive import SendReceive
from ep_plugin.errors import NotSupported
from ep_plugin.integrations.fallback import falls_back, warn_once
from ep_plugin.transport.groups import is_alive

_Key = tuple[str, dist.ProcessGroup, torch.device]
_lock = threading.Lock()


class _Entry:
    """The object of one key, which is made at its first use.

    Attributes:
        made: the object. If it is None and `is_made` is set, the framework serves the group.
        lock: is held while the object is made. Other threads may make objects of other keys in another order.
    """

    made: SendReceive | None = None
    is_made = is_closed = False

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def close(self) -> None:
        with self.lock:
            self.is_closed = True
            if self.made is not None:
                self.made.close()


_entries: dict[_Key, _Entry] = {}


def messages_of(name: str, group: dist.ProcessGroup | None, tensor: torch.Tensor) -> SendReceive | None:
    """Returns the object through which the integration `name` sends `tensor` over `group`; None if the framework sends.

    The first call with a group (None: the default group) and a device is collective over the group.

    The framework sends between devices that are neither CPUs nor GPUs. It sends between GPUs if the group spans nodes
    or is not served, and a warning says so once: NCCL matches messages between nodes in the order of the calls, and the
    framework's order may differ from ours. It sends between CPUs if the group is not served and the framework may take
    our place (fallback.py).
    """
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"tensor of a message: expected a tensor, got {type(tensor).__name__}")
    if tensor.device.type not in ("cpu", "cuda"):
        return None
    group = group or dist.group.WORLD
    assert group is not None
    key = name, group, tensor.device
    with _lock:
        entry = _entries.get(key)
        gone = [] if entry else [_entries.pop(one) for one in list(_entries) if not is_alive(one[1])]
        entry = entry or _entries.setdefault(key, _Entry())
    _close(gone)
    with entry.lock:
        if not entry.is_closed:
            if not entry.is_made:
                entry.made, entry.is_made = _made(name, group, tensor.device), True
            return entry.made
    return messages_of(name, group, tensor)  # another thread has closed it meanwhile


def _made(name: str, group: dist.ProcessGroup, device: torch.device) -> SendReceive | None:
    try:
        made = SendReceive(group, device=device)
    except NotSupported as error:
        if device.type == "cuda":
            _warn(name, group, str(error))
        elif not falls_back(name, error):
            raise
        return None
    if device.type == "cuda" and made.num_nodes > 1:
        made.close()
        _warn(name, group, f"expected GPUs of one node, got those of {made.num_nodes} nodes")
        return None
    counts.holds(name, made)
    return made


def _warn(name: str, group: dist.ProcessGroup, why: str) -> None:
    ranks = dist.get_process_group_ranks(group)
    warn_once(name, f"messages between the GPUs of ranks {ranks} are left to the framework ({why})")


def close_all(name: str) -> None:
    """Closes the objects of the integration `name`. Their groups get new ones at the next use."""
    with _lock:
        closing = [_entries.pop(key) for key in list(_entries) if key[0] == name]
    _close(closing)


def _close(entries: list[_Entry]) -> None:
    """Closes all, also if one raises."""
    with contextlib.ExitStack() as stack:
        for entry in entries:
            stack.callback(entry.close)
