"""Low-latency dispatch and combine against the oracle, bit for bit and within rounding."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.moe.low_latency_cases import check_rows, check_sums, expert_results, low_latency, round_trip
from tests.moe.moe_cases import ROUTINGS, Case, make_inputs, named, on_ranks, poisoned

QUANTIZED = ("e4m3", "e4m3_pow2", "e4m3_ue8m0")
SHAPES = {
    "few pairs": Case(tokens=(3, 8, 1), num_experts=6, seed=1),
    "many pairs": Case(tokens=(53, 80, 64), num_experts=6, topk=5, seed=2),
    "few and many pairs": Case(tokens=(64, 65, 0), num_experts=12, topk=4, seed=3),
    "more pairs than come early": Case(tokens=(70, 5, 78), num_experts=12, topk=5, hidden=8, seed=9),
    "more pairs than every warp counts": Case(tokens=(70, 70, 70), num_experts=12, topk=5, hidden=8, seed=10),
    "groups and few pairs": Case(tokens=(150, 2, 20), num_experts=6, hidden=8, seed=11),
    "several tokens in a group": Case(tokens=(300, 2, 129), num_experts=3, topk=3, hidden=8, seed=4),
    "groups of several sizes": Case(tokens=(300, 128, 2), num_experts=3, topk=2, hidden=8, seed=8),
    "one token": Case(tokens=(1, 0, 1), num_experts=3, seed=5),
    "no token": Case(tokens=(0, 0, 0), num_experts=3, seed=6),
    "many experts of a token": Case(tokens=(4, 12, 11), num_experts=384, topk=128, hidden=8, seed=7),
    "many experts of few tokens": Case(tokens=(3, 1, 2), num_experts=96, topk=40, hidden=8, seed=12),
    # Few pairs together, but one rank has more than come early on a GPU.
    "few ranks with many pairs": Case(tokens=(100, 3), num_experts=12, topk=5, hidden=8, seed=14),
    "as many tokens as are allowed": Case(tokens=(4096, 1), num_experts=4, topk=2, hidden=8, seed=15),
}


def _all_shapes(rank: int, size: int) -> None:
    for name, case in SHAPES.items():
        if len(case.tokens) != size:
            continue
        with named(name), poisoned(), low_latency(case) as comm:
            for number in range(3):
                round_trip(comm, make_inputs(dataclasses.replace(case, seed=case.seed + 100 * number)))


@pytest.mark.parametrize("size", [2, 3])
def test_shapes(size: int) -> None:
    on_ranks(size, _all_shapes)


def _all_dtypes(rank: int, size: int) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        for id_dtype in (torch.int32, torch.int64):
            case = Case(tokens=(5, 90), num_experts=8, hidden=40, topk=3, dtype=dtype, id_dtype=id_dtype)
            with named((dtype, id_dtype)), poisoned(), low_latency(case) as comm:
                round_trip(comm, make_inputs(case))


def test_dtypes() -> None:
    on_ranks(2, _all_dtypes)


def _quantized(rank: int, size: int) -> None:
    for hidden in (128, 640):
        for dtype in (torch.bfloat16, torch.float32):
            tokens = (6, 20, 140, 0)[:size]
            case = Case(tokens=tokens, num_experts=2 * size, hidden=hidden, topk=2, dtype=dtype, seed=hidden)
            with low_latency(case) as comm:
                for quantize in QUANTIZED:
                    with named((hidden, dtype, quantize)), poisoned():
                        out, _ = round_trip(comm, make_inputs(case), quantize)
                        assert out.tokens.dtype is torch.float8_e4m3fn
                        assert out.scales.dtype is (torch.int32 if quantize == "e4m3_ue8m0" else torch.float32)


@pytest.mark.parametrize("size", [2, 4])
def test_quantized_rows(size: int) -> None:
    on_ranks(size, _quantized)


def _all_routings(rank: int, size: int) -> None:
    tokens = tuple(4 + r + 130 * (r % 2) for r in range(size))  # few and many pairs
    case = Case(tokens=tokens, num_experts=2 * size, topk=2, dtype=torch.bfloat16)
    with low_latency(case) as comm:
        for number, routing in enumerate(ROUTINGS):
            with named(routing), poisoned():
                round_trip(comm, make_inputs(dataclasses.replace(case, routing=routing, seed=number)))


@pytest.mark.parametrize("size", [1, 2, 5])
def test_routings(size: int) -> None:
    on_ranks(size, _all_routings)


@pytest.mark.slow
def test_eight_ranks() -> None:
    on_ranks(8, _all_routings, timeout_s=200)


def _fewer_pairs(rank: int, size: int) -> None:
    case = Case(tokens=(5, 70), num_experts=8, topk=4, seed=9)
    inputs = make_inputs(case)
    generator = torch.Generator().manual_seed(1)
    now = [ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.4, -1) for ids in inputs.ids]
    with low_latency(case) as comm:
        out, handle = comm.dispatch(inputs.x[rank], inputs.ids[rank])
        y = expert_results(inputs, out.tokens.shape[1])
        for weighted in (True, False):
            fewer = handle._replace(topk_ids=now[rank].int())
            result = comm.combine(y[rank], fewer, weights=inputs.weights[rank] if weighted else None)
            check_sums(inputs, rank, y, result, weighted, now)
        check_sums(inputs, rank, y, comm.combine(y[rank], handle), weighted=False)


def test_a_combine_may_leave_out_pairs() -> None:
    on_ranks(2, _fewer_pairs)


def _zero_weights(rank: int, size: int) -> None:
    case = Case(tokens=(5, 70), num_experts=8, topk=4, seed=10)
    inputs = make_inputs(case)
    inputs = dataclasses.replace(inputs, weights=[weights * (weights > 0) for weights in inputs.weights])
    with low_latency(case) as comm:
        round_trip(comm, inputs)
        out, handle = comm.dispatch(inputs.x[rank], inputs.ids[rank])
        y = expert_results(inputs, out.tokens.shape[1])[rank]
        weights = torch.full_like(inputs.weights[rank], torch.nan)
        weights.view(torch.int32).fill_(-1)  # a NaN that is the mark of pairs that are left out
        sums = comm.combine(y, handle, weights=weights)
        named_here = (inputs.ids[rank] >= 0).any(dim=1)
        assert sums[named_here].isnan().all() and (sums[~named_here] == 0).all()


def test_weights_of_zero_and_nan() -> None:
    on_ranks(2, _zero_weights)


def _bias(rank: int, size: int) -> None:
    case = Case(tokens=(5, 140), num_experts=4, seed=11)
    inputs = make_inputs(case)
    with low_latency(case) as comm:
        out, handle = comm.dispatch(inputs.x[rank], inputs.ids[rank])
        y = expert_results(inputs, out.tokens.shape[1])[rank]
        plain = comm.combine(y, handle, weights=inputs.weights[rank])
        biased = comm.combine(y, handle, weights=inputs.weights[rank], bias=inputs.bias[rank])
        torch.testing.assert_close(biased, plain + inputs.bias[rank])


def test_bias() -> None:
    on_ranks(2, _bias)


def _smaller_calls(rank: int, size: int) -> None:
    """Calls of fewer tokens, narrower rows and fewer experts per token than the communicator allows."""
    most = Case(tokens=(50, 50), num_experts=8, hidden=64, topk=6)
    with low_latency(most) as comm:
        for number, (tokens, hidden, topk) in enumerate([((7, 20), 16, 2), ((50, 1), 64, 6), ((3, 3), 4, 1)]):
            case = Case(tokens=tokens, num_experts=8, hidden=hidden, topk=topk, seed=number)
            inputs = make_inputs(case)
            with named(case), poisoned():
                out, handle = comm.dispatch(inputs.x[rank], inputs.ids[rank], capacity=2 * max(tokens))
                assert out.tokens.shape == (4, 2 * max(tokens), hidden)
                check_rows(comm, out, inputs)
                y = expert_results(inputs, out.tokens.shape[1])
                check_sums(inputs, rank, y, comm.combine(y[rank], handle, weights=inputs.weights[rank]))
                again, same = comm.dispatch(inputs.x[rank], inputs.ids[rank], previous_handle=handle)
                assert same is handle
                check_rows(comm, again, inputs)


def test_calls_smaller_than_the_communicator() -> None:
    on_ranks(2, _smaller_calls)


def _repeats(rank: int, size: int) -> None:
    case = Case(tokens=(20, 60, 7), num_experts=6, topk=5, dtype=torch.bfloat16, hidden=256, seed=12)
    inputs = make_inputs(case)
    with low_latency(case) as comm:
        first = None
        for _ in range(20):
            out, handle = comm.dispatch(inputs.x[rank], inputs.ids[rank], quantize="e4m3")
            y = torch.nan_to_num(out.tokens.float()).bfloat16()
            sums = comm.combine(y, handle, weights=inputs.weights[rank])
            first = sums if first is None else first
            assert torch.equal(first.view(torch.int16), sums.view(torch.int16))


def test_repeats_give_the_same_bits() -> None:
    on_ranks(3, _repeats)


def _outputs_of_megabytes(rank: int, size: int) -> None:
    case = Case(tokens=(64, 40), num_experts=8, topk=2, dtype=torch.float32, hidden=1024, seed=13)
    with low_latency(case) as comm:
        held = []
        for number in range(5):
            out, _ = round_trip(comm, make_inputs(dataclasses.replace(case, seed=case.seed + number)))
            # A view, and a storage without a tensor.
            rows = out.tokens[1:]
            held.append((rows if number % 2 else rows.untyped_storage(), out.tokens.clone()))
            del out, rows
        for kept, copy in held:
            storage = kept if isinstance(kept, torch.UntypedStorage) else kept.untyped_storage()
            whole, expected = (torch.empty(0, dtype=torch.uint8).set_(one) for one in (storage, copy.untyped_storage()))
            assert torch.equal(whole, expected)
        del kept, storage, whole, held
        inputs = make_inputs(case)
        made = {comm.dispatch(inputs.x[rank], inputs.ids[rank])[0].tokens.data_ptr() for _ in range(5)}
        assert len(made) == 1  # no new memory


def test_outputs_share_memory_only_with_those_that_are_gone() -> None:
    on_ranks(2, _outputs_of_megabytes)
