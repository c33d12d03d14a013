"""What low-latency tests share: communicators, the oracle's rows in EXPERT_MAJOR, and comparisons."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ep_plugin import MoECommunicator, MoECommunicatorConfig
from ep_plugin.dtypes import weight_dtype
from ep_plugin.moe.layout import DispatchHandle, DispatchOutput
from ep_plugin.moe.reference import reference_combine, reference_dispatch, reference_quantize
from tests.moe.moe_cases import Case, Inputs, close, roundings_of, same_bits


def low_latency(case: Case, **settings: Any) -> MoECommunicator:
    """A low-latency communicator of the default group that serves `case`."""
    base = {
        "num_experts": case.num_experts,
        "hidden_size": case.hidden,
        "topk": case.topk,
        "max_tokens_per_rank": max(1, *case.tokens),
        "mode": "ll",
        "max_row_bytes": case.hidden * case.dtype.itemsize,
    }
    return MoECommunicator(None, MoECommunicatorConfig(**(base | settings)))


@dataclass(frozen=True)
class Rows:
    """One rank's rows by the oracle: FLAT rows, and where they are in EXPERT_MAJOR.

    tokens: ``[rows, H]``. place: ``[rows]``, of ``[E_l * N]``. counts: ``[E_l]``. token: ``[rows]``, over all ranks.
    """

    tokens: torch.Tensor
    place: torch.Tensor
    counts: torch.Tensor
    token: torch.Tensor


def expected_rows(inputs: Inputs, rank: int, per_expert: int) -> Rows:
    """The rows that `rank` receives."""
    out = reference_dispatch(inputs.x, inputs.ids, inputs.weights, num_experts=inputs.case.num_experts)[rank]
    within = torch.arange(len(out.tokens)) - out.expert_offsets[out.row_expert_ids.long()]
    place = out.row_expert_ids.long() * per_expert + within
    token = torch.empty(len(out.tokens), dtype=torch.int64)
    token[out.pair_row] = out.pair_token
    return Rows(out.tokens, place, out.num_tokens_per_expert, token)


def check_rows(comm: MoECommunicator, out: DispatchOutput, inputs: Inputs, quantize: str | None = None) -> Rows:
    """Compares a dispatch with the oracle, bit for bit. Returns the oracle's rows."""
    per_expert = out.tokens.shape[1]
    rows = expected_rows(inputs, comm.rank, per_expert)
    same_bits("num_tokens_per_expert", out.num_tokens_per_expert, rows.counts)
    starts = torch.arange(comm.num_local_experts + 1, dtype=torch.int32) * per_expert
    same_bits("expert_offsets", out.expert_offsets, starts)
    got = out.tokens.flatten(0, 1)
    if quantize is None:
        assert out.scales is None
        same_bits("tokens", got[rows.place], rows.tokens)
        return rows
    codes, scales = reference_quantize(rows.tokens) if quantize == "e4m3" else quantize_by_powers(rows.tokens)
    same_bits("tokens", got.view(torch.uint8)[rows.place], codes.view(torch.uint8))
    same_bits("scales", scales_as_float(out, rows, quantize, scales.shape[1]), scales)
    return rows


def quantize_by_powers(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As reference_quantize, with each scale rounded up to a power of two. For finite rows."""
    T, H = x.shape
    blocks = x.float().view(T, H // 128, 128)
    exact = blocks.abs().amax(dim=2) / 448
    scales = torch.where(exact == 0, 1.0, exact.clamp(min=2.0**-126).log2().ceil().exp2())
    codes = (blocks / scales.unsqueeze(2)).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes.view(T, H), scales


def scales_as_float(out: DispatchOutput, rows: Rows, quantize: str, groups: int) -> torch.Tensor:
    """The scales ``[rows, S]`` of the rows that are there."""
    scales = out.scales
    assert scales is not None and scales.stride(1) == 1, "expected scales that are stored transposed"
    found = scales.flatten(0, 1)[rows.place]
    if quantize != "e4m3_ue8m0":
        return found
    exponents = found.contiguous().view(torch.uint8).view(len(found), 4 * scales.shape[2])
    assert not exponents[:, groups:].any(), "expected zeros after the exponents"
    return (exponents[:, :groups].float() - 127).exp2()


def expert_results(inputs: Inputs, per_expert: int) -> list[torch.Tensor]:
    """y of every rank: fresh random rows where there are rows, NaN elsewhere."""
    case, made = inputs.case, []
    for rank in range(case.size):
        rows = expected_rows(inputs, rank, per_expert)
        generator = torch.Generator().manual_seed(case.seed * 31 + rank)
        y = torch.full((case.num_experts // case.size * per_expert, case.hidden), torch.nan, dtype=case.dtype)
        fresh = torch.randn((len(rows.place), case.hidden), generator=generator, dtype=torch.float64)
        y[rows.place] = fresh.to(case.dtype)
        made.append(y.view(case.num_experts // case.size, per_expert, case.hidden))
    return made


def check_sums(
    inputs: Inputs,
    rank: int,
    y: list[torch.Tensor],
    result: torch.Tensor,
    weighted: bool = True,
    ids_now: list[torch.Tensor] | None = None,
    roundings: int = 2,
) -> None:
    """Compares a combine with the oracle, within the roundings of partial rows and sums (roundings_of)."""
    case = inputs.case
    out = reference_dispatch(inputs.x, inputs.ids, inputs.weights, num_experts=case.num_experts)
    ids_now = ids_now or inputs.ids
    kept = torch.cat(ids_now) >= 0
    factors = torch.cat(inputs.weights) if weighted else torch.ones_like(torch.cat(inputs.weights))
    rows_of, weights, magnitudes = [], [], []
    for source, received in enumerate(out):
        rows = expected_rows(inputs, source, y[source].shape[1])
        flat = y[source].flatten(0, 1)[rows.place]
        weight = torch.zeros(len(flat), dtype=weight_dtype(case.dtype))
        named = kept[received.pair_token, received.pair_k]
        weight[received.pair_row] = factors[received.pair_token, received.pair_k] * named
        rows_of.append(flat)
        weights.append(weight)
        magnitudes.append(flat.abs())
    exact = reference_combine(rows_of, out, list(case.tokens), weights)[rank]
    magnitude = reference_combine(magnitudes, out, list(case.tokens), [weight.abs() for weight in weights])[rank]
    close(f"combine of rank {rank}, weighted={weighted}", result, exact, magnitude, case.dtype, roundings)


def round_trip(comm: MoECommunicator, inputs: Inputs, quantize: str | None = None) -> tuple[Any, DispatchHandle]:
    """A dispatch and a combine, both compared. Returns the dispatch's output and the handle."""
    rank = comm.rank
    out, handle = comm.dispatch(inputs.x[rank], inputs.ids[rank], quantize=quantize)
    check_rows(comm, out, inputs, quantize)
    y = expert_results(inputs, out.tokens.shape[1])
    sums = comm.combine(y[rank], handle, weights=inputs.weights[rank])
    check_sums(inputs, rank, y, sums, roundings=roundings_of(comm))
    return out, handle
