"""Low-latency calls by C: the same bits from both doors, and every call that Python must check again."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ep_plugin import _C, EpPluginError, MoECommunicator, PeerAborted, record_stats
from ep_plugin.errors import CommunicatorClosed
from tests.faults.fault_cases import nothing_left_behind
from tests.moe.in_c_cases import CASE, Checks, Watching, calls_of, same_dispatches, tokens_of
from tests.moe.low_latency_cases import low_latency
from tests.moe.moe_cases import Case, named, on_ranks
from tests.ranks import note, run_ranks, values


def _both_doors(rank: int, size: int) -> None:
    """Each form twice, as an operator that PyTorch sees and directly. The second call of each needs no check."""
    case, checks = Case(tokens=(64,) * size, num_experts=4, hidden=16384, topk=2), Checks()
    seen, direct = low_latency(case), low_latency(case)
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

    def by_both(call: Callable[[int, MoECommunicator], Any]) -> list[Any]:
        with Watching():
            first = call(0, seen)
        return [first, call(1, direct)]

    for hidden, dtype, quantize, capacity in forms:
        for num_tokens in (0, 1, 16):
            x, ids, weights = tokens_of(generator, num_tokens, hidden, dtype)
            ids = ids.int() if num_tokens == 1 else ids
            weights = weights.double() if dtype is torch.float64 else weights
            how: dict[str, Any] = {"capacity": capacity, "quantize": quantize}
            for turn in range(2):
                before = checks.num, calls_of(seen), calls_of(direct)
                with named(f"{hidden} {dtype} {quantize} {capacity} {num_tokens} {turn}"):
                    made = by_both(lambda _, comm, x=x, ids=ids, how=how: comm.dispatch(x, ids, **how))
                    same_dispatches(*made)
                    again = by_both(
                        lambda at, comm, x=x, ids=ids, how=how, made=made: comm.dispatch(
                            x, ids, previous_handle=made[at][1], quantize=how["quantize"]
                        )
                    )
                    same_dispatches(*again)
                    assert again[1][1] is made[1][1]
                    for given in ((), (weights,), (weights, torch.ones_like(x)), (None, x)) if quantize is None else ():
                        sums = by_both(
                            lambda at, comm, made=made, given=given: comm.combine(
                                made[at][0].tokens, made[at][1], *given
                            )
                        )
                        assert torch.equal(*sums) and sums[0].dtype is sums[1].dtype
                    calls = 6 if quantize is None else 2
                    assert (calls_of(seen) - before[1], calls_of(direct) - before[2]) == (calls, calls)
                    assert checks.num - before[0] == (0 if turn else 2 * calls)
    seen.close()
    direct.close()


@pytest.mark.parametrize("size", [1, 2])
def test_operators_and_direct_calls_make_the_same_bits(size: int) -> None:
    on_ranks(size, _both_doors)


class _Subclass(torch.Tensor):
    pass


def _own_memory(rank: int, size: int) -> None:
    """PyTorch may not find two results of an operator in one storage."""
    x, ids = torch.randn(4, 128).bfloat16(), torch.tensor([[0, 1]] * 4)
    with low_latency(Case(tokens=(4,), num_experts=4, hidden=128, topk=2)) as comm:
        for _ in range(2):
            made = torch.ops.ep_plugin.dispatch(x, ids, None, None, None, None, [], comm.number, 0)
            again = torch.ops.ep_plugin.dispatch(x, ids, None, None, None, None, list(made[8:10]), comm.number, 0)
            for results in (made, again):
                held = [one.untyped_storage().data_ptr() for one in results if one.numel()]
                assert len(held) == len(set(held)) > 2


def test_each_result_of_the_operator_has_its_own_memory() -> None:
    on_ranks(1, _own_memory)


def _checked(rank: int, size: int) -> None:
    """After calls of a known form: each of these is checked again, and is right or refused."""
    comm, checks = low_latency(replace(CASE, tokens=(4,) * size)), Checks()
    generator = torch.Generator().manual_seed(3)
    x, ids, weights = tokens_of(generator, 4, 128, torch.bfloat16)
    for _ in range(3):
        out, handle = comm.dispatch(x, ids)
        expected = comm.combine(out.tokens, handle, weights)

    def is_checked(what: str, call: Callable[[], Any], refused: str = "", times: int = 1) -> Any:
        before = checks.num
        with named(what):
            made = None
            if refused:
                ran = calls_of(comm)
                with pytest.raises(ValueError, match=refused):
                    call()
                assert calls_of(comm) == ran
            else:
                made = call()
                assert checks.num == before + times
        return made

    def is_known(what: str, call: Callable[[], Any]) -> Any:
        return is_checked(what, call, times=0)

    def trip(rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor = weights) -> None:
        out, handle = comm.dispatch(rows, ids)
        assert torch.equal(comm.combine(out.tokens, handle, weights), expected)

    with Watching():
        is_known("a dispatch mode", lambda: trip(x, ids))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        is_known("a profiler", lambda: trip(x, ids))
    assert {"ep_plugin::dispatch", "ep_plugin::combine"} <= {event.name for event in profile.events()}
    rows = is_checked("a subclass", lambda: comm.dispatch(x.as_subclass(_Subclass), ids))[0].tokens
    assert type(rows) is _Subclass
    is_checked("a subclass, again", lambda: comm.dispatch(x, ids.as_subclass(_Subclass)))
    apart = torch.cat([x, x], dim=1)[:, :128]
    is_checked("other strides", lambda: comm.dispatch(apart, ids))
    with torch.inference_mode():  # tensors of another kind, but of the same form
        out, handle = comm.dispatch(x.clone(), ids.clone())
        assert out.tokens.is_inference() and handle.plan.is_inference()
    shifted = torch.zeros(4 * 128 + 1, dtype=torch.bfloat16)[1:].view(4, 128)
    is_checked("another alignment", lambda: comm.dispatch(shifted, ids))
    negated = torch._neg_view(x)
    out = is_known("a pending sign", lambda: comm.dispatch(negated, ids))[0]
    assert torch.equal(out.tokens[0, :1], -x[(ids == comm.rank * comm.num_local_experts).any(1)][:1]) or size > 1
    wants = x.clone().requires_grad_()
    rows = is_known("a gradient", lambda: comm.dispatch(wants, ids))[0]
    assert rows.tokens.requires_grad
    with torch.no_grad():
        assert not is_known("no gradient", lambda: comm.dispatch(wants, ids))[0].tokens.requires_grad
    small = x.clone()
    small.untyped_storage().resize_(x.nbytes - 1)
    is_checked("a storage that is too small", lambda: comm.dispatch(small, ids), "expected a storage")
    small.untyped_storage().resize_(0)
    is_checked("a storage that was freed", lambda: comm.dispatch(small, ids), "expected a storage")
    is_checked("another device", lambda: comm.dispatch(x.to("meta"), ids), "x: expected")
    is_checked("a repeated id", lambda: comm.dispatch(x, torch.zeros_like(ids)), "expected distinct experts")
    is_checked("an unknown id", lambda: comm.dispatch(x, ids + 4), "topk_ids: expected -1 or 0 to 3")
    is_checked("a capacity of another type", lambda: comm.dispatch(x, ids, capacity=True), "capacity: expected")
    is_checked("weights", lambda: comm.dispatch(x, ids, weights), "topk_weights: expected None")
    out, handle = comm.dispatch(x, ids)
    is_checked("no handle", lambda: comm.combine(out.tokens, tuple(handle)), "expected a DispatchHandle")  # type: ignore[arg-type]
    strange = handle._replace(comm=handle.comm + 1)
    is_checked("a handle of another communicator", lambda: comm.combine(out.tokens, strange), "expected one of comm")
    cut = handle._replace(plan=handle.plan[:-1])
    is_checked("a handle that was cut", lambda: comm.combine(out.tokens, cut, weights), "handle.plan: expected")
    is_known("wide weights, which are converted", lambda: comm.combine(out.tokens, handle, weights.double()))
    record_stats()
    is_known("statistics", lambda: trip(x, ids))
    assert (comm.stats().dispatches, comm.stats().combines) == (1, 1)
    record_stats(False)
    work = comm.dispatch_async(x, ids)
    is_known("an un-received dispatch", lambda: comm.dispatch(x, ids))
    work.wait()
    for name in ("", "\0", "e4m3\0", "\udcff"):
        is_checked("a name like none", lambda name=name: comm.dispatch(x, ids, quantize=name), "quantize: expected")
    is_checked("a very large capacity", lambda: comm.dispatch(x, ids, capacity=2**70), "capacity: expected")
    torch.use_deterministic_algorithms(True)
    try:
        is_known("deterministic algorithms", lambda: trip(x, ids))
        rows = comm.dispatch(x, torch.full_like(ids, -1))[0].tokens
        assert rows.isnan().all(), "new memory was not filled"
    finally:
        torch.use_deterministic_algorithms(False)
    comm.close()
    for call in (lambda: comm.dispatch(x, ids), lambda: comm.combine(out.tokens, handle, weights)):
        with pytest.raises(CommunicatorClosed):
            call()


@pytest.mark.parametrize("size", [1, 2])
def test_what_is_checked_again(size: int) -> None:
    on_ranks(size, _checked)


def _keeps_nothing(rank: int, size: int) -> None:
    comm = low_latency(replace(CASE, tokens=(4,) * size))
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
    communicators = [low_latency(replace(CASE, tokens=(4,), dtype=torch.float32))]
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
    comm = low_latency(CASE)
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
    comm = low_latency(CASE)
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
    comm = low_latency(CASE)
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
    comm = low_latency(replace(CASE, tokens=(4,)))
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
    comm = low_latency(replace(CASE, tokens=(4,)))
    x, ids, _ = tokens_of(torch.Generator().manual_seed(3), 4, 128, torch.bfloat16)
    for turn in range(1, 4):
        comm.dispatch(x, ids)
        calls, *call, began, ended = _C.kept_calls()[-1]
        assert calls is comm.engine.calls and call == ["dispatch", "", turn + 2, turn, x.nbytes]
        assert ended is not None and began <= ended
    comm.close()


def test_c_logs_its_calls() -> None:
    on_ranks(1, _logged)
