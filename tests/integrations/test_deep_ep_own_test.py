"""The checks of DeepEP's own test of its low-latency calls, written anew, on CPU ranks."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from ep_plugin import deep_ep
from ep_plugin.deep_ep.utils.math import calc_diff, hash_tensor, per_token_cast_back
from tests.moe.moe_cases import named, on_ranks
from tests.moe.test_across_nodes import on_nodes

TOKENS, HIDDEN, TOPK, EXPERTS_PER_RANK = 32, 512, 4, 3
OFFSET = 128  # of ranks: integers to 256 are exact in bfloat16
LOWER = 2**32 - 1


class Format(NamedTuple):
    use_fp8: bool
    round_scale: bool
    use_ue8m0: bool


FORMATS = [
    Format(False, False, False),
    Format(True, False, False),
    Format(True, True, False),
    Format(True, True, True),
]


def _all_checks(rank: int, size: int, use_logfmt: bool) -> None:
    num_experts = EXPERTS_PER_RANK * size
    hint = deep_ep.Buffer.get_low_latency_rdma_size_hint(TOKENS, HIDDEN, size, num_experts)
    buffer = deep_ep.Buffer(
        dist.group.WORLD,
        num_rdma_bytes=hint,
        low_latency_mode=True,
        num_qps_per_rank=EXPERTS_PER_RANK,
        allow_nvlink_for_low_latency_mode=True,
        explicitly_destroy=True,
        allow_mnnvl=False,
        enable_shrink=False,
    )
    hashes = [_one_run(buffer, num_experts, use_logfmt) for _ in range(3)]
    assert hashes.count(hashes[0]) == len(hashes)
    buffer.destroy()


def _one_run(buffer: deep_ep.Buffer, num_experts: int, use_logfmt: bool, seed: int = 1) -> int:
    """All checks with fresh inputs. Returns a hash of all results."""
    rank = buffer.rank
    torch.manual_seed(seed + rank)
    random.seed(seed + rank)
    x = torch.full((TOKENS, HIDDEN), float(rank - OFFSET), dtype=torch.bfloat16)
    x[:, -128:] = torch.arange(TOKENS).bfloat16().view(-1, 1)
    inputs = [x] + [torch.randn((TOKENS, HIDDEN)).bfloat16() * 0.5 * random.random() for _ in range(2 * use_logfmt)]
    inputs.append(torch.randn((TOKENS, HIDDEN)).bfloat16() * 0.1)
    scores = torch.randn((TOKENS, num_experts)).abs() + 1
    topk_idx = scores.topk(TOPK, dim=-1).indices.to(deep_ep.topk_idx_t)
    topk_weights = torch.randn((TOKENS, TOPK)).abs()
    for _ in range(10):
        topk_idx[random.randint(0, TOKENS - 1), random.randint(0, TOPK - 1)] = -1
    all_idx = torch.empty((buffer.group_size, TOKENS, TOPK), dtype=topk_idx.dtype)
    dist.all_gather(list(all_idx.unbind()), topk_idx)
    found = 0
    for number, current in enumerate(inputs):
        for halves in (False, True):
            for one in FORMATS:
                with named((one, number, halves)):
                    given = current, topk_idx, topk_weights, all_idx
                    found ^= _round_trip(buffer, given, num_experts, one, halves, use_logfmt, exact=current is x)
    return found


def _round_trip(
    buffer: deep_ep.Buffer,
    given: tuple[torch.Tensor, ...],
    num_experts: int,
    how: Format,
    halves: bool,
    use_logfmt: bool,
    exact: bool,
) -> int:
    x, topk_idx, topk_weights, all_idx = given
    for _ in range(1 + halves):
        stats = torch.zeros(EXPERTS_PER_RANK, dtype=torch.int32)
        received, count, handle, event, hook = buffer.low_latency_dispatch(
            x,
            topk_idx,
            TOKENS,
            num_experts,
            cumulative_local_expert_recv_stats=stats,
            async_finish=not halves,
            return_recv_hook=halves,
            **how._asdict(),
        )
        hook() if halves else event.current_stream_wait()
    found = _check_received(buffer.rank, received, (stats, count, *handle[:2]), all_idx, how, exact)
    if how.use_fp8:
        rows, scales = received[0], received[1].contiguous()
        rows = per_token_cast_back(rows.view(-1, HIDDEN), scales.view(-1, HIDDEN // 128)).view(rows.shape)
    else:
        rows = received.clone()
    named_weights = topk_weights.masked_fill(topk_idx == -1, 0)
    for zero_copy in (False,) if use_logfmt else (False, True):
        if zero_copy:
            buffer.get_next_low_latency_combine_buffer(handle)[:, :, :] = rows
        out = torch.empty((TOKENS, HIDDEN), dtype=torch.bfloat16)
        sums, event, hook = buffer.low_latency_combine(
            rows,
            topk_idx,
            topk_weights,
            handle,
            use_logfmt=use_logfmt,
            async_finish=not halves,
            zero_copy=zero_copy,
            return_recv_hook=halves,
            out=out,
        )
        hook() if halves else event.current_stream_wait()
        assert not sums.isnan().any()
        diff = calc_diff(x * named_weights.sum(dim=1).view(-1, 1), sums)
        if not how.round_scale:
            assert diff < (9e-4 if how.use_fp8 else 1e-5), f"{diff=}, {zero_copy=}"
        found ^= hash_tensor(sums)
    return found


def _check_received(
    rank: int, received: Any, tables: tuple[torch.Tensor, ...], all_idx: torch.Tensor, how: Format, exact: bool
) -> int:
    """Compares counts with the routing and, where rows are known, rows with their sources. Returns a hash."""
    found = 0
    for local in range(EXPERTS_PER_RANK):
        stats, count, src_info, ranges = (table[local] for table in tables)
        of_source = (all_idx == rank * EXPERTS_PER_RANK + local).sum(dim=(1, 2))
        valid = int(count)
        assert int(stats) == valid == int((ranges & LOWER).sum()) == int(of_source.sum())
        parts = [part[local] for part in received] if how.use_fp8 else [received[local]]
        found ^= hash_tensor(parts[0][:valid])
        if how.use_fp8:
            found ^= hash_tensor(parts[1][:valid])
        if not exact or not valid:
            continue
        rows = per_token_cast_back(*parts) if how.use_fp8 else parts[0]
        rows, tokens = rows[:valid], src_info[:valid]
        assert torch.equal(rows[:, :-128].amin(dim=1), rows[:, :-128].amax(dim=1))
        if how.round_scale:
            assert calc_diff(rows[:, -1], tokens) < 0.007
            continue
        assert torch.equal(rows[:, -128:], tokens.view(-1, 1).expand(-1, 128).bfloat16())
        for source, word in enumerate(ranges.tolist()):
            begin, number = word >> 32, word & LOWER
            assert number == int(of_source[source])
            assert (rows[begin : begin + number, :-128] == source - OFFSET).all()
    return found


@pytest.mark.parametrize("use_logfmt", [False, True])
@pytest.mark.parametrize("size", [2, 4])
def test_checks_of_deepeps_own_test(size: int, use_logfmt: bool) -> None:
    on_ranks(size, _all_checks, use_logfmt, timeout_s=250)


def test_checks_of_deepeps_own_test_over_two_nodes() -> None:
    on_nodes(2, 2, _all_checks, False, timeout_s=250)
