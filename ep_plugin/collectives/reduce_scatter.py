"""HierarchicalReduceScatter: the sum of all ranks' shards for this one, in a fixed order.

Inside a node ranks read each other's inputs in peer memory, on GPUs send each other their shards through slots, and sum
in float32, in rank order. Across nodes it is the all-gather backwards: the ranks of a node sum what they have for a
rank of another node, and the one of the same index sends it there, `(N - 1) * shard` bytes per rank in all; the sums of
the nodes, rounded to the dtype as they travel, are then added in float32 in node order. The same inputs give the same
bits, run after run.

Shapes: R ranks, N nodes, n elements of a shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ep_plugin import _C
from ep_plugin.collectives.base import Collective, as_bytes, check_alike
from ep_plugin.collectives.chunks import Chunks
from ep_plugin.collectives.engine import CollectiveEngine
from ep_plugin.collectives.work import CollectiveWork
from ep_plugin.dtypes import ELEMENTS

_REDUCE = dist.ReduceOp


class HierarchicalReduceScatter(Collective):
    """Reduce-scatter over one process group, in the form that FSDP2's `set_custom_reduce_scatter` takes.

    On CPUs inputs from `allocate` are read by the peers as they lie, and any other costs a copy. On GPUs all inputs are
    alike, and `allocate` hands out ordinary memory. Outputs are whatever the caller brings: no peer maps them. Errors
    are as those of HierarchicalAllGather.
    """

    maps_nothing_on = ("cuda",)

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        num_buffers: int = 2,
        path: str = "auto",
        sms: int = _C.most_lanes,
    ) -> None:
        """As HierarchicalAllGather. `sms`: on GPUs, the most SMs that the kernel takes for sums above 1 MiB, 1 to
        64, alike on all ranks; ValueError for any other. Fewer leave more to what runs beside it, and need less memory
        for slots (see docs/collectives.md). Of a device that has fewer it takes all.
        """
        if not isinstance(sms, int) or isinstance(sms, bool) or not 1 <= sms <= _C.most_lanes:
            raise ValueError(f"sms: expected an integer from 1 to {_C.most_lanes}, got {sms!r}")
        super().__init__(group, num_buffers=num_buffers, path=path)
        self._sum_sms = sms

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup | None = None,
        op: Any = _REDUCE.SUM,
        async_op: bool = False,
    ) -> CollectiveWork | None:
        """output_tensor: n elements. input_tensor: R*n elements, a shard for each rank in rank order; its own shard may
        be the output. Both contiguous, BF16, FP16, FP32 or (on CPUs) FP64. op: SUM, AVG or PREMUL_SUM. With async_op a
        Work, else None; the result is ordered on the caller's stream.
        """
        self._check_group(group)
        check_alike("input_tensor", input_tensor, "output_tensor", output_tensor)
        size = self.group.size()
        if input_tensor.numel() != size * output_tensor.numel():
            raise ValueError(
                f"input_tensor: expected {size} x {output_tensor.numel()} elements, one output_tensor for each rank, "
                f"got {input_tensor.numel()}"
            )
        whole, out = as_bytes("input_tensor", input_tensor), as_bytes("output_tensor", output_tensor)
        self._scatter(out, Chunks(whole, size), output_tensor.dtype, op)
        return self._done([output_tensor], async_op)

    def reduce_scatter(
        self, output: torch.Tensor, input_list: Sequence[torch.Tensor], op: Any = _REDUCE.SUM, async_op: bool = False
    ) -> CollectiveWork | None:
        """The list form: input_list holds R contiguous tensors of n elements each, one for each rank's `output`."""
        size = self.group.size()
        if len(input_list) != size:
            raise ValueError(f"input_list: expected {size} tensors, one for each rank, got {len(input_list)}")
        for rank, shard in enumerate(input_list):
            check_alike(f"input_list[{rank}]", shard, "output", output)
            if shard.numel() != output.numel():
                raise ValueError(f"input_list[{rank}]: expected {output.numel()} elements, got {shard.numel()}")
        shards = [as_bytes(f"input_list[{rank}]", shard) for rank, shard in enumerate(input_list)]
        self._scatter(as_bytes("output", output), shards, output.dtype, op)
        return self._done([output], async_op)

    def _scatter(self, out: torch.Tensor, shards: Sequence[torch.Tensor], dtype: torch.dtype, op: Any) -> None:
        if dtype not in ELEMENTS:
            names = ", ".join(str(known) for known in ELEMENTS)
            raise ValueError(f"dtype: expected one of {names}, got {dtype}")
        if out.is_cuda and dtype == torch.float64:
            raise ValueError(f"dtype: expected torch.float32, torch.bfloat16 or torch.float16 on GPUs, got {dtype}")
        scale = _scale_of(op, self.group.size())
        if self.group.size() == 1:
            self.check()
            total = shards[0].view(dtype)
            out.view(dtype).copy_(total if scale == 1 else (_wide(total) * scale))
        else:
            engine = self.engine_on(out.device)
            engine.run("reduce-scatter", scatter, out, shards, dtype, scale)
            engine.check()


def scatter(
    engine: CollectiveEngine, out: torch.Tensor, shards: Sequence[torch.Tensor], dtype: torch.dtype, scale: float
) -> None:
    """out: uint8 ``[bytes]``; shards: one such tensor for each rank of the group."""
    rails, node_map = engine.rails, engine.node_map
    if not rails.nodes:
        return scatter_in_node(engine, out, shards, dtype, scale)
    if out.numel() == 0:
        return scatter_in_node(engine, out, [shards[rank] for rank in engine.node_ranks], dtype, scale)
    sums = {node: torch.empty_like(out) for node in range(node_map.num_nodes)}
    partial = {node: torch.empty_like(out) for node in rails.nodes}
    chunks = [slice(begin, begin + rails.chunk_bytes) for begin in range(0, len(out), rails.chunk_bytes)]
    under_way = []
    for chunk in chunks:
        for node in rails.nodes:
            parts = [shards[rank][chunk] for rank in node_map.node_ranks(node)]
            scatter_in_node(engine, partial[node][chunk], parts, dtype, scale)
        # Both ways at once: a backend may begin nothing that was asked for later before these receives are over.
        leaving = [(node, partial[node][chunk]) for node in rails.nodes]
        under_way.append(rails.start(leaving, [(node, sums[node][chunk]) for node in rails.nodes]))
        parts = [shards[rank][chunk] for rank in engine.node_ranks]
        scatter_in_node(engine, sums[engine.node][chunk], parts, dtype, scale)
    for chunk, works in zip(chunks, under_way, strict=True):
        rails.wait(works)
        total = _wide(sums[0][chunk].view(dtype))
        for node in range(1, node_map.num_nodes):
            total += sums[node][chunk].view(dtype)
        out[chunk].view(dtype).copy_(total)


def scatter_in_node(
    engine: CollectiveEngine, out: torch.Tensor, shards: Sequence[torch.Tensor], dtype: torch.dtype, scale: float
) -> None:
    """out = scale * the sum over the node's ranks of their shards for this one; shards: one for each of them."""
    if engine.node_size == 1:
        total = shards[0].view(dtype)
        out.view(dtype).copy_(total if scale == 1 else (_wide(total) * scale))
        return
    engine.inside.scatter(out, shards, ELEMENTS[dtype], scale)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in which sums are kept."""
    return tensor.to(torch.float64 if tensor.dtype == torch.float64 else torch.float32, copy=True)


def _scale_of(op: Any, size: int) -> float:
    """What the sum is multiplied by. ValueError for an operation that is not a sum."""
    if op == _REDUCE.SUM:
        return 1.0
    if op == _REDUCE.AVG:
        return 1.0 / size
    if op == _REDUCE.PREMUL_SUM:
        state = op.__getstate__()  # (operation, factor); of the bare name a number
        factor = state[1] if isinstance(state, tuple) else None
        if isinstance(factor, float):
            return factor
        raise ValueError(f"op: expected PREMUL_SUM with a number as its factor, got {type(factor).__name__}")
    raise ValueError(f"op: expected SUM, AVG or PREMUL_SUM, got {op}")
