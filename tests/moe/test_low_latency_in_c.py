"""Low-latency calls that C starts: the same bits as by Python, and every call that C must leave to Python."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from ep_plugin import _C, EpPluginError, PeerAborted, record_stats
from ep_plugin.errors import CommunicatorClosed
from tests.faults.fault_cases import nothing_left_behind
from tests.moe.in_c_cases import calls_of, made_by, same_dispatches, tokens_of
from tests.moe.moe_cases import Case, named, on_ranks
from tests.ranks import note, run_ranks, values


def _both(rank: int, size: int) -> None:
    """Each form twice by both: the second call of C is its own."""
    case = Case(tokens=(64,) * size, num_experts=4, hidden=16384, topk=2)
    python, c = made_by("python", case), made_by("c", case)
    generator = torch.Generator().manual_seed(rank)
    forms: list[tuple[int, torch.dtype, str | None, int | None]] = [
        (128, torch.bfloat16, None, None),
        (128, torch.float32, None, 16 * size),
        (256, torch.float16, "e4m3", None),
        (640, torch.bfloat16, "e4m3_pow2", 64 * size),
        (640, torch.bfloat16, "e4m3_ue8m0", None),
        (128, torch.float64, None, None),
        (16384, torch.float32, None, None),  # rows of 32 MiB, whose memory is used again
    ]
    for hidden, dtype, quantize, capacity in forms:
        for num_tokens in (0, 1, 16):
            x, ids, weights = tokens_of(generator, num_tokens, hidden, dtype)
            ids = ids.int() if num_tokens == 1 else ids
            weights = weights.double() if dtype is torch.float64 else weights
            before = calls_of(c)
            for turn in range(2):
                with named(f"{hidden} {dtype} {quantize} {capacity} {num_tokens} {turn}"):
                    made = [comm.dispatch(x, ids, capacity=capacity, quantize=quantize) for comm in (python, c)]
                    same_dispatches(*made)
                    again = [
                        comm.dispatch(x, ids, previous_handle=handle, quantize=quantize)
                        for comm, (_, handle) in zip((python, c), made, strict=True)
                    ]
                    same_dispatches(*again)
                    assert again[1][1] is made[1][1]
                    if quantize is None:
                        for given in ((), (weights,), (weights, torch.ones_like(x)), (None, x)):
                            sums = [
                                comm.combine(out.tokens, handle, *given)
                                for comm, (out, handle) in zip((python, c), made, strict=True)
                            ]
                            assert torch.equal(*sums) and sums[0].dtype is sums[1].dtype
            expected = 6 if quantize is None else 2
            assert calls_of(c) - before == expected, f"{calls_of(c) - before} calls like an earlier one ran in C"
    assert calls_of(python) == 0
    python.close()
    c.close()


@pytest.mark.parametrize("size", [1, 2])
def test_c_and_python_make_the_same_bits(size: int) -> None:
    on_ranks(size, _both)


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _Subclass(torch.Tensor):
    pass


def _left_to_python(rank: int, size: int) -> None:
    """After calls that C ran: each of these goes through Python, and is right or refused as ever."""
    comm = made_by("c", Case(tokens=(4,) * size, num_experts=4, hidden=128, topk=2, dtype=torch.bfloat16))
    generator = torch.Generator().manual_seed(3)
    x, ids, weights = tokens_of(generator, 4, 128, torch.bfloat16)
    for _ in range(3):
        out, handle = comm.dispatch(x, ids)
        expected = comm.combine(out.tokens, handle, weights)

    def is_left(what: str, call: Callable[[], Any], refused: str = "") -> Any:
        before = calls_of(comm)
        with named(what):
            made = None
            if refused:
                with pytest.raises(ValueError, match=refused):
                    call()
            else:
                made = call()
            assert calls_of(comm) == before
        return made

    def trip(rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor = weights) -> None:
        out, handle = comm.dispatch(rows, ids)
        assert torch.equal(comm.combine(out.tokens, handle, weights), expected)

    with _Mode():
        is_left("a dispatch mode", lambda: trip(x, ids))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        is_left("a profiler", lambda: trip(x, ids))
    is_left("a subclass", lambda: comm.dispatch(x.as_subclass(_Subclass), ids))
    apart = torch.cat([x, x], dim=1)[:, :128]
    is_left("other strides", lambda: comm.dispatch(apart, ids))
    with torch.inference_mode():  # tensors of another kind, but of the same form
        out, handle = comm.dispatch(x.clone(), ids.clone())
        assert out.tokens.is_inference() and handle.plan.is_inference()
    shifted = torch.zeros(4 * 128 + 1, dtype=torch.bfloat16)[1:].view(4, 128)
    is_left("another alignment", lambda: comm.dispatch(shifted, ids))
    negated = torch._neg_view(x)
    is_left("a pending sign", lambda: comm.dispatch(negated, ids))
    wants = x.clone().requires_grad_()
    rows = is_left("a gradient", lambda: comm.dispatch(wants, ids))[0]
    assert rows.tokens.requires_grad
    with torch.no_grad():
        before = calls_of(comm)
        comm.dispatch(wants, ids)
        assert calls_of(comm) == before + 1
    small = x.clone()
    small.untyped_storage().resize_(x.nbytes - 1)
    is_left("a storage that is too small", lambda: comm.dispatch(small, ids), "expected a storage")
    small.untyped_storage().resize_(0)
    is_left("a storage that was freed", lambda: comm.dispatch(small, ids), "expected a storage")
    is_left("another device", lambda: comm.dispatch(x.to("meta"), ids), "x: expected")
    is_left("a repeated id", lambda: comm.dispatch(x, torch.zeros_like(ids)), "expected distinct experts")
    is_left("an unknown id", lambda: comm.dispatch(x, ids + 4), "topk_ids: expected -1 or 0 to 3")
    is_left("a capacity of another type", lambda: comm.dispatch(x, ids, capacity=True), "capacity: expected")
    is_left("weights", lambda: comm.dispatch(x, ids, weights), "topk_weights: expected None")
    is_left("no handle", lambda: comm.combine(out.tokens, tuple(handle)), "expected a DispatchHandle")  # type: ignore[arg-type]
    strange = handle._replace(comm=handle.comm + 1)
    is_left("a handle of another communicator", lambda: comm.combine(out.tokens, strange), "expected one of comm")
    cut = handle._replace(plan=handle.plan[:-1])
    is_left("a handle that was cut", lambda: comm.combine(out.tokens, cut, weights), "handle.plan: expected")
    is_left("wide weights", lambda: comm.combine(out.tokens, handle, weights.double()))
    record_stats()
    is_left("statistics", lambda: trip(x, ids))
    assert comm.stats().dispatches == 1
    record_stats(False)
    work = comm.dispatch_async(x, ids)
    is_left("an un-received dispatch", lambda: comm.dispatch(x, ids))
    work.wait()
    for name in ("", "\0", "e4m3\0", "\udcff"):
        is_left("a name like none", lambda name=name: comm.dispatch(x, ids, quantize=name), "quantize: expected")
    is_left("a very large capacity", lambda: comm.dispatch(x, ids, capacity=2**70), "capacity: expected")
    torch.use_deterministic_algorithms(True)
    try:
        is_left("deterministic algorithms, which fill new memory", lambda: trip(x, ids))
    finally:
        torch.use_deterministic_algorithms(False)
    before = calls_of(comm)
    trip(x, ids)
    assert calls_of(comm) == before + 2
    comm.close()
    for call in (lambda: comm.dispatch(x, ids), lambda: comm.combine(out.tokens, handle, weights)):
        with pytest.raises(CommunicatorClosed):
            call()


@pytest.mark.parametrize("size", [1, 2])
def test_what_c_leaves_to_python(size: int) -> None:
    on_ranks(size, _left_to_python)


def _keeps_nothing(rank: int, size: int) -> None:
    comm = made_by("c", Case(tokens=(4,) * size, num_experts=4, hidden=128, topk=2, dtype=torch.bfloat16))
    x, ids, weights = tokens_of(torch.Generator().manual_seed(3), 4, 128, torch.bfloat16)

    def turn() -> None:
        out, handle = comm.dispatch(x, ids)
        comm.dispatch(x, ids, previous_handle=handle)
        comm.combine(out.tokens, handle, weights)
        with pytest.raises(ValueError, match="topk_ids"):
            comm.dispatch(x, ids + 4)

    for _ in range(400):  # the latest calls of the process are kept, up to 1000
        turn()
    gc.collect()
    before = len(gc.get_objects()), calls_of(comm)
    references = [torch._C._storage_Use_Count(t.untyped_storage()._cdata) for t in (x, ids, weights)]
    for _ in range(1000):
        turn()
    gc.collect()
    assert len(gc.get_objects()) - before[0] < 50
    assert references == [torch._C._storage_Use_Count(t.untyped_storage()._cdata) for t in (x, ids, weights)]
    assert calls_of(comm) - before[1] == 3000
    comm.close()


@pytest.mark.slow
def test_c_keeps_nothing() -> None:
    on_ranks(1, _keeps_nothing)


def _calls_of_threads(rank: int, size: int) -> None:
    """Threads call one communicator at once, and each result is its own. A function of C outlives its communicator."""
    communicators = [made_by("c", Case(tokens=(4,), num_experts=4, hidden=128, topk=2, dtype=torch.float32))]
    ids, wrong = torch.tensor([[0, 1], [1, 2], [2, 3], [3, 0]]), []

    def calls(number: int) -> None:
        x = torch.full((4, 128), float(number))
        for _ in range(200):
            out, handle = communicators[0].dispatch(x, ids)
            if not torch.equal(communicators[0].combine(out.tokens, handle), 2 * x):
                wrong.append(number)

    threads = [threading.Thread(target=calls, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong and calls_of(communicators[0]) > 1000
    called = communicators[0]._in_c.dispatch
    communicators.pop().close()
    gc.collect()
    assert called(torch.zeros(4, 128), ids, None, None, None, None, None) is None


def test_threads_in_c() -> None:
    on_ranks(1, _calls_of_threads)


class _Alarm(Exception):
    pass


def _interrupted(rank: int) -> str:
    """Rank 0's handler raises while C waits for rank 1, which then raises at once."""
    comm = made_by("c")
    x, ids, _ = tokens_of(torch.Generator().manual_seed(3), 4, 128, torch.bfloat16)
    for _ in range(2):
        comm.dispatch(x, ids)
    before = calls_of(comm)
    if rank == 0:

        def handler(*_: object) -> None:
            raise _Alarm

        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        note("waits for rank 1")
        with pytest.raises(_Alarm):
            comm.dispatch(x, ids)
        assert calls_of(comm) == before + 1
        with pytest.raises(EpPluginError, match="failed earlier on this rank: _Alarm in dispatch"):
            comm.dispatch(x, ids)
    else:
        threading.Event().wait(1)
        with pytest.raises(PeerAborted) as caught:
            comm.dispatch(x, ids)
        assert caught.value.rank == 0
        comm.close()
        nothing_left_behind()
        return str(caught.value)
    comm.close()
    nothing_left_behind()
    return ""


def test_a_signal_ends_a_wait_in_c() -> None:
    assert "_Alarm in dispatch" in values(run_ranks(2, _interrupted, timeout_s=30))[1]


def _interrupted_at_the_lock(rank: int) -> bool:
    """While a thread of rank 0 waits for rank 1 in C, the main thread waits for the thread's lock."""
    comm = made_by("c")
    x, ids, _ = tokens_of(torch.Generator().manual_seed(3), 4, 128, torch.bfloat16)
    for _ in range(2):
        comm.dispatch(x, ids)
    if rank == 0:

        def handler(*_: object) -> None:
            raise _Alarm

        signal.signal(signal.SIGALRM, handler)
        thread = threading.Thread(target=comm.dispatch, args=(x, ids))
        thread.start()
        threading.Event().wait(0.2)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(_Alarm):
            comm.dispatch(x, ids)
        assert thread.is_alive()
        dist.barrier()
        thread.join(20)
    else:
        dist.barrier()
        comm.dispatch(x, ids)
    comm.dispatch(x, ids)
    comm.close()
    return True


def test_a_signal_ends_the_wait_for_a_turn_in_c() -> None:
    values(run_ranks(2, _interrupted_at_the_lock, timeout_s=30))


def _closes_in_a_handler(rank: int) -> None:
    comm = made_by("c")
    x, ids, _ = tokens_of(torch.Generator().manual_seed(3), 4, 128, torch.bfloat16)
    for _ in range(2):
        comm.dispatch(x, ids)
    if rank == 0:
        signal.signal(signal.SIGALRM, lambda *_: comm.close())
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(EpPluginError, match="closed by a signal handler"):
            comm.dispatch(x, ids)
        assert comm.engine.closed
    else:
        threading.Event().wait(1)
        with pytest.raises(PeerAborted, match="closed by a signal handler"):
            comm.dispatch(x, ids)
    comm.close()
    nothing_left_behind()


def test_a_handler_may_close_during_a_wait_in_c() -> None:
    values(run_ranks(2, _closes_in_a_handler, timeout_s=30))


def _forked(rank: int, size: int) -> None:
    comm = made_by("c", Case(tokens=(4,), num_experts=4, hidden=128, topk=2, dtype=torch.bfloat16))
    x, ids, _ = tokens_of(torch.Generator().manual_seed(3), 4, 128, torch.bfloat16)
    for _ in range(2):
        comm.dispatch(x, ids)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            comm.dispatch(x, ids)
        except EpPluginError as error:
            code = 3 if "forked child" in str(error) else 2
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    comm.dispatch(x, ids)
    comm.close()


def test_a_forked_child_may_not_call_c() -> None:
    on_ranks(1, _forked)


def _logged(rank: int, size: int) -> None:
    """The calls that a failure writes, and their end."""
    comm = made_by("c", Case(tokens=(4,), num_experts=4, hidden=128, topk=2, dtype=torch.bfloat16))
    x, ids, _ = tokens_of(torch.Generator().manual_seed(3), 4, 128, torch.bfloat16)
    for turn in range(1, 4):
        comm.dispatch(x, ids)
        calls, *call, began, ended = _C.kept_calls()[-1]
        assert calls is comm.engine.calls and call == ["dispatch", "", turn + 1, turn, x.nbytes]
        assert ended is not None and began <= ended
    comm.close()


def test_c_logs_its_calls() -> None:
    on_ranks(1, _logged)
