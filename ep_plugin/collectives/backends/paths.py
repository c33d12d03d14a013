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
_BYTES_PER_CTA = 16 << 10  # of a shard
# More CTAs store no faster, since links are full. Other numbers than powers of two load the links unevenly.
_MOST_PUSH_CTAS = 64
_SMALL_BYTES_PER_CTA = 4 << 10  # to or from one peer
_SMALL_BYTES_PER_ROUND = 12 << 10  # two words for each thread of a CTA


def is_small(path: str, nbytes: int, node_size: int) -> bool:
    """Whether words with flags carry shards of `nbytes` bytes."""
    return path == "auto" and nbytes * node_size <= SMALL_BYTES


def small_ctas(nbytes: int, node_size: int) -> int:
    """Returns the CTAs of the kernel that exchanges shards of `nbytes` bytes as words.

    Each peer has the same number of CTAs, at most as many as send the largest small shard in one round.
    """
    most = -(-SMALL_BYTES // node_size // _SMALL_BYTES_PER_ROUND)
    return (node_size - 1) * max(1, min(most, nbytes // _SMALL_BYTES_PER_CTA))


def staged_bytes(node_size: int) -> int:
    """Returns how many bytes of each shard fit into the staging block at a time."""
    return STAGING_BYTES // node_size // 16 * 16


def push_ctas(path: str, nbytes: int, node_size: int, mapped: bool = True) -> int:
    """Returns the CTAs of the kernel that pushes shards of `nbytes` bytes; 0 if copy engines push.

    mapped: whether peers have mapped the outputs. Else shards are copied out of the staging block, which a kernel does
    sooner than copy engines.
    """
    if not mapped:
        path, nbytes = "sm" if path == "auto" else path, min(nbytes, staged_bytes(node_size))
    if path == "copy_engine" or (path == "auto" and nbytes * node_size >= SM_BELOW_BYTES):
        return 0
    return max(1, min(_MOST_PUSH_CTAS, nbytes // _BYTES_PER_CTA))


def most_sum_sms(device: torch.device, asked: int) -> int:
    """Returns how many of the `asked` SMs sums may use. Their CTAs run at the same time, each on an SM of its own."""
    return min(asked, torch.cuda.get_device_properties(device).multi_processor_count)


def gather_sms(path: str, nbytes: int, node_size: int, mapped: bool = True) -> int:
    """Returns how many SMs a gather of shards of `nbytes` bytes uses. mapped: as in push_ctas."""
    if is_small(path, nbytes, node_size):
        return small_ctas(nbytes, node_size)
    return push_ctas(path, nbytes, node_size, mapped)


def scatter_sms(path: str, nbytes: int, node_size: int, sum_sms: int) -> int:
    """Returns how many SMs a sum of shards of `nbytes` bytes uses: the CTAs of its kernel. sum_sms: the most that a sum
    may use; small shards may use more."""
    if is_small(path, nbytes, node_size):
        return small_ctas(nbytes, node_size)
    return max(1, min(sum_sms, nbytes // _BYTES_PER_CTA))
