"""The SMs of each GPU, which all communicators of the process share (docs/concepts.md, "SMs")."""

from __future__ import annotations

import functools

import torch

from ep_plugin import _C


@functools.cache
def budget_of(device: torch.device) -> _C.SmBudget:
    """Returns the budget of the GPU `device`. Kernels that wait for peers run together only as far as they fit in it.

    Processes that share a GPU have a budget of all SMs each, since the GPU runs one process at a time.
    """
    return _C.SmBudget(device.index, torch.cuda.get_device_properties(device).multi_processor_count)
