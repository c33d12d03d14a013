"""The handles of dispatches: tuples of tensors in the order of DeepEP's own.

Callers take these tuples apart. Some save them with ``ctx.save_for_backward(*handle)`` and pass the saved tuple on. So
every part is a tensor, and a handle can be made again from its parts. A low-latency handle ends with three numbers.

Shapes: T tokens here, R ranks on N nodes of G each, M segments of a dispatch over nodes. Of low-latency calls: T_max
tokens of any rank at most, H hidden size, E experts, E_l = E / R of them here.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from typing import Any, TypeAlias

import torch

from ep_plugin.deep_ep.nodes import ranks_by_node
from ep_plugin.moe.communicator import MoECommunicator
from ep_plugin.moe.layout import DispatchHandle
from ep_plugin.runtime.tensors import check_memory

_NOTHING = torch.empty(0, dtype=torch.int64, device="cpu")
_LENGTHS = (6, 10)

LowLatencyHandle: TypeAlias = tuple[torch.Tensor, torch.Tensor, int, int, int]
"""src_info int32 ``[E_l, R * T_max]``, layout_range int64 ``[E_l, R]``, T_max, H, E. Both tensors are views of the
plan, which has the inverse map that combine needs."""


class Handle(tuple[torch.Tensor, ...]):
    """The routing of a dispatch, for `combine` and a cached `dispatch`. The caller owns it.

    It has the length of DeepEP's handle, and its contents where callers read them. The other parts are private:
    DeepEP has the state of its kernels there.

    On one node, 6 parts:
        0: rank_prefix_matrix, int32 ``[R, R]``: the rows that ranks 0 to i send to rank j.
        4: is_token_in_rank, bool ``[T, R]``.

    On several nodes, 10 parts:
        0: is_token_in_rank, bool ``[T, R]``.
        6: recv_gbl_rank_prefix_sum, int32 ``[R]``: the rows that ranks 0 to i send to this rank.
    """

    @functools.cached_property
    def routing(self) -> DispatchHandle:
        """The parts as MoECommunicator knows them."""
        _, plan, topk_ids, recv_rows, *_, kept = self
        return DispatchHandle(topk_ids, plan, recv_rows, kept[1:], int(kept[0]))


def handle_of(comm: MoECommunicator, routing: DispatchHandle, is_token_in_rank: torch.Tensor) -> Handle:
    """Make the handle of a dispatch that has run. Prefix sums are read from the plan."""
    private = routing.plan, routing.topk_ids, routing.recv_rows
    kept = torch.cat([_number(routing.comm), routing.totals])
    if comm.nodes is None:
        R = comm.size
        matrix = routing.plan.as_strided((R, R), (R, 1))  # see MetaLayout in csrc/common/layout.h
        return Handle((matrix, *private, is_token_in_rank, kept))
    received = _received_through(comm, routing)
    return Handle((is_token_in_rank, *private, _NOTHING, _NOTHING, received, _NOTHING, _NOTHING, kept))


def routing_of(handle: object) -> DispatchHandle:
    """Return the routing of a handle, or of a tuple or list of its parts. ValueError for anything else."""
    if isinstance(handle, Handle):
        return handle.routing
    if not isinstance(handle, (tuple, list)):
        raise ValueError(f"handle: expected what dispatch returned, got {type(handle).__name__}")
    if len(handle) not in _LENGTHS or not all(isinstance(part, torch.Tensor) for part in handle):
        parts = ", ".join(type(part).__name__ for part in handle)
        raise ValueError(f"handle: expected what dispatch returned, 6 or 10 tensors, got ({parts})")
    _, _, topk_ids, *_, kept = handle
    if topk_ids.dim() != 2:
        raise ValueError(f"handle.topk_ids: expected 2 dimensions, got shape {tuple(topk_ids.shape)}")
    if kept.dtype is not torch.int64 or kept.dim() != 1 or len(kept) < 2 or kept.device.type != "cpu":
        raise ValueError(
            "handle: expected the parts of what dispatch returned, in their order, the last one torch.int64 in host "
            f"memory, got {kept.dtype} of shape {list(kept.shape)} on {kept.device}"
        )
    return Handle(handle).routing


def worst_tokens_of(routing: DispatchHandle) -> int:
    """Return the num_worst_tokens of the dispatch that made the routing."""
    return int(routing.totals[0]) if len(routing.totals) == 1 else 0


@functools.lru_cache(maxsize=64)
def _number(comm: int) -> torch.Tensor:
    return torch.tensor([comm], device="cpu")


def received_from(comm: MoECommunicator, routing: DispatchHandle) -> torch.Tensor:
    """Return int32 ``[R]``: the tokens that ranks 0 to i send to this rank. The caller owns it."""
    if comm.nodes is None:
        return routing.plan[: comm.size**2].view(comm.size, comm.size)[:, comm.rank].clone()
    return _received_through(comm, routing)


def received_by_local_rank(comm: MoECommunicator, routing: DispatchHandle) -> torch.Tensor:
    """Return int32 ``[ranks of a node]``: the tokens that local ranks 0 to i of all nodes send here.

    The caller owns it.
    """
    through = received_from(comm, routing)
    if comm.nodes is None:
        return through
    ranks = ranks_by_node(comm.engine.node_map, through.device)  # copied once, since the host would wait for a copy
    counts = through.diff(prepend=through.new_zeros(1))
    return counts[ranks].view(-1, comm.engine.node_size).sum(0).cumsum(0, dtype=torch.int32)


def _received_through(comm: MoECommunicator, routing: DispatchHandle) -> torch.Tensor:
    """Return int32 ``[R]``: the rows that ranks 0 to i send to this rank."""
    nodes, T = comm.nodes, routing.topk_ids.shape[0]
    assert nodes is not None
    at, M, G = nodes.layout, nodes.num_segments, comm.engine.node_size
    metas = routing.plan[T * nodes.num_nodes :][: M * at.words].view(M, at.words)
    ends = metas[:, at.origin_end : at.origin_rows].view(M, G, -1)
    rows = ends.diff(dim=2, prepend=torch.zeros_like(ends[:, :, :1]))
    through = rows.flatten().index_select(0, nodes.order).cumsum(0, dtype=torch.int32)
    return through.index_select(0, _last_sources(comm))


# Of each communicator over nodes, int64 [R]: the last source of each rank, in the order of the output's rows.
_last: weakref.WeakKeyDictionary[MoECommunicator, torch.Tensor] = weakref.WeakKeyDictionary()


def _last_sources(comm: MoECommunicator) -> torch.Tensor:
    """Return each rank's last source. A rank of another node has one source for each chunk, a rank of this node one."""
    if comm not in _last:
        nodes, engine = comm.nodes, comm.engine
        assert nodes is not None
        here = [engine.node_map.node_of(rank) == engine.node for rank in range(comm.size)]
        counts = itertools.accumulate(1 if same else nodes.chunks for same in here)
        _last[comm] = torch.tensor([count - 1 for count in counts], device=engine.device)
    return _last[comm]


# -- low latency -----------------------------------------------------------------------------------------------------


def parts_of(handle: Any) -> LowLatencyHandle:
    """Return the parts of a low-latency handle. ValueError for anything else."""
    parts = tuple(handle) if isinstance(handle, (tuple, list)) else ()
    kinds = (torch.Tensor, torch.Tensor, int, int, int)
    if len(parts) != len(kinds) or not all(map(isinstance, parts, kinds)):
        got = f"({', '.join(type(part).__name__ for part in parts)})" if parts else type(handle).__name__
        raise ValueError(
            f"handle: expected what low_latency_dispatch returned, (src_info, layout_range, T_max, H, E), got {got}"
        )
    return parts


def check_low_latency(handle: LowLatencyHandle, size: int) -> None:
    """ValueError unless a handle's parts have the shapes of a group of `size` ranks."""
    src_info, layout_range, max_tokens, hidden, num_experts = handle
    if max_tokens < 1 or hidden < 1 or num_experts < 1 or num_experts % size:
        raise ValueError(
            f"handle: expected positive T_max, H and E, a multiple of {size} ranks, got {max_tokens}, {hidden} and "
            f"{num_experts}"
        )
    local = num_experts // size
    expected = {
        "src_info": (src_info, torch.int32, size * max_tokens),
        "layout_range": (layout_range, torch.int64, size),
    }
    for name, (given, dtype, columns) in expected.items():
        if given.dtype is not dtype or given.shape != (local, columns):
            raise ValueError(
                f"handle: expected {name} as {dtype} of shape {[local, columns]}, got {given.dtype} of shape "
                f"{list(given.shape)}"
            )
        if given.device != src_info.device:
            raise ValueError(f"handle: expected {name} on {src_info.device}, got {given.device}")
        check_memory(f"handle: {name}", given)


def plan_behind(src_info: torch.Tensor, layout: Any) -> torch.Tensor:
    """Return the plan that src_info is a view of. layout: the plan's _C.LlPlanLayout, for T_max and K of the call."""
    words = src_info.untyped_storage().nbytes() // src_info.element_size()
    if words != layout.words or src_info.storage_offset() != layout.src_info or not src_info.is_contiguous():
        raise ValueError(
            "handle: expected the src_info that low_latency_dispatch returned for this topk_idx, no copy, in memory of "
            f"{layout.words} words, got one at {src_info.storage_offset()} of {words}"
        )
    return src_info.as_strided((layout.words,), (1,), 0)
