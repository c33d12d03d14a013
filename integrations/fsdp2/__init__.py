"""PyTorch FSDP2: its all-gathers and reduce-scatters through ep_plugin, set by one call after ``fully_shard``.

    from ep_plugin.integrations import fsdp2

    for block in model.layers:
        fully_shard(block)
    fully_shard(model)
    fsdp2.enable(model)  # on every rank; fsdp2.disable(model) brings PyTorch's own back

``EP_PLUGIN=fsdp2`` in the environment does it for every module that an unmodified script shards.

What is left to stock
    What a process group serves better or alone: sums of types that ours does not add on a device, and on GPUs gathers
    of parameter groups of 64 MiB and more that no other of the model is as large as (the embedding and the head in the
    root, mostly). Peers do not map these, and the copy that this costs is more than ours gains (adapters.py).
Why memory may be used again
    FSDP2 drops its last reference to a gathered buffer only after it has made its all-gather streams wait for the copy
    out of that buffer: its use of PyTorch's allocator rests on the same. A buffer of ours is handed out again when no
    tensor is left in it, on any rank of the node (ep_plugin/collectives/blocks.py), and before a rank writes to a
    peer's, that peer's stream has come to the same gather. So it does not matter which layers are gathered ahead
    (implicitly, by explicit prefetch, in pipelines): whoever holds more at once gets more.
    What a reduce-scatter reads and writes are ordinary tensors, each owned by FSDP2: gradients are views of the output,
    at offsets from its storage's start, until the optimizer drops them.
Why ranks agree
    What is made and closed when, and which buffers are mapped, follows from the calls that all ranks make in one order,
    never from when Python collects garbage.
"""

from __future__ import annotations

from ep_plugin.integrations.fsdp2.hooks import Launches, disable, enable, launches, switch_on

__all__ = ["Launches", "disable", "enable", "launches", "switch_on"]
