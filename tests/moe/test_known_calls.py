"""Calls whose forms are known, after ones that were right: what can differ between such calls is still refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from ep_plugin import MoECommunicator, MoECommunicatorConfig
from ep_plugin.deep_ep import Buffer
from tests.moe.moe_cases import named, on_ranks

TOKENS, HIDDEN, TOPK, EXPERTS = 4, 128, 2, 4
HT = MoECommunicatorConfig(num_experts=EXPERTS, hidden_size=HIDDEN, topk=TOPK, max_tokens_per_rank=TOKENS)
LL = MoECommunicatorConfig(mode="ll", num_experts=EXPERTS, hidden_size=HIDDEN, topk=TOPK, max_tokens_per_rank=TOKENS)


def _freed(tensor: torch.Tensor) -> torch.Tensor:
    copy = tensor.clone()
    copy.untyped_storage().resize_(copy.untyped_storage().nbytes() - 1)
    return copy


def _refused(says: str, call: Callable[..., object], *given: object, **more: object) -> None:
    with named(says), pytest.raises(ValueError, match=says):
        call(*given, **more)


def tokens() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.arange(TOKENS * HIDDEN, dtype=torch.float32).view(TOKENS, HIDDEN).bfloat16()
    return x, torch.tensor([[0, 1], [1, 2], [2, 3], [3, -1]]), torch.full((TOKENS, TOPK), 0.5)


def _communicators(rank: int, size: int) -> None:
    x, ids, weights = tokens()
    bad, twice = ids.clone(), ids.clone()
    bad[1, 0], twice[1, 0] = EXPERTS, 2
    for config in (HT, LL):
        with MoECommunicator(dist.group.WORLD, config) as comm:
            for _ in range(3):
                out, handle = comm.dispatch(x, ids, None if config is LL else weights)
                row_weights = weights if config is LL else out.weights
                sums = comm.combine(out.tokens, handle, row_weights)
                assert torch.equal(sums[:3], x[:3]) and torch.equal(sums[3], x[3] * 0.5)
            given = None if config is LL else weights
            _refused("topk_ids: expected -1 or 0 to 3, got 4 at token 1", comm.dispatch, x, bad, given)
            _refused("topk_ids: expected distinct experts per token", comm.dispatch, x, twice, given)
            _refused("x: expected a storage of at least", comm.dispatch, _freed(x), ids, given)
            _refused("x: expected at most", comm.dispatch, x.repeat(2, 1), ids.repeat(2, 1))
            _refused("capacity: expected", comm.dispatch, x, ids, given, capacity=-size)
            _refused("capacity: expected", comm.dispatch, x, ids, given, capacity=True)
            _refused("y: expected a storage of at least", comm.combine, _freed(out.tokens), handle, row_weights)
            _refused("weights: expected", comm.combine, out.tokens, handle, row_weights[:-1])
            _refused("handle.plan: expected", comm.combine, out.tokens, handle._replace(plan=handle.plan[:-1]))
            longer = torch.cat([handle.topk_ids] * 2)
            _refused("handle", comm.combine, out.tokens, handle._replace(topk_ids=longer))
            _refused("handle", comm.dispatch, x, ids, previous_handle=handle._replace(topk_ids=longer))
            assert torch.equal(comm.combine(out.tokens, handle, row_weights), sums)  # nobody was disturbed


@pytest.mark.parametrize("size", [1, 2])
def test_wrong_calls_of_known_forms(size: int) -> None:
    on_ranks(size, _communicators)


def _forms_in_turn(rank: int, size: int) -> None:
    """Calls of several forms, each more than once: none takes what is known of another."""
    with MoECommunicator(dist.group.WORLD, LL) as comm:
        generator = torch.Generator().manual_seed(rank)
        for turn in range(12):
            num_tokens, hidden = (TOKENS, 0, 1, 3)[turn % 4], (HIDDEN // 2, 16)[turn % 2]
            dtype, id_dtype = ((torch.bfloat16, torch.int64), (torch.float32, torch.int32))[turn // 2 % 2]
            x = torch.randint(-8, 8, (num_tokens, hidden), generator=generator).to(dtype)
            x = x if turn % 3 else torch.cat([x, x], dim=1)[:, :hidden]
            ids = torch.rand(num_tokens, EXPERTS, generator=generator).topk(TOPK).indices.to(id_dtype)
            capacity = None if turn % 2 else size * TOKENS
            out, handle = comm.dispatch(x, ids, capacity=capacity)
            again, _ = comm.dispatch(x * 2, ids, capacity=capacity, previous_handle=handle)
            bias = torch.ones_like(x).contiguous() if turn % 3 == 1 else None
            with named(f"turn {turn}"):
                sums = comm.combine(out.tokens, handle, bias=bias)
                assert torch.equal(sums, x * 2 + (0 if bias is None else 1))
                weights = torch.full((num_tokens, TOPK), 0.5)
                assert torch.equal(comm.combine(again.tokens, handle, weights), x * 2)


@pytest.mark.parametrize("size", [1, 2])
def test_calls_of_several_forms(size: int) -> None:
    on_ranks(size, _forms_in_turn)


def _buffers(rank: int, size: int) -> None:
    x, ids, weights = tokens()
    bad = ids.clone()
    bad[1, 0] = EXPERTS
    buffer = Buffer(dist.group.WORLD, 0, 1, low_latency_mode=True, num_qps_per_rank=EXPERTS // size)
    dispatch, combine = buffer.low_latency_dispatch, buffer.low_latency_combine
    for _ in range(3):
        rows, _, handle, *_ = dispatch(x, ids, TOKENS, EXPERTS, use_fp8=False)
        sums, *_ = combine(rows, ids, weights, handle)
        assert torch.equal(sums[:3], x[:3])
    _refused("topk_idx: expected ids from -1 to 3", dispatch, x, bad, TOKENS, EXPERTS, use_fp8=False)
    _refused("num_max_dispatch_tokens_per_rank: expected 1 to", dispatch, x, ids, 4.0, EXPERTS, use_fp8=False)
    _refused("num_experts: expected a positive", dispatch, x, ids, TOKENS, [EXPERTS], use_fp8=False)
    _refused("topk_idx: expected ids from -1 to 3", combine, rows, bad, weights, handle)
    copied = (handle[0].clone(), *handle[1:])
    _refused("handle: expected the src_info that low_latency_dispatch returned", combine, rows, ids, weights, copied)
    _refused("expected a storage of at least", combine, _freed(rows), ids, weights, handle)
    again, *_ = combine(rows, ids, weights, handle)
    assert torch.equal(again, sums)


@pytest.mark.parametrize("size", [1, 2])
def test_wrong_calls_of_a_buffer_of_known_forms(size: int) -> None:
    on_ranks(size, _buffers)
