"""Dispatch and combine against the oracles: every rank count, both layouts, all dtypes, shapes and kinds of routing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ep_plugin import DispatchLayout
from tests.moe.moe_cases import (
    FLAT,
    LAYOUTS,
    ROUTINGS,
    TOKEN_MAJOR,
    Case,
    Inputs,
    check_dispatch,
    communicator,
    expert_rows,
    make_inputs,
    named,
    on_ranks,
    poisoned,
    ragged,
    round_trip,
    same_bits,
)

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def _cases(size: int, num_experts: int, topk: int) -> list[Case]:
    """Cases for one communicator. The rows that a case leaves in the pools are poison for the next case."""
    case = Case(tokens=(1,) * size, num_experts=num_experts, topk=topk)
    cases = [case, replace(case, tokens=(0,) * size), replace(case, tokens=ragged(size, 9), topk=1)]
    for seed, routing in enumerate(ROUTINGS):
        cases.append(replace(case, tokens=ragged(size, 37, seed), routing=routing, seed=seed))
    for i, dtype in enumerate(DTYPES):
        ids = torch.int32 if i % 2 else torch.int64
        tokens = ragged(size, 20, i)
        cases.append(replace(case, tokens=tokens, dtype=dtype, id_dtype=ids, hidden=8 * (i + 1), seed=i))
    # A chunk has 32 tokens, and there are at most 32 chunks. So: a second chunk, two full ones, then longer chunks.
    cases += [replace(case, tokens=ragged(size, most, most), hidden=4) for most in (33, 64, 1100)]
    return cases


def _every_case(rank: int, size: int) -> None:
    for layout, per_rank, alignment in ((FLAT, 1, 1), (FLAT, 4, 16), (TOKEN_MAJOR, 3, 1)):
        num_experts = size * per_rank
        cases = _cases(size, num_experts, topk=min(3, num_experts))
        with communicator(cases[0], layout, hidden_size=64, expert_alignment=alignment) as comm:
            for case in cases:
                with named((layout, alignment, case)), poisoned():
                    inputs = make_inputs(case)
                    round_trip(comm, inputs, inputs.expected(layout, alignment))


@pytest.mark.parametrize("size", range(1, 9))
def test_ragged_routing_and_dtypes(size: int) -> None:
    on_ranks(size, _every_case)


def _wide(rank: int, size: int) -> None:
    """Many experts per token, and rows from 16 bytes to far more than one copy moves."""
    for layout in LAYOUTS:
        num_experts = size * -(-128 // size)
        case = Case(tokens=ragged(size, 9), num_experts=num_experts)
        cases = [replace(case, topk=k, hidden=4, seed=k) for k in (1, 7, 64, 128)]
        for hidden in (8, 520, 7168, 33000):
            cases.append(replace(case, tokens=ragged(size, 3, hidden), hidden=hidden, dtype=torch.bfloat16))
        with communicator(case, layout, topk=128, hidden_size=33000) as comm:
            for case in cases:
                with named((layout, case)), poisoned():
                    inputs = make_inputs(case)
                    round_trip(comm, inputs, inputs.expected(layout))


@pytest.mark.parametrize("size", [1, 3, 8])
def test_topk_up_to_128_and_row_widths(size: int) -> None:
    on_ranks(size, _wide)


def _without_weights_and_strided(rank: int, size: int) -> None:
    case = Case(tokens=ragged(size, 21, 3), num_experts=2 * size, seed=3)
    inputs = make_inputs(case)
    for layout in LAYOUTS:
        expected = inputs.expected(layout)[rank]
        with communicator(case, layout) as comm, poisoned():
            out, _ = comm.dispatch(inputs.x[rank], inputs.ids[rank])
            assert out.weights is None
            check_dispatch(out._replace(weights=expected.weights), expected)
            # Rows of a wider tensor: their stride is not H.
            wide = torch.cat([inputs.x[rank], expert_rows(case.tokens[rank], 8, case.dtype, 1)], dim=1)
            out, _ = comm.dispatch(wide[:, : case.hidden], inputs.ids[rank], inputs.weights[rank].double())
            check_dispatch(out, expected)


@pytest.mark.parametrize("size", [1, 3])
def test_without_weights_and_from_strided_rows(size: int) -> None:
    on_ranks(size, _without_weights_and_strided)


def _one_strided_token(rank: int, size: int) -> None:
    case = Case(tokens=(1,) * size, num_experts=2 * size, drop=0.0)
    inputs = make_inputs(case)
    every_second = torch.zeros(1, 2 * case.hidden)[:, ::2]
    with communicator(case) as comm, pytest.raises(ValueError, match=r"stride 1 along H.*got strides \(\d+, 2\)"):
        comm.dispatch(every_second, inputs.ids[rank])


def test_one_token_with_a_strided_row_is_refused() -> None:
    on_ranks(1, _one_strided_token)


def _scales(rank: int, size: int) -> None:
    """Dispatch treats FP8 rows and their scales as bytes: all bit patterns, also NaNs, arrive unchanged."""
    case = Case(tokens=ragged(size, 30, 5), num_experts=2 * size, hidden=128, dtype=torch.float32, seed=5)
    inputs = make_inputs(case)
    generator = torch.Generator().manual_seed(7)
    raw = [torch.randint(0, 256, x.shape, generator=generator, dtype=torch.uint8) for x in inputs.x]
    scales = [torch.rand((len(x), 3), generator=generator) for x in inputs.x]
    for layout, alignment in ((FLAT, 1), (FLAT, 8), (TOKEN_MAJOR, 1)):
        rows = _through_the_oracle(inputs, raw, layout, alignment)[rank]
        beside = _through_the_oracle(inputs, scales, layout, alignment)[rank]
        with communicator(case, layout, expert_alignment=alignment) as comm, poisoned():
            for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8):
                out, handle = comm.dispatch(
                    raw[rank].view(dtype), inputs.ids[rank], inputs.weights[rank], scales=scales[rank]
                )
                same_bits("rows", out.tokens, rows.view(dtype))
                same_bits("scales", out.scales, beside)
            again, _ = comm.dispatch(
                raw[rank].view(dtype), inputs.ids[rank], scales=scales[rank].to(torch.bfloat16), previous_handle=handle
            )
            same_bits("scales of another dtype", again.scales, beside.to(torch.bfloat16))


def _ids_as_given(rank: int, size: int) -> None:
    case = Case(tokens=ragged(size, 30, 5), num_experts=2 * size, hidden=8, seed=9)
    inputs = make_inputs(case)
    expected = inputs.expected(TOKEN_MAJOR)[rank].topk_ids
    assert expected is not None
    with communicator(case, TOKEN_MAJOR, ids_as_given=True, max_tokens_per_rank=30) as comm, poisoned():
        for dtype in (torch.int64, torch.int32):
            ids = inputs.ids[rank].to(dtype)
            out, _ = comm.dispatch(inputs.x[rank], ids)
            same_bits("ids", out.topk_ids, expected.to(dtype))
            out, _ = comm.dispatch(inputs.x[rank], ids, capacity=len(expected) + 3)
            same_bits("ids", out.topk_ids, torch.nn.functional.pad(expected.to(dtype), (0, 0, 0, 3), value=-1))


@pytest.mark.parametrize("size", [1, 3])
def test_ids_have_the_dtype_of_the_given_ones_where_asked(size: int) -> None:
    on_ranks(size, _ids_as_given)


def _through_the_oracle(
    inputs: Inputs, rows: list[torch.Tensor], layout: DispatchLayout, alignment: int
) -> list[torch.Tensor]:
    return [out.tokens for out in replace(inputs, x=rows).expected(layout, alignment)]


@pytest.mark.parametrize("size", [1, 2, 4, 7])
def test_fp8_rows_and_scales_arrive_bit_for_bit(size: int) -> None:
    on_ranks(size, _scales)


def _twice(rank: int, size: int) -> None:
    for layout in LAYOUTS:
        case = Case(tokens=ragged(size, 300, 2), num_experts=4 * size, topk=4, dtype=torch.bfloat16, seed=2)
        inputs = make_inputs(case)
        first = None
        for attempt in range(3):
            with communicator(case, layout) as comm, named((layout, attempt)):
                out, handle = comm.dispatch(inputs.x[rank], inputs.ids[rank], inputs.weights[rank])
                z = comm.combine(out.tokens, handle, weights=out.weights, bias=inputs.bias[rank])
                results = [out.tokens, out.weights, z]
                first = first or results
                for i, (now, before) in enumerate(zip(results, first, strict=True)):
                    same_bits(f"result {i}", now, before)


@pytest.mark.parametrize("size", [2, 6])
def test_two_runs_give_the_same_bits(size: int) -> None:
    on_ranks(size, _twice)
