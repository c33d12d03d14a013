"""Inside a node on CPUs: ranks copy from each other's memory in the calling thread, and return when all is done."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from ep_plugin import _C
from ep_plugin.collectives.blocks import Node
from ep_plugin.collectives.shards import addresses_of


class CpuNode:
    """The operations of one communicator on shards of the node's ranks."""

    def __init__(self, node: Node) -> None:
        self._node: Node = weakref.proxy(node)

    def gather(self, shard: torch.Tensor, outputs: Sequence[torch.Tensor]) -> None:
        """Brings `shard`, which is this rank's of `outputs`, to every rank."""
        args = _C.CpuAllGatherArgs(comm=self._node.comm, piece=self._piece([shard]), input=shard.data_ptr())
        args.set_outputs(addresses_of(outputs))
        self._node.kernels.all_gather(args)

    def scatter(self, out: torch.Tensor, shards: Sequence[torch.Tensor], element: int, scale: float) -> None:
        """out = scale * the sum over the ranks of their shards for this one."""
        args = _C.CpuReduceScatterArgs(
            comm=self._node.comm, piece=self._piece(shards), output=out.data_ptr(), scale=scale, element=element
        )
        args.set_inputs(addresses_of(shards))
        self._node.kernels.reduce_scatter(args)

    def close(self) -> None: ...

    def _piece(self, shards: Sequence[torch.Tensor]) -> _C.Piece:
        """This rank's contribution. Peers read it in place if all of it is in one block."""
        blocks = self._node.blocks
        block, offsets = blocks.locate(shards) or (-1, [0] * len(shards))
        table, sizes = blocks.addresses
        piece = _C.Piece(
            bytes=shards[0].numel(), block=block, num_blocks=_C.max_blocks, blocks=table, block_bytes=sizes
        )
        piece.set_offset(offsets)
        return piece
