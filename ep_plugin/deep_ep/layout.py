"""The layout of a dispatch: how many tokens here go to each rank and node, and how many each expert gets.

Shapes: T tokens here, K experts per token, E experts in all, R ranks on N nodes.
"""

from __future__ import annotations

import torch

from ep_plugin import _C
from ep_plugin.deep_ep.arguments import check_ids
from ep_plugin.moe.across_nodes.tables import places_of_ranks
from ep_plugin.runtime.streams import current_stream, kernels_for, on_device
from ep_plugin.runtime.tensors import PLAIN, check_memory, check_storage, is_lazy
from ep_plugin.transport.topology import NodeMap


def count_tokens(
    topk_idx: torch.Tensor, num_experts: int, nodes: NodeMap
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """Count the tokens of each rank, node and expert, with one kernel on the current stream.

    A token counts once for an expert that it names twice. Ids that no expert has do not count.

    Args:
        topk_idx: int32 or int64 ``[T, K]``.

    Returns:
        num_tokens_per_rank int32 ``[R]``; num_tokens_per_rdma_rank int32 ``[N]``, or None on one node;
        num_tokens_per_expert int32 ``[E]``; is_token_in_rank bool ``[T, R]``. The counts share one allocation.

    Raises:
        ValueError: the device is not served; the ids are not in memory; as `check_ids`.
    """
    device, (T, K) = topk_idx.device, topk_idx.shape
    kernels = kernels_for(device)
    ids = topk_idx.contiguous() if _C.form_of(topk_idx) is not None else _in_memory(topk_idx)
    check_ids(ids, num_experts)
    N = nodes.num_nodes
    R = N * nodes.ranks_per_node
    sizes = [R, N, num_experts] if N > 1 else [R, num_experts]
    counts = torch.empty(sum(sizes), dtype=torch.int32, device=device)
    in_rank = torch.empty((T, R), dtype=torch.bool, device=device)
    args = _C.LayoutArgs(
        ids=ids.data_ptr(),
        nodes=_C.Nodes(
            rank_place=places_of_ranks(nodes, device).data_ptr() if N > 1 else 0, num_ranks=R, num_experts=num_experts
        ),
        counts=counts.data_ptr(),
        in_rank=in_rank.data_ptr(),
        num_tokens=T,
        topk=K,
        num_nodes=N if N > 1 else 0,
        id_bytes=ids.element_size(),
        stream=current_stream(device),
    )
    with on_device(device):
        kernels.layout(args)
    per_rank, *per_node, per_expert = counts.split_with_sizes(sizes)
    return per_rank, per_node[0] if N > 1 else None, per_expert, in_rank


def _in_memory(topk_idx: torch.Tensor) -> torch.Tensor:
    """Return `topk_idx` as a kernel reads it: contiguous, with all values in its own memory."""
    if type(topk_idx) not in PLAIN or is_lazy(topk_idx):
        topk_idx = topk_idx.clone()  # unwraps a tensor that stands for another one, and applies a pending sign
    check_memory("topk_idx", topk_idx)
    return topk_idx.contiguous()


def check_agreement(topk_idx: torch.Tensor, is_token_in_rank: torch.Tensor, num_experts: int, nodes: NodeMap) -> None:
    """ValueError if `is_token_in_rank` differs from `topk_idx`, by which tokens are sent."""
    expected = count_tokens(topk_idx, num_experts, nodes)[3]
    if is_token_in_rank.device != expected.device:
        raise ValueError(
            f"is_token_in_rank: expected a tensor on {expected.device}, got one on {is_token_in_rank.device}"
        )
    check_storage("is_token_in_rank", is_token_in_rank)
    if not torch.equal(expected, is_token_in_rank):
        token, rank = (expected != is_token_in_rank).nonzero()[0].tolist()
        raise ValueError(
            f"is_token_in_rank: expected {bool(expected[token, rank])} for token {token} and rank {rank}, as in "
            f"topk_idx, got {bool(is_token_in_rank[token, rank])}"
        )
