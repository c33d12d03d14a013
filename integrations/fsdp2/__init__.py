"""PyTorch FSDP2: its all-gathers and reduce-scatters through ep_plugin, set by one call after ``fully_shard``.

    from ep_plugin.integrations import fsdp2

    for block in model.layers:
        fully_shard(block)
    fully_shard(model)
    fsdp2.enable(model)  # on every rank; fsdp2.disable(model) brings PyTorch's own back

``EP_PLUGIN=fsdp2`` in the environment does it for every module that an unmodified script shards.

Why memory may be used again
    FSDP2 drops its last reference to a gathered buffer only after it has made its all-gather streams wait for the
    copy out of that buffer; so does its use of PyTorch's allocator, which relies on it. A buffer of ours is handed out
    again under the same condition: when its storage has no user left, to the stream that had it. Which layers are
    gathered ahead (implicit or explicit prefetch, pipelines) therefore does not matter; whoever needs more buffers at
    once than there are gets ordinary memory, and the gather copies. What a peer still reads of this rank's memory, or
    has yet to be told, is the collective's own handshake, in the stream.
    The input and the output of a reduce-scatter are ordinary tensors: gradients are views of the output, which live
    until the optimizer drops them.
"""

from __future__ import annotations

from ep_plugin.integrations.fsdp2.hooks import Launches, disable, enable, launches, switch_on

__all__ = ["Launches", "disable", "enable", "launches", "switch_on"]
