"""HierarchicalReduceScatter: the sum of all ranks' shards for this one, in a fixed order.

Inside a node CPU ranks read each other's inputs in peer memory, and GPU ranks send shards through cells. Sums are kept
in float32 and added in rank order. Across nodes the all-gather runs backwards: the ranks of a node sum their shards for
a rank of another node, and the rank with its local index sends the sum there, `(N - 1) * shard` bytes per rank. The
sums of the nodes are rounded to the dtype before they are sent, and added in float32 in node order. The same inputs
give the same bits, run after run.

Shapes: R ranks, N nodes, n elements of a shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ep_plugin import _C
from ep_plugin.collectives.base import Collective, CollectiveWork
from ep_plugin.collectives.engine import CollectiveEngine
from ep_plugin.collectives.shards import as_bytes, check_apart, check_cut, cut, flat, listed
from ep_plugin.dtypes import ELEMENTS
from ep_plugin.errors import PeerTimeout
from ep_plugin.runtime.failures import STATUS_BYTES
from ep_plugin.transport.groups import Group
from ep_plugin.transport.rails import Piece

_REDUCE = dist.ReduceOp
_SUM, _AVG = _REDUCE.SUM, _REDUCE.AVG


class HierarchicalReduceScatter(Collective):
    """Reduce-scatter over one process group, in the form that FSDP2's `set_custom_reduce_scatter` takes.

    On CPUs peers read inputs from `allocate` in place; any other input costs a copy. On GPUs all inputs cost the same,
    and `allocate` returns ordinary memory. Outputs may be any memory. Raises like HierarchicalAllGather.
    """

    _name = "reduce-scatter"
    maps_nothing_on = ("cuda",)

    def __init__(
        self,
        group: Group = None,
        *,
        num_buffers: int = 2,
        path: str = "auto",
        sms: int = _C.max_channels,
    ) -> None:
        """Exchanges nothing with peers, like HierarchicalAllGather.

        Args:
            group, num_buffers, path: as for HierarchicalAllGather.
            sms: on GPUs, the most SMs that sums above 1 MiB use: 1 to 64, the same on all ranks. Fewer SMs leave more
                to compute beside them and need less memory for cells (docs/collectives.md).

        Raises:
            ValueError: `sms` is not an integer from 1 to 64.
        """
        if not isinstance(sms, int) or isinstance(sms, bool) or not 1 <= sms <= _C.max_channels:
            raise ValueError(f"sms: expected an integer from 1 to {_C.max_channels}, got {sms!r}")
        self._sum_sms = sms
        super().__init__(group, num_buffers=num_buffers, path=path)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup | None = None,
        op: Any = _REDUCE.SUM,
        async_op: bool = False,
    ) -> CollectiveWork | None:
        """Sums all ranks' shards for this rank. The result is ordered on the caller's stream.

        Args:
            output_tensor: n elements, contiguous: BF16, FP16, FP32 or (on CPUs) FP64.
            input_tensor: R*n elements of the same dtype and device, contiguous: a shard for each rank, in rank order.
                The output may be this rank's own shard in it, and shares no other memory with it.
            group: the group that this object was made for, or None.
            op: SUM, AVG or PREMUL_SUM with a number.
            async_op: return a Work.
        """
        self._check_group(group)
        size = self.group.size()
        scale = _scale_of(op, size)
        if self._in_c(output_tensor, input_tensor, scale) is None:
            check_cut("input_tensor", input_tensor, size, "output_tensor", output_tensor)
            _check_dtype(output_tensor)
            dtype = output_tensor.dtype
            output, shards = flat(output_tensor), cut(input_tensor, size)
            check_apart("output_tensor", output, "input_tensor", shards, self.group.rank())
            self._run(scatter, scatter_alone, output, shards, dtype, scale)
            self._known.learn(output_tensor, input_tensor, output_tensor.nbytes, ELEMENTS[dtype])
        return self._work([output_tensor], async_op)

    def reduce_scatter(
        self, output: torch.Tensor, input_list: Sequence[torch.Tensor], op: Any = _REDUCE.SUM, async_op: bool = False
    ) -> CollectiveWork | None:
        """The list form: input_list holds R contiguous tensors of n elements each, one for each rank's `output`."""
        shards = listed("input_list", input_list, self.group.size(), "output", output)
        out = as_bytes("output", output)
        _check_dtype(output)
        scale = _scale_of(op, self.group.size())
        check_apart("output", out, "input_list", shards, self.group.rank())
        self._run(scatter, scatter_alone, out, shards, output.dtype, scale)
        return self._work([output], async_op)


def _check_dtype(tensor: torch.Tensor) -> None:
    """ValueError unless sums of its dtype are served on its device."""
    if tensor.dtype not in ELEMENTS:
        names = ", ".join(str(known) for known in ELEMENTS)
        raise ValueError(f"dtype: expected one of {names}, got {tensor.dtype}")
    if tensor.is_cuda and tensor.dtype == torch.float64:
        raise ValueError(f"dtype: expected torch.float32, torch.bfloat16 or torch.float16 on GPUs, got {tensor.dtype}")


def scatter(
    engine: CollectiveEngine, out: torch.Tensor, shards: list[torch.Tensor], dtype: torch.dtype, scale: float
) -> None:
    """out: uint8 ``[bytes]``; shards: one such tensor for each rank of the group."""
    rails, node_map, boards = engine.rails, engine.node_map, engine.group_boards
    if boards is None:
        return scatter_in_node(engine, out, shards, dtype, scale)
    if out.numel() == 0:
        return scatter_in_node(engine, out, [shards[rank] for rank in engine.node_ranks], dtype, scale)
    nbytes, others = out.numel(), rails.nodes
    # A status word follows the rows and crosses with the last chunk: it says whether they are good.
    leaving, arriving = (
        {node: torch.empty(nbytes + STATUS_BYTES, dtype=torch.uint8, device=out.device) for node in others}
        for _ in range(2)
    )
    own = torch.empty_like(out)
    sums = [own if node == engine.node else arriving[node] for node in range(node_map.num_nodes)]
    under_way = []
    for begin in range(0, nbytes, rails.chunk_bytes):
        rows, last = slice(begin, min(begin + rails.chunk_bytes, nbytes)), begin + rails.chunk_bytes >= nbytes
        crossing = slice(begin, None) if last else rows
        for node in others:
            parts = [shards[rank][rows] for rank in node_map.node_ranks(node)]
            scatter_in_node(engine, leaving[node][rows], parts, dtype, scale)
        engine.check()  # nothing crosses after a failure that the host knows of
        for node in others if last else ():
            boards.attach_status(leaving[node][nbytes:])
        # Both ways in one call: a backend may start nothing that comes later before these receives are over.
        try:
            works = rails.start(
                [_piece(node, leaving[node][crossing]) for node in others],
                [_piece(node, arriving[node][crossing]) for node in others],
            )
        except PeerTimeout as error:
            engine.raise_of_rail(error)
        under_way.append((rows, works))
        scatter_in_node(engine, own[rows], [shards[rank][rows] for rank in engine.node_ranks], dtype, scale)
    for rows, works in under_way:
        try:
            rails.wait(works)
        except PeerTimeout as error:
            engine.raise_of_rail(error)
        total = _wide(sums[0][rows].view(dtype))
        for node in range(1, node_map.num_nodes):
            total += sums[node][rows].view(dtype)
        out[rows].view(dtype).copy_(total)
    for node in others:
        boards.receive_status(node, arriving[node][nbytes:])


def scatter_in_node(
    engine: CollectiveEngine, out: torch.Tensor, shards: list[torch.Tensor], dtype: torch.dtype, scale: float
) -> None:
    """out = scale * the sum over the node's ranks of their shards for this one; shards: one for each of them."""
    if engine.node_size > 1:
        engine.inside.exchange(out, shards, ELEMENTS[dtype], scale)
    else:
        scatter_alone(out, shards, dtype, scale)


def scatter_alone(out: torch.Tensor, shards: list[torch.Tensor], dtype: torch.dtype, scale: float) -> None:
    """out = scale * the shard of the only rank."""
    total = shards[0].view(dtype)
    out.view(dtype).copy_(total if scale == 1 else _wide(total) * scale)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in the dtype in which sums are kept."""
    return tensor.to(torch.float64 if tensor.dtype == torch.float64 else torch.float32, copy=True)


def _scale_of(op: Any, size: int) -> float:
    """The factor of the sum; ValueError for an operation that is not a sum."""
    if op is not _AVG and (op is _SUM or op == _SUM):  # to compare them takes longer
        return 1.0
    if op is _AVG or op == _AVG:
        return 1.0 / size
    if op == _REDUCE.PREMUL_SUM:
        state = op.__getstate__()  # (operation, factor); a number if the factor is missing
        factor = state[1] if isinstance(state, tuple) else None
        if isinstance(factor, float):
            return factor
        raise ValueError(f"op: expected PREMUL_SUM with a number as its factor, got {type(factor).__name__}")
    raise ValueError(f"op: expected SUM, AVG or PREMUL_SUM, got {op}")


def _piece(node: int, part: torch.Tensor) -> Piece:
    """Returns a whole uint8 tensor as a message to or from a node."""
    return node, part, 0, part.numel()
