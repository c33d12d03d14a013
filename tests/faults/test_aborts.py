"""Ranks that fail locally, and ranks that disagree: every rank raises at once, saying who and what."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ep_plugin.errors import EpPluginError, PeerAborted
from tests.faults.disagreement_cases import assert_calls_named, assert_configs_named, calls_differ, configs_differ
from tests.faults.fault_cases import nothing_left_behind, open_communicator, replace_kernels, round_trip, tokens_for
from tests.ranks import run_ranks, values

SIZE = 3
FAILS = 1  # the rank that fails, or differs
PATIENCE_S = 20.0  # far more than any test here may take: nothing ends by a deadline
AT_ONCE_S = 1.0
QUICKLY_S = 5.0


def _no_memory(*_: Any, **__: Any) -> None:
    raise MemoryError("no room on this rank × " + "x" * 400)


def _failing_dispatch(comm: Any, x: Any, ids: Any, weights: Any) -> None:
    replace_kernels(comm, dispatch_recv=_no_memory)
    comm.dispatch(x, ids, weights)


def _failing_combine(comm: Any, x: Any, ids: Any, weights: Any) -> None:
    out, handle = comm.dispatch(x, ids, weights)
    replace_kernels(comm, combine_recv=_no_memory)
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


def test_ranks_that_disagree_on_the_config() -> None:
    assert_configs_named(values(run_ranks(SIZE, configs_differ)))


def test_ranks_that_disagree_on_one_call() -> None:
    assert_calls_named(values(run_ranks(SIZE, calls_differ, timeout_s=120)))
