"""The communicators of integrations. `ep_plugin.integrations.status()` and load statistics count their operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ep_plugin import MoECommunicator, counts
from ep_plugin.errors import NotSupported
from ep_plugin.integrations.fallback import falls_back
from ep_plugin.moe.in_flight import untraced
from ep_plugin.moe.statistics import layer
from ep_plugin.ranges import NOTHING, Opener


@untraced
def communicator_of(name: str, group: dist.ProcessGroup | None, **settings: Any) -> MoECommunicator:
    """Returns `MoECommunicator.shared(group, **settings)`, whose operations count for the integration `name`.

    The communicator counts them, since the compiler may trace the caller.
    """
    comm = MoECommunicator.shared(group, **settings)
    comm.in_flight.serves = name
    counts.holds(name, comm)
    return comm


@untraced
def communicator_or_none(name: str, group: dist.ProcessGroup | None, **settings: Any) -> MoECommunicator | None:
    """Returns the result of `communicator_of`, or None if the framework's own exchange must serve the group
    (fallback.py)."""
    try:
        return communicator_of(name, group, **settings)
    except NotSupported as error:
        if not falls_back(name, error):
            raise
        return None


def in_layer(name: str, opens: Opener | None, operation: Callable[..., Any], *args: Any) -> Any:
    """Calls `operation` in a range with the layer's name, counts it in the layer's load, and returns its result.

    Code that torch.compile traces opens no range, and counts in no layer.
    """
    if torch.compiler.is_compiling():
        return operation(*args)
    with layer(name), opens(name) if opens else NOTHING:
        return operation(*args)
