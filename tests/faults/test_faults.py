"""Ranks that die, fail, or stay away: their peers say who and where, in time, close, and leave nothing behind."""

from __future__ import annotations

import gc
import os
import re
import signal
import time
import weakref
from typing import Any

import pytest

from ep_plugin.errors import EpPluginError, PeerTimeout
from tests.faults.fault_cases import (
    assert_says_different_order,
    die_at_gate,
    different_order,
    nothing_left_behind,
    open_communicator,
    open_with_deadline,
    orphaned_names,
    record_outputs,
    round_trip,
    tokens_for,
)
from tests.ranks import run_ranks, values

DEADLINE_S = 1.5
GRACE_S = 5.0
SIZE = 3
ONE_CHUNK, THREE_CHUNKS = 20, 80

# Where the victim is held, T, the victim, the operation that fails for its peers, and the step in which they wait.
HELD = [
    ("plan", THREE_CHUNKS, 0, "dispatch 1", "notify"),
    ("notify", THREE_CHUNKS, 1, "dispatch 1", "notify"),
    ("dispatch_send", THREE_CHUNKS, 2, "dispatch 1", "dispatch_recv"),
    ("dispatch_send", ONE_CHUNK, 0, "combine 1", "combine_recv"),  # all its rows have left before it is held
    ("dispatch_recv", THREE_CHUNKS, 1, "combine 1", "combine_recv"),
    ("combine_send", THREE_CHUNKS, 2, "combine 1", "combine_recv"),
    ("combine_send", ONE_CHUNK, 1, "dispatch 2", "notify"),
]


def _held(rank: int, gate: str, count: int, victim: int) -> tuple[str, PeerTimeout, bool]:
    if rank == victim:
        os.environ["EP_PLUGIN_TEST_GATE"] = gate
    comm = open_with_deadline(SIZE, DEADLINE_S)
    held_at, comm.engine.comm.gate = comm.engine.comm.gate, 0
    round_trip(comm, count)  # the pools are there when it happens
    comm.engine.comm.gate = held_at
    outputs = record_outputs(comm)
    if rank == victim:
        die_at_gate(comm)
    x, ids, weights = tokens_for(rank, SIZE, count)
    what, error = "", None
    began = time.monotonic()
    try:
        for turn in range(1, 4):
            what, began = f"dispatch {turn}", time.monotonic()
            out, handle = comm.dispatch(x, ids, weights)
            what, began = f"combine {turn}", time.monotonic()
            comm.combine(out.tokens, handle, weights=out.weights)
    except PeerTimeout as caught:
        error = caught
    took = time.monotonic() - began
    assert error is not None, f"{what} passed without rank {victim}"
    assert took < DEADLINE_S + GRACE_S, f"{what} took {took:.1f} s"
    if error.step == "notify":
        assert set(outputs) == ({"dispatch_recv", "combine_recv"} if what == "dispatch 2" else set()), (
            "launched after the fault"
        )
    poisoned = error.step not in outputs or set(outputs[error.step]) == {0xFF}
    _refuses_everything(comm, error, x, ids)
    comm.close()
    comm.close()
    del comm, outputs
    nothing_left_behind()
    return what, error, poisoned


def _refuses_everything(comm: Any, error: EpPluginError, x: Any, ids: Any) -> None:
    """Every later call raises the first error again, at once."""
    began = time.monotonic()
    for call in (comm.check, lambda: comm.dispatch(x, ids), lambda: comm.dispatch_async(x, ids)):
        with pytest.raises(type(error)) as again:
            call()
        assert str(again.value) == str(error)
    assert time.monotonic() - began < 1


@pytest.mark.deadline
@pytest.mark.parametrize(("gate", "count", "victim", "operation", "step"), HELD)
def test_a_rank_killed_at_a_gate_is_named_by_every_survivor(
    gate: str, count: int, victim: int, operation: str, step: str
) -> None:
    outcomes = run_ranks(SIZE, _held, gate, count, victim)
    assert outcomes[victim].exitcode == -signal.SIGKILL
    survivors = [rank for rank in range(SIZE) if rank != victim]
    for rank, (what, error, poisoned) in zip(survivors, values([outcomes[r] for r in survivors]), strict=True):
        assert (what, error.rank, error.step) == (operation, victim, step)
        assert f"rank {rank} waited {DEADLINE_S:g} s for rank {victim} at step {step}" in str(error)
        assert poisoned, "the output of the failed operation is not NaN bytes"
    assert not orphaned_names()


def _with_block(rank: int, victim: int) -> PeerTimeout:
    if rank == victim:
        os.environ["EP_PLUGIN_TEST_GATE"] = "notify"
    try:
        # The survivors' deadlines pass at different times: the first to leave must not blame itself to the other.
        with open_with_deadline(SIZE, DEADLINE_S if rank == 0 else DEADLINE_S + 1) as comm:
            if rank == victim:
                die_at_gate(comm)
            round_trip(comm)
    except PeerTimeout as error:
        return error
    raise AssertionError(f"the round trip passed without rank {victim}")


@pytest.mark.deadline
def test_survivors_that_leave_a_with_block_still_name_the_dead_rank() -> None:
    outcomes = run_ranks(SIZE, _with_block, 2)
    assert [(error.rank, error.step) for error in values(outcomes[:2])] == [(2, "notify")] * 2


def _waits_for_work(rank: int, victim: int) -> tuple[PeerTimeout, bool]:
    if rank == victim:
        os.environ["EP_PLUGIN_TEST_GATE"] = "notify"
    comm = open_with_deadline(SIZE, DEADLINE_S)
    if rank == victim:
        die_at_gate(comm)
    x, ids, weights = tokens_for(rank, SIZE, THREE_CHUNKS)
    payload = weakref.ref(x)
    work = comm.dispatch_async(x, ids, weights)
    with pytest.raises(PeerTimeout):
        comm.check()
    with pytest.raises(PeerTimeout) as caught:
        work.wait()
    error = str(caught.value)
    with pytest.raises(PeerTimeout, match=re.escape(error)):
        comm.combine(x, work.wait()[1])
    said = PeerTimeout(error, caught.value.rank, caught.value.step)
    del work, x, ids, weights, caught
    comm.close()
    gc.collect()
    return said, payload() is None


@pytest.mark.deadline
def test_an_asynchronous_operation_raises_in_wait_and_keeps_nothing_alive() -> None:
    for error, freed in values(run_ranks(SIZE, _waits_for_work, 2)[:2]):
        assert (error.rank, error.step) == (2, "notify")
        assert freed


def _stays_away(rank: int) -> tuple[PeerTimeout | None, float]:
    comm, other = open_with_deadline(2, DEADLINE_S), open_communicator(2, timeout_s=30)
    round_trip(other)
    error, began = None, time.monotonic()
    if rank == 0:
        with pytest.raises(PeerTimeout) as caught:
            round_trip(comm)
        error = caught.value
    took = time.monotonic() - began
    round_trip(other, 40)
    if rank == 1:  # it finds what rank 0 left: its own wait then ends by its own deadline
        with pytest.raises(PeerTimeout):
            for _ in range(2):
                round_trip(comm)
    round_trip(other, 3)
    comm.close()
    round_trip(other, 70)
    other.close()
    nothing_left_behind()
    return error, took


@pytest.mark.deadline
def test_a_fault_leaves_another_communicator_of_the_same_ranks_usable() -> None:
    (error, took), _ = values(run_ranks(2, _stays_away))
    assert error is not None and error.rank == 1
    assert DEADLINE_S <= took < DEADLINE_S + GRACE_S


@pytest.mark.deadline
def test_different_order_on_two_ranks_is_a_timeout_that_says_so() -> None:
    assert_says_different_order(values(run_ranks(2, different_order, DEADLINE_S)))


def _dies_before_growing(rank: int) -> PeerTimeout | None:
    comm = open_with_deadline(SIZE, DEADLINE_S)
    x, ids, weights = tokens_for(rank, SIZE, 5)
    out, handle = comm.dispatch(x, ids, weights)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerTimeout) as caught:
        comm.combine(out.tokens, handle)  # the first combine makes the pool
    _refuses_everything(comm, caught.value, x, ids)
    comm.close()
    nothing_left_behind()
    return caught.value


@pytest.mark.deadline
def test_a_rank_that_dies_before_a_pool_grows_is_named() -> None:
    outcomes = run_ranks(SIZE, _dies_before_growing)
    for error in values([outcomes[0], outcomes[2]]):
        assert (error.rank, error.step) == (1, "grow combine pool")


def _ends_without_close(rank: int, how: str) -> None:
    global _kept
    comm = open_with_deadline(2, DEADLINE_S)
    x, ids, weights = tokens_for(rank, 2, 5)
    if how == "asynchronous operation":
        _kept = comm, comm.dispatch_async(x, ids, weights)
    elif how == "fault":
        out, handle = comm.dispatch(x, ids, weights)
        if rank == 0:  # while rank 1 is past its last call
            with pytest.raises(PeerTimeout):
                comm.combine(out.tokens, handle)
        _kept = comm, out
    else:
        round_trip(comm)
        _kept = (comm,)


_kept: tuple[Any, ...] = ()


@pytest.mark.deadline
@pytest.mark.parametrize("how", ["nothing", "asynchronous operation", "fault"])
def test_a_process_that_never_closes_ends_by_itself(how: str) -> None:
    began = time.monotonic()
    values(run_ranks(2, _ends_without_close, how))
    assert time.monotonic() - began < 3 * DEADLINE_S + GRACE_S


def _dropped(rank: int) -> None:
    for _ in range(3):
        comm = open_communicator(2)
        round_trip(comm)
        out = comm.dispatch(*tokens_for(rank, 2, 5))
        del comm, out
        gc.collect()
        nothing_left_behind()


def test_a_dropped_communicator_gives_its_memory_back() -> None:
    values(run_ranks(2, _dropped))


def _closed_under_way(rank: int) -> None:
    comm = open_communicator(2)
    round_trip(comm)
    x, ids, weights = tokens_for(rank, 2, 5)
    out, handle = comm.dispatch(x, ids, weights)
    works = [comm.dispatch_async(x, ids, weights), comm.combine_async(out.tokens, handle)]
    comm.close()
    assert works[0].done  # starting the second has completed it
    with pytest.raises(ValueError, match="expected an open communicator, got a closed one"):
        works[1].wait()
    nothing_left_behind()
    with open_communicator(2) as next_one:
        round_trip(next_one)


def test_close_with_an_operation_under_way() -> None:
    values(run_ranks(2, _closed_under_way))
