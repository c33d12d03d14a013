"""The handles of dispatches: tuples of tensors in the order of DeepEP's own.

Callers take these tuples apart. Some save them with ``ctx.save_for_backward(*handle)`` and pass the saved tuple on. So
every part is a tensor, and a handle can be made again from its parts.

Shapes: T tokens here, R ranks on N nodes of G each, M segments of a dispatch over nodes.
"""

from __future__ import annotations

import functools
import itertools
import weakref

import torch

from ep_plugin.moe.communicator import MoECommunicator
from ep_plugin.moe.layout import DispatchHandle

_NOTHING = torch.empty(0, dtype=torch.int64, device="cpu")
_LENGTHS = (6, 10)


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

    routing: DispatchHandle
    """The parts as MoECommunicator knows them. It needs no check of these very tensors."""


def handle_of(comm: MoECommunicator, routing: DispatchHandle, is_token_in_rank: torch.Tensor) -> Handle:
    """The handle of a dispatch that has run. Prefix sums are made of the plan."""
    private = routing.plan, routing.topk_ids, routing.recv_rows
    kept = torch.cat([_number(routing.comm), routing.totals])
    if comm.nodes is None:
        matrix = routing.plan[: comm.size**2].view(comm.size, comm.size)  # see MetaLayout in csrc/common/layout.h
        handle = Handle((matrix, *private, is_token_in_rank, kept))
    else:
        received = _received_through(comm, routing)
        handle = Handle((is_token_in_rank, *private, _NOTHING, _NOTHING, received, _NOTHING, _NOTHING, kept))
    handle.routing = routing
    return handle


def routing_of(handle: object) -> DispatchHandle:
    """The routing of a handle, or of a tuple or list of its parts. ValueError for anything else."""
    if isinstance(handle, Handle):
        return handle.routing
    if not isinstance(handle, (tuple, list)):
        raise ValueError(f"handle: expected what dispatch returned, got {type(handle).__name__}")
    if len(handle) not in _LENGTHS or not all(isinstance(part, torch.Tensor) for part in handle):
        parts = ", ".join(type(part).__name__ for part in handle)
        raise ValueError(f"handle: expected what dispatch returned, 6 or 10 tensors, got ({parts})")
    _, plan, topk_ids, recv_rows, *_, kept = handle
    if kept.dtype is not torch.int64 or kept.dim() != 1 or len(kept) < 2 or kept.device.type != "cpu":
        raise ValueError(
            "handle: expected the parts of what dispatch returned, in their order, the last one torch.int64 in host "
            f"memory, got {kept.dtype} of shape {list(kept.shape)} on {kept.device}"
        )
    return DispatchHandle(topk_ids, plan, recv_rows, kept[1:], int(kept[0]))


def worst_tokens_of(routing: DispatchHandle) -> int:
    """The num_worst_tokens of the dispatch that made the routing."""
    return int(routing.totals[0]) if len(routing.totals) == 1 else 0


@functools.lru_cache(maxsize=64)
def _number(comm: int) -> torch.Tensor:
    return torch.tensor([comm], device="cpu")


def _received_through(comm: MoECommunicator, routing: DispatchHandle) -> torch.Tensor:
    """int32 ``[R]``: the rows that ranks 0 to i send to this rank."""
    nodes, T = comm.nodes, routing.topk_ids.shape[0]
    assert nodes is not None
    G, words, first = comm.engine.node_size, nodes.layout.words, nodes.layout.token_base
    metas = routing.plan[T * nodes.num_nodes :][: nodes.num_segments * words].view(nodes.num_segments, words)
    begins = metas[:, first : first + G].flatten().index_select(0, nodes.order)  # of all sources, in their order
    ends = torch.cat([begins[1:], metas[0, first + G : first + G + 1]])
    return ends.index_select(0, _last_sources(comm))


# Of each communicator over nodes, int64 [R]: the last source of each rank, in the order of the output's rows.
_last: weakref.WeakKeyDictionary[MoECommunicator, torch.Tensor] = weakref.WeakKeyDictionary()


def _last_sources(comm: MoECommunicator) -> torch.Tensor:
    """A rank of this node is one source. A rank of another node is as many as its tokens cross in chunks."""
    if comm not in _last:
        nodes, engine = comm.nodes, comm.engine
        assert nodes is not None
        here = [engine.node_map.node_of(rank) == engine.node for rank in range(comm.size)]
        counts = itertools.accumulate(1 if same else nodes.chunks for same in here)
        _last[comm] = torch.tensor([count - 1 for count in counts], device=engine.device)
    return _last[comm]
