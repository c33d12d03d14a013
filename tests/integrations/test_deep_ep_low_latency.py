"""ep_plugin.deep_ep's low-latency calls against a plain oracle on 1 to 8 CPU ranks, and what they refuse.

The file is long because all of it tests one interface, and tests/gpu runs its cases, too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from ep_plugin import deep_ep
from ep_plugin.deep_ep.shared import _users
from ep_plugin.errors import CommunicatorClosed, NotSupported
from tests.integrations.deep_ep_cases import Case, Sent, make, on
from tests.integrations.deep_ep_low_latency import check_combine, check_dispatch, results_of
from tests.moe.moe_cases import named, on_ranks, poisoned
from tests.moe.test_across_nodes import on_nodes
from tests.ranks import run_ranks, values

FORMATS = {None: {"use_fp8": False}, "plain": {}, "round_scale": {"round_scale": True}}
FORMATS |= {"use_ue8m0": {"round_scale": True, "use_ue8m0": True}}
CASES = {
    1: [Case(tokens=(5,), hidden=128, experts_per_rank=3, topk=2)],
    3: [
        Case(tokens=(9, 0, 17), hidden=384, experts_per_rank=2, topk=4, seed=1),
        Case(tokens=(1, 1, 0), hidden=512, experts_per_rank=1, topk=1, drop=0.5, seed=2),
        Case(tokens=(30, 140, 4), hidden=128, experts_per_rank=3, topk=3, id_dtype=torch.int32, seed=3),
    ],
    8: [Case(tokens=(8, 1, 0, 14, 5, 5, 9, 2), hidden=128, experts_per_rank=2, topk=3, seed=4)],
}


def _buffer(**settings: Any) -> deep_ep.Buffer:
    return deep_ep.Buffer(dist.group.WORLD, num_rdma_bytes=1 << 20, low_latency_mode=True, **settings)


def _receive(event: Any, hook: Any, halves: bool) -> None:
    if halves:
        hook()
    else:
        assert hook is None
        event.current_stream_wait()


def _all_calls(rank: int, size: int, cases: list[Case], device: str = "cpu") -> None:
    buffer = _buffer(num_qps_per_rank=2, allow_nvlink_for_low_latency_mode=False, allow_mnnvl=True)
    for case in cases:
        sent, most = make(case), max(case.tokens) + case.seed
        there = on(device, sent)
        expected = torch.zeros(case.experts_per_rank, dtype=torch.int32, device=device)
        stats, costs = torch.zeros_like(expected), torch.zeros(size, dtype=torch.int64, device=device)
        for number, (fp8, how) in enumerate(FORMATS.items()):
            with named((fp8, case)), poisoned() if device == "cpu" else contextlib.nullcontext():
                halves = number % 2 == 0
                results = buffer.low_latency_dispatch(
                    there.x[rank],
                    there.ids[rank],
                    most,
                    case.num_experts,
                    stats,
                    costs,
                    async_finish=not halves,
                    return_recv_hook=halves,
                    **how,
                )
                _receive(*results[3:], halves)
                check_dispatch(case, sent, rank, most, tree_map_only(torch.Tensor, _on_cpu, results), fp8)
                expected += results[1]
                assert torch.equal(stats, expected) and (costs >= 0).all()
                for zero_copy in (False, True):
                    _combine(buffer, case, sent, results[2], halves, zero_copy)


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides, if it is on a GPU."""
    return tensor.cpu()


def _combine(buffer: deep_ep.Buffer, case: Case, sent: Sent, handle: Any, halves: bool, zero_copy: bool) -> None:
    """With a handle made again from its parts, and fewer pairs than were dispatched."""
    rank, N, device = buffer.rank, handle[0].shape[1], handle[0].device
    y = results_of(case, sent, rank, N).to(device)
    out = torch.empty((case.tokens[rank], case.hidden), dtype=torch.bfloat16, device=device)
    if zero_copy:
        buffer.get_next_low_latency_combine_buffer(handle)[:, :, :] = y
        y = torch.full_like(y, 7.0)
    left_out = torch.rand(sent.ids[rank].shape, generator=torch.Generator().manual_seed(rank)) < 0.3
    now = sent.ids[rank].masked_fill(left_out, -1) if zero_copy else sent.ids[rank]
    costs = torch.zeros(buffer.group_size, dtype=torch.int64, device=device)
    sums, event, hook = buffer.low_latency_combine(
        y,
        now.to(device),
        sent.weights[rank].to(device),
        tuple(handle) if zero_copy else list(handle),
        zero_copy=zero_copy,
        async_finish=not halves,
        return_recv_hook=halves,
        out=out if zero_copy else None,
        combine_wait_recv_cost_stats=costs,
    )
    _receive(event, hook, halves)
    assert (sums is out) == zero_copy and (costs >= 0).all()
    check_combine(case, sent, rank, N, now, sums.cpu())


@pytest.mark.parametrize("size", CASES)
def test_every_call_gives_what_the_oracle_says(size: int) -> None:
    on_ranks(size, _all_calls, CASES[size], timeout_s=280)


CASE = Case(tokens=(20, 13), hidden=256, experts_per_rank=2, topk=2, seed=5)
FLAT = Case(tokens=(7, 9), hidden=256, experts_per_rank=2, topk=2, seed=6)


def _halves(rank: int, size: int) -> None:
    """Hooks late and in either order, between calls of the other mode; a third un-received call is refused."""
    buffer, most = _buffer(explicitly_destroy=True), 24
    sent = [make(dataclasses.replace(CASE, seed=seed)) for seed in range(5)]

    def dispatch(number: int, halves: bool = True) -> Any:
        return buffer.low_latency_dispatch(
            sent[number].x[rank], sent[number].ids[rank], most, 4, use_fp8=False, return_recv_hook=halves
        )

    for turn in range(4):
        first, second = dispatch(turn), dispatch(turn + 1)
        with pytest.raises(ValueError, match="dispatch: expected the last but one dispatch to be received"):
            dispatch(0, halves=False)
        _throughput(buffer, make(FLAT))
        for one in (second, first) if turn % 2 else (first, second):
            one[4]()
            one[4]()  # nothing to receive any more
        for number, one in ((turn, first), (turn + 1, second)):
            check_dispatch(CASE, sent[number], rank, most, one, None)
    combines, places = [], set()
    for number, one in ((3, first), (4, second)):
        rows = results_of(dataclasses.replace(CASE, seed=number), sent[number], rank, size * most)
        place = buffer.get_next_low_latency_combine_buffer(one[2])
        assert place.data_ptr() == buffer.get_next_low_latency_combine_buffer(one[2]).data_ptr()
        place[:] = rows
        places.add(place.data_ptr())
        given = rows, sent[number].ids[rank], sent[number].weights[rank], one[2]
        combines.append(buffer.low_latency_combine(*given, zero_copy=True, return_recv_hook=True))
    assert len(places) == 2, "expected buffers that take turns"
    with pytest.raises(ValueError, match="combine: expected the last but one combine to be received"):
        buffer.low_latency_combine(*given)
    for number, (sums, _, hook) in zip((4, 3), reversed(combines), strict=True):
        hook()
        case = dataclasses.replace(CASE, seed=number)
        check_combine(case, sent[number], rank, size * most, sent[number].ids[rank], sums)
    buffer.destroy()
    assert not _users
    with pytest.raises(CommunicatorClosed, match="got one after destroy"):
        dispatch(0)


def _throughput(buffer: deep_ep.Buffer, sent: Any) -> None:
    rank = buffer.rank
    per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(sent.ids[rank], FLAT.num_experts)
    x, _, _, _, handle, _ = buffer.dispatch(
        sent.x[rank], None, per_rank, per_node, in_rank, per_expert, sent.ids[rank], sent.weights[rank]
    )
    times = in_rank.sum(1, keepdim=True)
    torch.testing.assert_close(buffer.combine(x, handle)[0], sent.x[rank] * times, rtol=2**-7, atol=0)


def test_halves_and_both_modes_in_one_buffer() -> None:
    on_ranks(2, _halves, timeout_s=200)


def _sizes(rank: int, size: int) -> None:
    """Calls of several T_max share a communicator up to 128; another H or a larger T_max has its own."""
    buffer = _buffer()
    for hidden, most in ((128, 20), (128, 128), (128, 129), (256, 20)):
        case = dataclasses.replace(CASE, hidden=hidden)
        sent = make(case)
        buffer.clean_low_latency_buffer(most, hidden, 4)
        results = buffer.low_latency_dispatch(sent.x[rank], sent.ids[rank], most, 4)
        check_dispatch(case, sent, rank, most, results, "plain")
    comms = buffer._low_latency.values()
    hint = deep_ep.Buffer.get_low_latency_rdma_size_hint
    assert [comm.engine.memory_bytes for comm in comms] == [
        hint(num_max_dispatch_tokens_per_rank=most, hidden=hidden, num_ranks=size, num_experts=4)
        for hidden, most in ((128, 1), (128, 200), (256, 128))
    ]


def test_sizes() -> None:
    on_ranks(2, _sizes)


def _refused(rank: int, size: int) -> None:
    buffer, sent, most = _buffer(), make(CASE), 24
    x, ids, weights = sent.x[rank], sent.ids[rank], sent.weights[rank]
    handle = buffer.low_latency_dispatch(x, ids, most, 4)[2]
    y = torch.zeros((2, size * most, 256), dtype=torch.bfloat16)

    def dispatch(message: str, *given: Any, error: type[Exception] = ValueError, **how: Any) -> None:
        with pytest.raises(error, match=message):
            buffer.low_latency_dispatch(*(given + (x, ids, most, 4)[len(given) :]), **how)

    def combine(message: str, *given: Any, **how: Any) -> None:
        with pytest.raises(ValueError, match=message):
            buffer.low_latency_combine(*(given + (y, ids, weights, handle)[len(given) :]), **how)

    dispatch("topk_idx: expected at most num_max_dispatch_tokens_per_rank=3 tokens, got", x, ids, 3)
    dispatch("num_max_dispatch_tokens_per_rank: expected 1 to 4096, got 4097", x, ids, 4097)
    dispatch("num_experts: expected a positive multiple of the group's 2 ranks, got 5", x, ids, most, 5)
    dispatch("x: expected torch.bfloat16 of shape .T, H., got torch.float32", x.float())
    dispatch("a multiple of 128 with use_fp8=True, got 192", x[:, :192].contiguous())
    dispatch("x: expected rows of a positive multiple of 16 bytes, got 200", x[:, :100].contiguous(), use_fp8=False)
    dispatch("x: expected a tensor, got NoneType", None)
    dispatch("topk_idx: expected torch.int64 of shape", x, ids[:2])
    dispatch("topk_idx: expected ids from -1 to 3, got .* to 4", x, torch.full_like(ids, 4))
    dispatch("topk_idx: expected 1 to 4 experts per token, got 0", x, ids[:, :0])
    dispatch("use_ue8m0: expected False without round_scale=True, got True", use_ue8m0=True)
    dispatch("async_finish: expected False with return_recv_hook=True", async_finish=True, return_recv_hook=True)
    wrong = torch.zeros(3, dtype=torch.int32)
    dispatch(r"cumulative_local_expert_recv_stats: expected torch.int32 of shape \[2\]", x, ids, most, 4, wrong)
    dispatch(r"dispatch_wait_recv_cost_stats: expected torch.int64 of shape \[2\]", x, ids, most, 4, None, wrong)
    strided = torch.zeros((2, 2), dtype=torch.int64)[:, 0]
    dispatch(
        "dispatch_wait_recv_cost_stats: expected a contiguous tensor, got strides .2,.", x, ids, most, 4, None, strided
    )
    combine("zero_copy: expected False with use_logfmt=True, got True", use_logfmt=True, zero_copy=True)
    combine("async_finish: expected False with return_recv_hook=True", async_finish=True, return_recv_hook=True)
    combine("zero_copy: expected get_next_low_latency_combine_buffer.handle. to be called", zero_copy=True)
    combine(r"x: expected torch.bfloat16 of shape \[2, 48, 256\], got torch.bfloat16 of shape \[2, 47, 256\]", y[:, 1:])
    combine("x: expected a contiguous tensor, got strides", y.transpose(0, 1).contiguous().transpose(0, 1))
    combine("topk_weights: expected torch.float32 of shape", y, ids, weights[:, :1])
    combine("topk_weights: expected a tensor, got NoneType", y, ids, None)
    combine("topk_idx: expected at most num_max_dispatch_tokens_per_rank=24 tokens", y, ids.new_zeros((25, 2)))
    combine("topk_idx: expected ids from -1 to 3, got .* to 9", y, torch.full_like(ids, 9))
    combine("out: expected torch.bfloat16 of shape", out=torch.empty((1, 256)))
    combine(r"combine_wait_recv_cost_stats: expected torch.int64 of shape \[2\]", combine_wait_recv_cost_stats=wrong)
    for change in (torch.Tensor.to_sparse, torch.Tensor.to_mkldnn):
        factors = change(weights)
        got = f"expected a dense tensor, got one of layout {factors.layout}"
        dispatch(f"x: {got}", change(x))
        dispatch(f"topk_idx: {got}", x, factors)
        dispatch(f"cumulative_local_expert_recv_stats: {got}", x, ids, most, 4, factors)
        combine(f"x: {got}", change(y))
        combine(f"topk_idx: {got}", y, factors)
        combine(f"topk_weights: {got}", y, ids, factors)
        combine(f"out: {got}", out=change(x))
    src_info, layout_range, *numbers = handle
    combine("handle: expected what low_latency_dispatch returned, .*, got NoneType", y, ids, weights, None)
    copied = src_info.clone(), layout_range, *numbers
    combine(
        "handle: expected the src_info that low_latency_dispatch returned for this topk_idx", y, ids, weights, copied
    )
    fewer = (y, ids[:, :1].contiguous(), weights[:, :1].contiguous())
    combine("handle: expected the src_info that low_latency_dispatch returned for this topk_idx", *fewer)
    combine("handle: expected positive T_max, H and E", y, ids, weights, (src_info, layout_range, 24, 256, 3))
    combine("handle: expected src_info as torch.int32", y, ids, weights, (src_info, layout_range, 25, 256, 4))
    combine("handle: expected layout_range as torch.int64", y, ids, weights, (src_info, src_info, *numbers))
    layout = buffer.get_dispatch_layout(ids, 4)
    other = buffer.dispatch(x, None, layout[0], None, layout[3], layout[2], ids, weights)[4]
    combine(
        r"handle: expected what low_latency_dispatch returned, .*, got \(Tensor, .*Tensor\)", y, ids, weights, other
    )
    with pytest.raises(
        ValueError, match=r"handle: expected what dispatch returned, 6 or 10 tensors, got \(Tensor, Ten"
    ):
        buffer.combine(x, handle)
    _refused_without_a_mode(buffer, handle)
    narrow = x[:, :64].contiguous()
    handle = buffer.low_latency_dispatch(narrow, ids, most, 4, use_fp8=False)[2]
    y = torch.zeros((2, size * most, 64), dtype=torch.bfloat16)
    combine("x: expected a hidden size that is a multiple of 128 with use_logfmt=True, got 64", use_logfmt=True)
    buffer.low_latency_combine(y, ids, weights, handle)  # refusals have enqueued nothing


def test_size_hint_refuses_what_is_no_size() -> None:
    hint = deep_ep.Buffer.get_low_latency_rdma_size_hint
    with pytest.raises(ValueError, match="num_ranks: expected an integer of at least 1, got 0"):
        hint(128, 7168, 0, 256)
    with pytest.raises(ValueError, match=r"hidden: expected an integer of at least 1, got 7168\.0"):
        hint(128, 7168.0, 8, 256)


WAITED = Case(tokens=(9, 20, 12), hidden=128, experts_per_rank=2, topk=3, seed=9)
WAITED_TOKENS = {"few pairs": (9, 20, 12), "many pairs": (100, 110, 120)}
_LATE_S = 1.0


def _waits(rank: int, size: int, tokens: tuple[int, ...], device: str = "cpu") -> None:
    """Rank 1 is late in a dispatch, then in a combine. The others' statistics say for whom they waited."""
    case, most = dataclasses.replace(WAITED, tokens=tokens), max(tokens)
    buffer, sent = deep_ep.Buffer(dist.group.WORLD, 0, 0, True, 24, True, False, True), on(device, make(case))
    x, ids, weights = sent.x[rank], sent.ids[rank], sent.weights[rank]
    costs = [torch.zeros(size, dtype=torch.int64, device=device) for _ in range(2)]
    out, _, handle, _, _ = buffer.low_latency_dispatch(x, ids, most, case.num_experts, use_fp8=False)
    for late in range(2):
        dist.barrier()
        if rank == 1 and late == 0:
            time.sleep(_LATE_S)
        buffer.low_latency_dispatch(x, ids, most, case.num_experts, None, costs[0], use_fp8=False)
        dist.barrier()
        if rank == 1 and late == 1:
            time.sleep(_LATE_S)
        buffer.low_latency_combine(out.nan_to_num(), ids, weights, handle, combine_wait_recv_cost_stats=costs[1])
    for cost in costs:
        seconds = (cost / 1e9).tolist()
        if rank != 1:  # threads of a GPU also wait for this rank's own
            assert _LATE_S / 2 < seconds[1] < 20 and max(seconds[0], seconds[2]) < seconds[1] / 2, seconds
    buffer.destroy()


@pytest.mark.parametrize("tokens", WAITED_TOKENS)
def test_statistics_of_waiting_name_the_late_rank(tokens: str) -> None:
    on_ranks(3, _waits, WAITED_TOKENS[tokens])


def _in_threads(rank: int, size: int) -> None:
    """Several threads call one hook at once. The operation is received once, and all of them return after it."""
    buffer, sent = _buffer(), make(CASE)
    for _ in range(20):
        results = buffer.low_latency_dispatch(sent.x[rank], sent.ids[rank], 24, 4, use_fp8=False, return_recv_hook=True)
        with ThreadPoolExecutor(4) as pool:
            for one in [pool.submit(results[4]) for _ in range(4)]:
                one.result()
        check_dispatch(CASE, sent, rank, 24, results, None)


def test_a_hook_may_be_called_by_several_threads() -> None:
    on_ranks(2, _in_threads)


def _refused_without_a_mode(buffer: deep_ep.Buffer, handle: Any) -> None:
    plain = deep_ep.Buffer(dist.group.WORLD)
    calls = {
        "clean_low_latency_buffer": (8, 128, 4),
        "low_latency_dispatch": (None, None, 8, 4),
        "low_latency_combine": (None, None, None, handle),
        "get_next_low_latency_combine_buffer": (handle,),
        "low_latency_clean_mask_buffer": (),
    }
    for name, given in calls.items():
        with pytest.raises(ValueError, match=rf"{name}\(\): expected a Buffer made with low_latency_mode=True, got F"):
            getattr(plain, name)(*given)
    masks = {
        "low_latency_update_mask_buffer": (1, True),
        "low_latency_query_mask_buffer": (torch.zeros(2, dtype=torch.int32),),
        "low_latency_clean_mask_buffer": (),
    }
    for name, given in masks.items():
        with pytest.raises(ValueError, match=rf"{name}\(\): expected a Buffer made with enable_shrink=True, got False"):
            getattr(buffer, name)(*given)
    with pytest.raises(ValueError, match="enable_shrink: expected False without low_latency_mode=True, got True"):
        deep_ep.Buffer(enable_shrink=True)


def test_bad_input_is_refused_by_name() -> None:
    on_ranks(2, _refused)


def _refused_over_nodes(rank: int, size: int) -> None:
    with pytest.raises(NotSupported, match=r'shrink: expected False in mode="ll" over several nodes, got True for 2'):
        deep_ep.Buffer(low_latency_mode=True, enable_shrink=True)
    buffer, sent = _buffer(), make(CASE)
    x, ids, weights = sent.x[rank], sent.ids[rank], sent.weights[rank]
    y, _, handle, _, _ = buffer.low_latency_dispatch(x, ids, 20, CASE.num_experts, use_fp8=False)
    with pytest.raises(NotSupported, match="logfmt: expected False over several nodes, got True for 2 nodes"):
        buffer.low_latency_combine(y, ids, weights, handle, use_logfmt=True)


def test_what_is_refused_over_nodes() -> None:
    on_nodes(2, 1, _refused_over_nodes)


def test_every_call_over_three_nodes() -> None:
    on_nodes(3, 1, _all_calls, CASES[3], timeout_s=280)


@pytest.mark.slow
def test_every_call_over_two_nodes_of_two() -> None:
    case = Case(tokens=(30, 140, 0, 4), hidden=128, experts_per_rank=3, topk=3, seed=3)
    on_nodes(2, 2, _all_calls, [case], timeout_s=280)


def test_halves_over_two_nodes() -> None:
    on_nodes(2, 1, _halves)


def test_statistics_of_waiting_name_the_late_node() -> None:
    on_nodes(3, 1, _waits, WAITED_TOKENS["many pairs"])


def _masks(rank: int, size: int) -> None:
    """The others mask rank 2, which leaves, then serve each other alone, in calls of two shapes."""
    buffer = _buffer(enable_shrink=True)
    case = Case(tokens=(9, 20, 12), hidden=128, experts_per_rank=2, topk=3, seed=7)
    sent, most, status = make(case), 24, torch.full((3,), 5, dtype=torch.int32)
    for hidden in (128, 256):
        buffer.clean_low_latency_buffer(most, hidden, case.num_experts)
    buffer.low_latency_query_mask_buffer(status)
    assert status.tolist() == [0, 0, 0]
    dist.barrier()
    if rank == 2:
        return
    with pytest.raises(ValueError, match="rank_to_mask: expected a rank from 0 to 2, got 3"):
        buffer.low_latency_update_mask_buffer(3, True)
    buffer.low_latency_update_mask_buffer(2, True)
    buffer.low_latency_query_mask_buffer(status)
    assert status.tolist() == [0, 0, 1]
    alone = dataclasses.replace(case, tokens=(9, 20, 0))
    for hidden in (128, 256):
        part = dataclasses.replace(alone, hidden=hidden)
        sent = make(part)
        for halves in (False, True):
            results = buffer.low_latency_dispatch(
                sent.x[rank], sent.ids[rank], most, 6, use_fp8=False, return_recv_hook=halves
            )
            _receive(*results[3:], halves)
            check_dispatch(part, sent, rank, most, results, None)
            y = results_of(part, sent, rank, 3 * most)
            sums = buffer.low_latency_combine(y, sent.ids[rank], sent.weights[rank], results[2])[0]
            there = sent.ids[rank].masked_fill(sent.ids[rank] >= 4, -1)  # experts 4 and 5 are of rank 2
            check_combine(part, sent, rank, 3 * most, there, sums)
    buffer.low_latency_update_mask_buffer(2, False)
    buffer.low_latency_query_mask_buffer(status)
    assert status.tolist() == [0, 0, 0]
    buffer.low_latency_update_mask_buffer(2, True)
    buffer.low_latency_clean_mask_buffer()
    buffer.low_latency_query_mask_buffer(status)
    assert status.tolist() == [0, 0, 0]


def test_masks() -> None:
    on_ranks(3, _masks)


def _reserved(rank: int, size: int) -> list[int]:
    """A hint that all ranks ask for makes memory. A rank may then leave before its first call, and is masked."""
    hint = deep_ep.Buffer.get_low_latency_rdma_size_hint
    asked_by_one = [hint(24, 256, size, 6) if rank == 0 else None]
    dist.broadcast_object_list(asked_by_one)
    assert asked_by_one[0] is not None
    group = dist.new_group(timeout=datetime.timedelta(seconds=6))
    buffer = deep_ep.Buffer(group, num_rdma_bytes=asked_by_one[0], low_latency_mode=True)
    assert not buffer._low_latency
    buffer = deep_ep.Buffer(group, 0, hint(24, 128, size, 6), low_latency_mode=True, enable_shrink=True)
    status = torch.zeros(size, dtype=torch.int32)
    if rank < 2:
        case = Case(tokens=(9, 20, 0), hidden=128, experts_per_rank=2, topk=3, seed=9)
        sent = make(case)
        results = buffer.low_latency_dispatch(sent.x[rank], sent.ids[rank], 24, 6, use_fp8=False)
        check_dispatch(case, sent, rank, 24, results, None)
        buffer.low_latency_query_mask_buffer(status)
    return status.tolist()


@pytest.mark.deadline
def test_a_rank_may_leave_before_its_first_call() -> None:
    assert values(run_ranks(3, _reserved, 3, timeout_s=90)) == [[0, 0, 1], [0, 0, 1], [0, 0, 0]]


def _shrinks(rank: int, size: int) -> list[list[int]]:
    """Rank 2 leaves before one call, then rank 1 before another. The call masks them, and the next one is right."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=6))
    buffer = deep_ep.Buffer(group, low_latency_mode=True, enable_shrink=True)
    case = Case(tokens=(9, 20, 0, 12), hidden=128, experts_per_rank=2, topk=3, seed=8)
    sent, most, statuses = make(case), 24, []
    buffer.clean_low_latency_buffer(most, 128, case.num_experts)
    for gone in (2, 1):
        if rank == gone:
            return statuses
        buffer.clean_low_latency_buffer(most, 128, case.num_experts)
        status = torch.zeros(size, dtype=torch.int32)
        buffer.low_latency_query_mask_buffer(status)
        statuses.append(status.tolist())
        case = dataclasses.replace(case, tokens=tuple(0 if other == gone else T for other, T in enumerate(case.tokens)))
        sent = make(case)
        results = buffer.low_latency_dispatch(sent.x[rank], sent.ids[rank], most, case.num_experts, use_fp8=False)
        check_dispatch(case, sent, rank, most, results, None)
        y = results_of(case, sent, rank, size * most)
        sums = buffer.low_latency_combine(y, sent.ids[rank], sent.weights[rank], results[2])[0]
        there = sent.ids[rank].masked_fill(status.bool()[sent.ids[rank].clamp(min=0) // 2], -1)
        check_combine(case, sent, rank, size * most, there, sums)
    return statuses


@pytest.mark.deadline
def test_ranks_that_leave_are_masked_by_the_next_call() -> None:
    outcomes = run_ranks(4, _shrinks, 4, timeout_s=90)
    for rank in (0, 3):
        assert outcomes[rank].error is None, outcomes[rank].trace
        assert outcomes[rank].value == [[0, 0, 1, 0], [0, 1, 1, 0]]
