"""The SendReceive objects of the integrations: one for each process group and device, shared by all that
send over it."""

from __future__ import annotations

import threading

import torch
import torch.distributed as dist

from ep_plugin.collectives.send_receive import SendReceive
from ep_plugin.transport.groups import is_alive

_objects: dict[tuple[dist.ProcessGroup, torch.device], SendReceive] = {}
_lock = threading.Lock()


def messages_of(group: dist.ProcessGroup | None, device: torch.device) -> SendReceive:
    """The object for tensors of `group` on `device`; None: the default group. Collective at its first use."""
    group = group or dist.group.WORLD
    assert group is not None
    with _lock:
        found = _objects.get((group, device))
        if found is None:
            for gone in [key for key in _objects if not is_alive(key[0])]:
                _objects.pop(gone).close()
            found = _objects[group, device] = SendReceive(group, device=device)
        return found


def serves(tensor: torch.Tensor) -> bool:
    """Whether the integrations send this tensor. Between GPUs, the frameworks' own messages are as fast or faster."""
    return tensor.device.type == "cpu"


def close_all() -> None:
    """Closes every object. Their groups get new ones at the next use."""
    with _lock:
        objects = list(_objects.values())
        _objects.clear()
    for one in objects:
        one.close()
