"""Compares the results of an exchange with plain torch.

Shapes: R ranks, T tokens per rank, H hidden size, K experts per token, E experts in all, E_l = E / R, N rows received.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from ep_plugin.bench.exchange.workload import EXPERT_MAJOR, FLAT, SCALE_BLOCK, Batch, Workload
from ep_plugin.config import DispatchLayout
from ep_plugin.moe.layout import DispatchOutput
from ep_plugin.moe.reference import reference_dispatch, reference_quantize

_MAY_BE_MISSING = ("num_tokens_per_expert", "weights", "row_expert_ids")


def expert_rows(factors: torch.Tensor, out: DispatchOutput, rank: int) -> torch.Tensor:
    """Returns the rows of `rank` times the factors of their experts. factors: `[E]`.

    A TOKEN_MAJOR row is multiplied by the sum of its local experts' factors, each times its weight. FLAT padding gets
    any factor. EXPERT_MAJOR rows that no token has become NaN, since nobody may read them.
    """
    local = factors[rank * len(out.num_tokens_per_expert) :][: len(out.num_tokens_per_expert)]
    if out.topk_ids is not None and out.weights is not None:
        terms = local[out.topk_ids.clamp(min=0).long()].float() * out.weights.float()
        of_rows = terms.masked_fill(out.topk_ids < 0, 0).sum(1, keepdim=True)
        return (out.tokens.float() * of_rows).to(out.tokens.dtype)
    if out.tokens.dim() == 3:
        return (out.tokens * local.view(-1, 1, 1)).masked_fill(~_present(out).unsqueeze(2), torch.nan)
    if out.row_expert_ids is not None:
        of_rows = local[out.row_expert_ids.clamp(min=0).long()]
    else:
        of_rows = local.repeat_interleave(out.num_tokens_per_expert.long(), output_size=len(out.tokens))
    return out.tokens * of_rows.unsqueeze(1)


def _present(out: DispatchOutput) -> torch.Tensor:
    """Returns `[E_l, N]` bool: whether an EXPERT_MAJOR row belongs to a token."""
    return torch.arange(out.tokens.shape[1], device=out.tokens.device) < out.num_tokens_per_expert.unsqueeze(1)


def wrong_dispatch(
    got: DispatchOutput,
    everyone: list[Batch],
    workload: Workload,
    layout: DispatchLayout,
    rank: int,
    exact_fp8: bool = True,
) -> str | None:
    """Compares `got`, bit for bit, with the rows that belong to `rank`.

    It also compares num_tokens_per_expert, weights and row_expert_ids if `got` has them.

    Args:
        got: the output of a dispatch.
        everyone: the batches of all ranks, each of T tokens.
        workload: the sizes of the exchange.
        layout: the layout of `got`.
        rank: the rank that received `got`.
        exact_fp8: False: rows that were quantised on the way are multiplied by their scales before they are compared,
            and may differ by roundings to FP8.

    Returns:
        The first difference in words, or None if there is none.
    """
    if layout is EXPERT_MAJOR:  # compared as FLAT, which has the same order
        present, layout = _present(got), FLAT
        tokens = got.tokens.view(torch.uint8)[present].view(got.tokens.dtype)
        got = got._replace(tokens=tokens, scales=None if got.scales is None else got.scales[present])
    with everyone[rank].x.device:  # the oracle makes its own tensors on the default device
        ids, weights = [batch.ids for batch in everyone], [batch.weights for batch in everyone]
        numbers = list(torch.arange(sum(map(len, ids))).unsqueeze(1).split(len(ids[0])))  # stand for the rows
        expected = reference_dispatch(numbers, ids, weights, num_experts=workload.experts, layout=layout)[rank]
    source, quantized = expected.tokens.squeeze(1), everyone[rank].quantize
    counts = got.num_tokens_per_expert, expected.num_tokens_per_expert
    pairs: dict[str, tuple[Any, Any]] = {"num_tokens_per_expert": counts}
    if quantized and not exact_fp8:
        rows = torch.cat([batch.x for batch in everyone])[source]
        pairs["tokens times scales"] = _multiplied_out(got, rows), rows.float()
    else:
        sent = [reference_quantize(batch.x) if quantized else (batch.x, batch.scales) for batch in everyone]
        rows = torch.cat([x.view(torch.int64) for x, _ in sent])[source]  # compared as bits, whatever the type
        scales = [scales for _, scales in sent if scales is not None]
        pairs["tokens"] = got.tokens.view(torch.int64), rows
        pairs["scales"] = got.scales, torch.cat(scales)[source] if scales else None
    pairs["topk_ids"] = got.topk_ids, expected.topk_ids
    pairs |= {name: (getattr(got, name), getattr(expected, name)) for name in ("weights", "row_expert_ids")}
    for name, pair in pairs.items():
        given = name not in _MAY_BE_MISSING or pair[0] is not None
        if given and (problem := _difference(*pair)):
            return f"{name}: {problem}"
    return None


def _multiplied_out(got: DispatchOutput, rows: torch.Tensor) -> torch.Tensor:
    """Returns the FP8 rows of `got` times their scales, `[N, H]` float32.

    An element that is close enough to the element of `rows` is replaced by it, so that a comparison finds them equal.
    One rounding to FP8 is a sixteenth of the element, or half of FP8's smallest number times the scale. Two roundings
    are close enough, since peers may round their scales differently.

    rows: `[N, H]`, the rows before they were quantised.
    """
    if got.scales is None or got.tokens.shape != rows.shape:
        return got.tokens.float()
    scales = got.scales.repeat_interleave(SCALE_BLOCK, 1)[:, : rows.shape[1]]
    found, exact = got.tokens.float() * scales, rows.float()
    allowed = exact.abs() / 8 + scales * 2**-9
    return torch.where((found - exact).abs() <= allowed, exact, found)


def wrong_combine(got: torch.Tensor, batch: Batch, factors: torch.Tensor, roundings: int = 4) -> str | None:
    """Compares combined rows with the weighted sums in float64.

    Errors are relative to the sum of the terms' magnitudes. Four roundings to the rows' dtype are allowed (weights, a
    product, a rank's sum, the result), a fifth with several nodes (a node's sum), and the roundings of float32 sums.

    Args:
        got: `[T, H]`, the result of a combine.
        batch: the tokens that were dispatched.
        factors: `[E]`, the factor by which each expert multiplied its rows.
        roundings: the number of roundings to the rows' dtype.

    Returns:
        The difference in words, or None if every element is within the allowed error.
    """
    if got.shape != batch.x.shape:
        return f"expected shape {tuple(batch.x.shape)}, got {tuple(got.shape)}"
    exact, magnitude = (torch.zeros_like(batch.x, dtype=torch.float64) for _ in range(2))
    for ids, weights in zip(batch.ids.t(), batch.weights.t(), strict=True):
        term = (batch.x * factors[ids].unsqueeze(1)).double() * weights.double().unsqueeze(1)
        exact += term
        magnitude += term.abs()
    allowed = roundings / 2 * torch.finfo(got.dtype).eps + 32 * torch.finfo(torch.float32).eps
    errors = (got.double() - exact).abs() / (magnitude + torch.finfo(got.dtype).smallest_normal)
    wrong = ~(errors <= allowed)  # written so that NaN is wrong
    if not bool(wrong.any()):
        return None
    worst, rows = float(errors.max()), int(wrong.any(1).sum())
    return f"expected relative errors of at most {allowed:g}, got {worst:g}, and more in {rows} of {len(got)} rows"


def _difference(got: torch.Tensor | None, expected: torch.Tensor | None) -> str | None:
    if expected is None or got is None:
        return None if got is expected else f"expected {'none' if expected is None else 'some'}, got the opposite"
    if got.shape != expected.shape:
        return f"expected shape {tuple(expected.shape)}, got {tuple(got.shape)}"
    wrong = got != expected
    differing = (wrong if wrong.dim() == 1 else wrong.any(1)).nonzero()
    if len(differing) == 0:
        return None
    first = int(differing[0])
    return f"expected the oracle's values, got others in {len(differing)} of {got.shape[0]} rows, first row {first}"


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Makes torch fill memory that it allocates in this context with NaN, or with the largest integers.

    PyTorch ties this setting to deterministic algorithms. The context hides the warnings of operations that have none.
    """
    settings: Any = torch.utils.deterministic  # its annotations lack the setting
    mode, fill = torch.get_deterministic_debug_mode(), settings.fill_uninitialized_memory
    torch.set_deterministic_debug_mode("warn")  # use_deterministic_algorithms would import the compiler
    settings.fill_uninitialized_memory = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        settings.fill_uninitialized_memory = fill
