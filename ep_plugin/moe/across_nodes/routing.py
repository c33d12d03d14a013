"""The routing of a dispatch over several nodes: one segment's routing after the other, in the tensors of one handle.

plan, int32, one after the other:
    rail_rows ``[T, N]``   the row of the rail's buffers in which a token goes to each node, -1: it does not go there
    meta ``[M, W]``        per segment, csrc/common/layout.h's MetaLayout
    per segment            ids ``[T_m, K]`` of this node's experts, send_pos ``[T_m, G]``, pair_pos ``[T_m, K]``
recv_rows, int32 ``[sum of slots, K]``: the recv_rows of the segments, one after the other.
totals, int64 on the host: the totals as on one node, over all segments; then the rows that each leg sends ``[L]``, the
    rows that each leg brings ``[L]``, and the slots of each segment ``[M]``. With a capacity: the capacity alone.

Shapes: T tokens, K experts per token, N nodes, G ranks on each, L legs, C chunks, M = C + 1 segments of T_m tokens, O
origins of a segment, E_l local experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ep_plugin import _C
from ep_plugin.moe.across_nodes.nodes import Nodes
from ep_plugin.moe.arguments import check_handle_shapes, check_handle_tensors
from ep_plugin.moe.layout import DispatchHandle, Routing

_SLOTS, _ROWS, _MAX_ROWS, _MAX_SENT = _C.Total.SLOTS, _C.Total.ROWS, _C.Total.MAX_ROWS, _C.Total.MAX_SENT


class NodesRouting:
    """A routing of T tokens over `nodes`, in new memory or in the memory of a handle.

    sent, received: the rows that each leg sends and brings; none while the host does not know them.
    """

    def __init__(
        self, nodes: Nodes, topk_ids: torch.Tensor, sent: Sequence[int], received: Sequence[int], plan: torch.Tensor
    ) -> None:
        self._nodes, self.topk_ids, self.plan = nodes, topk_ids, plan
        self.sent, self.received = list(sent), list(received)
        T = topk_ids.shape[0]
        M, words = nodes.num_segments, nodes.layout.words
        self.tokens = nodes.tokens_of(T, self.received)
        self.rail_rows = plan[: T * nodes.num_nodes].view(T, nodes.num_nodes)
        begin = T * nodes.num_nodes
        self.metas = plan[begin : begin + M * words].view(M, words)
        self.recv_rows: torch.Tensor | None = None
        self.slots = [0] * M

    @classmethod
    def empty(cls, nodes: Nodes, topk_ids: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> NodesRouting:
        words = nodes.words_of(topk_ids.shape[0], topk_ids.shape[1], received)
        return cls(nodes, topk_ids, sent, received, topk_ids.new_empty(words, dtype=torch.int32))

    def extended(self, sent: Sequence[int], received: Sequence[int]) -> NodesRouting:
        """Returns a copy of a routing whose legs had no rows, with room for their rows."""
        routing = NodesRouting.empty(self._nodes, self.topk_ids, sent, received)
        self._nodes.enter()
        with self._nodes.engine.streams.on_own():
            routing.plan[: len(self.plan)].copy_(self.plan)
        return routing

    def make_recv_rows(self, slots: Sequence[int]) -> torch.Tensor:
        self.slots = list(slots)
        self.recv_rows = self.plan.new_empty((sum(slots), self.topk_ids.shape[1]))
        return self.recv_rows

    @property
    def struct(self) -> _C.SegmentedRouting:
        """The routing as C reads it."""
        return _C.SegmentedRouting(
            nodes=self._nodes.struct,
            plan=self.plan.data_ptr(),
            recv_rows=_C.address(self.recv_rows),
            tokens=self.tokens,
            slots=self.slots,
            topk=self.topk_ids.shape[1],
        )

    def segment(self, number: int) -> _C.Routing:
        """Returns a segment's routing as kernels read it."""
        return _C.segment_of(self._nodes.engine.control, self.struct, number)


def routing_of(nodes: Nodes, name: str, handle: DispatchHandle) -> tuple[Routing, NodesRouting]:
    """Returns a handle's routing. Raises ValueError, with the argument's `name`, unless its tensors are as dispatch
    made them."""
    engine = nodes.engine
    L, first = len(nodes.legs), engine.num_totals
    check_handle_tensors(engine, name, handle, nodes.num_totals)
    totals: list[int] = handle.totals.tolist()
    if len(totals) == 1:
        sent, slots = nodes.padded_rows, nodes.padded_slots
        received = sent
    else:
        sent, received, slots = totals[first : first + L], totals[first + L : first + 2 * L], totals[first + 2 * L :]
        rows = [*sent, *received, *slots]
        if min(rows, default=0) < 0 or max(rows, default=0) > _C.max_tokens * engine.node_size:
            raise ValueError(f"{name}.totals: expected the contents that dispatch wrote, got {totals}")
    T, K = handle.topk_ids.shape
    check_handle_shapes(name, handle, nodes.words_of(T, K, received), sum(slots))
    routing = NodesRouting(nodes, handle.topk_ids, sent, received, handle.plan)
    routing.recv_rows, routing.slots = handle.recv_rows, slots
    return Routing(handle, routing.segment(0), totals), routing
