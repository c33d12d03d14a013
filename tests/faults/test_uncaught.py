"""Exceptions that nobody catches, ends that are no failures, and forked children: what peers hear of them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ep_plugin import HierarchicalAllGather
from ep_plugin.errors import EpPluginError, PeerAborted
from ep_plugin.runtime import uncaught
from tests.faults.fault_cases import open_communicator, round_trip
from tests.ranks import run_ranks, values

PATIENCE_S = 20.0  # far more than any test here may take: nothing ends by a deadline
QUICKLY_S = 5.0


SCRIPT = """
import datetime, multiprocessing, sys, threading
import torch.distributed as dist
from tests.faults.fault_cases import open_communicator, round_trip
rank, port, how = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
def fail():
    round_trip(comm)
    raise LookupError("nothing to train on")
def main():
    global comm
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=datetime.timedelta(seconds=60))
    comm = open_communicator(2, timeout_s=20)
    if rank == 0:
        round_trip(comm)
        round_trip(comm)
    elif how == "thread":
        thread = threading.Thread(target=fail)
        thread.start()
        thread.join()
        comm.check()
    else:
        fail()
if how == "process of a rank":
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    kept = open_communicator(1)
    dist.destroy_process_group()
if how.startswith("process"):
    child = multiprocessing.get_context("fork").Process(target=main)
    child.start()
    child.join()
    sys.exit(child.exitcode)
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["script", "thread", "process", "process of a rank"])
def test_an_uncaught_exception_reaches_peers(how: str) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    scripts = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(rank), str(store.port), how],
            stderr=subprocess.PIPE,
            text=True,
            cwd=_root(),
        )
        for rank in range(2)
    ]
    errors = []
    try:
        errors = [script.communicate(timeout=200)[1] for script in scripts]
    finally:
        for script in scripts:
            script.kill()
            script.wait()
    assert [script.returncode for script in scripts] == [1, 1]
    assert "rank 1 aborted: LookupError: nothing to train on" in errors[0]
    assert errors[1].rstrip().endswith("LookupError: nothing to train on")


def _ends_cleanly(rank: int) -> None:
    """What leaves a ``with`` block says of no failure: peers go on."""

    def rows() -> Iterator[int]:
        with open_communicator(2, timeout_s=PATIENCE_S) as comm:
            round_trip(comm)
            yield 1

    for end in (SystemExit(), SystemExit(0)):
        comm, gather = open_communicator(2, timeout_s=PATIENCE_S), HierarchicalAllGather()
        round_trip(comm)
        gather(torch.empty(2), torch.ones(1))
        if rank == 1:
            with contextlib.suppress(SystemExit), comm, gather:
                raise end
        dist.barrier()
        if rank == 0:
            for made in (comm, gather):
                made.check()
                made.close()
    generator = rows()
    assert next(generator) == 1
    generator.close()
    with open_communicator(2, timeout_s=PATIENCE_S) as comm:
        round_trip(comm)
        child = os.fork() if rank == 1 else 0
        if rank == 1 and child == 0:
            with contextlib.suppress(LookupError), comm:
                raise LookupError("in a child, which is no rank")
            os._exit(0)
        if rank == 1:
            os.waitpid(child, 0)
        dist.barrier()
        round_trip(comm)


def _child_uses(rank: int) -> None:
    """A child of a fork shares the rank's memory: what it sent would be added to what the rank expects."""
    gather = HierarchicalAllGather()
    with open_communicator(2, timeout_s=PATIENCE_S) as comm, gather:
        round_trip(comm)
        gather(torch.empty(2), torch.ones(1))
        with _locked_by_a_thread(comm):
            child = os.fork()
            if child == 0:
                signal.alarm(int(QUICKLY_S))
                os._exit(_misuse(comm, gather))
        assert os.waitpid(child, 0)[1] == 0
        dist.barrier()
        for made in (comm, gather):
            made.check()
        round_trip(comm)
        gather(torch.empty(2), torch.ones(1))


@contextlib.contextmanager
def _locked_by_a_thread(comm: Any) -> Iterator[None]:
    locked, over = threading.Event(), threading.Event()

    def hold() -> None:
        with comm.engine.lock:
            locked.set()
            over.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    locked.wait()
    yield
    over.set()
    thread.join()


def _misuse(comm: Any, gather: Any) -> int:
    """In the child: how many uses were not refused, or touched the parent's communicators."""
    wrong: list[str] = []
    comm.engine._resources.callback(wrong.append, "gave back")
    uses = [lambda: round_trip(comm), lambda: gather(torch.empty(2), torch.ones(1)), comm.check, gather.check]
    for use in uses:
        try:
            use()
            wrong.append("went on")
        except EpPluginError as error:
            if f"expected to be used by the process that made it, got its forked child {os.getpid()}" not in str(error):
                wrong.append(str(error))
    for made in (comm, gather):
        made.abort("in a child, which is no rank")
        made.close()
    uncaught.abort_all(LookupError("in a child, which is no rank"))
    return len(wrong)


def test_a_forked_child_is_refused() -> None:
    values(run_ranks(2, _child_uses))


def test_a_clean_end_and_a_forked_child_tell_peers_nothing() -> None:
    values(run_ranks(2, _ends_cleanly))


def _ends_with(rank: int, code: object) -> str:
    comm = open_communicator(2, timeout_s=PATIENCE_S)
    if rank == 1:
        with contextlib.suppress(SystemExit), comm:
            round_trip(comm)
            sys.exit(code)
        return ""
    with pytest.raises(PeerAborted) as caught:
        for _ in range(2):
            round_trip(comm)
    comm.close()
    return caught.value.reason


@pytest.mark.parametrize("code", [1, "no data"])
def test_an_exit_that_says_of_a_failure_reaches_the_peers(code: object) -> None:
    assert values(run_ranks(2, _ends_with, code))[0] == f"SystemExit: {code}"


def _catches(rank: int) -> None:
    """Rank 1 catches its exceptions itself, but for one in a thread that has no part in the exchange."""
    with open_communicator(2, timeout_s=PATIENCE_S) as comm:

        def user() -> None:
            round_trip(comm)
            with contextlib.suppress(LookupError):
                raise LookupError("caught")

        def bystander() -> None:
            raise LookupError("of no concern")

        for target in (user, *([bystander] if rank == 1 else [])):
            thread = threading.Thread(target=target)
            thread.start()
            thread.join()
        with contextlib.suppress(LookupError):
            raise LookupError("caught")
        dist.barrier()
        comm.check()
        round_trip(comm)


def test_an_exception_that_is_caught_tells_peers_nothing() -> None:
    values(run_ranks(2, _catches))


class _Shell:
    """IPython's shell, as far as its events go."""

    def __init__(self) -> None:
        self.events = self
        self._callbacks: list[Callable[[Any], None]] = []

    def register(self, event: str, callback: Callable[[Any], None]) -> None:
        assert event == "post_run_cell"
        self._callbacks.append(callback)

    def run_cell(self, cell: Callable[[], None]) -> None:
        error: BaseException | None = None
        try:
            cell()
        except BaseException as caught:
            error = caught
        for callback in self._callbacks:
            callback(SimpleNamespace(error_in_exec=error, error_before_exec=None))


def _in_a_notebook(rank: int) -> str:
    shell = _Shell()
    sys.modules["IPython"] = SimpleNamespace(get_ipython=lambda: shell)  # type: ignore[assignment]
    comms = [open_communicator(2, timeout_s=PATIENCE_S) for _ in range(2)]

    def caught() -> None:
        with contextlib.suppress(LookupError):
            raise LookupError("caught")

    def fails() -> None:
        raise LookupError("nothing to train on")

    shell.run_cell(lambda: round_trip(comms[0]))
    shell.run_cell(caught)
    dist.barrier()
    comms[0].check()
    dist.barrier()
    if rank == 1:
        shell.run_cell(fails)
    dist.barrier()
    with pytest.raises(PeerAborted) as raised:
        comms[0].check()
    round_trip(comms[1])  # which the cell's thread had not used
    for comm in comms:
        comm.close()
    return str(raised.value)


def test_an_exception_in_a_cell_of_ipython_reaches_peers() -> None:
    for said in values(run_ranks(2, _in_a_notebook)):
        assert "rank 1 aborted: LookupError: nothing to train on" in said


def _root() -> str:
    return os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
