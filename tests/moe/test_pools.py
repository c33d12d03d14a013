"""Memory: pools that grow collectively, rounds that leave nothing behind, blocks of more than 2**31 bytes."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch

from ep_plugin import MoECommunicator
from ep_plugin.errors import CaptureRefused
from ep_plugin.moe.high_throughput.engine import COMBINE_POOL, DISPATCH_POOL
from ep_plugin.runtime.streams import Streams
from tests.moe.moe_cases import (
    FLAT,
    LAYOUTS,
    Case,
    communicator,
    make_inputs,
    named,
    on_ranks,
    poisoned,
    ragged,
    round_trip,
    same_bits,
)
from tests.ranks import run_ranks, values


def _pool_bytes(comm: MoECommunicator) -> tuple[int, int]:
    return comm.engine.pool_bytes(DISPATCH_POOL), comm.engine.pool_bytes(COMBINE_POOL)


def _growing(rank: int, size: int) -> list[tuple[int, int]]:
    """Small and large calls in any order. Pools only grow, equally on all ranks, and not at every call."""
    history: list[tuple[int, int]] = []
    most_hidden = 256
    for layout in LAYOUTS:
        first = Case(tokens=(1,) * size, num_experts=2 * size, hidden=most_hidden)
        with communicator(first, layout) as comm:
            assert _pool_bytes(comm) == (0, 0)
            before = (0, 0)
            for step, (most, hidden) in enumerate(
                ((0, 8), (1, 8), (40, 8), (3, 8), (41, 8), (600, 32), (2, 256), (1, 8), (300, 256), (610, 32))
            ):
                inputs = make_inputs(
                    Case(tokens=ragged(size, most, step), num_experts=2 * size, hidden=hidden, seed=step)
                )
                with named((layout, step, most, hidden)), poisoned():
                    round_trip(comm, inputs, inputs.expected(layout))
                now = _pool_bytes(comm)
                assert all(b >= a for a, b in zip(before, now, strict=True)), f"shrank from {before} to {now}"
                history.append(now)
                before = now
    return history


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_pools_grow_together(size: int) -> None:
    ranks = on_ranks(size, _growing)
    assert all(history == ranks[0] for history in ranks)
    assert len({dispatch for dispatch, _ in ranks[0]}) > 3


def _slowly(rank: int, size: int) -> int:
    """Batches grow by one token at a time. Pools have spare room, so not every call replaces them."""
    sizes = set()
    case = Case(tokens=(80,) * size, num_experts=2 * size, hidden=64)
    with communicator(case) as comm:
        for tokens in range(40, 80):
            inputs = make_inputs(Case(tokens=(tokens,) * size, num_experts=2 * size, hidden=64, drop=0.0))
            round_trip(comm, inputs, inputs.expected(FLAT))
            sizes.add(_pool_bytes(comm))
    return len(sizes)


def test_slow_growth_does_not_replace_the_pools_each_time() -> None:
    assert max(on_ranks(2, _slowly)) <= 8


def _captured_too_early(rank: int, size: int) -> None:
    """A capture that needs a larger pool raises CaptureRefused. The communicator stays usable."""
    case = Case(tokens=(6,) * size, num_experts=2 * size, dtype=torch.float32)
    inputs = make_inputs(case)
    arguments = inputs.x[rank], inputs.ids[rank], inputs.weights[rank]
    for settings in ({}, {"dispatch_recv_sms": 0, "combine_recv_sms": 0}):
        with communicator(case, max_tokens_per_rank=6, **settings) as comm:
            capturing = Streams()
            capturing.capturing = lambda: 1
            eager = comm.engine.streams
            comm.engine.use(capturing)
            with pytest.raises(CaptureRefused, match="dispatch pool has 0 bytes where .* run one step of this shape"):
                comm.dispatch(*arguments, capacity=40)
            comm.engine.use(eager)
            out, handle = comm.dispatch(*arguments, capacity=40)
            comm.engine.use(capturing)
            with pytest.raises(CaptureRefused, match="combine pool has 0 bytes where .* run one step of this shape"):
                comm.combine(out.tokens, handle)
            comm.engine.use(eager)
            round_trip(comm, inputs, inputs.expected(FLAT))
            comm.engine.use(capturing)
            again, handle = comm.dispatch(*arguments, capacity=40)
            same_bits("tokens", again.tokens, out.tokens)
            comm.combine(again.tokens, handle)
            comm.engine.use(eager)


@pytest.mark.parametrize("size", [1, 2])
def test_a_capture_that_comes_too_early_breaks_nothing(size: int) -> None:
    on_ranks(size, _captured_too_early)


def _fixed(rank: int, size: int) -> None:
    """With max_tokens_per_rank, the first call fixes the size for its kind of rows. T and routing do not matter."""
    first = make_inputs(Case(tokens=(1,) * size, num_experts=2 * size, hidden=64))
    worst = make_inputs(Case(tokens=(50,) * size, num_experts=2 * size, hidden=64, routing="last rank only"))
    spread = make_inputs(Case(tokens=(50,) * size, num_experts=2 * size, hidden=64, drop=0.0))
    for layout in LAYOUTS:
        with communicator(first.case, layout, max_tokens_per_rank=50) as comm:
            round_trip(comm, first, first.expected(layout))
            settled = _pool_bytes(comm)
            assert min(settled) >= 50 * 64 * 4
            for inputs in (worst, spread, first):
                round_trip(comm, inputs, inputs.expected(layout))
                assert _pool_bytes(comm) == settled


@pytest.mark.parametrize("size", [1, 4])
def test_pools_of_a_fixed_size_stay(size: int) -> None:
    on_ranks(size, _fixed)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def _mappings() -> int:
    """Mappings of files, shared memory among them. Those of threads' stacks come and go."""
    return sum("/" in line for line in Path("/proc/self/maps").read_text().splitlines())


def _train(comm: MoECommunicator, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    out, handle = comm.dispatch(x, ids, weights)
    work = comm.dispatch_async(x.detach(), ids, previous_handle=handle)
    z = comm.combine(torch.sin(out.tokens), handle, weights=out.weights)
    z.sum().backward()
    work.wait()


def _many_rounds(rank: int, size: int) -> tuple[int, int]:
    """Growth of memory and open files over 200 rounds. Closed communicators leave nothing behind."""
    inputs = make_inputs(Case(tokens=(256,) * size, num_experts=2 * size, hidden=128))
    x, ids, weights = inputs.x[rank], inputs.ids[rank], inputs.weights[rank]
    with communicator(inputs.case) as comm:
        for _ in range(50):
            _train(comm, x, ids, weights)
        gc.collect()
        resident, files = _resident_bytes(), _open_files()
        for _ in range(200):
            _train(comm, x, ids, weights)
        gc.collect()
        grown = _resident_bytes() - resident, _open_files() - files
    files, mappings = _open_files(), _mappings()
    for _ in range(10):
        with communicator(inputs.case) as comm:
            _train(comm, x, ids, weights)
    gc.collect()
    assert _open_files() <= files, f"expected at most {files} open files, got {_open_files()}"
    assert _mappings() <= mappings, f"expected at most {mappings} mappings, got {_mappings()}"
    return grown


@pytest.mark.slow
@pytest.mark.parametrize("size", [2])
def test_rounds_leave_nothing_behind(size: int) -> None:
    # The rows of a round take at least 256 KiB. If each round kept one copy, that would be 50 MiB.
    for resident, files in on_ranks(size, _many_rounds):
        assert resident < 8 * 2**20, f"grew by {resident} bytes"
        assert files == 0


def _beyond_31_bits(rank: int, size: int) -> None:
    """Pools, output, result and an input's stride exceed 2**31 bytes, so a 32-bit offset would fail."""
    hidden = 2**19
    row_bytes = 4 * hidden
    tokens = 2**31 // row_bytes + 3
    # Rows overlap in memory: all differ, and they need little memory.
    x = torch.arange(hidden + tokens, dtype=torch.float32).as_strided((tokens, hidden), (1, 1))
    ids = torch.arange(tokens).flip(0).unsqueeze(1) % 2
    case = Case(tokens=(tokens,), num_experts=2, hidden=hidden, topk=1)
    with communicator(case, FLAT, max_tokens_per_rank=tokens) as comm:
        out, handle = comm.dispatch(x, ids)
        assert out.tokens.numel() * 4 > 2**31 and comm.engine.pool_bytes(DISPATCH_POOL) > 2**31
        order = ids.squeeze(1).argsort(stable=True)
        for row in (0, 1, tokens // 2, tokens - 2, tokens - 1):
            same_bits(f"row {row}", out.tokens[row], x[order[row]])
        assert torch.equal(out.tokens[:, 0], x[order, 0]) and torch.equal(out.tokens[:, -1], x[order, -1])
        z = comm.combine(out.tokens, handle)
        assert comm.engine.pool_bytes(COMBINE_POOL) > 2**31
        del out
        assert torch.equal(z[:, 0], x[:, 0]) and torch.equal(z[:, -1], x[:, -1])
        same_bits("last token", z[-1], x[-1])
    # Rows are far apart: most of this memory is never touched.
    far = torch.empty(3 * (2**29 + 64)).view(3, -1)[:, :8]
    far.copy_(torch.arange(24.0).view(3, 8))
    with communicator(Case(tokens=(3,), num_experts=2, hidden=8, topk=1)) as comm:
        out, _ = comm.dispatch(far, torch.ones(3, 1, dtype=torch.int64))
        same_bits("rows far apart", out.tokens, far)


@pytest.mark.slow
def test_more_than_2_to_the_31_bytes_of_rows() -> None:
    on_ranks(1, _beyond_31_bits)


def _nothing_for_anyone(rank: int, size: int) -> None:
    """No pool has been made, since no rank sends a row."""
    inputs = make_inputs(Case(tokens=(33,) * size, num_experts=2 * size, drop=1.0))
    for layout in LAYOUTS:
        with communicator(inputs.case, layout) as comm:
            round_trip(comm, inputs, inputs.expected(layout))
            assert comm.engine.pool_bytes(DISPATCH_POOL) == comm.engine.pool_bytes(COMBINE_POOL) == 0


@pytest.mark.parametrize("kernels", ["cpu", "simt"])
def test_no_rows_need_no_pools(kernels: str) -> None:
    env = {} if kernels == "cpu" else {"EP_TEST_KERNELS": kernels}
    values(run_ranks(2, _nothing_for_anyone, 2, timeout_s=200, env=env))
