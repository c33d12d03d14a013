"""Megatron's routing in our words: a map and probabilities over experts become top-k ids over the TP × EP group.

Shapes: T tokens here, E experts of the model, E_l of them on each expert-parallel rank, P expert-tensor-parallel ranks
(each holds a slice of the same experts), K experts per token. Rank (ep, tp) of the group is number ep * P + tp and
stands for experts of its own: P * E in all, and a token goes to P * K of them.
"""

from __future__ import annotations

import torch


def select(routing_map: torch.Tensor, probs: torch.Tensor, topk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """ids int64 ``[T, K]`` with -1 for dropped pairs, and their probabilities ``[T, K]``, differentiable in `probs`.

    routing_map: bool ``[T, E]`` with at most K experts a token; probs: ``[T, E]``, at least 0. A pair whose probability
    is 0 goes where the map says, as drop-and-pad has it.
    """
    values, ids = torch.topk(probs.masked_fill(~routing_map, -1.0), topk, dim=1, sorted=False)
    dropped = values < 0
    return ids.masked_fill(dropped, -1), values.masked_fill(dropped, 0.0)


def over_tensor_parallel(
    ids: torch.Tensor, probs: torch.Tensor, tp_size: int, local_experts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """ids and probabilities ``[T, P * K]``: each pair once for every rank that holds a slice of its expert."""
    if tp_size == 1:
        return ids, probs
    first = ids // local_experts * (tp_size * local_experts) + ids % local_experts
    slices = torch.arange(tp_size, device=ids.device) * local_experts
    copies = (first.unsqueeze(2) + slices).masked_fill((ids < 0).unsqueeze(2), -1)
    return copies.flatten(1), probs.unsqueeze(2).expand(-1, -1, tp_size).flatten(1)


def rounded_up(counts: torch.Tensor, alignment: int) -> torch.Tensor:
    """Rows of each expert with its padding."""
    return counts if alignment == 1 else (counts + alignment - 1) // alignment * alignment
