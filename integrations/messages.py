"""The SendReceive objects of the integrations: one for each integration, process group and device."""

from __future__ import annotations

import threading

import torch
import torch.distributed as dist

from ep_plugin.collectives.send_receive import SendReceive
from ep_plugin.errors import NotSupported
from ep_plugin.integrations.fallback import falls_back
from ep_plugin.transport.groups import is_alive

_Key = tuple[str, dist.ProcessGroup, torch.device]
_objects: dict[_Key, SendReceive | None] = {}  # None: the framework serves this group
_lock = threading.Lock()


def messages_of(name: str, group: dist.ProcessGroup | None, tensor: torch.Tensor) -> SendReceive | None:
    """The object through which the integration `name` sends `tensor` over `group`, or None: it is left to the
    framework. Collective over the group, or the default group, at its first use with the device of the tensor.

    ep_plugin leaves devices that are neither CPUs nor GPUs, and GPUs whose group spans nodes or is not served. It would
    send between nodes through NCCL, which matches messages in the order of the calls, and that of the framework may
    differ. For CPUs it leaves groups that are not served only where the framework takes its place (fallback.py).
    """
    if tensor.device.type not in ("cpu", "cuda"):
        return None
    group = group or dist.group.WORLD
    assert group is not None
    key = name, group, tensor.device
    with _lock:
        if key not in _objects:
            for gone in [key for key in _objects if not is_alive(key[1])]:
                _close(gone)
            _objects[key] = _made(name, group, tensor.device)
        return _objects[key]


def _made(name: str, group: dist.ProcessGroup, device: torch.device) -> SendReceive | None:
    try:
        made = SendReceive(group, device=device)
    except NotSupported as error:
        if device.type == "cpu" and not falls_back(name, error):
            raise
        return None
    if device.type == "cuda" and made.num_nodes > 1:
        made.close()
        return None
    return made


def close_all(name: str) -> None:
    """Closes the objects of the integration `name`. Their groups get new ones at the next use."""
    with _lock:
        for key in [key for key in _objects if key[0] == name]:
            _close(key)


def _close(key: _Key) -> None:
    found = _objects.pop(key)
    if found is not None:
        found.close()
