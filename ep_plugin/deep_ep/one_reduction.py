"""Combine with a single rounding, for ``ElasticBuffer(allow_multiple_reduction=False)``.

Shapes: T tokens here, K experts per token, H hidden size, N rows that dispatch returned.
"""

from __future__ import annotations

import torch

from ep_plugin.deep_ep.elastic_handles import EPHandle
from ep_plugin.dtypes import weight_dtype
from ep_plugin.moe.arguments import check_beside
from ep_plugin.moe.communicator import MoECommunicator
from ep_plugin.moe.layout import DispatchHandle
from ep_plugin.moe.registry import communicator

_HIDDEN = 8  # elements of a row that carries nothing


def reduce_once(
    comm: MoECommunicator,
    x: torch.Tensor,
    handle: EPHandle,
    topk_weights: torch.Tensor | None,
    start: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return every expert's row to its token's owner, and add the rows there in the order of the token's choices.

    Args:
        comm: a communicator for ``T * K`` tokens with one expert each, otherwise as the dispatch's.
        x, topk_weights: as in `ElasticBuffer.combine`.
        start: ``[T, H]``, where the sums start, or None.

    Returns:
        ``[T, H]`` of x's dtype, and the sums of the weights or None. Sums are float32 (float64 for float64 rows).
    """
    T, K = handle.topk_idx.shape
    if start is not None:
        check_beside("bias", start, (T, x.shape[1]), comm.engine)
    if handle.pairs is None or handle.pairs.comm != comm.number:  # its communicator may be closed by now
        handle.pairs = _dispatch_pairs(comm, x, handle)
    if handle.do_expand:
        by_pair, weights = comm.combine_with_values(x, handle.pairs, topk_weights)
    else:  # a row has K weights, but only one pair
        by_pair, narrow = comm.combine(x, handle.pairs), x.new_zeros((x.shape[0], _HIDDEN))
        _, weights = communicator(handle.routing.comm).combine_with_values(narrow, handle.routing, topk_weights)
    rows = by_pair.view(T, K, x.shape[1])
    sums = x.new_zeros((T, x.shape[1]), dtype=weight_dtype(x.dtype))
    if start is not None:
        sums.copy_(start)
    for choice in range(K):
        sums += rows[:, choice]
    return sums.to(x.dtype), None if weights is None else weights.view(T, K)


def _dispatch_pairs(comm: MoECommunicator, x: torch.Tensor, handle: EPHandle) -> DispatchHandle:
    """Route each pair of a token and an expert like a token with one expert. Its row has the pair's place in `x`."""
    ids = handle.routing.topk_ids
    if not handle.do_expand:
        ids = _last_of_each_rank(ids, handle.num_experts // comm.size)
    rows = x.new_zeros((ids.numel(), _HIDDEN))
    capacity = None if handle.num_recv_tokens_per_expert_list else handle.num_expanded_tokens
    return comm.dispatch(rows, ids.reshape(-1, 1), capacity=capacity)[1]


def _last_of_each_rank(ids: torch.Tensor, local_experts: int) -> torch.Tensor:
    """Return a copy of `ids` with -1 where the same rank holds one of the token's later experts."""
    ranks = torch.where(ids < 0, -1, ids // local_experts)
    later = torch.ones((ids.shape[1], ids.shape[1]), dtype=torch.bool, device=ids.device).triu(1)
    again = ((ranks.unsqueeze(2) == ranks.unsqueeze(1)) & later).any(2)
    return ids.masked_fill(again, -1)
