"""The SM counts of low-latency kernels: all SMs of the device, shared by the ranks that use it.

A kernel that both sends and waits is launched cooperatively. All its CTAs must fit on the device beside the CTAs of the
other ranks there.
"""

from __future__ import annotations

import torch


def for_device(device: torch.device, sharing: int) -> int:
    """Returns the SMs of one rank's kernels. sharing: ranks of the group on this device. Has no effect on CPUs."""
    if device.type != "cuda":
        return 1
    return max(1, torch.cuda.get_device_properties(device).multi_processor_count // sharing)
