"""Calls that are like earlier ones: what can differ between them is still looked at."""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode

from ep_plugin import MoECommunicator, MoECommunicatorConfig
from ep_plugin.deep_ep import Buffer
from ep_plugin.moe.high_throughput import engine
from ep_plugin.moe.low_latency.combine import LowLatencyCombine
from ep_plugin.moe.low_latency.dispatch import LowLatencyDispatch
from ep_plugin.moe.registry import communicator
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
            longer = handle._replace(topk_ids=torch.cat([handle.topk_ids] * 2))
            said = "topk_ids: expected at most 4 tokens, by its plan, got 8" if config is LL else "plan: expected shape"
            _refused(f"^handle.{said}", comm.combine, out.tokens, longer)
            _refused(f"^previous_handle.{said}", comm.dispatch, x, ids, previous_handle=longer)
            if config is HT:
                apart = handle._replace(totals=torch.stack([handle.totals] * 2, 1)[:, 0])
                _refused("totals: expected a contiguous tensor", comm.combine, out.tokens, apart, row_weights)
                _refused("topk_ids: expected a contiguous", comm.dispatch, x, ids.T.contiguous().T, weights)
            assert torch.equal(comm.combine(out.tokens, handle, row_weights), sums)  # nobody was disturbed


def _bounded(rank: int, size: int) -> None:
    """Handles of one communicator whose routings have other sizes, with capacities."""
    x, ids, weights = tokens()
    scales = torch.ones(TOKENS, 1)
    with MoECommunicator(dist.group.WORLD, HT) as comm:
        for _ in range(2):
            many, of_many = comm.dispatch(x, ids, weights, capacity=size * 8)
            few, of_few = comm.dispatch(x[:2], ids[:2], weights[:2], capacity=size * 4)
            comm.combine(many.tokens, of_many, bias=x)
            comm.combine(few.tokens, of_few, bias=x[:2])
            comm.dispatch(x, ids, weights, capacity=size * 8, previous_handle=of_many)
            comm.dispatch(x, ids, None, scales, capacity=size * 8)
        _refused("y: expected the .* rows that dispatch returned", comm.combine, few.tokens, of_many, bias=x[:2])
        _refused("y: expected the .* rows that dispatch returned", comm.combine, many.tokens, of_few, bias=x)
        _refused("bias: expected shape", comm.combine, many.tokens, of_many, bias=x[:2])
        given = x, ids, weights
        _refused("capacity: expected .* rows, which", comm.dispatch, *given, None, of_many, size * 4)
        _refused("capacity: expected an integer", comm.dispatch, *given, None, of_many, True)
        _refused("capacity: expected at most", comm.dispatch, *given, None, of_many, 2**31)
        _refused("topk_ids: expected the shape", comm.dispatch, x[:2], ids[:2], None, None, of_many, size * 8)
        given = x[:2], ids[:2], weights[:2]
        _refused("capacity: expected .* rows, which", comm.dispatch, *given, None, of_many, size * 4)
        _, written = comm.dispatch(x, ids, weights, capacity=size * 8)
        written.totals[0] = 3  # the caller owns a handle, so nobody else sees this
        assert of_many.totals.item() == comm.dispatch(x, ids, weights, capacity=size * 8)[1].totals.item() == size * 8
        _refused("scales: expected None with quantize", comm.dispatch, x, ids, None, scales, None, size * 8, "e4m3")


@pytest.mark.parametrize("size", [1, 2])
def test_calls_with_capacities(size: int) -> None:
    on_ranks(size, _bounded)


def _earlier_handles(rank: int, size: int) -> None:
    x, ids, weights = tokens()
    with MoECommunicator(dist.group.WORLD, HT) as comm:
        made = [comm.dispatch(x * turn, ids, weights) for turn in range(1, 9)]
        comm.combine(made[0][0].tokens, made[0][1], made[0][0].weights)
        with mock.patch.object(engine, "check_routing", side_effect=AssertionError("a handle was checked again")):
            for turn, (out, handle) in reversed(list(enumerate(made, 1))):
                assert torch.equal(comm.combine(out.tokens, handle, out.weights)[:3], x[:3] * turn)


def test_handles_of_several_layers_need_no_second_check() -> None:
    on_ranks(1, _earlier_handles)


def _counters(rank: int, size: int) -> None:
    """Kernels add to the counters' memory."""
    x, ids, weights = tokens()
    with MoECommunicator(dist.group.WORLD, LL) as comm:
        cumulative, cost = torch.zeros(EXPERTS // size, dtype=torch.int32), torch.zeros(size, dtype=torch.int64)
        given: Any = (x, ids, None, None, None, None, [], comm.number)
        run, wrong = comm.in_flight.run, (cost.int(), torch.zeros(size + 1, dtype=torch.int64))
        for _ in range(2):
            made = run(LowLatencyDispatch(comm.engine, *given, cumulative=cumulative, wait_cost=cost))
        for other in wrong:
            _refused("wait_cost: expected", run, LowLatencyDispatch(comm.engine, *given, wait_cost=other))
        for other in (cumulative.long(), cumulative.repeat(2)):
            _refused("cumulative: expected", run, LowLatencyDispatch(comm.engine, *given, cumulative=other))
        given = (made[0], weights, None, None, False, list(made[8:]), comm.number)
        for _ in range(2):
            run(LowLatencyCombine(comm.engine, *given, wait_cost=cost))
        for other in wrong:
            _refused("wait_cost: expected", run, LowLatencyCombine(comm.engine, *given, wait_cost=other))


@pytest.mark.parametrize("size", [1, 2])
def test_wrong_counters(size: int) -> None:
    on_ranks(size, _counters)


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
    for turn in range(4):
        rows, _, handle, *_ = dispatch(x, ids, TOKENS, EXPERTS, use_fp8=False)
        sums, *_ = combine(rows, ids.int() if turn % 2 else ids, weights, handle)
        assert torch.equal(sums[:3], x[:3])
    half, _, of_half, *_ = dispatch(x[:, :64].contiguous(), ids, TOKENS, EXPERTS, use_fp8=False)
    combine(half, ids, weights, of_half)
    _refused("multiple of 128 with use_logfmt=True, got 64", combine, half, ids, weights, of_half, use_logfmt=True)
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


def _throughput_buffers(rank: int, size: int) -> None:
    x, ids, weights = tokens()
    buffer = Buffer(dist.group.WORLD)
    for _ in range(2):
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, EXPERTS)
        layout = {"num_tokens_per_rank": per_rank, "is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert}
        routed = {"topk_idx": ids, "topk_weights": weights} | layout
        rows, *_, handle, _ = buffer.dispatch(x, **routed)
        sums, *_ = buffer.combine(rows, handle)
    count = buffer.get_dispatch_layout
    _refused("topk_idx: expected ids from -1 to 3, got -1 to 4", count, ids + (ids == 3), EXPERTS)
    _refused("topk_idx: expected a storage of at least", count, _freed(ids), EXPERTS)
    _refused("topk_idx: expected torch.int64 of shape", count, weights, EXPERTS)
    _refused("num_experts: expected a positive multiple", count, ids, -EXPERTS)
    _refused("num_experts: expected a positive multiple", count, ids, float(EXPERTS))
    _refused("is_token_in_rank: expected torch.bool of shape", buffer.dispatch, x[:3], **routed)
    _refused(
        "is_token_in_rank: expected (True|False) for", buffer.dispatch, x, **routed | {"is_token_in_rank": ~in_rank}
    )
    _refused("num_worst_tokens: expected 0, or", buffer.dispatch, x, **routed, num_worst_tokens=1)
    _refused("num_worst_tokens: expected 0, or", buffer.dispatch, x, **routed, num_worst_tokens=False)
    _refused("expert_alignment: expected an integer", buffer.dispatch, x, **routed, expert_alignment=0)
    again, *_ = buffer.combine(buffer.dispatch(x, **routed)[0], handle)
    assert torch.equal(again, sums)


@pytest.mark.parametrize("size", [1, 2])
def test_wrong_throughput_calls_of_a_buffer_of_known_forms(size: int) -> None:
    on_ranks(size, _throughput_buffers)


def _gone(rank: int, size: int) -> None:
    """A buffer remembers its communicators, but not those of a group that has been destroyed, or that were closed."""
    x, ids, _ = tokens()
    group = dist.new_group(list(range(size)))
    buffer = Buffer(group)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, EXPERTS)
    layout = {"num_tokens_per_rank": per_rank, "is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert}
    for _ in range(2):
        *_, handle, _ = buffer.dispatch(x, **layout, topk_idx=ids)
        dist.barrier()
        communicator(handle.routing.comm).close()
        dist.barrier()
    buffer.dispatch(x, **layout, topk_idx=ids)
    dist.destroy_process_group(group)
    _refused("group: expected a process group that has not been destroyed", buffer.dispatch, x, **layout, topk_idx=ids)


def test_communicators_that_are_gone_are_not_used_again() -> None:
    on_ranks(2, _gone)


class _Rows(enum.IntEnum):
    """Integers of a class of their own."""

    ALL = 8


def _kinds_of_capacities(rank: int, size: int) -> None:
    """A capacity beside a known routing is any integer but a bool, as without one."""
    x, ids, weights = tokens()
    with MoECommunicator(dist.group.WORLD, HT) as comm:
        _, handle = comm.dispatch(x, ids, weights, capacity=8)
        for run in (comm.dispatch, lambda *given: comm.dispatch_async(*given).wait()):
            again, _ = run(x, ids, weights, None, handle, _Rows.ALL)
            assert again.tokens.shape == (8, HIDDEN)
            _refused("capacity: expected an integer", run, x, ids, weights, None, handle, True)
        complex_scales = torch.ones(TOKENS, 1, dtype=torch.complex64)
        _refused("scales: expected a real dtype, got torch.complex64", comm.dispatch, x, ids, None, complex_scales)
    with MoECommunicator(dist.group.WORLD, LL) as comm:
        _, handle = comm.dispatch(x, ids)
        assert comm.dispatch(x, ids, previous_handle=handle, capacity=_Rows.ALL // 2)[0].tokens.shape[1] == TOKENS
        for wrong in (float(TOKENS), torch.tensor(TOKENS)):
            _refused("capacity: expected 4 rows", comm.dispatch, x, ids, previous_handle=handle, capacity=wrong)


def test_kinds_of_capacities_of_known_routings() -> None:
    on_ranks(1, _kinds_of_capacities)


def _freed_by_columns(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without memory that a call would copy, since it is not contiguous."""
    copy = tensor.t().contiguous().t()
    copy.untyped_storage().resize_(0)
    return copy


def _freed_for_buffers(rank: int, size: int) -> None:
    """Buffers say so before they read memory that was freed."""
    x, ids, weights = tokens()
    buffer = Buffer(dist.group.WORLD, 0, 1, low_latency_mode=True, num_qps_per_rank=EXPERTS)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, EXPERTS)
    layout = {"num_tokens_per_rank": per_rank, "is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert}
    routed = {"topk_idx": ids} | layout
    for _ in range(2):
        rows, *_, handle, _ = buffer.dispatch(x, **routed)
        buffer.combine(rows, handle, bias=x)
        sent, _, of_sent, *_ = buffer.low_latency_dispatch(x, ids, TOKENS, EXPERTS, use_fp8=False)
        buffer.low_latency_combine(sent, ids, weights, of_sent)
    said = "{}: expected a storage of at least"
    for name, freed in (("is_token_in_rank", _freed(in_rank)), ("topk_idx", _freed_by_columns(ids))):
        _refused(said.format(name), buffer.dispatch, x, **routed | {name: freed})
    _refused("is_token_in_rank: expected", buffer.dispatch, x, **routed | {"is_token_in_rank": in_rank.to("meta")})
    for name in ("is_token_in_rank", "num_tokens_per_expert"):
        _refused(said.format(name), buffer.dispatch, x, **layout | {name: _freed(layout[name])})
    scales = _freed_by_columns(torch.ones(TOKENS, 4))
    _refused(said.format("scales"), buffer.dispatch, (x, scales), **routed)
    _refused(said.format("x"), buffer.combine, _freed_by_columns(rows), handle)
    for bias in (_freed_by_columns(x), (x, _freed(x))):
        _refused(said.format("bias"), buffer.combine, rows, handle, bias=bias)
    _refused("num_worst_tokens: expected at most", buffer.dispatch, x, **routed, num_worst_tokens=2**70)
    combine = buffer.low_latency_combine
    for freed in (_freed(ids), _freed_by_columns(ids)):
        _refused(said.format("topk_idx"), combine, sent, freed, weights, of_sent)
    _refused(said.format("topk_weights"), combine, sent, ids, _freed_by_columns(weights), of_sent)
    src_info, layout_range, *sizes = of_sent
    for wrong in (_freed(layout_range), layout_range.to("meta")):
        _refused("^handle: .*layout_range", combine, sent, ids, weights, (src_info, wrong, *sizes))


def test_freed_memory_in_calls_of_a_buffer() -> None:
    on_ranks(1, _freed_for_buffers)


class _EmptiesAList:
    """A lock whose next acquire() comes after another thread has emptied a list."""

    def __init__(self, lock: Any, emptied: list[torch.Tensor]) -> None:
        self._lock, self._emptied = lock, emptied
        self.lost = 0

    def acquire(self) -> bool:
        references = list(map(weakref.ref, self._emptied))
        self._emptied.clear()
        self.lost += sum(reference() is None for reference in references)
        return self._lock.acquire()

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()


def _emptied_handles(rank: int, size: int) -> None:
    x, ids, _ = tokens()
    buffer = Buffer(dist.group.WORLD)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, EXPERTS)
    layout = {"num_tokens_per_rank": per_rank, "is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert}
    for _ in range(2):
        rows, *_, handle, _ = buffer.dispatch(x, **layout, topk_idx=ids)
        sums, *_ = buffer.combine(rows, handle)
    made = communicator(handle.routing.comm).engine
    parts = list(handle)
    del handle
    lock = made.lock = _EmptiesAList(made.lock, parts)
    again, *_ = buffer.combine(rows, parts)
    assert torch.equal(again, sums) and lock.lost == 0 and not parts


def test_a_call_holds_the_parts_of_a_list() -> None:
    on_ranks(1, _emptied_handles)


def _under_fakes(rank: int, size: int) -> None:
    """A mode that refuses a call's tensors does so before the operation begins, and disturbs no later call."""
    x, ids, weights = tokens()
    buffer = Buffer(dist.group.WORLD, 0, 1, low_latency_mode=True, num_qps_per_rank=EXPERTS)
    dispatch, combine = buffer.low_latency_dispatch, buffer.low_latency_combine
    for _ in range(3):
        rows, _, handle, *_ = dispatch(x, ids, TOKENS, EXPERTS, use_fp8=False)
        sums, *_ = combine(rows, ids, weights, handle)
        assert torch.equal(sums[:3], x[:3])
        for halves in (False, True):
            with FakeTensorMode(), pytest.raises(AssertionError, match="convert all Tensors to FakeTensors"):
                dispatch(x, ids, TOKENS, EXPERTS, use_fp8=False, return_recv_hook=halves)


def test_fakes_disturb_no_buffer() -> None:
    on_ranks(1, _under_fakes)


def _large_under_fakes(rank: int, size: int) -> None:
    """The rows of a started dispatch have memory, whatever mode is on when it starts. So many rows are used again."""
    config = MoECommunicatorConfig(mode="ll", num_experts=EXPERTS, hidden_size=1024, topk=TOPK, max_tokens_per_rank=256)
    ids = torch.tensor([[0, 1]]).repeat(256, 1)
    with MoECommunicator(dist.group.WORLD, config) as comm:
        for turn in range(1, 4):
            x = torch.full((256, 1024), float(turn), dtype=torch.bfloat16)
            with FakeTensorMode():
                work = comm.dispatch_async(x, ids)
            out, handle = work.wait()
            assert torch.equal(comm.combine(out.tokens, handle), x * 2)


def test_large_rows_under_fakes() -> None:
    on_ranks(1, _large_under_fakes)
