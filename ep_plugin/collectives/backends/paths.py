"""What moves a shard inside a node of GPUs, by its size and the communicator's `path`, and how many SMs that takes.

- Words: up to SMALL_BYTES of all ranks together, every 16 bytes carry a flag. One kernel gathers or sums them.
- Kernels: a kernel of a few CTAs pushes shards to peers, or sums them.
- Copy engines: from SM_BELOW_BYTES gathered. They leave all SMs to the model, and take longer to start than a kernel.
"""

from __future__ import annotations

import torch

from ep_plugin import _C

SMALL_BYTES = _C.small_bytes  # gathered, or of the input of a sum
SM_BELOW_BYTES = 32 << 20
STAGING_BYTES = 32 << 20


def ways(path: str, node_size: int, sum_sms: int = 0) -> _C.Ways:
    """Returns the choice for a node of `node_size` ranks. sum_sms: the most SMs that a sum which is not small uses."""
    return _C.Ways(path, node_size, sum_sms, SM_BELOW_BYTES, STAGING_BYTES)


def gather_sms(path: str, nbytes: int, node_size: int, mapped: bool = True) -> int:
    """Returns how many SMs a gather of shards of `nbytes` bytes uses; 0 if copy engines push them.

    mapped: whether peers have mapped the outputs. Else shards are copied out of the staging block.
    """
    return ways(path, node_size).gather_sms(nbytes, mapped)


def scatter_sms(path: str, nbytes: int, node_size: int, sum_sms: int) -> int:
    """Returns how many SMs a sum of shards of `nbytes` bytes uses. Small shards may use more than `sum_sms`."""
    return ways(path, node_size, sum_sms).sum_sms(nbytes)


def most_sum_sms(device: torch.device, asked: int) -> int:
    """Returns how many of the `asked` SMs sums may use. Their CTAs run at the same time, each on an SM of its own."""
    return min(asked, torch.cuda.get_device_properties(device).multi_processor_count)
