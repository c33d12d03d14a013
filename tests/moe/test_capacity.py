"""Dispatch with a fixed number of output rows: rows that fit, rows that are dropped and counted, and their combine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from ep_plugin import DispatchLayout, MoECommunicator
from ep_plugin.moe.layout import DispatchOutput
from ep_plugin.moe.reference import ReferenceOutput, reference_combine
from tests.moe.moe_cases import (
    FLAT,
    TOKEN_MAJOR,
    Case,
    Inputs,
    close,
    communicator,
    expert_rows,
    make_inputs,
    named,
    on_ranks,
    poisoned,
    ragged,
    same_bits,
)


def _cut(full: ReferenceOutput, capacity: int, layout: DispatchLayout) -> ReferenceOutput:
    """The oracle's output in `capacity` rows. Further rows are dropped; unused rows are zeros, and -1.

    In TOKEN_MAJOR dropped tokens still count for their experts.
    """
    kept = full.pair_row < capacity
    offsets = full.expert_offsets.clamp(max=capacity) if layout is FLAT else full.expert_offsets
    topk_ids = None if full.topk_ids is None else _resized(full.topk_ids, capacity, -1)
    row_ids = None if full.row_expert_ids is None else _resized(full.row_expert_ids, capacity, -1)
    counts = full.num_tokens_per_expert
    if row_ids is not None:
        counts = torch.bincount(row_ids[row_ids >= 0], minlength=len(counts)).int()
    return ReferenceOutput(
        tokens=_resized(full.tokens, capacity, 0),
        weights=_resized(full.weights, capacity, 0),
        topk_ids=topk_ids,
        row_expert_ids=row_ids,
        num_tokens_per_expert=counts,
        expert_offsets=offsets,
        pair_token=full.pair_token[kept],
        pair_k=full.pair_k[kept],
        pair_row=full.pair_row[kept],
    )


def _resized(rows: torch.Tensor, capacity: int, filling: int) -> torch.Tensor:
    result = rows.new_full((capacity, *rows.shape[1:]), filling)
    count = min(capacity, len(rows))
    result[:count] = rows[:count]
    return result


def _check(out: DispatchOutput, expected: ReferenceOutput, required: int, capacity: int) -> None:
    for field in ("tokens", "weights", "topk_ids", "row_expert_ids", "num_tokens_per_expert", "expert_offsets"):
        same_bits(field, getattr(out, field), getattr(expected, field))
    assert out.num_tokens_per_expert_cpu is None
    assert out.required is not None and out.overflow is not None
    assert int(out.required) == required
    assert int(out.overflow) == (required > capacity)
    assert out.overflow.shape == out.required.shape == ()


def check_capacity(
    rank: int,
    comm: MoECommunicator,
    inputs: Inputs,
    share: float,
    spare: int,
    given: Sequence[torch.Tensor] | None = None,
) -> tuple[DispatchOutput, DispatchOutput]:
    """Compares a dispatch, another one with its handle, and a combine with the oracle. Returns the outputs of both.

    Each rank's capacity is `share` of the rows that it needs, plus `spare`. given: the ids of each rank's dispatch, if
    they are not those of the oracle.
    """
    case, layout, alignment = inputs.case, comm.config.layout, comm.config.expert_alignment
    full = inputs.expected(layout, alignment)
    capacities = [int(share * len(out.tokens)) + spare for out in full]
    cut = [_cut(out, capacity, layout) for out, capacity in zip(full, capacities, strict=True)]
    ids = (given or inputs.ids)[rank]
    with poisoned():
        out, handle = comm.dispatch(inputs.x[rank], ids, inputs.weights[rank], capacity=capacities[rank])
        _check(out, cut[rank], len(full[rank].tokens), capacities[rank])
        y = [expert_rows(len(o.tokens), case.hidden, case.dtype, r) for r, o in enumerate(cut)]
        weights = [o.weights for o in cut]
        exact = reference_combine(y, cut, list(case.tokens), weights)[rank]
        magnitude = reference_combine([rows.abs() for rows in y], cut, list(case.tokens), [w.abs() for w in weights])[
            rank
        ]
        result = comm.combine(y[rank], handle, weights=weights[rank])
        close("combine", result, exact, magnitude, case.dtype)
        fresh = replace(inputs, x=[x + 1 for x in inputs.x])
        again, _ = comm.dispatch(
            fresh.x[rank],
            ids,
            inputs.weights[rank],
            previous_handle=handle,
            capacity=capacities[rank],
        )
        fresh_cut = _cut(fresh.expected(layout, alignment)[rank], capacities[rank], layout)
        _check(again, fresh_cut, len(full[rank].tokens), capacities[rank])
    return out, again


def _every_capacity(rank: int, size: int) -> None:
    for layout, alignment in ((FLAT, 1), (FLAT, 8), (TOKEN_MAJOR, 1)):
        for routing in ("random", "last rank only"):
            case = Case(tokens=ragged(size, 40, 3), num_experts=3 * size, topk=3, routing=routing, seed=3)
            inputs = make_inputs(case)
            settings = {"expert_alignment": alignment, "max_tokens_per_rank": max(case.tokens) or 1}
            with communicator(case, layout, **settings) as comm:
                for share, spare in ((1.0, 0), (1.0, 7), (2.0, 300), (0.7, 0), (0.25, 1), (0.0, 1), (0.0, 0)):
                    with named((layout, alignment, routing, share, spare)):
                        out, _ = check_capacity(rank, comm, inputs, share, spare)
                        assert out.left_out is None or not int(out.left_out)


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_rows_that_do_not_fit_are_dropped_and_counted(size: int) -> None:
    on_ranks(size, _every_capacity)


def _gradients(rank: int, size: int) -> None:
    """A dropped row sends no gradient. A kept row does."""
    for layout in (FLAT, TOKEN_MAJOR):
        case = Case(tokens=ragged(size, 20, 1), num_experts=2 * size, dtype=torch.float64, hidden=4, seed=1)
        inputs = make_inputs(case)
        full = inputs.expected(layout)
        capacities = [len(out.tokens) * 2 // 3 for out in full]
        x = [rows.clone().requires_grad_() for rows in inputs.x]
        weights = [w.clone().requires_grad_() for w in inputs.weights]
        live = replace(inputs, x=x, weights=weights).expected(layout)
        cut = [_cut(o, c, layout) for o, c in zip(live, capacities, strict=True)]
        y = [torch.sin(o.tokens) for o in cut]
        z = reference_combine(y, cut, list(case.tokens), [o.weights for o in cut])
        sum((rows * bias).sum() for rows, bias in zip(z, inputs.bias, strict=True)).backward()
        with communicator(case, layout, max_tokens_per_rank=20) as comm, named(layout), poisoned():
            mine = inputs.x[rank].clone().requires_grad_()
            my_weights = inputs.weights[rank].clone().requires_grad_()
            out, handle = comm.dispatch(mine, inputs.ids[rank], my_weights, capacity=capacities[rank])
            result = comm.combine(torch.sin(out.tokens), handle, weights=out.weights)
            (result * inputs.bias[rank]).sum().backward()
        torch.testing.assert_close(mine.grad, x[rank].grad)
        torch.testing.assert_close(my_weights.grad, weights[rank].grad)


@pytest.mark.parametrize("size", [2, 3])
def test_gradients_of_what_fitted(size: int) -> None:
    on_ranks(size, _gradients)


def _refused(rank: int, size: int) -> None:
    inputs = make_inputs(Case(tokens=(5,) * size, num_experts=2 * size))
    x, ids = inputs.x[rank], inputs.ids[rank]
    with communicator(inputs.case, max_tokens_per_rank=5) as comm:
        with pytest.raises(ValueError, match=r"capacity: expected an integer of at least 0, rows, got -1"):
            comm.dispatch(x, ids, capacity=-1)
        _, handle = comm.dispatch(x, ids, capacity=20)
        with pytest.raises(ValueError, match=r"capacity: expected a number of rows.*got None"):
            comm.dispatch(x, ids, previous_handle=handle)
        for other in (19, 21):
            with pytest.raises(ValueError, match=f"capacity: expected 20 rows, which previous_handle has, got {other}"):
                comm.dispatch(x, ids, previous_handle=handle, capacity=other)
            with pytest.raises(ValueError, match=f"y: expected the 20 rows that dispatch returned, got {other}"):
                comm.combine(torch.zeros(other, x.shape[1]), handle)
        out, unbounded = comm.dispatch(x, ids)
        rows = len(out.tokens)
        with pytest.raises(ValueError, match=f"capacity: expected at least {rows} rows, which .*, got {rows - 1}"):
            comm.dispatch(x, ids, previous_handle=unbounded, capacity=rows - 1)
        wide, handle = comm.dispatch(x, ids, previous_handle=unbounded, capacity=rows + 2)
        same_bits("rows", wide.tokens[:rows], out.tokens)
        same_bits("sums", comm.combine(wide.tokens, handle), comm.combine(out.tokens, unbounded))
    with communicator(inputs.case) as comm, pytest.raises(ValueError, match=r"max_tokens_per_rank=None"):
        comm.dispatch(x, ids, capacity=20)


def test_capacities_that_cannot_be_served_are_refused() -> None:
    on_ranks(2, _refused)
