"""Rows that are quantised while they are sent: bits against the oracle, layouts, shapes and refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ep_plugin import _C, DispatchLayout
from ep_plugin.errors import DisagreementError
from ep_plugin.moe.reference import ReferenceOutput, reference_quantize
from tests.moe.moe_cases import (
    FLAT,
    LAYOUTS,
    TOKEN_MAJOR,
    Case,
    Inputs,
    check_dispatch,
    communicator,
    make_inputs,
    named,
    on_ranks,
    poisoned,
    ragged,
    same_bits,
)

E4M3 = torch.float8_e4m3fn
WIDTHS = (16, 128, 144, 1024, 7168)  # one short block, whole blocks, whole ones and a short one


def _every_e4m3() -> torch.Tensor:
    """The 127 magnitudes, ascending."""
    return torch.arange(0x7F, dtype=torch.uint8).view(E4M3).float()


def _code(magnitude: float, scale: float = 1.0) -> int:
    return _C.e4m3(magnitude, scale)


# -- one element -----------------------------------------------------------------------------------------------------


def test_every_bfloat16_becomes_what_torch_makes_of_it() -> None:
    """All magnitudes and NaNs. Not infinity: its scale is one, and only some versions of torch saturate above 448."""
    values = torch.arange(0x8000, dtype=torch.int16).view(torch.bfloat16).float()
    values = values[~values.isinf()]
    expected = values.clamp(max=448).to(E4M3).view(torch.uint8) & 0x7F
    assert [_code(value) for value in values.tolist()] == expected.tolist()


def test_ties_go_to_even_and_their_neighbours_do_not() -> None:
    grid = _every_e4m3().double()
    middles = ((grid[1:] + grid[:-1]) / 2).float()
    assert torch.equal(middles.double(), (grid[1:] + grid[:-1]) / 2)
    for below, middle in enumerate(middles.tolist()):
        just_under, just_over = (torch.tensor(middle).nextafter(torch.tensor(to)).item() for to in (0.0, 500.0))
        assert _code(just_under) == below
        assert _code(middle) == below + below % 2
        assert _code(just_over) == below + 1


def test_the_division_of_gpus_rounds_as_a_division() -> None:
    """Scales of all magnitudes, with quotients close to rounding boundaries. A reciprocal alone rounds some wrong."""
    generator = torch.Generator().manual_seed(1)
    middles = ((_every_e4m3()[1:] + _every_e4m3()[:-1]) / 2)[8:]
    naive = 0
    for exponent in (*range(-149, 120, 10), 119):
        scales = torch.ldexp(1 + torch.rand(100, generator=generator), torch.tensor(exponent))
        amax = scales * 448
        scales = torch.where(amax.isfinite(), amax, torch.finfo().max) / 448
        scales = scales[scales > 0]
        near = middles[torch.randint(len(middles), (len(scales),), generator=generator)] * scales
        for x in (near, near.nextafter(torch.tensor(0.0)), near.nextafter(torch.tensor(torch.inf)), near.bfloat16()):
            x = x.float().minimum(448 * scales)
            expected = (x / scales).to(E4M3).view(torch.uint8).tolist()
            assert [_code(*pair) for pair in zip(x.tolist(), scales.tolist(), strict=True)] == expected, exponent
            naive += sum(
                a != b for a, b in zip((x * (1 / scales)).to(E4M3).view(torch.uint8).tolist(), expected, strict=True)
            )
    assert naive > 0


def test_the_oracle_on_a_row_worked_by_hand() -> None:
    row = torch.zeros(1, 272, dtype=torch.bfloat16)
    row[0, :4] = torch.tensor([-896.0, 2.0, 17.0, 19.0])  # scale 2: -448, 1, 8.5 (a tie), 9.5 (a tie)
    row[0, 256:258] = torch.tensor([-0.0, 0.0])
    rows, scales = reference_quantize(row)
    assert scales.tolist() == [[2.0, 1.0, 1.0]] and rows.shape == row.shape and rows.dtype is E4M3
    assert rows[0, :5].float().tolist() == [-448.0, 1.0, 8.0, 10.0, 0.0]
    assert rows.view(torch.uint8)[0, 256:258].tolist() == [0x80, 0]


# -- dispatch --------------------------------------------------------------------------------------------------------


def _rows(case: Case) -> Inputs:
    """Inputs with blocks of very different magnitudes, zeros, and blocks of zeros."""
    inputs = make_inputs(replace(case, dtype=torch.float32))
    generator = torch.Generator().manual_seed(case.seed)
    x = []
    for rows in inputs.x:
        blocks = -(-case.hidden // 128)
        powers = torch.randint(-30, 15, (len(rows), blocks), generator=generator)
        factors = 2.0 ** powers.float() * (torch.rand(len(rows), blocks, generator=generator) > 0.1)
        x.append((rows * factors.repeat_interleave(128, dim=1)[:, : case.hidden]).to(case.dtype))
    return replace(inputs, case=case, x=x)


def _expected(
    inputs: Inputs, layout: DispatchLayout, alignment: int = 1
) -> tuple[list[ReferenceOutput], list[torch.Tensor]]:
    """The rows that every rank should receive, and their scales."""
    rows, scales = zip(*(reference_quantize(x) for x in inputs.x), strict=True)
    codes = replace(inputs, x=[row.view(torch.uint8) for row in rows]).expected(layout, alignment)
    beside = replace(inputs, x=list(scales)).expected(layout, alignment)
    return [replace(out, tokens=out.tokens.view(E4M3)) for out in codes], [out.tokens for out in beside]


def _every_width(rank: int, size: int) -> None:
    for layout, alignment in ((FLAT, 1), (FLAT, 8), (TOKEN_MAJOR, 1)):
        case = Case(tokens=ragged(size, 40, 3), num_experts=2 * size, hidden=max(WIDTHS))
        with communicator(case, layout, expert_alignment=alignment) as comm:
            for seed, hidden in enumerate(WIDTHS):
                for dtype in (torch.bfloat16, torch.float16, torch.float32):
                    here = replace(case, hidden=hidden, dtype=dtype, seed=seed, tokens=ragged(size, 40, seed))
                    with named((layout, alignment, here)), poisoned():
                        inputs = _rows(here)
                        received, scales = _expected(inputs, layout, alignment)
                        out, handle = comm.dispatch(
                            inputs.x[rank], inputs.ids[rank], inputs.weights[rank], quantize="e4m3"
                        )
                        check_dispatch(out, received[rank])
                        same_bits("scales", out.scales, scales[rank])
                        again = comm.dispatch_async(
                            inputs.x[rank], inputs.ids[rank], previous_handle=handle, quantize="e4m3"
                        )
                        same_bits("cached", again.wait()[0].tokens, out.tokens)
                        same_bits("cached scales", again.wait()[0].scales, out.scales)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_rows_and_scales_are_the_oracles_bit_for_bit(size: int) -> None:
    on_ranks(size, _every_width)


def _unusual_values(rank: int, size: int) -> None:
    """NaNs of both signs, infinities, subnormal values and the largest, each alone in a block and beside others."""
    tiny, most = 2.0**-133, torch.finfo(torch.bfloat16).max
    specials = [torch.nan, -torch.nan, torch.inf, -torch.inf, tiny, -tiny, 300 * tiny, most, -most, 0.0, -0.0]
    x = torch.randn(len(specials) + 1, 384, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    for token, special in enumerate(specials):
        x[token, :128] = special
        x[token, 200] = special
    x[-1, 5:7] = torch.tensor([torch.inf, torch.nan])
    case = Case(tokens=(len(x),) * size, num_experts=size, hidden=384, topk=1, dtype=torch.bfloat16, drop=0.0)
    rows, scales = reference_quantize(x)
    assert scales.isinf().any() and rows.float().isnan().any()
    for given in (x, x.float(), x.float() * 2.0**-13):  # the last has values whose 448th part is 0
        rows, scales = reference_quantize(given)
        with communicator(case, TOKEN_MAJOR) as comm:
            ids = torch.full((len(x), 1), rank)
            out, _ = comm.dispatch(given, ids, quantize="e4m3")
        same_bits("rows", out.tokens, rows)
        same_bits("scales", out.scales, scales)


def test_what_is_not_finite_or_hardly_there() -> None:
    on_ranks(2, _unusual_values)


def _with_capacity(rank: int, size: int) -> None:
    case = Case(tokens=ragged(size, 30, 1), num_experts=2 * size, hidden=272, dtype=torch.bfloat16)
    inputs = _rows(case)
    for layout in LAYOUTS:
        received, scales = _expected(inputs, layout)
        rows = len(received[rank].tokens)
        with communicator(case, layout, max_tokens_per_rank=30) as comm, poisoned(), named(layout):
            out, _ = comm.dispatch(inputs.x[rank], inputs.ids[rank], capacity=rows + 9, quantize="e4m3")
            same_bits("rows", out.tokens[:rows], received[rank].tokens)
            same_bits("scales", out.scales[:rows], scales[rank])
            assert not out.tokens[rows:].view(torch.uint8).any() and not out.scales[rows:].any()
            small = rows // 2
            out, _ = comm.dispatch(inputs.x[rank], inputs.ids[rank], capacity=small, quantize="e4m3")
            same_bits("fewer rows", out.tokens, received[rank].tokens[:small])
            same_bits("fewer scales", out.scales, scales[rank][:small])


def test_with_a_capacity() -> None:
    on_ranks(3, _with_capacity)


def _strided(rank: int, size: int) -> None:
    case = Case(tokens=(7,) * size, num_experts=2 * size, hidden=160, dtype=torch.bfloat16)
    inputs = _rows(case)
    received, scales = _expected(inputs, FLAT)
    wide = torch.cat([inputs.x[rank], torch.full((7, 8), torch.inf, dtype=case.dtype)], dim=1)
    with communicator(case) as comm:
        out, _ = comm.dispatch(wide[:, :160], inputs.ids[rank], quantize="e4m3")
        same_bits("rows", out.tokens, received[rank].tokens)
        same_bits("scales", out.scales, scales[rank])


def test_rows_of_a_wider_tensor() -> None:
    on_ranks(2, _strided)


def _compiled(rank: int, size: int) -> None:
    case = Case(tokens=(9,) * size, num_experts=2 * size, hidden=144, dtype=torch.bfloat16)
    inputs = _rows(case)
    for layout in LAYOUTS:
        with communicator(case, layout) as comm, named(layout):

            def rows(x: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
                out, handle = comm.dispatch(x, ids, quantize="e4m3")
                assert out.scales is not None
                wide = out.tokens.float() * out.scales.repeat_interleave(128, dim=1)[:, : x.shape[1]]
                return wide, comm.combine(wide, handle)

            torch._dynamo.reset()
            compiled = torch.compile(rows, fullgraph=True, backend="aot_eager", dynamic=True)
            for got, plain in zip(
                compiled(inputs.x[rank], inputs.ids[rank]), rows(inputs.x[rank], inputs.ids[rank]), strict=True
            ):
                torch.testing.assert_close(got, plain)


@pytest.mark.slow
def test_in_a_graph() -> None:
    on_ranks(2, _compiled)


def _gradients(rank: int, size: int) -> None:
    """Weights get their gradients as usual. Rows get none."""
    case = Case(tokens=(11,) * size, num_experts=2 * size, hidden=32, dtype=torch.bfloat16)
    inputs = _rows(case)
    for layout in LAYOUTS:
        with communicator(case, layout) as comm, named(layout):
            weights = inputs.weights[rank].clone().requires_grad_()
            out, _ = comm.dispatch(inputs.x[rank], inputs.ids[rank], weights, quantize="e4m3")
            assert out.weights is not None
            out.weights.square().sum().backward()
            kept = (inputs.ids[rank] >= 0).float()
            torch.testing.assert_close(weights.grad, 2 * weights.detach() * kept)
            live = inputs.x[rank].clone().requires_grad_()
            with torch.no_grad():  # nothing is recorded, so no gradient is lost
                comm.dispatch(live, inputs.ids[rank], quantize="e4m3")


def test_gradients_of_the_weights() -> None:
    on_ranks(2, _gradients)


# -- agreement and refusals ------------------------------------------------------------------------------------------


def _one_quantises(rank: int, size: int) -> str:
    """Rank 1 quantises and rank 0 does not."""
    case = Case(tokens=(6,) * size, num_experts=2 * size, hidden=128, dtype=torch.bfloat16)
    inputs = make_inputs(case)
    with communicator(case, timeout_s=20) as comm, pytest.raises(DisagreementError) as caught:
        comm.dispatch(inputs.x[rank], inputs.ids[rank], quantize="e4m3" if rank else None)
    return str(caught.value)


def test_ranks_that_disagree() -> None:
    for said in on_ranks(2, _one_quantises):
        assert "row bytes is" in said and "128 on rank 1" in said and "256 on rank 0" in said, said


def _one_brings_its_own(rank: int, size: int) -> None:
    """A rank that passes quantised rows and scales agrees with a rank that lets dispatch quantise."""
    case = Case(tokens=(6,) * size, num_experts=2 * size, hidden=144, dtype=torch.bfloat16)
    inputs = _rows(case)
    received, scales = _expected(inputs, FLAT)
    with communicator(case) as comm:
        if rank:
            out, _ = comm.dispatch(inputs.x[rank], inputs.ids[rank], quantize="e4m3")
        else:
            rows, beside = reference_quantize(inputs.x[rank])
            out, _ = comm.dispatch(rows, inputs.ids[rank], scales=beside)
    same_bits("rows", out.tokens, received[rank].tokens)
    same_bits("scales", out.scales, scales[rank])


def test_beside_a_rank_that_quantised_before() -> None:
    on_ranks(2, _one_brings_its_own)


def _refused(rank: int, size: int) -> None:
    case = Case(tokens=(6,) * size, num_experts=2 * size, hidden=32, dtype=torch.bfloat16)
    inputs = make_inputs(case)
    x, ids = inputs.x[rank], inputs.ids[rank]
    wrong = {
        "quantize: expected None or 'e4m3', got 'e5m2'": {"quantize": "e5m2"},
        "quantize: expected None or 'e4m3', got True": {"quantize": True},
        r"scales: expected None with quantize='e4m3', which makes them, got shape \(6, 1\)": {
            "scales": torch.ones(6, 1)
        },
        "x: expected one of torch.bfloat16.*got torch.float64": {"x": x.double()},
        "x: expected one of torch.bfloat16.*got torch.float8_e4m3fn": {"x": x.to(E4M3)},
        r"x: expected rows of a positive multiple of 16 bytes, got 24 \(24 elements of torch.float8_e4m3fn\)": {
            "x": x[:, :24].contiguous()
        },
        "x: expected a tensor without gradients, such as x.detach.*got requires_grad=True": {
            "x": x.clone().requires_grad_()
        },
    }
    with communicator(case) as comm:
        for says, arguments in wrong.items():
            for call in (comm.dispatch, comm.dispatch_async):
                with named(says), pytest.raises(ValueError, match=says):
                    call(**({"x": x, "topk_ids": ids, "quantize": "e4m3"} | arguments))
        comm.dispatch(x, ids, quantize="e4m3")  # nothing was launched, so all ranks continue


def test_wrong_arguments() -> None:
    on_ranks(2, _refused)
