"""torch.distributed.pipelining: messages between pipeline stages through SendReceive.

    from ep_plugin.integrations import pipelining

    pipelining.enable()  # on every rank, before the first step; pipelining.disable() restores PyTorch's own

``EP_PLUGIN=pipelining`` in the environment does the same in an unmodified script. Every schedule of PyTorch sends
through one function, which this module replaces. Losses and gradients are PyTorch's own, bit for bit.

Left to PyTorch: messages of GPUs, and messages with a tag.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.pipelining import schedules

from ep_plugin.collectives.send_receive import Receive, Send
from ep_plugin.integrations import hooks
from ep_plugin.integrations.messages import close_all, messages_of, serves

__all__ = ["disable", "enable"]

hooks.check_signatures("pipelining", schedules, ["_batch_p2p(p2p_ops, desc)"])
_stock: Any = schedules._batch_p2p


def enable() -> None:
    """Sends through SendReceive from now on. Every rank of a pipeline's group calls it before the first step."""
    hooks.replace("pipelining", schedules, "_batch_p2p", _batch_p2p)


def disable() -> None:
    """Restores PyTorch's own function, and closes what ours has made. No message may be under way."""
    hooks.restore("pipelining")
    close_all()


def _batch_p2p(p2p_ops: list[dist.P2POp], desc: str | None = None) -> list[dist.Work]:
    """The messages of one step of a schedule: to ranks of one pipeline's group, in the order of the operations."""
    ours = [op for op in p2p_ops if serves(op.tensor) and op.tag == 0]
    hooks.served("pipelining", len(ours))
    hooks.left("pipelining", len(p2p_ops) - len(ours))
    works: list[dist.Work] = []
    if len(ours) < len(p2p_ops):
        works += _stock([op for op in p2p_ops if op not in ours], desc)
    for group, device in {(op.group, op.tensor.device): None for op in ours}:
        ops = [_message(op) for op in ours if op.group is group and op.tensor.device == device]
        works.append(messages_of(group, device).batch(ops))
    return works


def _message(op: dist.P2POp) -> Send | Receive:
    return Send(op.tensor, op.group_peer) if op.op is dist.isend else Receive(op.tensor, op.group_peer)
