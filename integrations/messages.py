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


class _Slot:
    """The object of one key, made at its first use. made: once `is_made`, None if the framework serves the group."""

    made: SendReceive | None = None
    is_made = is_closed = False

    def __init__(self) -> None:
        self.lock = threading.Lock()  # of its own: other threads may make those of other groups in another order

    def close(self) -> None:
        with self.lock:
            self.is_closed = True
            if self.made is not None:
                self.made.close()


_slots: dict[_Key, _Slot] = {}


def messages_of(name: str, group: dist.ProcessGroup | None, tensor: torch.Tensor) -> SendReceive | None:
    """The object through which the integration `name` sends `tensor` over `group`, or None: it is left to the
    framework. Collective over the group, or the default group, at its first use with the device of the tensor.

    ep_plugin leaves devices that are neither CPUs nor GPUs, and GPUs whose group spans nodes or is not served; a
    warning says so once, on rank 0 of the job for its groups. It would send between nodes through NCCL, which
    matches messages in the order of the calls, and that of the framework may differ. For CPUs it leaves groups that
    are not served only where the framework takes its place (fallback.py).
    """
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"tensor of a message: expected a tensor, got {type(tensor).__name__}")
    if tensor.device.type not in ("cpu", "cuda"):
        return None
    group = group or dist.group.WORLD
    assert group is not None
    key = name, group, tensor.device
    with _lock:
        slot = _slots.get(key)
        gone = [] if slot else [_slots.pop(one) for one in list(_slots) if not is_alive(one[1])]
        slot = slot or _slots.setdefault(key, _Slot())
    _close(gone)
    with slot.lock:
        if not slot.is_closed:
            if not slot.is_made:
                slot.made, slot.is_made = _made(name, group, tensor.device), True
            return slot.made
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
        closing = [_slots.pop(key) for key in list(_slots) if key[0] == name]
    _close(closing)


def _close(slots: list[_Slot]) -> None:
    """Closes all, also if one raises."""
    with contextlib.ExitStack() as stack:
        for slot in slots:
            stack.callback(slot.close)
