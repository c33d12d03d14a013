"""The SendReceive objects of the integrations: one for each process group, shared by all that send over it."""

from __future__ import annotations

import threading

import torch.distributed as dist

from ep_plugin.collectives.send_receive import SendReceive
from ep_plugin.transport.exchange import is_alive

_objects: dict[dist.ProcessGroup, SendReceive] = {}
_lock = threading.Lock()


def messages_of(group: dist.ProcessGroup | None) -> SendReceive:
    """The object that serves CPU tensors of `group`, None for the default group. Collective at its first use."""
    group = group or dist.group.WORLD
    with _lock:
        found = _objects.get(group)
        if found is None:
            for gone in [one for one in _objects if not is_alive(one)]:
                _objects.pop(gone).close()
            found = _objects[group] = SendReceive(group, device="cpu")
        return found


def close_all() -> None:
    """Closes every object. Their groups get new ones at the next use."""
    with _lock:
        objects = list(_objects.values())
        _objects.clear()
    for one in objects:
        one.close()
