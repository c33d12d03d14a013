"""Megatron-core's pipeline: messages between stages through SendReceive.

Every schedule of Megatron sends through two functions of `p2p_communication`, which `enable` replaces. One starts all
messages as a batch, and the other starts them one by one. Activations use channel 0 and gradients channel 1. With two
stages both neighbours are the same rank, and the channels keep activations and gradients apart.

Unless `batch_p2p_sync` is off, Megatron waits for the whole device after each batch, to work around a bug of PyTorch's
batches. Our batches do not need that: `Work.wait()` has made the current stream wait for the messages. So `enable` also
wraps `P2PCommunicator._communicate`, which would wait.

These messages are left to Megatron: messages under `use_ring_exchange_p2p`; messages between GPUs if the group spans
nodes or is not served; with EP_PLUGIN_FALLBACK, messages of CPU groups that are not served.
"""

from __future__ import annotations

import copy
import functools
import threading
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import p2p_communication
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from ep_plugin import counts
from ep_plugin.collectives.send_receive import Receive, Send, SendReceive
from ep_plugin.integrations import hooks
from ep_plugin.integrations.fallback import warn_once
from ep_plugin.integrations.messages import close_all, messages_of

_PARAMETERS = (
    "tensor_send_prev, tensor_recv_prev, tensor_send_next, tensor_recv_next, group, prev_pipeline_rank, "
    "next_pipeline_rank"
)
_TENSORS = ("tensor_send_prev", "tensor_recv_prev", "tensor_send_next", "tensor_recv_next")
_SIDES = ("tensor_send_next", "tensor_send_prev", "recv_prev", "recv_next")
_COMMUNICATE = (
    "P2PCommunicator._communicate(self, tensor_send_next, tensor_send_prev, recv_prev, recv_next, tensor_shape, "
    "wait_on_reqs)"
)
hooks.check_signatures(
    "megatron", p2p_communication, [f"_batched_p2p_ops({_PARAMETERS})", f"_p2p_ops({_PARAMETERS})", _COMMUNICATE]
)
_ACTIVATIONS, _GRADIENTS = 0, 1  # channels
_stock: dict[str, Any] = {name: getattr(p2p_communication, name) for name in ("_batched_p2p_ops", "_p2p_ops")}
_stock["_communicate"] = P2PCommunicator._communicate
_thread = threading.local()  # .needs_sync: whether Megatron must wait for the device after this thread's last batch


def enable() -> None:
    """Sends through SendReceive from now on. Every rank of a pipeline calls it before the first step."""
    hooks.replace("megatron", p2p_communication, "_batched_p2p_ops", _batched_p2p_ops)
    hooks.replace("megatron", p2p_communication, "_p2p_ops", _p2p_ops)
    hooks.replace("megatron", P2PCommunicator, "_communicate", _communicate)


def disable() -> None:
    """Restores Megatron's functions, and closes the SendReceive objects. No message may be under way."""
    hooks.restore("megatron", p2p_communication, P2PCommunicator)
    close_all("megatron")


class _Config:
    """Megatron's configuration, except that `batch_p2p_sync` is False after a batch that SendReceive has sent."""

    def __init__(self, theirs: Any) -> None:
        self._theirs = theirs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._theirs, name)

    @property
    def batch_p2p_sync(self) -> bool:
        return self._theirs.batch_p2p_sync and _thread.needs_sync


@functools.wraps(_stock["_communicate"])
def _communicate(self: Any, **given: Any) -> Any:
    if hooks.is_enabled("megatron", P2PCommunicator):
        if getattr(self.config, "use_ring_exchange_p2p", False):
            hooks.left("megatron")
            warn_once("megatron", "messages by use_ring_exchange_p2p are left to Megatron")
        elif _begins_with_shapes(self.config, given):
            # Making the object is collective, so all stages make it before they send shapes. The first message would be
            # too late: a stage would wait for its neighbour's shapes while the neighbour waits for it to make the
            # object.
            messages_of("megatron", self.pp_group, torch.empty(0, device=torch.cuda.current_device()))
    _thread.needs_sync = True
    view = copy.copy(self)
    view.config = _Config(self.config)
    return _stock["_communicate"](view, **given)


def _begins_with_shapes(config: Any, given: dict[str, Any]) -> bool:
    """Whether Megatron sends shapes before these messages."""
    sends_shapes = any(getattr(config, name, False) for name in ("variable_seq_lengths", "mtp_standalone"))
    return sends_shapes and any(given[side] is not None and given[side] is not False for side in _SIDES)


def _batched_p2p_ops(*, group: dist.ProcessGroup, **given: Any) -> list[dist.Work]:
    """Starts all messages as a batch. Returns one work for all of them."""
    through = _messages_of(group, given)
    if through is None:
        return _stock["_batched_p2p_ops"](group=group, **given)
    return [through.batch(list(_messages(group, given).values()))]


def _p2p_ops(*, group: dist.ProcessGroup, **given: Any) -> dict[str, dist.Work]:
    """Starts the messages one by one. Returns a work for each message, by Megatron's name for it."""
    through = _messages_of(group, given)
    if through is None:
        return _stock["_p2p_ops"](group=group, **given)
    return {name: through.batch([message]) for name, message in _messages(group, given).items()}


def _messages(group: dist.ProcessGroup, given: dict[str, Any]) -> dict[str, Send | Receive]:
    before, after = (dist.get_group_rank(group, given[f"{side}_pipeline_rank"]) for side in ("prev", "next"))
    found: dict[str, Send | Receive] = {}
    if (tensor := given["tensor_send_next"]) is not None:
        found["send_next"] = Send(tensor, after, _ACTIVATIONS)
    if (tensor := given["tensor_recv_prev"]) is not None:
        found["recv_prev"] = Receive(tensor, before, _ACTIVATIONS)
    if (tensor := given["tensor_send_prev"]) is not None:
        found["send_prev"] = Send(tensor, before, _GRADIENTS)
    if (tensor := given["tensor_recv_next"]) is not None:
        found["recv_next"] = Receive(tensor, after, _GRADIENTS)
    return found


def _messages_of(group: dist.ProcessGroup, given: dict[str, Any]) -> SendReceive | None:
    """Returns the SendReceive for these tensors, which must be on one type of device. Returns None if there are no
    tensors, or if Megatron's own functions must send them."""
    _thread.needs_sync = True
    if not hooks.is_enabled("megatron", p2p_communication):
        return None
    tensors = [given[name] for name in _TENSORS if given[name] is not None]
    through = messages_of("megatron", group, tensors[0]) if tensors else None
    _thread.needs_sync = bool(tensors) and through is None
    if through is None:
        hooks.left("megatron", len(tensors))
    else:
        hooks.served("megatron", len(tensors), counts.MESSAGES)
    return through
