"""Ranks that fail locally, and ranks that disagree: every rank raises at once, saying who and what."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ep_plugin import HierarchicalAllGather
from ep_plugin.errors import EpPluginError, PeerAborted
from ep_plugin.moe.high_throughput import dispatch_args
from tests.faults.disagreement_cases import assert_calls_named, assert_configs_named, calls_differ, configs_differ
from tests.faults.fault_cases import nothing_left_behind, open_communicator, round_trip, tokens_for
from tests.ranks import run_ranks, values

SIZE = 3
FAILS = 1  # the rank that fails, or differs
PATIENCE_S = 20.0  # far more than any test here may take: nothing ends by a deadline
AT_ONCE_S = 1.0
QUICKLY_S = 5.0


def _no_memory(*_: Any, **__: Any) -> None:
    raise MemoryError("no room on this rank × " + "x" * 400)


def _failing_dispatch(comm: Any, x: Any, ids: Any, weights: Any) -> None:
    dispatch_args._empty_result = _no_memory
    comm.dispatch(x, ids, weights)


def _failing_combine(comm: Any, x: Any, ids: Any, weights: Any) -> None:
    out, handle = comm.dispatch(x, ids, weights)
    comm.engine.lanes.fork_receive = _no_memory
    comm.combine(out.tokens, handle)


def _failing_growth(comm: Any, x: Any, ids: Any, weights: Any) -> None:
    os.posix_fallocate = _no_memory
    comm.dispatch(torch.cat([x] * 50), torch.cat([ids] * 50))


def _asked_to_abort(comm: Any, x: Any, ids: Any, weights: Any) -> None:
    comm.abort("MemoryError: no room on this rank, and never was")
    comm.check()


def _abort_while_peers_grow(comm: Any, x: Any, ids: Any, weights: Any) -> None:
    comm.dispatch(x, ids, weights)
    comm.abort("MemoryError: no room on this rank, and never was")
    comm.check()


def _leaving_with(comm: Any, x: Any, ids: Any, weights: Any) -> None:
    with comm:
        comm.dispatch(x, ids, weights)
        raise MemoryError("no room on this rank")


FAILURES: dict[str, Callable[..., None]] = {
    "allocation in dispatch": _failing_dispatch,
    "allocation in combine": _failing_combine,
    "growth of the pool": _failing_growth,
    "abort": _asked_to_abort,
    "abort while peers grow a pool": _abort_while_peers_grow,
    "with block": _leaving_with,
}


def _failure(rank: int, how: str) -> tuple[Exception, float]:
    comm = open_communicator(SIZE, timeout_s=PATIENCE_S)
    other = open_communicator(SIZE, timeout_s=PATIENCE_S)
    if how != "abort while peers grow a pool":
        round_trip(comm)
    dist.barrier()  # an abort also ends what a slower rank has not quite finished
    x, ids, weights = tokens_for(rank, SIZE, 40)
    try:
        if rank == FAILS:
            FAILURES[how](comm, x, ids, weights)
        else:
            _use(comm, x, ids, weights, 50 if how == "growth of the pool" else 1)
    except Exception as error:
        raised, at = error, time.monotonic()
    if not comm.engine.closed:
        with pytest.raises(EpPluginError) as again:
            comm.dispatch(x, ids, weights)
        assert "no room on this rank" in str(again.value)
    comm.close()
    if how not in ("growth of the pool", "allocation in dispatch", "allocation in combine"):  # those stay broken
        round_trip(other, 60)
    other.close()
    nothing_left_behind()
    return raised, at


def _use(comm: Any, x: Any, ids: Any, weights: Any, times: int) -> None:
    while True:
        if times > 1:
            comm.dispatch(torch.cat([x] * times), torch.cat([ids] * times))
        out, handle = comm.dispatch(x, ids, weights)
        comm.combine(out.tokens, handle)


@pytest.mark.parametrize("how", FAILURES)
def test_a_local_failure_reaches_every_peer_within_a_second(how: str) -> None:
    results = values(run_ranks(SIZE, _failure, how))
    own, since = results[FAILS]
    assert "no room on this rank" in str(own)
    for error, at in (results[rank] for rank in range(SIZE) if rank != FAILS):
        assert isinstance(error, PeerAborted) and error.rank == FAILS, repr(error)
        assert "no room on this rank" in error.reason and "MemoryError" in error.reason
        assert error.reason in str(error)
        assert at - since < AT_ONCE_S


def _abort_from_a_thread(rank: int) -> tuple[PeerAborted, float]:
    comm = open_communicator(2, timeout_s=PATIENCE_S)
    began = time.monotonic()
    if rank == 0:
        dist.distributed_c10d._get_default_store().wait(["rank 1 waits"])
    else:

        def watchdog() -> None:
            while not comm.engine.boards.activity_of(1).startswith("in dispatch"):
                time.sleep(0.001)
            dist.distributed_c10d._get_default_store().set("rank 1 waits", "")
            comm.abort("the watchdog bit")

        threading.Thread(target=watchdog).start()
    with pytest.raises(PeerAborted) as caught:
        round_trip(comm)
    comm.close()
    return caught.value, time.monotonic() - began


def test_abort_from_another_thread_ends_this_ranks_own_wait_too() -> None:
    for error, took in values(run_ranks(2, _abort_from_a_thread)):
        assert (error.rank, error.reason) == (1, "the watchdog bit")
        assert took < QUICKLY_S


def _says_what_it_does(rank: int) -> list[str]:
    """On the boards of both communicators of two, while one of them runs, and when the other is closed."""
    first, second = open_communicator(2), open_communicator(2)
    said = []
    for comm in (first, second):
        round_trip(comm)
        said += [other.engine.boards.activity_of(rank) for other in (first, second)]
    second.close()
    round_trip(first)
    first.close()
    return said


def test_every_communicator_tells_its_peers_what_the_rank_is_doing() -> None:
    for of_first, too, of_second, also in values(run_ranks(2, _says_what_it_does)):
        assert of_first == too != of_second == also
        assert all(said.startswith("in combine of communicator ") for said in (of_first, of_second))


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
if how == "process":
    child = multiprocessing.get_context("fork").Process(target=main)
    child.start()
    child.join()
    sys.exit(child.exitcode)
main()
"""


@pytest.mark.parametrize("how", ["script", "thread", "process"])
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
        errors = [script.communicate(timeout=60)[1] for script in scripts]
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


def _child_exchanges(rank: int) -> None:
    """A child of a fork shares the rank's memory: what it sent would be added to what the rank expects."""
    gather = HierarchicalAllGather()
    with open_communicator(2, timeout_s=PATIENCE_S) as comm, gather:
        round_trip(comm)
        gather(torch.empty(2), torch.ones(1))
        child = os.fork()
        if child == 0:
            said = []
            for use in (lambda: round_trip(comm), lambda: gather(torch.empty(2), torch.ones(1))):
                with contextlib.suppress(EpPluginError):
                    use()
                    said.append("went on")
            os._exit(len(said))
        assert os.waitpid(child, 0)[1] == 0
        dist.barrier()
        round_trip(comm)
        gather(torch.empty(2), torch.ones(1))


def test_a_forked_child_is_refused() -> None:
    values(run_ranks(2, _child_exchanges))


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


def _root() -> str:
    return os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def _bad_device(rank: int) -> str:
    from ep_plugin import MoECommunicator, MoECommunicatorConfig

    config = MoECommunicatorConfig(num_experts=4, hidden_size=8, topk=2, timeout_s=PATIENCE_S)
    with pytest.raises(ValueError if rank == FAILS else PeerAborted) as caught:
        MoECommunicator(None, config, device="meta" if rank == FAILS else "cpu")
    with open_communicator(2) as comm:
        round_trip(comm)
    return str(caught.value)


def _cleanup_fails(rank: int) -> tuple[list[str], list[str]]:
    from ep_plugin.runtime.base import BaseEngine

    closed: list[str] = []

    class Failing(BaseEngine):
        found_error = described = None  # type: ignore[assignment]

        def _construct(self) -> None:
            self._resources.callback(closed.append, "memory")
            raise MemoryError("first")

    def abort(reason: str) -> None:
        raise OSError("store is gone")

    def close() -> None:
        closed.append("exchange")

    exchange: Any = SimpleNamespace(name="0.1", rank=rank, size=1, timeout_s=1.0, abort=abort, close=close)
    with pytest.raises(MemoryError, match="first") as caught:
        Failing(exchange, torch.device("cpu"))
    return closed, caught.value.__notes__


def test_cleanup_that_fails_keeps_the_first_error_and_closes_the_rest() -> None:
    closed, notes = _cleanup_fails(0)
    assert closed == ["memory", "exchange"]
    assert notes == ["communicator 0.1: giving back failed, too: OSError: store is gone"]


def test_a_rank_that_cannot_construct_does_not_keep_its_peers_waiting() -> None:
    began = time.monotonic()
    texts = values(run_ranks(2, _bad_device))
    assert texts == [
        "rank 1 aborted: ValueError: device: expected cpu or cuda, got meta",
        "device: expected cpu or cuda, got meta",
    ]
    assert time.monotonic() - began < PATIENCE_S


def test_ranks_that_disagree_on_the_config() -> None:
    assert_configs_named(values(run_ranks(SIZE, configs_differ)))


def test_ranks_that_disagree_on_one_call() -> None:
    assert_calls_named(values(run_ranks(SIZE, calls_differ, timeout_s=120)))
