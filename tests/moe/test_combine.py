"""Combine alone: precision of sums, bias, the weights that count, and rows that it must not read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from ep_plugin.moe.reference import reference_combine
from tests.moe.moe_cases import (
    FLAT,
    LAYOUTS,
    TOKEN_MAJOR,
    Case,
    close,
    communicator,
    expert_rows,
    make_inputs,
    named,
    on_ranks,
    poisoned,
    ragged,
    roundings_of,
    same_bits,
)


def _float32_sums(rank: int, size: int) -> None:
    """256 + 1 is 256 in bfloat16. So eight ones added to 256 survive only if sums are wider."""
    per_rank = 9
    case = Case(tokens=(3,) * size, num_experts=per_rank * size, topk=9, hidden=8, dtype=torch.bfloat16)
    owner = (rank + 1) % size
    ids = torch.arange(per_rank).expand(3, per_rank).contiguous() + owner * per_rank
    with communicator(case) as comm:
        out, handle = comm.dispatch(torch.zeros(3, 8, dtype=torch.bfloat16), ids)
        y = torch.where(out.row_expert_ids == 0, 256.0, 1.0).to(torch.bfloat16).unsqueeze(1).repeat(1, 8)
        same_bits("one rank's rows", comm.combine(y, handle), torch.full((3, 8), 264.0, dtype=torch.bfloat16))
    # The same across ranks: each partial row is exact, and their sum must be exact, too.
    case = replace(case, topk=size, num_experts=size)
    with communicator(case) as comm:
        ids = torch.arange(size).expand(3, size).contiguous()
        out, handle = comm.dispatch(torch.zeros(3, 8, dtype=torch.bfloat16), ids)
        y = torch.full((len(out.tokens), 8), 256.0 if rank == 0 else 2.0 / (size - 1), dtype=torch.bfloat16)
        same_bits("all ranks' rows", comm.combine(y, handle), torch.full((3, 8), 258.0, dtype=torch.bfloat16))


@pytest.mark.parametrize("size", [3, 5])
def test_sums_are_kept_in_float32(size: int) -> None:
    on_ranks(size, _float32_sums)


def _bias(rank: int, size: int) -> None:
    for layout in LAYOUTS:
        for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
            case = Case(tokens=ragged(size, 40, 1), num_experts=2 * size, hidden=1032, dtype=dtype, drop=0.6, seed=1)
            inputs = make_inputs(case)
            received = inputs.expected(layout)
            y = [expert_rows(len(out.tokens), case.hidden, dtype, r) for r, out in enumerate(received)]
            weights = [out.weights for out in received]
            exact = reference_combine(y, received, list(case.tokens), weights)[rank] + inputs.bias[rank].double()
            magnitudes = reference_combine(
                [rows.abs() for rows in y], received, list(case.tokens), [weight.abs() for weight in weights]
            )
            with communicator(case, layout) as comm, named((layout, dtype)), poisoned():
                _, handle = comm.dispatch(inputs.x[rank], inputs.ids[rank], inputs.weights[rank])
                result = comm.combine(y[rank], handle, weights=weights[rank], bias=inputs.bias[rank])
                magnitude = magnitudes[rank] + inputs.bias[rank].double().abs()
                close("bias", result, exact, magnitude, dtype, roundings_of(comm))
                alone = comm.combine(torch.zeros_like(y[rank]), handle, bias=inputs.bias[rank])
                same_bits("bias over zero rows", alone, inputs.bias[rank])


@pytest.mark.parametrize("size", [1, 4])
def test_bias_is_added_once_to_every_token(size: int) -> None:
    on_ranks(size, _bias)


WIDTHS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def starts_from_the_bias(rank: int, size: int, dtypes: Sequence[torch.dtype] = WIDTHS) -> None:
    """Each rank holds one expert of each token, so a sum has one term of each rank, in their order."""
    T, H = 37, 2056
    ids = torch.arange(size).expand(T, size).contiguous()
    for dtype in dtypes:
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        case = Case(tokens=(T,) * size, num_experts=size, topk=size, hidden=H, dtype=dtype)
        generator = torch.Generator().manual_seed(5)
        rows = torch.randn((size, size, T, H), generator=generator).to(dtype)  # by rank of the expert, by owner
        rows *= torch.tensor(2.0).pow(torch.randint(-12, 3, rows.shape, generator=generator)).to(dtype)
        biases = torch.randn((size, T, H), generator=generator, dtype=wide)
        with communicator(case, TOKEN_MAJOR) as comm, named(dtype), poisoned():
            _, handle = comm.dispatch(torch.zeros((T, H), dtype=dtype), ids)
            for bias in (biases[rank], biases[rank].to(dtype)):
                sums = bias.to(wide)
                for term in rows[:, rank]:
                    sums = sums + term.to(wide)
                same_bits("sums", comm.combine(rows[rank].flatten(0, 1), handle, bias=bias), sums.to(dtype))
            leaf = biases[rank].clone().requires_grad_()
            comm.combine(rows[rank].flatten(0, 1), handle, bias=leaf).sum().backward()
            assert leaf.grad is not None
            same_bits("gradient", leaf.grad, torch.ones_like(leaf))
            other = torch.float16 if dtype is not torch.float16 else torch.bfloat16
            with pytest.raises(ValueError, match=f"bias: expected the dtype {dtype} of y.*, got {other}"):
                comm.combine(rows[rank].flatten(0, 1), handle, bias=biases[rank].to(other))


@pytest.mark.parametrize("size", [1, 3])
def test_a_sum_starts_from_the_bias_which_may_be_as_wide_as_sums(size: int) -> None:
    on_ranks(size, starts_from_the_bias)


def _weights_of_absent_experts(rank: int, size: int) -> None:
    """In TOKEN_MAJOR a row carries all K weights, but only those of local experts count."""
    case = Case(tokens=ragged(size, 25, 2), num_experts=2 * size, topk=min(4, 2 * size), seed=2)
    inputs = make_inputs(case)
    received = inputs.expected(TOKEN_MAJOR)
    with communicator(case, TOKEN_MAJOR) as comm, poisoned():
        out, handle = comm.dispatch(inputs.x[rank], inputs.ids[rank], inputs.weights[rank])
        assert out.topk_ids is not None and out.weights is not None
        y = expert_rows(len(out.tokens), case.hidden, case.dtype, rank)
        loud = out.weights.masked_fill(out.topk_ids < 0, float("nan"))
        same_bits("absent weights", comm.combine(y, handle, weights=loud), comm.combine(y, handle, weights=out.weights))
        assert received[rank].tokens.shape == y.shape


@pytest.mark.parametrize("size", [2, 3])
def test_weights_of_experts_elsewhere_do_not_count(size: int) -> None:
    on_ranks(size, _weights_of_absent_experts)


def _rows_not_to_read(rank: int, size: int) -> None:
    """Padding rows, and rows beyond those that dispatch returned, never reach a token."""
    case = Case(tokens=ragged(size, 25, 4), num_experts=3 * size, seed=4)
    inputs = make_inputs(case)
    with communicator(case, FLAT, expert_alignment=8) as comm:
        out, handle = comm.dispatch(inputs.x[rank], inputs.ids[rank], inputs.weights[rank])
        assert out.row_expert_ids is not None and out.weights is not None
        y = expert_rows(len(out.tokens), case.hidden, case.dtype, rank)
        expected = comm.combine(y, handle, weights=out.weights)
        y[out.row_expert_ids < 0] = float("nan")
        more = torch.cat([y, torch.full((5, case.hidden), float("nan"))])
        weights = torch.cat([out.weights, torch.full((5,), float("nan"))])
        same_bits("with poison", comm.combine(more, handle, weights=weights), expected)


@pytest.mark.parametrize("size", [1, 3])
def test_padding_rows_never_reach_a_token(size: int) -> None:
    on_ranks(size, _rows_not_to_read)


def _another_dtype(rank: int, size: int) -> None:
    """Experts may return another dtype and width than they receive."""
    case = Case(tokens=ragged(size, 25, 6), num_experts=2 * size, hidden=32, dtype=torch.bfloat16, seed=6)
    inputs = make_inputs(case)
    received = inputs.expected(FLAT)
    with communicator(case) as comm, poisoned():
        _, handle = comm.dispatch(inputs.x[rank], inputs.ids[rank])
        for dtype, hidden in ((torch.float32, 32), (torch.float64, 2), (torch.float16, 512)):
            y = [expert_rows(len(out.tokens), hidden, dtype, r) for r, out in enumerate(received)]
            exact = reference_combine(y, received, list(case.tokens))[rank]
            magnitude = reference_combine([rows.abs() for rows in y], received, list(case.tokens))[rank]
            close(f"{dtype}", comm.combine(y[rank], handle), exact, magnitude, dtype)


@pytest.mark.parametrize("size", [1, 3])
def test_rows_of_another_type_and_width_come_back(size: int) -> None:
    on_ranks(size, _another_dtype)


def _values_beside_rows(rank: int, size: int) -> None:
    """Values of all K columns, float64 too, where rank 0 has none and the rows are the oracle's."""
    for layout in LAYOUTS:
        for dtype in (torch.float64, torch.bfloat16):
            case = Case(tokens=ragged(size, 20), num_experts=2 * size, topk=min(3, 2 * size), hidden=8, dtype=dtype)
            inputs = make_inputs(case)
            with named((layout, dtype)), communicator(case, layout=layout) as comm:
                out, handle = comm.dispatch(inputs.x[rank], inputs.ids[rank], inputs.weights[rank])
                values = torch.full_like(out.weights, float(rank))
                plain = comm.combine(out.tokens, handle)
                rows, sums = comm.combine_with_values(out.tokens, handle, values if rank else None)
                same_bits("the rows", rows, plain)
                assert (sums is None) == (rank == 0)
                if sums is None:
                    continue
                ids = inputs.ids[rank]
                ranks = torch.where(ids >= 0, ids // 2, -1)
                expected = ranks.clamp(min=0)  # of each pair, in FLAT
                if layout == TOKEN_MAJOR:  # of each rank that the token went to, in every column
                    went = (ranks.unsqueeze(2) == torch.arange(size)).any(1)
                    expected = (went * torch.arange(size)).sum(1, keepdim=True).expand_as(ids)
                same_bits("the values", sums, expected.to(sums.dtype))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_values_travel_beside_the_rows(size: int) -> None:
    on_ranks(size, _values_beside_rows)


def _gradients_of_rows(rank: int, size: int) -> None:
    """The rows' gradients, where only some ranks have values."""
    for layout in LAYOUTS:
        case = Case(tokens=ragged(size, 20), num_experts=2 * size, topk=2, hidden=8)
        inputs = make_inputs(case)
        with named(layout), communicator(case, layout=layout) as comm:
            out, handle = comm.dispatch(inputs.x[rank], inputs.ids[rank], inputs.weights[rank])
            found = []
            for values in (None, out.weights if rank else None):
                y = out.tokens.clone().requires_grad_()
                rows, sums = comm.combine_with_values(y, handle, values)
                assert sums is None or not sums.requires_grad
                rows.square().sum().backward()
                found.append(y.grad)
            same_bits("gradients", *found)


@pytest.mark.parametrize("size", [1, 3])
def test_rows_have_gradients_beside_values(size: int) -> None:
    on_ranks(size, _gradients_of_rows)


def _values_with_gradients(rank: int, size: int) -> None:
    case = Case(tokens=(4,), num_experts=2, topk=2, hidden=8)
    inputs = make_inputs(case)
    with communicator(case) as comm:
        out, handle = comm.dispatch(inputs.x[0], inputs.ids[0], inputs.weights[0])
        with pytest.raises(ValueError, match="values: expected a tensor without gradient, got one with requires_grad"):
            comm.combine_with_values(out.tokens, handle, torch.ones_like(out.weights).requires_grad_())
        wrong: Any = [1.0]
        for sentence, values in {
            "values: expected a tensor, got list": wrong,
            "values: expected a dense tensor, got one of layout torch._mkldnn": torch.ones_like(
                out.weights
            ).to_mkldnn(),
            r"values: expected shape .*, got \(1,\)": torch.ones(1),
        }.items():
            with pytest.raises(ValueError, match=sentence):
                comm.combine_with_values(out.tokens, handle, values)


def test_values_with_gradients_are_refused() -> None:
    on_ranks(1, _values_with_gradients)
