"""Dispatches that receive rows before the host knows their number.

On CPUs the totals are always there in time, so `denies_totals` makes the host behave as if they were not.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import resource
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ep_plugin import _C, DispatchLayout, MoECommunicator
from ep_plugin.errors import CaptureRefused, PeerTimeout
from ep_plugin.moe.high_throughput.engine import DISPATCH_POOL, HighThroughputEngine
from ep_plugin.runtime.streams import Streams
from tests.faults.fault_cases import die_at_gate, set_deadline
from tests.moe.moe_cases import (
    FLAT,
    LAYOUTS,
    Case,
    check_dispatch,
    communicator,
    make_inputs,
    named,
    on_ranks,
    poisoned,
    round_trip,
)
from tests.ranks import run_ranks

SPARE_ROWS, REMEMBERED = 256, 16  # as in csrc/control/high_throughput


class Recorded:
    """The kernels of an engine. For each receive they record whether it started before the totals were known. If
    `keeps_rows` is set, they also record the bytes that the latest one has left in its output."""

    keeps_rows, rows = False, b""

    def __init__(self, engine: HighThroughputEngine) -> None:
        self._kernels = engine.kernels
        self.early: list[bool] = []
        self.in_order: list[int] = []  # the receives of dispatches and combines
        engine.kernels = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    def dispatch_recv(self, args: Any) -> None:
        self.early.append(bool(args.optimistic))
        self.in_order.append(args.in_order)
        self._kernels.dispatch_recv(args)
        if self.keeps_rows:
            self.rows = ctypes.string_at(args.tokens, args.capacity * args.header.row_bytes)

    def combine_recv(self, args: Any) -> None:
        self.in_order.append(args.in_order)
        self._kernels.combine_recv(args)

    def since_last(self) -> list[bool]:
        early, self.early = self.early, []
        return early


def _hurry(comm: MoECommunicator) -> Recorded:
    comm.engine.control.denies_totals = True
    return Recorded(comm.engine)


def _changing(rank: int, size: int, layout: DispatchLayout, bounded: bool) -> list[list[bool]]:
    """The receives of routings of one shape: even, then most rows to the last rank, then even again."""
    shape = {"tokens": (800,) * size, "num_experts": 2 * size}
    alike, skewed = ("random", 0.7), ("last rank only", 0.0)
    history = []
    with communicator(Case(**shape), layout, max_tokens_per_rank=800 if bounded else None, timeout_s=20) as comm:
        kernels = _hurry(comm)
        for seed, (routing, drop) in enumerate([alike] * 3 + [skewed] + [alike] * 2):
            inputs = make_inputs(Case(**shape, routing=routing, drop=drop, seed=seed))
            with named((layout, bounded, seed)), poisoned():
                round_trip(comm, inputs, inputs.expected(layout))
            history.append(kernels.since_last())
    return history


@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_receives_ahead_of_the_totals_and_again_where_that_was_too_small(size: int, bounded: bool) -> None:
    for layout in LAYOUTS:
        ranks = on_ranks(size, _changing, layout, bounded)
        for rank, history in enumerate(ranks):
            assert history[:3] == [[False], [True], [True]]
            assert history[3] == ([True, False] if rank == size - 1 or not bounded else [True])
            assert history[4:] == [[False]] * 2, "expected no guess among dispatches that differ so much"


def _one_count_outgrows(rank: int, size: int, alike: tuple[int, int], other: tuple[int, int]) -> None:
    """(tokens with experts, pairs of each): two equal dispatches, then one with more rows only, or more slots only."""
    case = Case(tokens=(800,) * size, num_experts=4 * size, topk=3, drop=0.0)
    with communicator(case, max_tokens_per_rank=800, timeout_s=20) as comm:
        kernels = _hurry(comm)
        for tokens, pairs in (alike, alike, other):
            inputs = make_inputs(case)
            for ids in inputs.ids:  # pairs of a token on one rank
                ids.copy_((ids[:, :1] // 4 * 4 + torch.arange(3)).masked_fill(torch.arange(3) >= pairs, -1))
                ids[tokens:] = -1
            with poisoned():
                round_trip(comm, inputs, inputs.expected(FLAT))
        assert kernels.since_last() == [False, True, True, False]


@pytest.mark.parametrize(("alike", "other"), [((800, 1), (800, 3)), ((200, 3), (600, 1))], ids=["rows", "slots"])
def test_rows_or_slots_alone_may_outgrow_an_early_output(alike: tuple[int, int], other: tuple[int, int]) -> None:
    on_ranks(2, _one_count_outgrows, alike, other)


def _after_fills(rank: int, size: int) -> None:
    case = Case(tokens=(20,) * size, num_experts=2 * size)
    inputs = make_inputs(case)
    for capacity in (None, 400):
        with communicator(case, max_tokens_per_rank=20, timeout_s=20) as comm:
            kernels = Recorded(comm.engine)
            for filled in (contextlib.nullcontext(), poisoned()):
                with filled:
                    output, handle = comm.dispatch(inputs.x[rank], inputs.ids[rank], capacity=capacity)
                    comm.combine(output.tokens, handle)
            assert kernels.in_order == [0, 0, 1, 1]


def test_a_receive_waits_for_kernels_that_fill_its_output() -> None:
    on_ranks(2, _after_fills)


def _memory_for_no_more(rank: int, size: int) -> None:
    """Rank 0 cannot allocate the expected output, but can allocate the output that is needed."""
    hidden = 2**19  # so SPARE_ROWS rows take 512 MiB
    inputs = make_inputs(Case(tokens=(4,) * size, num_experts=2 * size, drop=0.0, hidden=hidden))
    with communicator(inputs.case, timeout_s=20, hidden_size=hidden) as comm:
        kernels = _hurry(comm)
        round_trip(comm, inputs, inputs.expected(FLAT))
        wanted, before = inputs.expected(FLAT), resource.getrlimit(resource.RLIMIT_AS)
        gc.collect()  # of the round trip
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        if rank == 0:
            resource.setrlimit(resource.RLIMIT_AS, (used + 2**26, before[1]))
        try:
            out, _ = comm.dispatch(inputs.x[rank], inputs.ids[rank], inputs.weights[rank])
        finally:
            resource.setrlimit(resource.RLIMIT_AS, before)
        check_dispatch(out, wanted[rank])
        early = kernels.since_last()
        assert early == [False, rank != 0], early


def test_want_of_memory_for_more_than_comes_is_no_error() -> None:
    on_ranks(2, _memory_for_no_more)


def _growing(rank: int, size: int) -> None:
    """The pool is too small, so nothing is sent, even to the rank whose output is large enough."""
    shape = {"tokens": (600,) * size, "num_experts": 2 * size, "drop": 0.0}
    with communicator(Case(**shape), hidden_size=400, timeout_s=20) as comm:
        kernels = _hurry(comm)
        spread = [make_inputs(Case(**shape, seed=seed)) for seed in range(2)]
        one = make_inputs(Case(**shape, routing="last rank only"))
        for inputs in spread:
            round_trip(comm, inputs, inputs.expected(FLAT))
        before = comm.engine.pool_bytes(DISPATCH_POOL)
        kernels.since_last()
        wide = make_inputs(Case(**shape, hidden=400))
        with poisoned():
            round_trip(comm, wide, wide.expected(FLAT))
        assert kernels.since_last() == [True, False]
        assert comm.engine.pool_bytes(DISPATCH_POOL) > before
        with poisoned():
            round_trip(comm, one, one.expected(FLAT))


@pytest.mark.parametrize("size", [2, 3])
def test_a_pool_that_grows_is_sent_to_and_received_from_again(size: int) -> None:
    on_ranks(size, _growing)


def _everything_beside(rank: int, size: int) -> None:
    """Scales, quantised rows, aligned experts, asynchronous calls, and the handle of an early dispatch."""
    shape = {"tokens": (300,) * size, "num_experts": 2 * size, "hidden": 256, "drop": 0.1}
    for layout in LAYOUTS:
        with communicator(Case(**shape), layout, expert_alignment=8 if layout is FLAT else 1) as comm:
            kernels = _hurry(comm)
            for seed in range(3):
                inputs = make_inputs(Case(**shape, seed=seed))
                wanted = inputs.expected(layout, 8 if layout is FLAT else 1)
                x, ids, weights = inputs.x[rank], inputs.ids[rank], inputs.weights[rank]
                with named((layout, seed)), poisoned():
                    out, handle = comm.dispatch_async(x, ids, weights).wait()
                    check_dispatch(out, wanted[rank])
                    again, _ = comm.dispatch(x, ids, weights, previous_handle=handle)
                    check_dispatch(again, wanted[rank])
                    marks = torch.arange(300 * 3, dtype=torch.float32).view(300, 3)
                    scaled, _ = comm.dispatch(x, ids, weights, scales=marks)
                    known, _ = comm.dispatch(x, ids, weights, scales=marks, previous_handle=handle)
                    assert scaled.scales is not None and known.scales is not None
                    torch.testing.assert_close(scaled.scales, known.scales, rtol=0, atol=0)
                    quick, _ = comm.dispatch(x, ids, quantize="e4m3")
                    slow, _ = comm.dispatch(x, ids, quantize="e4m3", previous_handle=handle)
                    assert quick.scales is not None and slow.scales is not None
                    torch.testing.assert_close(quick.scales, slow.scales, rtol=0, atol=0)
                    assert torch.equal(quick.tokens.view(torch.uint8), slow.tokens.view(torch.uint8))
            assert kernels.since_last().count(True) == 8, "expected all that make a routing but the first"


def test_everything_beside_the_rows_is_as_large_as_they_are() -> None:
    on_ranks(2, _everything_beside)


def _spare_memory(rank: int, size: int) -> None:
    shape = {"tokens": (4000,) * size, "num_experts": 2 * size, "hidden": 8, "drop": 0.0}
    with communicator(Case(**shape)) as comm:
        kernels, seen = _hurry(comm), []
        for seed in range(6):
            inputs = make_inputs(Case(**shape, seed=seed))
            out, handle = comm.dispatch(inputs.x[rank], inputs.ids[rank], inputs.weights[rank])
            assert kernels.since_last() == [seed > 0]
            seen.append(max(len(out.tokens), len(handle.recv_rows)))
            most = max(seen) + max(seen) // 64 + SPARE_ROWS
            for tensor in (out.tokens, out.weights, out.row_expert_ids, handle.recv_rows):
                assert tensor is not None and tensor.is_contiguous()
                held = tensor.untyped_storage().nbytes() // (tensor[0].numel() * tensor.element_size())
                assert len(tensor) <= held <= most


def test_an_output_keeps_little_memory_that_it_does_not_need() -> None:
    on_ranks(2, _spare_memory)


def _without_a_peer(rank: int, size: int) -> None:
    """Rank 1 does not call dispatch. Notify's wait ends at the deadline, and then nothing is received early."""
    inputs = make_inputs(Case(tokens=(20,) * size, num_experts=2 * size))
    with communicator(inputs.case) as comm:
        set_deadline(comm.engine, 1.0)
        kernels = _hurry(comm)
        for _ in range(2):
            round_trip(comm, inputs, inputs.expected(FLAT))
        assert kernels.since_last() == [False, True]
        if rank == 0:
            with pytest.raises(PeerTimeout, match="rank 1 at step notify"):
                comm.dispatch(inputs.x[rank], inputs.ids[rank])
            assert kernels.since_last() == []
        dist.barrier()


def test_nothing_is_received_early_after_a_fault() -> None:
    on_ranks(2, _without_a_peer)


def _killed_while_sending(rank: int, size: int) -> tuple[PeerTimeout, list[bool], bool]:
    """The error of rank 0, its receives, and whether the rows of the last one are NaN bytes."""
    if rank == 1:
        os.environ["EP_PLUGIN_TEST_GATE"] = "dispatch_send"
    inputs = make_inputs(Case(tokens=(200,) * size, num_experts=2 * size))
    comm = communicator(inputs.case)
    set_deadline(comm.engine, 2.0)
    gate, comm.engine.comm.gate = comm.engine.comm.gate, 0
    kernels = _hurry(comm)
    for _ in range(2):
        comm.dispatch(inputs.x[rank], inputs.ids[rank])
    comm.engine.comm.gate = gate
    if rank == 1:
        die_at_gate(comm)
    kernels.keeps_rows = True
    with pytest.raises(PeerTimeout) as raised:
        comm.dispatch(inputs.x[rank], inputs.ids[rank])
    comm.close()
    return raised.value, kernels.early, set(kernels.rows) == {0xFF}


@pytest.mark.deadline
def test_a_peer_killed_while_it_sends_ends_an_early_receive() -> None:
    ranks = run_ranks(2, _killed_while_sending, 2)
    assert ranks[1].exitcode == -signal.SIGKILL
    error, early, poisoned_rows = ranks[0].value
    assert "rank 1 at step dispatch_recv" in str(error)
    assert early == [False, True, True] and poisoned_rows


def _across_a_capture(rank: int, size: int, other: int) -> None:
    """An operation that began outside of a capture is not completed in it, nor the other way round."""
    inputs = make_inputs(Case(tokens=(20,) * size, num_experts=2 * size))
    wanted = inputs.expected(FLAT)
    x, ids, weights = inputs.x[rank], inputs.ids[rank], inputs.weights[rank]
    with communicator(inputs.case, max_tokens_per_rank=20) as comm:
        out, handle = round_trip(comm, inputs, wanted)
        eager, capturing = comm.engine.streams, Streams()
        capturing.capturing = lambda: 7
        for begin, check in (
            (lambda: comm.dispatch_async(x, ids, weights), lambda result: check_dispatch(result[0], wanted[rank])),
            (lambda: comm.combine_async(out.tokens, handle), lambda result: None),
        ):
            work = begin()
            comm.engine.use(capturing)
            for late in (work.wait, lambda: comm.dispatch(x, ids, weights, capacity=200)):
                with pytest.raises(
                    CaptureRefused, match="begun before the capture .* to be completed and waited for there too"
                ):
                    late()
            comm.engine.use(eager)
            check(work.wait())
        work = comm.dispatch_async(x, ids, weights)
        comm.combine(out.tokens, handle)
        comm.engine.use(capturing)
        with pytest.raises(CaptureRefused, match="begun before the capture .* got its wait.* in it$"):
            work.wait()
        comm.engine.use(eager)
        check_dispatch(work.wait()[0], wanted[rank])
        comm.engine.use(capturing)
        comm.dispatch_async(x, ids, weights, capacity=200).wait()
        lost = comm.combine_async(out.tokens, handle)
        later = Streams()
        comm.engine.use(later)
        later.capturing = lambda: other
        where = "in another" if other else "after it"
        with pytest.raises(
            CaptureRefused, match=f"begun in the capture .* to be completed and waited for there too, .* {where}$"
        ):
            lost.wait()


@pytest.mark.parametrize("other", [0, 8])
def test_a_capture_has_both_ends_of_an_operation_or_none(other: int) -> None:
    on_ranks(2, _across_a_capture, other)


class _Recording(Streams):
    """Streams with their own handles. events: what is ordered, and on which stream each kernel is launched."""

    own = 9

    def __init__(self, kernels: Any) -> None:
        self.current, self.events, self._kernels = 1, list[Any](), kernels

    def caller(self) -> int:
        return self.current

    def order_after(self, stream: int, *earlier: int) -> None:
        self.events.append((stream, "after", *earlier))

    def enter_on(self, stream: int, sms: int, needed: int) -> None:
        self.events.append((stream, "enters" if sms > 0 else "joins"))

    def __getattr__(self, name: str) -> Any:
        def launch(*args: Any) -> None:
            self.events.append((args[0].stream, name))
            getattr(self._kernels, name)(*args)

        return launch

    def taken(self) -> list[Any]:
        events, self.events = self.events, []
        return events


def _on_streams(rank: int, size: int) -> None:
    """Each dispatch is called on stream 1, and waited for on stream 2. Its receive must follow its send directly."""
    inputs = make_inputs(Case(tokens=(20,) * size, num_experts=2 * size))
    given = inputs.x[rank], inputs.ids[rank]
    with communicator(inputs.case, max_tokens_per_rank=20) as comm:
        streams = comm.engine.kernels = _Recording(comm.engine.kernels)
        comm.engine.use(streams)
        sends = ["enters", "plan", "notify", "dispatch_send"]
        for _ in range(2):  # by Python, then by C
            _, handle = comm.dispatch(*given, capacity=200)
            assert streams.taken() == [(1, what) for what in (*sends, "dispatch_recv", "joins")]
        out, _ = comm.dispatch(*given, previous_handle=handle, capacity=200)
        assert streams.taken() == [(1, what) for what in ("enters", "dispatch_send", "dispatch_recv", "joins")]
        comm.combine(out.tokens, handle)
        assert streams.taken() == [(1, what) for what in ("enters", "combine_send", "combine_recv", "joins")]
        work = comm.dispatch_async(*given, capacity=200)
        assert streams.taken() == [(9, "after", 1), *((9, what) for what in sends)]
        streams.current = 2
        work.wait()
        assert streams.taken() == [(9, "after", 2), (9, "enters"), (9, "dispatch_recv"), (2, "joins")]


def test_operations_run_on_the_callers_stream_and_in_flight_on_their_own() -> None:
    on_ranks(2, _on_streams)


def test_what_is_expected_follows_what_was_seen() -> None:
    seen, shape = _C.Expected(), (4096, 8)
    assert seen.guess(*shape) is None
    seen.saw(*shape, 32_000, 15_000)
    assert seen.guess(4096, 4) is None and seen.guess(4095, 8) is None
    slots = 15_000 + 234 + SPARE_ROWS
    assert seen.guess(*shape) == (32_000 + 500 + SPARE_ROWS, slots)
    seen.saw(*shape, 33_000, 14_000)
    assert seen.guess(*shape) == (33_000 + 515 + SPARE_ROWS, slots)
    seen.saw(*shape, 33_000, 13_000)
    assert seen.guess(*shape) is None, "slots differ by more than a 16th"
    for _ in range(REMEMBERED):
        seen.saw(*shape, 30_000, 13_000)
    assert seen.guess(*shape) == (30_000 + 468 + SPARE_ROWS, 13_000 + 203 + SPARE_ROWS)
    seen.saw(1, 8, 4, 1)
    assert seen.guess(*shape) is None
    assert seen.guess(1, 8) == (4 + SPARE_ROWS, 1 + SPARE_ROWS)
