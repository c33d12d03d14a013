"""Signals while a rank waits for its peers: handlers run at once, and Ctrl-C ends the wait here and on the peers."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch

from ep_plugin import _C
from ep_plugin.errors import CommunicatorClosed, EpPluginError, PeerAborted
from tests.faults.fault_cases import (
    at_gate,
    nothing_left_behind,
    open_communicator,
    replace_kernels,
    round_trip,
    signal_self,
    tokens_for,
)
from tests.ranks import run_ranks, values

SIZE = 3
HELD, INTERRUPTED = 0, 1
THREE_CHUNKS = 80
PATIENCE_S = 20.0  # far more than any test here may take: nothing ends by a deadline
AT_ONCE_S = 1.0

# The kernel in which a rank waits, and the gate at which the rank that it waits for is held.
WAITS = {"notify": _C.Step.NOTIFY, "dispatch_recv": _C.Step.DISPATCH_SEND, "combine_recv": _C.Step.DISPATCH_RECV}


def _interrupt_in(comm: Any, kernel: str, sent: list[float]) -> None:
    """Sends SIGINT to this process when its main thread is in `kernel`; notes when."""
    original, entered = getattr(_C.cpu, kernel), threading.Event()

    def enter(args: Any) -> None:
        entered.set()
        original(args)

    def interrupt() -> None:
        entered.wait()
        sent.append(time.monotonic())
        signal_self(signal.SIGINT)

    replace_kernels(comm, **{kernel: enter})
    threading.Thread(target=interrupt, daemon=True).start()


def _ctrl_c(rank: int, kernel: str) -> tuple[BaseException, float, list[float]]:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    comm = open_communicator(SIZE, timeout_s=PATIENCE_S)
    round_trip(comm, THREE_CHUNKS)  # the pools are there when it happens
    sent: list[float] = []
    if rank == HELD:
        comm.engine.comm.gate = WAITS[kernel]
    if rank == INTERRUPTED:
        _interrupt_in(comm, kernel, sent)
    x, ids, weights = tokens_for(rank, SIZE, THREE_CHUNKS)
    with pytest.raises((KeyboardInterrupt, PeerAborted)) as caught:
        out, handle = comm.dispatch(x, ids, weights)
        comm.combine(out.tokens, handle, weights=out.weights)
    raised_at = time.monotonic()
    with pytest.raises(EpPluginError, match="KeyboardInterrupt"):
        comm.dispatch(x, ids, weights)
    comm.close()
    nothing_left_behind()
    return caught.value, raised_at, sent


@pytest.mark.parametrize("kernel", WAITS)
def test_ctrl_c_ends_a_wait_at_once_and_tells_the_peers(kernel: str) -> None:
    outcomes = values(run_ranks(SIZE, _ctrl_c, kernel))
    sent = outcomes[INTERRUPTED][2][0]
    for rank, (error, raised_at, _) in enumerate(outcomes):
        assert raised_at - sent < AT_ONCE_S, rank
        if rank == INTERRUPTED:
            assert isinstance(error, KeyboardInterrupt), repr(error)
            continue
        assert isinstance(error, PeerAborted) and error.rank == INTERRUPTED, repr(error)
        assert error.reason == f"KeyboardInterrupt in {'combine' if kernel == 'combine_recv' else 'dispatch'}"


def _held_communicator() -> Any:
    """One rank that is held in notify until its gate is opened."""
    os.environ["EP_PLUGIN_TEST_GATE"] = "notify"
    return open_communicator(1, num_experts=4, timeout_s=PATIENCE_S)


def _round_trip_alone(comm: Any) -> None:
    x, ids, weights = tokens_for(0, 2, 5)
    out, handle = comm.dispatch(x, ids, weights)
    torch.testing.assert_close(comm.combine(out.tokens, handle, weights=out.weights), x)


def _handler_goes_on(rank: int) -> None:
    comm = _held_communicator()
    board = comm.engine.boards.address
    signal.signal(signal.SIGUSR1, lambda *_: _C.open_gate(board))
    at_gate(comm, lambda: signal_self(signal.SIGUSR1))
    _round_trip_alone(comm)  # ends because the handler has run while it waited


def _handler_closes(rank: int) -> None:
    comm = _held_communicator()
    signal.signal(signal.SIGUSR1, lambda *_: comm.close())
    at_gate(comm, lambda: signal_self(signal.SIGUSR1))
    with pytest.raises(PeerAborted, match="rank 0 aborted: closed by a signal handler during an operation"):
        _round_trip_alone(comm)
    with pytest.raises(CommunicatorClosed):
        comm.check()
    nothing_left_behind()


def _handler_operates(rank: int) -> None:
    comm, other = _held_communicator(), open_communicator(1)
    board, refused = comm.engine.boards.address, []

    def handler(*_: Any) -> None:
        for used in (comm, other):  # they share the device
            with pytest.raises(EpPluginError, match="expected no operation during one of .*, got dispatch in the hand"):
                used.dispatch(torch.ones(3, 8), torch.tensor([[0, 1]] * 3))
            refused.append(used)
        _C.open_gate(board)

    signal.signal(signal.SIGUSR1, handler)
    at_gate(comm, lambda: signal_self(signal.SIGUSR1))
    _round_trip_alone(comm)  # goes on as if nothing had happened
    assert refused == [comm, other]
    for used in refused:
        used.check()
        used.close()


def _other_thread_waits(rank: int) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    comm = _held_communicator()
    worker = threading.Thread(target=_round_trip_alone, args=(comm,))
    at_gate(comm, lambda: signal_self(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        worker.start()
        worker.join()
    _C.open_gate(comm.engine.boards.address)
    worker.join()
    comm.check()  # what another thread was doing is not this signal's business


def _ticket(rank: int) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    comm = open_communicator(1)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        threading.Thread(target=signal_self, args=(signal.SIGINT,)).start()
        comm.engine.wait_totals(1, segments=1)  # no notify has been launched
    assert time.monotonic() - began < AT_ONCE_S


def _handler_closes_before_a_kernel(rank: int) -> None:
    """In the first of two calls that are alike, which Python begins, and in one that C begins."""
    for warm in (False, True):
        comm = open_communicator(1, num_experts=4)
        if warm:
            for _ in range(2):
                _round_trip_alone(comm)
            other = threading.Thread(target=_round_trip_alone, args=(comm,))
            other.start()
            other.join()
        comm.engine.used_by_this_thread = comm.close  # Python runs here, so a handler may
        with pytest.raises(EpPluginError, match="closed by a signal handler during an operation"):
            _round_trip_alone(comm)
        assert comm.engine.closed


def _handler_waits(rank: int) -> None:
    """The wait for one communicator's operation is refused during another one's, and possible later."""
    comm, other = (open_communicator(1, num_experts=4) for _ in range(2))
    x, ids, weights = tokens_for(0, 2, 5)
    work = comm.dispatch_async(x, ids, weights)

    def waits(args: Any) -> None:
        with pytest.raises(EpPluginError, match="expected no operation during one of"):
            work.wait()
        _C.cpu.notify(args)

    replace_kernels(other, notify=waits)
    _round_trip_alone(other)
    out, handle = work.wait()
    comm.combine(out.tokens, handle)


@pytest.mark.parametrize(
    "case",
    [
        _handler_goes_on,
        _handler_closes,
        _handler_closes_before_a_kernel,
        _handler_operates,
        _handler_waits,
        _other_thread_waits,
        _ticket,
    ],
)
def test_signals_of_a_single_rank(case: Any) -> None:
    (outcome,) = run_ranks(1, case)
    values([outcome])
    assert outcome.seconds < PATIENCE_S / 2
