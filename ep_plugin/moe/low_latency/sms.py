"""How many SMs the low-latency kernels run on: all of the device, shared by the ranks that use it.

A kernel that both sends and waits is launched cooperatively: all its CTAs must fit beside those of the device's other
ranks.
"""

from __future__ import annotations

import torch


def for_device(device: torch.device, sharing: int) -> int:
    """The SMs of one rank's kernels. sharing: ranks of the group on this device. On CPUs the count has no effect."""
    if device.type != "cuda":
        return 1
    return max(1, torch.cuda.get_device_properties(device).multi_processor_count // sharing)
