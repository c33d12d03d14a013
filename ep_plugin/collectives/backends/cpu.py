"""Inside a node on CPUs: ranks copy from each other's memory, in the calling thread, to the end."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from ep_plugin import _C
from ep_plugin.collectives.blocks import OperatingNode
from ep_plugin.collectives.shards import addresses_of

CONTROL_BYTES = _C.collective_control_bytes


class CallLanes:
    """Operations are over when they return."""

    def join(self) -> None: ...

    def drain(self) -> None: ...

    def capturing(self) -> bool:
        return False

    def follow(self, earlier: None) -> None:
        """No stream."""


class CpuNode:
    """The operations of one communicator. `shards` and `outputs`: uint8 ``[bytes]``, one for each rank of the node."""

    def __init__(self, node: OperatingNode) -> None:
        self._node: OperatingNode = weakref.proxy(node)

    def gather(self, shard: torch.Tensor, outputs: Sequence[torch.Tensor]) -> None:
        """`shard`, which is this rank's of `outputs`, to every rank."""
        args = _C.CpuAllGatherArgs(comm=self._node.comm, piece=self._piece([shard]), input=shard.data_ptr())
        args.set_outputs(addresses_of(outputs))
        self._node.kernels.all_gather(args)

    def scatter(self, out: torch.Tensor, shards: Sequence[torch.Tensor], element: int, scale: float) -> None:
        """out = scale * the sum over the ranks of their shards for this one."""
        args = _C.CpuReduceScatterArgs(
            comm=self._node.comm,
            piece=self._piece(shards),
            output=out.data_ptr(),
            scale=scale,
            element=element,
        )
        args.set_inputs(addresses_of(shards))
        self._node.kernels.reduce_scatter(args)

    def close(self) -> None: ...

    def _piece(self, shards: Sequence[torch.Tensor]) -> Any:
        """What this rank offers: as it lies if all of it is in one block."""
        blocks = self._node.blocks
        place = blocks.place_of(shards)
        table, sizes = blocks.addresses
        piece = _C.Piece(
            bytes=shards[0].numel(),
            block=-1 if place is None else place[0],
            num_blocks=len(blocks),
            blocks=table,
            block_bytes=sizes,
        )
        if place is not None:
            piece.set_offset(place[1])
        return piece
