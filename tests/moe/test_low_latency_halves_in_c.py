"""Halves of low-latency operations: the bits of whole ones, the rules, and what ends a wait."""

from __future__ import annotations

import functools
import gc
import signal
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ep_plugin import _C, EpPluginError, MoECommunicator, PeerAborted, PeerTimeout
from ep_plugin.errors import CommunicatorClosed
from tests.faults.fault_cases import nothing_left_behind, signal_self
from tests.moe.in_c_cases import Checks, calls_of, same_dispatches, tokens_of
from tests.moe.low_latency_cases import low_latency
from tests.moe.moe_cases import Case, named, on_ranks
from tests.ranks import note, run_ranks, values

DEADLINE_S = 3.0


def _of(size: int) -> Case:
    return Case(tokens=(4,) * size, num_experts=4, hidden=128, topk=2, dtype=torch.bfloat16)


def _learned(size: int) -> tuple[MoECommunicator, tuple[torch.Tensor, ...], Any]:
    """A communicator that knows its calls, these, and the result of a dispatch."""
    comm = low_latency(_of(size))
    x, ids, weights = tokens_of(torch.Generator().manual_seed(3), 4, 128, torch.bfloat16)
    for _ in range(2):
        out, handle = comm.dispatch(x, ids)
        comm.combine(out.tokens, handle, weights)
    return comm, (x, ids, weights), (out.tokens.clone(), handle)


def _whole_and_halves(rank: int, size: int) -> None:
    """Calls in halves, two at a time, beside whole calls. Those of a known form need no check."""
    case, checks = Case(tokens=(64,) * size, num_experts=4, hidden=640, topk=2), Checks()
    whole, halves = both = low_latency(case), low_latency(case)
    generator = torch.Generator().manual_seed(rank)
    forms: list[tuple[torch.dtype, str | None, int | None]] = [
        (torch.bfloat16, None, None),
        (torch.float32, None, 16 * size),
        (torch.bfloat16, "e4m3", None),
        (torch.bfloat16, "e4m3_pow2", None),
        (torch.bfloat16, "e4m3_ue8m0", 32 * size),
    ]
    for dtype, quantize, capacity in forms:
        for turn in range(3):
            with named((dtype, quantize, capacity, turn)):
                before = checks.num
                how: dict[str, Any] = {"capacity": capacity, "quantize": quantize}
                pairs = [tokens_of(generator, 9, 640, dtype) for _ in range(2)]
                expected = [whole.dispatch(x, ids, **how) for x, ids, _ in pairs]
                works = [halves.dispatch_async(x, ids, **how) for x, ids, _ in pairs]
                order = (0, 1) if (turn + rank) % 2 else (1, 0)
                made = {at: works[at].wait() for at in order}
                for at in order:
                    same_dispatches(expected[at], made[at])
                    assert works[at].done and works[at].wait() is made[at]
                x, ids, weights = pairs[0]
                again = halves.dispatch_async(x, ids, previous_handle=made[0][1], quantize=quantize).wait()
                same_dispatches(whole.dispatch(x, ids, previous_handle=expected[0][1], quantize=quantize), again)
                assert again[1] is made[0][1]
                if quantize is None:
                    given = (weights, torch.ones_like(x)) if turn else ()
                    for _ in range(2):
                        sums = halves.combine_async(made[0][0].tokens, made[0][1], *given).wait()
                        assert torch.equal(whole.combine(expected[0][0].tokens, expected[0][1], *given), sums)
                assert turn != 2 or checks.num == before
    for comm in both:
        comm.close()


@pytest.mark.parametrize("size", [1, 2])
def test_halves_make_the_same_bits(size: int) -> None:
    on_ranks(size, _whole_and_halves)


def _rules(rank: int, size: int) -> None:
    """Two of a kind are un-received. Gradients and profilers see a call at its end."""
    comm, (x, ids, weights), (y, handle) = _learned(size)
    expected = comm.combine(y, handle, weights)
    first, second = comm.dispatch_async(x, ids), comm.dispatch_async(x, ids)
    for _ in range(2):
        with pytest.raises(ValueError, match="dispatch to be received .* got a new one with 2 un-received"):
            comm.dispatch_async(x, ids)
    second.wait()
    with pytest.raises(ValueError, match="dispatch to be received .* got a new one with 1 un-received"):
        comm.dispatch(x, ids)
    assert not first.done and torch.equal(comm.combine(y, handle, weights), expected)
    first.wait()
    for turn in range(6):  # dropped works, with a late receive by another work in between
        comm.dispatch_async(x, ids)
        work = comm.combine_async(y, handle, weights)
        del work
        assert torch.equal(comm.combine_async(y, handle, weights).wait(), expected), turn
    for _ in range(2):
        comm.dispatch(x, ids)  # receive the dropped ones
    before, work = calls_of(comm), comm.dispatch_async(x, ids)
    assert calls_of(comm) == before + 1
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        out, routing = work.wait()
    assert calls_of(comm) == before + 2 and any("ep_plugin::dispatch" in event.name for event in seen.events())
    assert torch.equal(comm.combine(out.tokens, routing, weights), expected)
    wants = x.clone().requires_grad_()
    with torch.no_grad():
        before, work = calls_of(comm), comm.dispatch_async(wants, ids)
        assert calls_of(comm) == before + 1
    assert work.wait()[0].tokens.requires_grad and calls_of(comm) == before + 2
    assert comm.dispatch_async(wants, ids).wait()[0].tokens.requires_grad and calls_of(comm) == before + 4
    with pytest.raises(ValueError, match="topk_ids: expected -1 or 0 to 3"):
        comm.dispatch_async(x, ids + 4)
    work, sums = comm.dispatch_async(x, ids), comm.combine_async(y, handle, weights)
    comm.close()
    for one in (work, sums):
        for _ in range(2):
            with pytest.raises(CommunicatorClosed):
                one.wait()
    with pytest.raises(CommunicatorClosed):
        comm.dispatch_async(x, ids)


@pytest.mark.parametrize("size", [1, 2])
def test_rules(size: int) -> None:
    on_ranks(size, _rules)


def _logged(rank: int, size: int) -> None:
    """Both halves are calls of one operation in the log that a failure writes."""
    comm, (x, ids, _), _ = _learned(size)
    work = comm.dispatch_async(x, ids)
    comm.dispatch_async(x, ids).wait()
    work.wait()
    calls = [(kind, part, number, epoch) for _, kind, part, number, epoch, *_ in _C.kept_calls()[-4:]]
    number, epoch = calls[0][2:]
    first, second = (number, epoch), (number + 1, epoch + 1)
    parts = [("send half", first), ("send half", second), ("receive half", second), ("receive half", first)]
    assert calls == [("dispatch", part, *of) for part, of in parts]
    assert all(call[-1] is not None for call in _C.kept_calls()[-4:])
    comm.close()


def test_halves_are_logged() -> None:
    on_ranks(1, _logged)


def _keeps_nothing(rank: int, size: int) -> None:
    comm, (x, ids, weights), (y, handle) = _learned(size)

    def turn() -> None:
        comm.dispatch_async(x, ids)  # dropped: a later dispatch receives it
        out, routing = comm.dispatch_async(x, ids).wait()
        comm.combine_async(out.tokens, routing, weights).wait()

    for _ in range(400):
        turn()
    gc.collect()
    before, calls = len(gc.get_objects()), calls_of(comm)
    references = [torch._C._storage_Use_Count(t.untyped_storage()._cdata) for t in (x, ids, weights)]
    for _ in range(400):
        turn()
    gc.collect()
    assert len(gc.get_objects()) - before < 50 and calls_of(comm) - calls > 1200
    assert references == [torch._C._storage_Use_Count(t.untyped_storage()._cdata) for t in (x, ids, weights)]
    work = comm.combine_async(y, handle, weights)
    started = weakref.ref(work._operation)
    assert isinstance(started(), _C.StartedOperation)
    work.wait()
    assert started() is None, "a work that was waited for holds its arguments"
    comm.close()


def test_c_keeps_nothing() -> None:
    on_ranks(1, _keeps_nothing)


def _of_threads(rank: int, size: int) -> None:
    """One thread's halves of dispatches beside another's of combines; four threads wait for one work."""
    comm, (x, ids, weights), (y, handle) = _learned(size)
    expected, wrong = comm.combine(y, handle, weights), []
    before = calls_of(comm)

    def dispatches() -> None:
        for _ in range(200):
            out, routing = comm.dispatch_async(x, ids).wait()
            if not torch.equal(out.num_tokens_per_expert.sum(), (routing.topk_ids >= 0).sum()):
                wrong.append("dispatch")

    def combines() -> None:
        for _ in range(200):
            work, found = comm.combine_async(y, handle, weights), list[torch.Tensor]()
            waiting = [threading.Thread(target=lambda of=work, to=found: to.append(of.wait())) for _ in range(4)]
            for thread in waiting:
                thread.start()
            for thread in waiting:
                thread.join(60)
            if len(found) != 4 or any(one is not found[0] for one in found) or not torch.equal(found[0], expected):
                wrong.append("combine")

    threads = [threading.Thread(target=each) for each in (dispatches, combines)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not wrong and calls_of(comm) - before == 800
    comm.close()


def test_threads() -> None:
    on_ranks(1, _of_threads)


def _killed(rank: int, half: str) -> tuple[int, str] | None:
    """Rank 1 dies. Rank 0 waits for it in a half that C runs."""
    comm, (x, ids, _), _ = _learned(2)
    comm.engine.exchange.barrier("test")
    comm.engine.comm.timeout_ns = int(DEADLINE_S * 1e9)
    if half == "receive half":
        if rank == 1:
            signal_self(signal.SIGKILL)
        work = comm.dispatch_async(x, ids)
    else:  # rank 1 sends two, and receives none
        works = [comm.dispatch_async(x, ids) for _ in range(2)]
        if rank == 1:
            signal_self(signal.SIGKILL)
        for one in works:
            one.wait()
    before = calls_of(comm)
    with pytest.raises(PeerTimeout) as caught:
        work.wait() if half == "receive half" else comm.dispatch_async(x, ids)
    assert calls_of(comm) == before + 1 and _C.kept_calls()[-1][2] == half
    with pytest.raises(PeerTimeout):
        work.wait() if half == "receive half" else comm.dispatch_async(x, ids)
    with pytest.raises(PeerTimeout):
        comm.dispatch_async(x, ids)
    comm.close()
    nothing_left_behind()
    return caught.value.rank, caught.value.step


@pytest.mark.deadline
@pytest.mark.parametrize("half", ["send half", "receive half"])
def test_a_killed_rank_is_named(half: str) -> None:
    outcomes = run_ranks(2, _killed, half, timeout_s=60)
    assert outcomes.pop(1).exitcode == -9
    assert values(outcomes) == [(1, "ll_dispatch_send" if half == "send half" else "ll_dispatch_recv")]


def _ended(rank: int, half: str, by_signal: bool) -> None:
    """Rank 0 waits in C. A handler of its own raises there, or rank 1 aborts."""
    comm, (x, ids, _), _ = _learned(2)
    sent = [comm.dispatch_async(x, ids) for _ in range(2)] if half == "send half" else []  # rank 1 receives none
    comm.engine.exchange.barrier("test")
    if rank == 1:
        threading.Event().wait(1)
        if not by_signal:
            comm.abort("has had enough")
        else:
            with pytest.raises(PeerAborted) as aborted:
                sent[0].wait() if sent else comm.dispatch_async(x, ids).wait()
            assert aborted.value.rank == 0 and "_Alarm in dispatch" in str(aborted.value)
        comm.close()
        return
    for one in sent:
        one.wait()
    waits: Callable[[], object] = functools.partial(comm.dispatch_async, x, ids)
    if not sent:
        waits = comm.dispatch_async(x, ids).wait
    before = calls_of(comm)
    if by_signal:
        signal.signal(signal.SIGALRM, _raise)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
    note("waits for rank 1")
    with pytest.raises(_Alarm if by_signal else PeerAborted) as caught:
        waits()
    assert calls_of(comm) == before + 1 and _C.kept_calls()[-1][2] == half
    assert by_signal or "has had enough" in str(caught.value)
    with pytest.raises(EpPluginError, match="_Alarm in dispatch" if by_signal else "has had enough"):
        waits()
    comm.close()
    nothing_left_behind()


class _Alarm(Exception):
    pass


def _raise(*_: object) -> None:
    raise _Alarm


@pytest.mark.parametrize("half", ["send half", "receive half"])
@pytest.mark.parametrize("by_signal", [True, False])
def test_what_ends_a_wait_in_c(half: str, by_signal: bool) -> None:
    values(run_ranks(2, _ended, half, by_signal, timeout_s=60))
