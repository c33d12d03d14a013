"""What DeepEP's arguments say about who gets which token, in MoECommunicator's words.

Shapes: T tokens here, K experts per token, E experts in all, R ranks, N rows received.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist

from ep_plugin import env
from ep_plugin.moe.layout import DispatchHandle


class Handle(NamedTuple):
    """What `combine` and a cached `dispatch` need of an earlier dispatch. Opaque: its fields are not DeepEP's six."""

    routing: DispatchHandle
    num_worst_tokens: int


def layout_of(
    topk_idx: torch.Tensor, num_experts: int, size: int
) -> tuple[torch.Tensor, None, torch.Tensor, torch.Tensor]:
    """num_tokens_per_rank int32 ``[R]``, None, num_tokens_per_expert int32 ``[E]``, is_token_in_rank ``[T, R]``."""
    check_experts(num_experts, size)
    check_topk(topk_idx)
    ids = topk_idx.long()
    if ids.numel() and (ids.device.type == "cpu" or env.check_ids()):
        least, most = int(ids.min()), int(ids.max())
        if least < -1 or most >= num_experts:
            raise ValueError(f"topk_idx: expected ids from -1 to {num_experts - 1}, got {least} to {most}")
    dropped = (ids < 0) | (ids >= num_experts)  # dispatch says so of ids that no expert has
    owner = (ids // (num_experts // size)).masked_fill(dropped, size)
    in_rank = torch.zeros((ids.shape[0], size + 1), dtype=torch.bool, device=ids.device)
    in_rank = in_rank.scatter_(1, owner, True)[:, :size].contiguous()
    per_expert = torch.zeros(num_experts + 1, dtype=torch.int32, device=ids.device)
    ones = torch.ones(ids.numel(), dtype=torch.int32, device=ids.device)
    per_expert.scatter_add_(0, ids.masked_fill(dropped, num_experts).reshape(-1), ones)
    return in_rank.sum(0, dtype=torch.int32), None, per_expert[:num_experts].contiguous(), in_rank


def check_experts(num_experts: int, size: int) -> None:
    if not isinstance(num_experts, int) or num_experts < 1 or num_experts % size:
        raise ValueError(f"num_experts: expected a positive multiple of the group's {size} ranks, got {num_experts}")


def check_topk(topk_idx: torch.Tensor) -> None:
    if topk_idx.dim() != 2 or topk_idx.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"topk_idx: expected int64 of shape [T, K], got {topk_idx.dtype} of shape {tuple(topk_idx.shape)}"
        )


def check_in_rank(is_token_in_rank: torch.Tensor, tokens: int, size: int) -> None:
    if is_token_in_rank.dtype is not torch.bool or tuple(is_token_in_rank.shape) != (tokens, size):
        raise ValueError(
            f"is_token_in_rank: expected bool of shape {(tokens, size)}, got {is_token_in_rank.dtype} of shape "
            f"{tuple(is_token_in_rank.shape)}"
        )


def check_agreement(topk_idx: torch.Tensor, is_token_in_rank: torch.Tensor, num_experts: int, size: int) -> None:
    """That `is_token_in_rank` says what `topk_idx` says, since the latter decides."""
    expected = layout_of(topk_idx, num_experts, size)[3]
    differ = (expected != is_token_in_rank).nonzero()
    if len(differ):
        token, rank = differ[0].tolist()
        raise ValueError(
            f"is_token_in_rank: expected {bool(expected[token, rank])} for token {token} and rank {rank}, as topk_idx "
            f"says, got {bool(is_token_in_rank[token, rank])}"
        )


def ranks_as_experts(is_token_in_rank: torch.Tensor) -> torch.Tensor:
    """int32 ``[T, R]``: routing by rank alone is routing to R experts, one on each rank."""
    ranks = torch.arange(is_token_in_rank.shape[1], dtype=torch.int32, device=is_token_in_rank.device)
    return torch.where(is_token_in_rank, ranks, -1)


def received_per_expert(num_tokens_per_expert: torch.Tensor, group: dist.ProcessGroup) -> list[int]:
    """What all ranks together send to each local expert, where the rows do not say it."""
    total = num_tokens_per_expert.clone()
    dist.all_reduce(total, group=group)
    local = total.numel() // group.size()
    return [int(count) for count in total[group.rank() * local : (group.rank() + 1) * local].tolist()]


def aligned(counts: list[int], alignment: int) -> list[int]:
    return [-(-count // alignment) * alignment for count in counts]
