"""Runs the all-gathers and reduce-scatters of PyTorch's FSDP2 through ep_plugin, by one call after ``fully_shard``.

    from ep_plugin.integrations import fsdp2

    for block in model.layers:
        fully_shard(block)
    fully_shard(model)
    fsdp2.enable(model)  # on every rank; fsdp2.disable(model) restores PyTorch's own

``fsdp2.enable()`` without a model, or ``EP_PLUGIN=fsdp2`` in the environment of an unmodified script, does the same for
every module that is sharded later.

Left to PyTorch's own collectives
    ep_plugin leaves sums of dtypes that it does not add on a device, and gathers of parameters that wrap other tensors
    and have no ``fsdp_pre_all_gather``. On GPUs it also leaves gathers of 64 MiB and more whose size no other parameter
    group of the model shares. These are mostly the embedding and the head in the root (adapters.py says why).
Groups of one rank
    They make no collective calls, and copy nothing (one_rank.py).
Gathers on CPUs
    They bring parameters to the memory that modules compute with (in_place.py).
Reuse of memory
    FSDP2 drops its last reference to a gathered buffer only after its all-gather streams wait for the copy out of that
    buffer. The plugin uses the buffer again when no rank of the node has a tensor in it, and a rank writes to a peer's
    buffer only after the peer's stream has reached the same gather (ep_plugin/collectives/blocks.py). So layers may be
    gathered ahead in any way. Inputs and outputs of a reduce-scatter belong to FSDP2. Gradients are views of the
    output, at offsets from its storage's start, until the optimizer drops them.
Agreement between ranks
    All ranks make the same calls in one order. Only these calls decide which objects are made and closed, and which
    buffers are mapped. The garbage collector decides nothing.
"""

from __future__ import annotations

from ep_plugin.integrations.fsdp2.hooks import Launches, disable, enable, launches

__all__ = ["Launches", "disable", "enable", "launches"]
