"""torch.distributed.pipelining: messages between pipeline stages through SendReceive.

    from ep_plugin.integrations import pipelining

    pipelining.enable()  # on every rank, before stages are made; pipelining.disable() restores PyTorch's own

``EP_PLUGIN=pipelining`` in the environment does the same in an unmodified script. Every schedule of PyTorch sends
through one function, which this module replaces. Losses and gradients are PyTorch's own, bit for bit.

Left to PyTorch: messages with a tag, those between GPUs if the group spans nodes or is not served, and with
EP_PLUGIN_FALLBACK groups of CPUs that are not served. Without the variable such groups are refused when a stage is
made, or in the first step for stages that were made before `enable`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import schedules, stage

from ep_plugin.collectives.send_receive import Receive, Send, SendReceive
from ep_plugin.integrations import hooks
from ep_plugin.integrations.groups import check_group
from ep_plugin.integrations.messages import close_all, messages_of

__all__ = ["disable", "enable"]

hooks.check_signatures("pipelining", schedules, ["_batch_p2p(p2p_ops, desc)"])
_stock: Any = schedules._batch_p2p
_init: Any = stage._PipelineStageBase.__init__


def enable() -> None:
    """Sends through SendReceive from now on. Every rank of a pipeline's group calls it before the first step.

    Stages that are made from now on raise NotSupported if their group is not served. That is collective over the group
    at its first stage.
    """
    hooks.replace("pipelining", schedules, "_batch_p2p", _batch_p2p)
    hooks.replace("pipelining", stage._PipelineStageBase, "__init__", _init_checked)


def disable() -> None:
    """Restores PyTorch's own function, and closes what ours has made. No message may be under way."""
    hooks.restore("pipelining")
    close_all("pipelining")


@functools.wraps(_init)
def _init_checked(self: Any, *args: Any, **kwargs: Any) -> None:
    _init(self, *args, **kwargs)
    if not hooks.is_enabled("pipelining", schedules):
        return
    if torch.device(self.device).type == "cpu" and self.group_size > 1:  # groups of GPUs are left to PyTorch
        check_group("pipelining", self.group or dist.group.WORLD, "cpu")


def _batch_p2p(p2p_ops: list[dist.P2POp], desc: str | None = None) -> list[dist.Work]:
    """Starts the messages of one step of a schedule, in the order of the operations. PyTorch's signature."""
    if not hooks.is_enabled("pipelining", schedules):
        return _stock(p2p_ops, desc)
    theirs: list[dist.P2POp] = []
    ours: dict[SendReceive, list[Send | Receive]] = {}
    for op in p2p_ops:
        through = None if op.tag else messages_of("pipelining", op.group, op.tensor)
        if through is None:
            theirs.append(op)
        else:
            ours.setdefault(through, []).append(_message(op))
    hooks.left("pipelining", len(theirs))
    hooks.served("pipelining", len(p2p_ops) - len(theirs))
    works: list[dist.Work] = _stock(theirs, desc) if theirs else []
    return works + [through.batch(messages) for through, messages in ours.items()]


def _message(op: dist.P2POp) -> Send | Receive:
    return Send(op.tensor, op.group_peer) if op.op is dist.isend else Receive(op.tensor, op.group_peer)
