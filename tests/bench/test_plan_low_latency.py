"""ep-bench plan's predictions of low latency: against the published model, and bytes and memory against a run."""

from __future__ import annotations

import pytest
import torch

from ep_plugin.bench.plan import COMBINE, DISPATCH, Plan
from ep_plugin.bench.plan_low_latency import bytes_of, markdown, memory_of, microseconds
from tests.moe.low_latency_cases import low_latency
from tests.moe.moe_cases import Case, make_inputs
from tests.moe.test_across_nodes import on_nodes

SIZES = {"tokens": 128, "hidden": 7168, "topk": 8, "experts": 256, "dtype": "fp8"}


@pytest.mark.parametrize(("nodes", "dispatch_us", "combine_us"), [(2, 43, 65), (8, 123, 219), (32, 176, 318)])
def test_times_are_those_of_the_model(nodes: int, dispatch_us: float, combine_us: float) -> None:
    plan = Plan(nodes=nodes, ranks=8, **SIZES)  # type: ignore[arg-type]
    assert microseconds(plan, DISPATCH, over_c10d=False) == pytest.approx(dispatch_us, rel=0.02)
    assert microseconds(plan, COMBINE, over_c10d=False) == pytest.approx(combine_us, rel=0.02)
    for operation in (DISPATCH, COMBINE):
        assert microseconds(plan, operation, over_c10d=True) > microseconds(plan, operation, over_c10d=False)


CASE = Case(tokens=(9,) * 4, num_experts=4, topk=4, hidden=128, dtype=torch.bfloat16, drop=0.0)


def _sent(rank: int, size: int) -> tuple[int, int, int]:
    inputs = make_inputs(CASE)
    with low_latency(CASE) as comm:
        out, handle = comm.dispatch(inputs.x[rank], inputs.ids[rank], quantize="e4m3")
        there = comm.rail_bytes_sent
        y = torch.zeros(out.tokens.shape, dtype=torch.bfloat16)
        comm.combine(y, handle, weights=inputs.weights[rank])
        return there, comm.rail_bytes_sent - there, comm.engine.memory_bytes


def test_bytes_and_memory_are_those_of_a_run() -> None:
    """Every token names every expert, so the mean of rows is the rows."""
    plan = Plan(nodes=2, ranks=2, tokens=9, hidden=128, topk=4, experts=4, dtype="fp8")
    there, back = (bytes_of(plan, operation) for operation in (DISPATCH, COMBINE))
    assert there.mean == there.padded and back.mean == back.padded
    for found in on_nodes(2, 2, _sent):
        assert found == (there.mean, back.mean, memory_of(plan))


def test_a_plan_of_many_tokens_has_no_table() -> None:
    assert "predicted over c10d" in markdown(Plan(nodes=2, ranks=2, **SIZES))  # type: ignore[arg-type]
    assert not markdown(Plan(nodes=2, ranks=2, **SIZES | {"tokens": 8192}))  # type: ignore[arg-type]
    assert not markdown(Plan(nodes=1, ranks=2, **SIZES))  # type: ignore[arg-type]
