"""Tests the oracle for CUDA graphs: it agrees with the reference, and it detects wrong results."""

from __future__ import annotations

import pytest
import torch

from ep_plugin import MoECommunicator
from ep_plugin.moe.reference import reference_combine, reference_dispatch
from tests.gpu import graphs
from tests.gpu.checks import config_of
from tests.moe.moe_cases import on_ranks


@pytest.mark.parametrize("size", [1, 2, 4])
def test_it_agrees_with_the_reference(size: int) -> None:
    factor, num_experts = graphs.factors(size), graphs.CASE.experts_per_rank * size
    batch = graphs.random_batch(size, torch.Generator().manual_seed(size))
    assert (batch.ids.flatten(1) == -1).any(1).all()
    received = reference_dispatch(list(batch.x), list(batch.ids), list(batch.weights), num_experts=num_experts)
    ours = [graphs.expected(batch, rank, factor) for rank in range(size)]
    ys = []
    for rank, (mine, theirs) in enumerate(zip(ours, received, strict=True)):
        rows = len(theirs.tokens)
        assert torch.equal(mine.tokens[:rows], theirs.tokens) and not mine.tokens[rows:].any()
        assert torch.equal(mine.weights[:rows], theirs.weights) and not mine.weights[rows:].any()
        assert theirs.row_expert_ids is not None
        assert torch.equal(mine.row_expert_ids[:rows], theirs.row_expert_ids.long())
        assert (mine.row_expert_ids[rows:] == -1).all()
        assert torch.equal(mine.counts, theirs.num_tokens_per_expert.long())
        ys.append(theirs.tokens.double() * factor.double()[theirs.row_expert_ids + rank * len(factor) // size, None])
    z = reference_combine(ys, received, [graphs.CASE.tokens] * size, [each.weights for each in received])
    for mine, theirs_z in zip(ours, z, strict=True):
        torch.testing.assert_close(mine.z, theirs_z, rtol=1e-6, atol=1e-6)


def _steps(rank: int, size: int) -> None:
    generator = torch.Generator().manual_seed(7)
    factor = graphs.factors(size)
    with MoECommunicator(None, config_of(graphs.CASE, size, max_tokens_per_rank=graphs.CASE.tokens), "cpu") as comm:
        for _ in range(5):
            batch = graphs.random_batch(size, generator)
            out, z = graphs.step(comm, graphs.Batch(*(part[rank] for part in batch)), factor)
            oracle = graphs.expected(batch, rank, factor)
            assert _judged(out, z, oracle) == []
        assert out.row_expert_ids is not None and out.weights is not None
        out.tokens[-1, -1] = 1
        out.weights[0] = float("nan")
        out.row_expert_ids[0] += 1
        out.num_tokens_per_expert[-1] += 1
        assert _judged(out, z + 1e-3, oracle) == [name for name in graphs.JUDGED if name != "overflow and required"]
        assert _judged(out._replace(required=out.required + 1), z * float("nan"), oracle) == list(graphs.JUDGED)


def _judged(out: graphs.DispatchOutput, z: torch.Tensor, oracle: graphs.Expected) -> list[str]:
    wrong = torch.zeros(len(graphs.JUDGED), dtype=torch.bool)
    graphs.judge(wrong, out, z, oracle)
    return [name for name, is_wrong in zip(graphs.JUDGED, wrong.tolist(), strict=True) if is_wrong]


@pytest.mark.parametrize("size", [1, 3])
def test_it_passes_what_is_right_and_sees_what_is_wrong(size: int) -> None:
    on_ranks(size, _steps)
