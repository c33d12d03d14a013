"""HierarchicalAllGather: every rank's shard on every rank, bit for bit.

Inside a node ranks exchange shards in peer memory. Across nodes each rank sends only its own shard, in chunks, to the
ranks of its local index on the other nodes: `(N - 1) * shard` bytes. Each chunk that has arrived is gathered inside the
node while the next one is under way.

Shapes: R ranks, N nodes, n elements of a rank's shard.
"""

from __future__ import annotations

import ctypes
import itertools
from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as dist

from ep_plugin.collectives.base import Collective, CollectiveWork
from ep_plugin.collectives.engine import CollectiveEngine
from ep_plugin.collectives.shards import as_bytes, check_apart, check_cut, cut, flat, listed
from ep_plugin.errors import PeerTimeout
from ep_plugin.transport.rails import UnderWay

_CHUNKS_AHEAD = 4  # on the rails at a time: over NCCL each arrives in memory of its own, and is copied


class HierarchicalAllGather(Collective):
    """All-gather over one process group, in the form that FSDP2's `set_custom_all_gather` takes.

    Peers map outputs from `allocate`; any other output costs a copy. Before a CUDA graph is captured, run one
    operation of each kind that it uses: up to 1 MiB, above 1 MiB, and into memory that is not from `allocate`.

    Raises:
        ValueError: wrong arguments, before anything is launched.
        PeerTimeout, PeerAborted, DisagreementError: a peer is late, has failed, or has called something else. Every
            later call raises the same error, and only `close` works.
    """

    _name = "all-gather"

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> CollectiveWork | None:
        """Gathers `input_tensor` of every rank into `output_tensor`. The result is ordered on the caller's stream.

        Args:
            output_tensor: R*n elements, the shards in rank order. Contiguous, of any shape and dtype.
            input_tensor: n elements of the same dtype and device, contiguous. It may be this rank's part of the output,
                and shares no other memory with it.
            group: the group that this object was made for, or None.
            async_op: return a Work.
        """
        self._check_group(group)
        if self._in_c(output_tensor, input_tensor, 1.0) is None:
            size = self.group.size()
            check_cut("output_tensor", output_tensor, size, "input_tensor", input_tensor)
            shard, outputs = flat(input_tensor), cut(output_tensor, size)
            check_apart("input_tensor", shard, "output_tensor", outputs, self.group.rank())
            self._run(gather, gather_alone, shard, outputs)
            self._known.learn(output_tensor, input_tensor, input_tensor.nbytes, -1)
        return self._work([output_tensor], async_op)

    def all_gather(
        self, tensor_list: Sequence[torch.Tensor], tensor: torch.Tensor, async_op: bool = False
    ) -> CollectiveWork | None:
        """The list form: tensor_list holds R contiguous tensors of n elements each, one for each rank's `tensor`."""
        outputs = listed("tensor_list", tensor_list, self.group.size(), "tensor", tensor)
        shard = as_bytes("tensor", tensor)
        check_apart("tensor", shard, "tensor_list", outputs, self.group.rank())
        self._run(gather, gather_alone, shard, outputs)
        return self._work(list(tensor_list), async_op)

    def gather_parts(self, block: torch.Tensor, parts: Sequence[tuple[int, int]]) -> None:
        """Gathers several tensors of one block, in which every rank has its own shards in place. For CPUs on one node.

        Ranks meet, read each other's blocks, and meet again: twice for any number of tensors. In memory that peers have
        not mapped each tensor is a gather of its own.

        Args:
            block: uint8, a whole tensor from `allocate`, or ordinary memory on every rank.
            parts: for each tensor, its first byte in the block and the bytes of one of its R shards, in rank order.
                They are equal on all ranks, which is not checked.

        Raises:
            PeerTimeout, PeerAborted: as a gather does.
        """
        engine = self.engine_on(block.device)
        engine.run(self._name, gather_parts, block, parts, nbytes=sum(nbytes for _, nbytes in parts))
        engine.check()


def gather(engine: CollectiveEngine, shard: torch.Tensor, outputs: list[torch.Tensor]) -> None:
    """shard: uint8 ``[bytes]``; outputs: one such tensor for each rank of the group."""
    shard = gather_alone(shard, outputs, engine.rank)
    rails, node_map = engine.rails, engine.node_map
    if not rails.nodes:
        gather_in_node(engine, shard, outputs)
        return
    chunks = [slice(begin, begin + rails.chunk_bytes) for begin in range(0, len(shard), rails.chunk_bytes)]
    arriving = {node: outputs[node_map.node_ranks(node)[engine.index]] for node in rails.nodes}

    def begin(chunk: slice) -> tuple[slice, UnderWay]:
        try:
            return chunk, rails.gather(shard[chunk], {node: output[chunk] for node, output in arriving.items()})
        except PeerTimeout as error:
            engine.raise_of_rail(error)

    under_way = deque(begin(chunk) for chunk in chunks[:_CHUNKS_AHEAD])
    later = iter(chunks[_CHUNKS_AHEAD:])
    gather_in_node(engine, shard, [outputs[rank] for rank in engine.node_ranks])
    while under_way:
        engine.check()  # nothing more crosses after a failure
        chunk, works = under_way.popleft()
        try:
            rails.wait(works)
        except PeerTimeout as error:
            engine.raise_of_rail(error)
        under_way.extend(begin(following) for following in itertools.islice(later, 1))
        for node in sorted(rails.nodes):
            parts = [outputs[rank][chunk] for rank in node_map.node_ranks(node)]
            gather_in_node(engine, parts[engine.index], parts)


def gather_in_node(engine: CollectiveEngine, shard: torch.Tensor, outputs: list[torch.Tensor]) -> None:
    """Brings `shard`, which is this rank's of `outputs`, to every rank of the node; outputs: one for each of them."""
    if engine.node_size > 1:
        engine.inside.exchange(shard, outputs)
        engine.keep_blocks(outputs)


def gather_parts(engine: CollectiveEngine, block: torch.Tensor, parts: Sequence[tuple[int, int]]) -> None:
    """The arguments are those of `HierarchicalAllGather.gather_parts`."""
    size, number = engine.node_size, engine.inside.block_of(block)
    if number < 0:  # peers have not mapped it
        for begin, nbytes in parts:
            shards = list(block.narrow(0, begin, size * nbytes).view(size, nbytes))
            gather_in_node(engine, shards[engine.index], shards)
        return
    words = list(torch.empty(size, 1, dtype=torch.uint8))
    gather_in_node(engine, words[engine.index], words)
    own = block.data_ptr()
    for index, theirs in enumerate(engine.blocks.addresses(number)):
        for begin, nbytes in parts if index != engine.index else ():
            at = begin + index * nbytes
            ctypes.memmove(own + at, theirs + at, nbytes)
    gather_in_node(engine, words[engine.index], words)  # before a rank changes what others read


def gather_alone(shard: torch.Tensor, outputs: list[torch.Tensor], rank: int = 0) -> torch.Tensor:
    """Copies `shard` to the output of `rank`, which is this one, unless it is there; returns it there."""
    if outputs[rank].data_ptr() == shard.data_ptr():
        return shard
    return outputs[rank].copy_(shard)
