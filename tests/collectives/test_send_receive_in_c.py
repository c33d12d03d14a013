"""SendReceive's calls that C starts by itself, those that it leaves to Python, and waits in C."""

from __future__ import annotations

import datetime
import gc
import os
import signal
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ep_plugin import DisagreementError, EpPluginError, PeerAborted, PeerTimeout, Receive, Send, SendReceive
from tests.faults.fault_cases import nothing_left_behind
from tests.ranks import run_ranks, values

MIB = 2**20


def _calls(p2p: SendReceive) -> int:
    assert p2p._engine is not None
    return p2p._engine.control.num_calls


class Named(torch.Tensor):
    """A subclass that stands for no other values."""


def _freed() -> torch.Tensor:
    freed = torch.ones(1000)
    freed.untyped_storage().resize_(0)
    return freed


def _is_in_c(rank: int) -> None:
    """Every kind of call of plain tensors, and none of another kind."""
    peer, x = 1 - rank, torch.arange(12.0).view(3, 4)
    with SendReceive() as p2p:

        def started(own: torch.Tensor, into: torch.Tensor, by_c: bool) -> None:
            before = _calls(p2p)
            p2p.exchange(own, into, peer, peer).wait()
            assert _calls(p2p) - before == by_c, (type(own), own.shape, own.stride())
            assert torch.equal(into, own)

        got = torch.zeros_like(x)
        (p2p.send(x, 1) if rank == 0 else p2p.receive(got, 0)).wait()
        (p2p.receive(got, 1) if rank == 0 else p2p.send(x, 0)).wait()
        p2p.batch([Send(x, peer), Receive(got, peer)]).wait()
        p2p.batch((Send(x, peer, 1), Receive(got, peer, 1))).wait()
        assert _calls(p2p) == 4 and torch.equal(got, x)
        for dtype in (torch.float64, torch.bfloat16, torch.int8, torch.bool, torch.float8_e4m3fn):
            started(x.to(dtype), torch.zeros(3, 4, dtype=dtype), True)
        started(torch.zeros(0, 3), torch.zeros(0, 3), True)
        started(torch.ones(()), torch.zeros(()), True)
        started(x[1:], torch.zeros(2, 4), True)
        started(x.clone().requires_grad_(), torch.zeros(3, 4), True)
        started(torch.nn.Parameter(x), torch.zeros(3, 4), True)
        started(x.t(), torch.zeros(3, 4).t(), False)
        started(x.to(torch.complex64), torch.zeros(3, 4, dtype=torch.complex64), False)
        started(x.as_subclass(Named), torch.zeros(3, 4), False)
        before = _calls(p2p)
        p2p.batch([Send(x, rank), Receive(got, rank), Send(x, peer), Receive(got, peer)]).wait()
        assert _calls(p2p) == before
    nothing_left_behind()


def test_plain_tensors_are_sent_by_c() -> None:
    values(run_ranks(2, _is_in_c))


def _is_refused(rank: int) -> None:
    """What Python refuses is refused after calls that C has started, too, and starts nothing."""
    peer, x, got = 1 - rank, torch.ones(4, 4), torch.zeros(4, 4)
    with SendReceive() as p2p:
        p2p.exchange(x, got, peer, peer).wait()
        before = _calls(p2p)
        refused: list[tuple[Any, str]] = [
            (x[:, ::2], r"contiguous tensor"),
            (_freed(), r"it was freed, or resized"),
            (x.to_sparse(), r"expected a dense tensor"),
            (torch.complex(x, x).conj().imag, r"whose conjugation, sign or zeros are pending"),
            (None, r"expected a tensor, got NoneType"),
        ]
        for tensor, message in refused:
            for call in (p2p.send, p2p.receive):
                with pytest.raises(ValueError, match=message):
                    call(tensor, peer)
        for wrong in (2, -1, True, 2**70, 0.0):
            with pytest.raises(ValueError, match=r"dst: expected 0 to 1, got"):
                p2p.send(x, wrong)  # type: ignore[arg-type]
            with pytest.raises(ValueError, match=r"channel: expected 0 to 1, got"):
                p2p.send(x, peer, wrong)  # type: ignore[arg-type]
        assert _calls(p2p) == before and not p2p._engine.control.kept()  # type: ignore[union-attr]
        p2p.exchange(2 * x, got, peer, peer).wait()
        assert torch.equal(got, 2 * x)
    with pytest.raises(EpPluginError, match="closed"):
        p2p.send(x, peer)
    nothing_left_behind()


def test_what_python_refuses_starts_nothing() -> None:
    values(run_ranks(2, _is_refused))


def _disagrees(rank: int) -> str:
    """The other end has another dtype, after a call in which both had the same."""
    p2p, peer, got = SendReceive(), 1 - rank, torch.zeros(8)
    p2p.exchange(torch.ones(8), got, peer, peer).wait()
    dist.barrier()
    sent, into = (torch.ones(8), got) if rank == 0 else (torch.ones(8, dtype=torch.int32), got.to(torch.int32))
    with pytest.raises(DisagreementError) as caught:
        p2p.exchange(sent, into, peer, peer).wait()
    with pytest.raises(DisagreementError):
        p2p.send(sent, peer)
    assert _calls(p2p) == 2
    p2p.close()
    nothing_left_behind()
    return str(caught.value)


def test_another_dtype_at_the_other_end() -> None:
    for said in values(run_ranks(2, _disagrees)):
        assert "torch.float32 on rank 0" in said and "torch.int32 on rank 1" in said


def _keeps(rank: int) -> bool:
    """What is sent stays when its tensor gets other memory, and goes after the wait. Nobody keeps the other Works."""
    with SendReceive() as p2p:
        if rank == 1:
            got = torch.zeros(3, 4 * MIB, dtype=torch.uint8)
            dist.barrier()
            for one in got:
                p2p.receive(one, 0).wait()
            return got.flatten().unique(return_counts=True)[1].tolist() == [4 * MIB] * 3
        sent = [torch.full((4 * MIB,), number, dtype=torch.uint8) for number in range(3)]
        works = [p2p.send(one, 1) for one in sent]
        for one in sent:
            one.data = torch.empty(0, dtype=torch.uint8)
        work = works.pop()
        del works, sent, one
        gc.collect()
        torch.full((16 * MIB,), 255, dtype=torch.uint8)  # it would take memory that was freed
        dist.barrier()
        work.wait()
        kept = p2p._engine.control.kept()  # type: ignore[union-attr]
        assert work._started not in kept and all(started.memory for started in kept)
        return len(kept) == 2 and work._started.memory is None  # type: ignore[union-attr]


def test_memory_stays_until_its_messages_are_over() -> None:
    assert values(run_ranks(2, _keeps)) == [True, True]


def _posts_in_a_handler(rank: int) -> list[float]:
    """The handler of a signal sends and waits while the same thread waits."""
    with SendReceive() as p2p:
        got, extra, own = torch.zeros(1), torch.zeros(1), torch.ones(1)
        if rank == 1:
            p2p.receive(extra, 0, channel=1).wait()  # of the handler
            p2p.send(extra + 1, 0).wait()
            return extra.tolist()
        waited: list[bool] = []

        def handler(*_: Any) -> None:
            waited.append(p2p._engine.control.is_waiting)  # type: ignore[union-attr]
            p2p.send(own, 1, channel=1).wait()

        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        p2p.receive(got, 1).wait()
        assert waited == [True] and not p2p._engine.control.is_waiting  # type: ignore[union-attr]
        return got.tolist()


def test_a_handler_may_send_during_a_wait() -> None:
    assert values(run_ranks(2, _posts_in_a_handler, timeout_s=30)) == [[2.0], [1.0]]


def _ctrl_c(rank: int) -> float:
    """Ctrl-C ends a wait at once, here and on the peer."""
    p2p = SendReceive()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    dist.barrier()
    if rank == 0:
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    began = time.monotonic()
    with pytest.raises((KeyboardInterrupt, PeerAborted)) as caught:
        p2p.receive(torch.zeros(1), 1 - rank).wait()
    seconds = time.monotonic() - began
    assert isinstance(caught.value, KeyboardInterrupt if rank == 0 else PeerAborted)
    with pytest.raises(EpPluginError, match="KeyboardInterrupt in send-receive"):
        p2p.send(torch.zeros(1), 1 - rank)
    p2p.close()
    nothing_left_behind()
    return seconds


def test_ctrl_c_ends_a_wait_at_once() -> None:
    assert max(values(run_ranks(2, _ctrl_c, timeout_s=30))) < 10


def _two_wait(rank: int) -> bool:
    """Two threads wait for one Work, with and without a timeout, which ends no message."""
    with SendReceive() as p2p:
        got = torch.zeros(1)
        if rank == 1:
            dist.barrier()
            p2p.send(torch.ones(1), 0).wait()
            return True
        work, arrived = p2p.receive(got, 1), list[bool]()
        with pytest.raises(PeerTimeout, match="expected the messages to end within"):
            work.wait(datetime.timedelta(seconds=0.05))
        limits = (None, datetime.timedelta(seconds=20))
        threads = [threading.Thread(target=lambda limit=limit: arrived.append(work.wait(limit))) for limit in limits]
        for thread in threads:
            thread.start()
        while p2p._engine.control.num_waiters < 2:  # type: ignore[union-attr]
            time.sleep(0.001)
        dist.barrier()
        for thread in threads:
            thread.join()
        return arrived == [True, True] and got.item() == 1 and work.wait() and work.is_success()


def test_two_threads_may_wait_for_one_work() -> None:
    assert values(run_ranks(2, _two_wait, timeout_s=40)) == [True, True]
