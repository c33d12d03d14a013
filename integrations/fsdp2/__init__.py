"""PyTorch FSDP2: its all-gathers and reduce-scatters through ep_plugin, set by one call after ``fully_shard``.

    from ep_plugin.integrations import fsdp2

    for block in model.layers:
        fully_shard(block)
    fully_shard(model)
    fsdp2.enable(model)  # on every rank; fsdp2.disable(model) brings PyTorch's own back

``EP_PLUGIN=fsdp2`` in the environment does it for every module that an unmodified script shards.

Left to PyTorch's own collectives
    Sums of dtypes that ours does not add on a device. On GPUs also gathers of 64 MiB and more whose size no other
    parameter group of the model shares, mostly the embedding and the head in the root: peers do not map these, and the
    extra copy costs more than our gather gains (adapters.py).
Reuse of memory
    FSDP2 drops its last reference to a gathered buffer only after its all-gather streams wait for the copy out of that
    buffer; PyTorch's allocator relies on the same. A buffer is used again when no rank of the node holds a tensor in it
    (ep_plugin/collectives/blocks.py). Before a rank writes to a peer's buffer, the peer's stream has reached the same
    gather. So layers may be gathered ahead in any way: implicitly, by explicit prefetch, in pipelines.
    Inputs and outputs of a reduce-scatter are ordinary tensors that FSDP2 owns. Gradients are views of the output, at
    offsets from its storage's start, until the optimizer drops them.
Agreement between ranks
    All ranks make the same calls in one order. These alone decide which objects are made and closed, and which buffers
    are mapped; when Python collects garbage does not.
"""

from __future__ import annotations

from ep_plugin.integrations.fsdp2.hooks import Launches, disable, enable, launches, switch_on

__all__ = ["Launches", "disable", "enable", "launches", "switch_on"]
