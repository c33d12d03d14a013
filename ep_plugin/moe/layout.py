"""What dispatch returns.

Shapes: T tokens here, H hidden size, K experts per token, R ranks, E experts in all, E_l = E / R on this rank,
N rows of the output. Rows are ordered by (source rank, source token), in FLAT within each expert.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ep_plugin.config import DispatchLayout

__all__ = ["DispatchHandle", "DispatchLayout", "DispatchOutput"]


class DispatchOutput(NamedTuple):
    """The rows this rank received. Every tensor is the caller's own; nothing here refers to communication memory.

    Without ``capacity`` the memory behind them may have room for more rows: the most of the last 16 dispatches, a 64th
    and 256. Who keeps or saves them for long clones them.

    tokens: ``[N, H]``, the dtype of ``x``, or what it was quantised to. FLAT: one row per (token, local expert),
        grouped by local expert, each group padded with zero rows to ``expert_alignment``. TOKEN_MAJOR: one row per
        token.
    scales: ``[N, S]``, the scales that came with the rows, given or made, or None. No gradient leads back from them.
    weights: FLAT ``[N]``, TOKEN_MAJOR ``[N, K]``; float32 (float64 for float64 rows), 0 where there is no pair; None
        when no weights were dispatched. Carries gradients back to ``topk_weights``.
    topk_ids: TOKEN_MAJOR: int32 ``[N, K]``, local expert ids, -1 where the expert is elsewhere; None in FLAT.
    row_expert_ids: FLAT: int32 ``[N]``, the local expert of each row, -1 for padding; None in TOKEN_MAJOR.
    num_tokens_per_expert: int32 ``[E_l]`` on the device, without padding. Where ``capacity`` was too small: in FLAT the
        rows that are present, in TOKEN_MAJOR those of dropped tokens too.
    num_tokens_per_expert_cpu: int64 ``[E_l]`` in host memory; None when ``capacity`` was given.
    expert_offsets: int32 ``[E_l + 1]`` on the device, where each expert's FLAT rows start, padding included.
    overflow: int32 ``[]``: 1 when rows were dropped because ``capacity`` was too small; None without ``capacity``.
    required: int32 ``[]``: rows that all tokens need; None without ``capacity``.
    """

    tokens: torch.Tensor
    scales: torch.Tensor | None
    weights: torch.Tensor | None
    topk_ids: torch.Tensor | None
    row_expert_ids: torch.Tensor | None
    num_tokens_per_expert: torch.Tensor
    num_tokens_per_expert_cpu: torch.Tensor | None
    expert_offsets: torch.Tensor
    overflow: torch.Tensor | None
    required: torch.Tensor | None


class DispatchHandle(NamedTuple):
    """The routing of one dispatch, for combine and for ``previous_handle=``: ordinary tensors and a number.

    Owned by the caller; may be kept, used several times, and outlive later dispatches. Its tensors are private: their
    layout is that of ``csrc/layout.h``.
    """

    topk_ids: torch.Tensor
    """int32 ``[T, K]``, global expert ids, -1: dropped."""
    plan: torch.Tensor
    """int32, one after the other: bases and counts; ``[T, R]``, position among this rank's rows for each rank, -1:
    none; ``[T, K]``, position among this rank's pairs for the expert, -1: dropped."""
    recv_rows: torch.Tensor
    """int32 ``[slots, K]``, the output row of each received pair, -1: none."""
    totals: torch.Tensor
    """int64 on the host: slots, rows, most rows from any rank to any and from any to all, rows of each local expert.

    With ``capacity``, that alone."""
    comm: int
    """The number of the communicator that made it."""
