"""Oracles: compute dispatch and combine in plain torch, for all ranks at once in one process.

Lists have one entry per rank. Shapes: T_r tokens of rank r, H hidden size, K experts per token, E experts in all,
N_r rows that rank r receives.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ep_plugin.config import DispatchLayout


@dataclass(frozen=True)
class ReferenceOutput:
    """The rows that one rank receives, with the names of DispatchOutput, and the origin of each row.

    pair_token, pair_k: ``[pairs]``, for every (token, local expert) pair its token (counted over all ranks) and its
    position in top-k. pair_row: ``[pairs]``, the output row of the pair.
    """

    tokens: torch.Tensor
    weights: torch.Tensor
    topk_ids: torch.Tensor | None
    row_expert_ids: torch.Tensor | None
    num_tokens_per_expert: torch.Tensor
    expert_offsets: torch.Tensor
    pair_token: torch.Tensor
    pair_k: torch.Tensor
    pair_row: torch.Tensor


def reference_dispatch(
    x: list[torch.Tensor],
    topk_ids: list[torch.Tensor],
    topk_weights: list[torch.Tensor],
    *,
    num_experts: int,
    layout: DispatchLayout = DispatchLayout.FLAT,
    expert_alignment: int = 1,
) -> list[ReferenceOutput]:
    """Dispatches the tokens of all ranks. Returns the rows that each rank receives.

    Args:
        x: per rank ``[T_r, H]``.
        topk_ids: per rank ``[T_r, K]``, global expert ids; -1: dropped.
        topk_weights: per rank ``[T_r, K]``.
        num_experts: E.
        layout: FLAT or TOKEN_MAJOR.
        expert_alignment: FLAT groups of experts are padded to a multiple of this.
    """
    all_x, all_ids, all_weights = torch.cat(x), torch.cat(topk_ids).long(), torch.cat(topk_weights)
    per_rank = num_experts // len(x)
    make = _flat if layout is DispatchLayout.FLAT else _token_major
    received = []
    for rank in range(len(x)):
        local = all_ids - rank * per_rank
        local = torch.where((all_ids >= 0) & (local >= 0) & (local < per_rank), local, -1)
        received.append(make(all_x, local, all_weights, per_rank, expert_alignment))
    return received


def reference_quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantises x ``[T, H]``. Returns float8_e4m3fn ``[T, H]`` and float32 scales ``[T, ceil(H / 128)]``, bit for bit.

    A block's scale is amax / 448 over its elements other than NaN, or 1 if that is 0. An element is x / scale, both
    divisions in float32, rounded to nearest even and saturated to 448. The block of an infinity has an infinite scale:
    the infinity becomes NaN, and finite elements become 0 (all are NaN once multiplied by the scale). NaN stays NaN.
    Every element keeps its sign. Where amax is below 2**-137 the scale is a coarse subnormal: quotients may saturate,
    and elements are up to a third too small; below about 2**-141 they are 0.
    """
    T, H = x.shape
    blocks = -(-H // 128)
    padded = torch.nn.functional.pad(x.float(), (0, blocks * 128 - H)).view(T, blocks, 128)
    amax = padded.abs().nan_to_num(nan=0.0, posinf=torch.inf).amax(dim=2)
    scales = amax / torch.full_like(amax, 448)  # on GPUs torch divides by a number by multiplying with its reciprocal
    scales = torch.where(scales == 0, 1.0, scales)
    magnitudes = (padded.abs() / scales.unsqueeze(2)).clamp(max=448).to(torch.float8_e4m3fn).view(torch.uint8)
    codes = (magnitudes & 0x7F) | (padded.signbit().to(torch.uint8) << 7)  # the sign of a computed NaN is undefined
    return codes.view(T, blocks * 128)[:, :H].contiguous().view(torch.float8_e4m3fn), scales


def reference_combine(
    y: list[torch.Tensor],
    received: list[ReferenceOutput],
    tokens_per_rank: list[int],
    weights: list[torch.Tensor] | None = None,
) -> list[torch.Tensor]:
    """Combines the rows of all ranks. Returns the sums of each rank's tokens, float64 ``[T_r, H]``.

    Args:
        y: per rank ``[N_r, H]``, one row for each row of `received`.
        received: the result of `reference_dispatch`.
        tokens_per_rank: T_r of each rank.
        weights: per rank ``[N_r]`` (FLAT) or ``[N_r, K]`` (TOKEN_MAJOR); None: a plain sum.
    """
    total = torch.zeros(sum(tokens_per_rank), y[0].shape[1], dtype=torch.float64)
    for rank, (rows, out) in enumerate(zip(y, received, strict=True)):
        token, row, k = out.pair_token, out.pair_row, out.pair_k
        if weights is not None:
            beside = weights[rank].double()
            factor = beside[row] if beside.dim() == 1 else beside[row, k]
            total.index_add_(0, token, rows.double()[row] * factor.unsqueeze(1))
            continue
        if out.topk_ids is not None:  # TOKEN_MAJOR: one row per token, however many experts it has here
            token_of_row = token.new_empty(len(rows)).index_copy_(0, row, token)
            row = row.unique()
            token = token_of_row[row]
        total.index_add_(0, token, rows.double()[row])
    return list(total.split(tokens_per_rank))


def _flat(
    x: torch.Tensor, local: torch.Tensor, weights: torch.Tensor, per_rank: int, alignment: int
) -> ReferenceOutput:
    token, k = (local >= 0).nonzero(as_tuple=True)
    expert = local[token, k]
    counts = torch.bincount(expert, minlength=per_rank)
    offsets = _starts((counts + alignment - 1) // alignment * alignment)
    order = expert.argsort(stable=True)
    row = torch.empty_like(order)
    row[order] = torch.arange(len(order), device=x.device) - _starts(counts)[expert[order]] + offsets[expert[order]]
    rows = int(offsets[-1])
    tokens, row_weights = x.new_zeros((rows, x.shape[1])), weights.new_zeros(rows)
    tokens[row], row_weights[row] = x[token], weights[token, k]
    ids = torch.full((rows,), -1, dtype=torch.int32, device=x.device)
    ids[row] = expert.int()
    return ReferenceOutput(tokens, row_weights, None, ids, counts.int(), offsets.int(), token, k, row)


def _token_major(
    x: torch.Tensor, local: torch.Tensor, weights: torch.Tensor, per_rank: int, alignment: int
) -> ReferenceOutput:
    here = (local >= 0).any(dim=1)
    token, k = (local >= 0).nonzero(as_tuple=True)
    row = (here.long().cumsum(0) - 1)[token]
    counts = torch.bincount(local[token, k], minlength=per_rank)
    kept = torch.where(local >= 0, weights, torch.zeros_like(weights))[here]
    offsets = _starts(counts).int()
    return ReferenceOutput(x[here], kept, local[here].int(), None, counts.int(), offsets, token, k, row)


def _starts(counts: torch.Tensor) -> torch.Tensor:
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])
