"""Wrong arguments and handles of low-latency communicators, and calls that differ between ranks."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ep_plugin import MoECommunicator, MoECommunicatorConfig
from ep_plugin.errors import DisagreementError, EpPluginError, NotSupported, PeerAborted
from tests.faults.test_low_latency import CASE, SIZE
from tests.moe.low_latency_cases import low_latency, round_trip
from tests.moe.moe_cases import Inputs, make_inputs, on_ranks
from tests.ranks import run_ranks, values


def _bad_dispatches(comm: MoECommunicator, inputs: Inputs) -> dict[str, dict[str, Any]]:
    x, ids = inputs.x[comm.rank], inputs.ids[comm.rank]
    more = torch.zeros(67, CASE.hidden), torch.zeros(67, 3, dtype=torch.int64)
    narrow = torch.zeros(len(x), 96)
    return {
        "x: expected at most max_tokens_per_rank=66 tokens, got 67": {"x": more[0], "topk_ids": more[1]},
        "x: expected at most 4 tokens, by capacity=12, got": {"capacity": 12},
        "x: expected rows of at most max_row_bytes=.* got 4096": {"x": torch.zeros(len(x), 1024)},
        "x: expected a multiple of 128 elements, at most 24, with quantize='e4m3'": {"x": narrow, "quantize": "e4m3"},
        "quantize: expected None or 'e4m3', 'e4m3_pow2', 'e4m3_ue8m0', got 'ue8m0'": {"quantize": "ue8m0"},
        'topk_weights: expected None in mode="ll"': {"topk_weights": inputs.weights[comm.rank]},
        'scales: expected None in mode="ll"': {"scales": torch.zeros(len(x), 1)},
        'capacity: expected a multiple of the 3 ranks, at most 198, in mode="ll", got 200': {"capacity": 200},
        "topk_ids: expected -1 or 0 to 5, got 6": {"topk_ids": torch.full_like(ids, -1).index_fill(0, _first(), 6)},
        "topk_ids: expected distinct experts": {"topk_ids": torch.zeros_like(ids)},
        "x: expected a dense tensor, got one of layout torch._mkldnn": {"x": x.to_mkldnn()},
        "topk_ids: expected a dense tensor, got one of layout torch._mkldnn": {"topk_ids": ids.float().to_mkldnn()},
        "x: expected a tensor without gradients": {"x": x.clone().requires_grad_(), "quantize": "e4m3"},
    }


def _first() -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int64)


def _bad_combines(comm: MoECommunicator, inputs: Inputs, y: torch.Tensor) -> dict[str, dict[str, Any]]:
    x, weights = inputs.x[comm.rank], inputs.weights[comm.rank]
    return {
        r"y: expected shape \(2, 198, H\), got \(396, 24\)": {"y": y.flatten(0, 1)},
        "y: expected a contiguous tensor": {"y": y.transpose(0, 1).contiguous().transpose(0, 1)},
        "y: expected one of .* got torch.int32": {"y": y.int()},
        r"weights: expected shape \(.*, 4\), got": {"weights": weights[:, :2].contiguous()},
        r"bias: expected shape": {"bias": torch.zeros(1, 24)},
        "handle: expected a DispatchHandle, got tuple": {"handle": ()},
        "y: expected a dense tensor, got one of layout torch._mkldnn": {"y": y.to_mkldnn()},
        "weights: expected a dense tensor, got one of layout torch._mkldnn": {"weights": weights.to_mkldnn()},
        "bias: expected a dense tensor, got one of layout torch._mkldnn": {"bias": x.to_mkldnn()},
    }


def _refused(rank: int, size: int) -> None:
    inputs = make_inputs(CASE)
    with low_latency(CASE) as comm:
        given = {"x": inputs.x[rank], "topk_ids": inputs.ids[rank]}
        for sentence, change in _bad_dispatches(comm, inputs).items():
            with pytest.raises(ValueError, match=sentence):
                comm.dispatch(**{**given, **change})
        out, handle = comm.dispatch(**given)
        y = torch.zeros_like(out.tokens)
        for sentence, change in _bad_combines(comm, inputs, y).items():
            with pytest.raises(ValueError, match=sentence):
                comm.combine(**{"y": y, "handle": handle, **change})
        with pytest.raises(ValueError, match="handle.plan: expected one of 3 ranks"):
            comm.combine(y, handle._replace(plan=handle.plan[1:]))
        with pytest.raises(ValueError, match='combine_with_values: expected mode="ht", got mode="ll"'):
            comm.combine_with_values(y, handle, None)
        with pytest.raises(ValueError, match='set_sms: expected no SM counts in mode="ll", got dispatch_send_sms'):
            comm.set_sms(dispatch_send_sms=4)
        with pytest.raises(ValueError, match="rank_mask: expected a communicator with shrink=True"):
            _ = comm.rank_mask
        round_trip(comm, inputs)
    os.environ["EP_PLUGIN_RANKS_PER_NODE"] = "1"
    with pytest.raises(NotSupported, match='shrink: expected False in mode="ll" over several nodes, got True for 3'):
        low_latency(CASE, shrink=True)


def test_wrong_arguments_are_refused_by_name() -> None:
    on_ranks(SIZE, _refused)


def _differ(rank: int, change: str) -> str:
    case = dataclasses.replace(CASE, tokens=(20, 12), num_experts=4)
    inputs = make_inputs(case)
    with low_latency(case, timeout_s=20) as comm:
        round_trip(comm, inputs)
        x, ids, capacity = inputs.x[rank], inputs.ids[rank], None
        if rank == 1 and change == "row bytes":
            x = x[:, :16].contiguous()
        elif rank == 1 and change == "dtype":
            x = x.view(torch.int32)
        elif rank == 1 and change == "top-k":
            ids = ids[:, :2].contiguous()
        elif rank == 1:
            capacity = 2 * 16
        with pytest.raises(EpPluginError) as caught:
            for _ in range(2):
                comm.dispatch(x, ids, capacity=capacity)
        assert isinstance(caught.value, DisagreementError), caught.value
    return str(caught.value)


@pytest.mark.parametrize("change", ["row bytes", "dtype", "top-k", "most tokens of a rank"])
def test_calls_that_differ_are_named(change: str) -> None:
    for said in values(run_ranks(2, _differ, change)):
        assert change in said and "rank 0" in said and "rank 1" in said


def _spoilt_plan(rank: int, size: int) -> None:
    inputs = make_inputs(CASE)
    with low_latency(CASE) as comm:
        out, handle = comm.dispatch(inputs.x[rank], inputs.ids[rank])
        y = torch.zeros_like(out.tokens)
        handle.plan.fill_(2**30)
        dist.barrier()  # else a rank may abort while others dispatch
        with pytest.raises((ValueError, PeerAborted), match="expected its tensors as dispatch wrote them"):
            comm.combine(y, handle)


def test_a_handle_with_other_contents() -> None:
    on_ranks(SIZE, _spoilt_plan)


def _spoilt_rows(rank: int, size: int) -> None:
    """A rank reads the rows of its own pairs where they are."""
    case = dataclasses.replace(CASE, tokens=(9,), num_experts=4)
    inputs = make_inputs(case)
    for value in (2**30, -1):
        with low_latency(case) as comm:
            out, handle = comm.dispatch(inputs.x[0], inputs.ids[0])
            rows = comm.engine.plan_layout(comm.engine.tokens_of(out.tokens.shape[1]), case.topk).rows
            handle.plan[rows:] = value
            with pytest.raises(ValueError, match="expected its tensors as dispatch wrote them"):
                comm.combine(torch.zeros_like(out.tokens), handle)


def test_a_handle_with_other_rows_of_own_pairs() -> None:
    on_ranks(1, _spoilt_rows)


def _first_use(rank: int, size: int) -> None:
    config = MoECommunicatorConfig(num_experts=6, hidden_size=7168, topk=8 % 6, max_tokens_per_rank=128, mode="ll")
    with MoECommunicator(None, config) as comm:
        assert comm.engine.comm is None, "memory before the first operation"
        assert comm.engine.memory_bytes < 40e6


def test_memory_is_made_on_first_use() -> None:
    on_ranks(SIZE, _first_use)
