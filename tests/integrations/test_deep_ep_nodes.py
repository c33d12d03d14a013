"""ep_plugin.deep_ep over emulated nodes of CPU ranks: every call, DeepEP's own checks, its users, and refusals."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from ep_plugin import deep_ep
from ep_plugin.deep_ep.arguments import ranks_as_experts
from ep_plugin.errors import DisagreementError, NotSupported
from tests.integrations import test_deep_ep
from tests.integrations.deep_ep_cases import Case, combined, make, received
from tests.moe.moe_cases import named
from tests.moe.test_across_nodes import on_nodes
from tests.ranks import run_ranks, values

SHAPES = {
    (2, 2): [
        Case(tokens=(20, 3, 11, 8), hidden=256, experts_per_rank=4, topk=6, alignment=16, seed=4),
        Case(tokens=(0, 0, 0, 2), hidden=64, experts_per_rank=2, topk=2, id_dtype=torch.int32, seed=6),
        Case(tokens=(6, 6, 6, 6), hidden=64, experts_per_rank=2, topk=1, drop=1.0, seed=5),
    ],
    (3, 2): [Case(tokens=(8, 1, 0, 14, 5, 5), hidden=80, experts_per_rank=3, topk=4, seed=7)],
    (2, 1): [Case(tokens=(13, 7), hidden=24, experts_per_rank=4, topk=3, dtype=torch.float32)],
}


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]}x{shape[1]}")
def test_every_call_gives_what_the_oracle_says(shape: tuple[int, int]) -> None:
    on_nodes(*shape, test_deep_ep._all_calls, SHAPES[shape])


def _interleaved(rank: int, size: int) -> None:
    os.environ["EP_PLUGIN_HOST"] = f"host {rank % 2}"
    os.environ["EP_TEST_HOSTS"] = "2"
    test_deep_ep._all_calls(rank, size, [Case(tokens=(9, 0, 17, 40), hidden=40, experts_per_rank=5, topk=9, seed=2)])


def test_ranks_may_be_interleaved_over_nodes() -> None:
    values(run_ranks(4, _interleaved, 4, timeout_s=120))


# -- the checks of DeepEP's own test of several nodes ----------------------------------------------------------------

TOKENS, HIDDEN, TOPK, EXPERTS_PER_RANK = 48, 256, 4, 4


def _as_deep_ep_checks(rank: int, size: int, num_nodes: int, topk_nodes: int) -> None:
    """Rows that hold their source rank are found by the handle's prefix sums. Tokens go to `topk_nodes` nodes."""
    torch.manual_seed(rank)
    buffer = deep_ep.Buffer(dist.group.WORLD, int(2e9), int(1e9), num_qps_per_rank=24)
    E = EXPERTS_PER_RANK * size
    ids = _limited_ids(E, num_nodes, topk_nodes)
    per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, E)
    node_ids = ids // (E // num_nodes)
    assert per_node is not None
    assert per_node.tolist() == [int((node_ids == node).any(1).sum()) for node in range(num_nodes)]
    assert int(per_node.sum()) <= TOKENS * topk_nodes
    layout = {
        "num_tokens_per_rank": per_rank,
        "num_tokens_per_rdma_rank": per_node,
        "is_token_in_rank": in_rank,
        "num_tokens_per_expert": per_expert,
    }
    of_all = torch.cat([per_rank, per_expert])
    dist.all_reduce(of_all)
    x = torch.full((TOKENS, HIDDEN), float(rank), dtype=torch.bfloat16)
    random = torch.randn((TOKENS, HIDDEN)).bfloat16()
    weights = torch.full((TOKENS, TOPK), float(rank))
    for rows, given in ((x, x), (x, _as_fp8(x)), (random, random)):
        for topk in ({}, {"topk_idx": ids, "topk_weights": weights}):
            for previous in (lambda: None, buffer.capture):
                how = functools.partial(_asynchronous, previous)
                got = buffer.dispatch(given, **layout, **topk, **how())
                got[-1].current_stream_wait()
                _check_one_source(got, given, rows is x, of_all, size, rank)
                _check_sums(buffer, got, rows, weights if topk else None, in_rank, how)
    if topk_nodes == 1:
        assert int((in_rank.sum(1) > size // num_nodes).sum()) == 0


def _asynchronous(previous: Callable[[], Any]) -> dict[str, Any]:
    """Options of a call that waits for what `previous` returns now, or for the current stream."""
    return {"config": deep_ep.Config(24, 8, 512, 16, 128), "async_finish": True, "previous_event": previous()}


def _limited_ids(num_experts: int, num_nodes: int, topk_nodes: int) -> torch.Tensor:
    """``[T, K]``, of experts on the best `topk_nodes` nodes of each token."""
    scores = torch.rand((TOKENS, num_experts)).view(TOKENS, num_nodes, -1)
    nodes = scores.amax(2).topk(topk_nodes, dim=1).indices
    allowed = torch.zeros((TOKENS, num_nodes), dtype=torch.bool).scatter_(1, nodes, True)
    return scores.masked_fill(~allowed[:, :, None], -1.0).flatten(1).topk(TOPK, dim=1).indices


def _check_one_source(got: Any, given: Any, one_value: bool, of_all: torch.Tensor, size: int, rank: int) -> None:
    received_x, local, row_weights, counts, handle, _ = got
    through = handle[-4].tolist()
    assert len(through) == size and through[-1] == int(of_all[rank])
    assert counts == of_all[size:].view(size, -1)[rank].tolist()
    rows = _from_fp8(*received_x) if isinstance(received_x, tuple) else received_x.float()
    assert len(rows) == through[-1]
    sources = torch.repeat_interleave(torch.arange(size), torch.tensor([0, *through]).diff())
    if one_value:
        torch.testing.assert_close(rows, sources[:, None].expand_as(rows).float(), rtol=1e-6, atol=1e-3)
    if local is not None:
        assert [int((local == expert).sum()) for expert in range(EXPERTS_PER_RANK)] == counts
        assert torch.equal(row_weights, sources[:, None].float() * (local >= 0))


def _check_sums(
    buffer: deep_ep.Buffer,
    got: Any,
    rows: torch.Tensor,
    weights: torch.Tensor | None,
    in_rank: torch.Tensor,
    how: Callable[[], dict[str, Any]],
) -> None:
    """The sum of a token's own rows is itself, times the number of ranks that it went to."""
    received_x, _, row_weights, _, handle, _ = got
    back = _from_fp8(*received_x).bfloat16() if isinstance(received_x, tuple) else received_x
    again, *_, event = buffer.dispatch(rows, handle=handle, **how())
    assert isinstance(again, torch.Tensor)
    event.current_stream_wait()
    torch.testing.assert_close(again, back, rtol=0, atol=0 if back is received_x else 1e-3)
    bias = torch.ones_like(rows), torch.randn(rows.shape).to(rows)
    sums, weight_sums, event = buffer.combine(back, handle, topk_weights=row_weights, bias=bias, **how())
    event.current_stream_wait()
    copies = in_rank.sum(1, keepdim=True)
    found = (sums.double() - bias[0].double() - bias[1].double()) / copies
    assert _difference(found, rows) < 5e-6, _difference(found, rows)  # DeepEP's own bound
    if weights is not None:
        torch.testing.assert_close(weight_sums, weights)


def _difference(found: torch.Tensor, exact: torch.Tensor) -> float:
    """DeepEP's measure: the squared distance of the values plus 1, relative to the sum of their squares."""
    x, y = found.double() + 1, exact.double() + 1
    return float((x - y).square().sum() / (x.square() + y.square()).sum())


def _as_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and a factor for each 128 elements, the factors stored by column, as DeepEP's callers have them."""
    groups = x.float().unflatten(1, (-1, 128))
    factors = groups.abs().amax(2).clamp(min=1e-4) / 448
    rows = (groups / factors[:, :, None]).flatten(1).to(torch.float8_e4m3fn)
    return rows, factors.T.contiguous().T


def _from_fp8(rows: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    return (rows.float().unflatten(1, (-1, 128)) * factors[:, :, None]).flatten(1)


@pytest.mark.slow
@pytest.mark.parametrize(("num_nodes", "topk_nodes"), [(2, 2), (2, 1), (3, 2)])
def test_what_deep_ep_itself_checks_of_several_nodes(num_nodes: int, topk_nodes: int) -> None:
    on_nodes(num_nodes, 2, _as_deep_ep_checks, num_nodes, topk_nodes)


# -- how users call it -----------------------------------------------------------------------------------------------


class Dispatch(torch.autograd.Function):
    """As callers write it who keep handles as saved tensors."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, buffer: deep_ep.Buffer, ids: torch.Tensor, layout: Any) -> Any:
        rows, _, _, _, handle, _ = buffer.dispatch(x, **layout, topk_idx=ids)
        assert handle is not None
        ctx.save_for_backward(*handle)
        ctx.buffer = buffer
        return rows, handle

    @staticmethod
    def backward(ctx: Any, grad_rows: torch.Tensor, *grads: None) -> Any:
        return ctx.buffer.combine(grad_rows.contiguous(), ctx.saved_tensors)[0], None, None, None


def _saved(rank: int, size: int) -> None:
    case = Case(tokens=(7, 5, 0, 9), hidden=16, experts_per_rank=2, topk=3, dtype=torch.float32)
    sent, buffer = make(case), deep_ep.Buffer()
    layout = test_deep_ep._layout(buffer, case, sent)
    x = sent.x[rank].clone().requires_grad_()
    rows, handle = Dispatch.apply(x, buffer, sent.ids[rank], layout)
    everyone = [received(case, sent, other) for other in range(size)]
    grads = [torch.rand(got.x.shape, generator=torch.Generator().manual_seed(3)) for got in everyone]
    rows.backward(grads[rank])
    assert x.grad is not None
    torch.testing.assert_close(x.grad.double(), combined(case, everyone, grads, rank))
    assert torch.equal(buffer.dispatch(sent.x[rank], handle=list(handle))[0], everyone[rank].x)


def test_a_handle_is_made_again_of_its_saved_tensors() -> None:
    on_nodes(2, 2, _saved)


def test_so_it_is_on_one_node() -> None:
    on_nodes(1, 4, _saved)


def _internode(rank: int, size: int) -> None:
    case = SHAPES[2, 2][0]
    sent, buffer = make(case), deep_ep.Buffer()
    everyone = [received(case, sent, other) for other in range(size)]
    called = SimpleNamespace(
        rank=rank,
        group_size=size,
        get_dispatch_layout=buffer.get_dispatch_layout,
        dispatch=buffer.internode_dispatch,
        combine=buffer.internode_combine,
    )
    config = deep_ep.Buffer.get_dispatch_config(size)
    test_deep_ep._with_topk(cast("deep_ep.Buffer", called), case, sent, everyone, config=config)


def test_internode_calls_do_as_dispatch_and_combine() -> None:
    on_nodes(2, 2, _internode)


def _fused_a2a(rank: int, size: int) -> float:
    import ep_plugin.integrations.hooks
    from tests.integrations import test_megatron
    from tests.integrations.on_cpus import make_megatron_run_here

    make_megatron_run_here()
    ep_plugin.integrations.hooks.enable(["deep_ep"])
    return test_megatron._run_fused_a2a(rank)


@pytest.mark.slow
def test_megatrons_deepep_functions_work_over_nodes() -> None:
    from tests.integrations.test_megatron import LIMIT

    for found in on_nodes(2, 2, _fused_a2a):
        assert found <= LIMIT


def _deepep_backend(rank: int, size: int) -> dict[str, Any]:
    from tests.integrations import test_megatron

    found: dict[str, Any] = test_megatron._run_deepep(rank, ["ep4"])["ep4"]
    return found


@pytest.mark.slow
def test_megatrons_own_deepep_backend_trains_over_nodes() -> None:
    from tests.integrations.test_megatron import LIMIT

    for found in on_nodes(2, 2, _deepep_backend):
        assert len(found["difference"]) >= 5 and max(found["difference"].values()) <= LIMIT
        assert min(found["ours"]["dispatch"], found["ours"]["combine"]) >= 2 and found["ours"]["stock"] == 0


# -- refusals --------------------------------------------------------------------------------------------------------


def _refusals(rank: int, size: int) -> None:
    case = SHAPES[2, 2][0]
    sent, buffer = make(case), deep_ep.Buffer()
    x, ids = sent.x[rank], sent.ids[rank]
    layout: dict[str, Any] = test_deep_ep._layout(buffer, case, sent)
    no_layout = "expected the tensor that get_dispatch_layout returned, or a handle="
    for message, changed in {
        f"num_tokens_per_rdma_rank: {no_layout}, got None": {"num_tokens_per_rdma_rank": None},
        f"num_tokens_per_rdma_rank: {no_layout}, got list": {"num_tokens_per_rdma_rank": [1, 2]},
        r"num_tokens_per_rdma_rank: expected torch.int32 of shape \[2\], got torch.int32 of shape \[4\]": {
            "num_tokens_per_rdma_rank": layout["num_tokens_per_rank"]
        },
        "is_token_in_rank: expected (True|False) for token": {"is_token_in_rank": ~layout["is_token_in_rank"]},
        "num_worst_tokens: expected 0, or an integer of at least .* got Config": {"num_worst_tokens": deep_ep.Config()},
        "handle: expected what dispatch returned, 6 or 10 tensors, got .Tensor, Tensor": {"handle": (x, x)},
    }.items():
        with named(message), pytest.raises(ValueError, match=message):
            buffer.internode_dispatch(**({"x": x, "topk_idx": ids} | layout | changed))
    with pytest.raises(ValueError, match="topk_idx: expected ids from -1 to 15, got"):
        buffer.get_dispatch_layout(ids + 16, case.num_experts)
    with pytest.raises(NotSupported, match=r'shrink: expected False in mode="ll" over several nodes, got True for 2'):
        deep_ep.Buffer(low_latency_mode=True, enable_shrink=True)


def test_wrong_arguments_are_refused_by_name() -> None:
    on_nodes(2, 2, _refusals)


def test_routing_by_rank_alone_is_refused_beyond_the_largest_top_k() -> None:
    with pytest.raises(NotSupported, match="topk_idx: expected expert ids in groups of more than 128 ranks, got None"):
        ranks_as_experts(torch.zeros((2, 129), dtype=torch.bool))
    assert ranks_as_experts(torch.eye(128, dtype=torch.bool)).amax(1).tolist() == list(range(128))


def _one_node_of_several(rank: int, size: int) -> None:
    """A group inside a node has no nodes to count, and the handles of one node."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    buffer = deep_ep.Buffer(groups[rank // 2])
    ids = torch.arange(8).view(4, 2) % 4
    per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, 4)
    assert per_node is None
    layout = {"num_tokens_per_rank": per_rank, "is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert}
    handle = buffer.dispatch(torch.ones(4, 16), **layout, topk_idx=ids)[4]
    assert handle is not None and len(handle) == 6


def test_a_group_inside_a_node_is_one_of_one_node() -> None:
    on_nodes(2, 2, _one_node_of_several)


def _uneven(rank: int, size: int) -> None:
    with pytest.raises(NotSupported, match="expected the same on every node, got node 0 .* has 2, node 1 .* has 1"):
        deep_ep.Buffer()


def test_nodes_of_different_sizes_are_refused_when_a_buffer_is_made() -> None:
    values(run_ranks(3, _uneven, 3, env={"EP_PLUGIN_RANKS_PER_NODE": "2"}))


def _disagreeing(rank: int, size: int) -> None:
    os.environ["EP_PLUGIN_RANKS_PER_NODE"] = str(1 + rank)
    with pytest.raises(DisagreementError, match="EP_PLUGIN_RANKS_PER_NODE: 1 on rank 0, 2 on rank 1"):
        deep_ep.Buffer()


def test_ranks_that_disagree_on_their_nodes_are_refused_too() -> None:
    values(run_ranks(2, _disagreeing, 2))
