"""The communicators of integrations, whose operations `ep_plugin.integrations.status()` counts."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from ep_plugin import MoECommunicator
from ep_plugin.moe.in_flight import untraced


@untraced
def communicator_of(name: str, group: dist.ProcessGroup | None, **settings: Any) -> MoECommunicator:
    """`MoECommunicator.shared(group, **settings)`, with its operations counted as those of the integration `name`.

    The communicator counts, not its caller: the compiler may trace the caller.
    """
    comm = MoECommunicator.shared(group, **settings)
    comm.in_flight.serves = name
    return comm
