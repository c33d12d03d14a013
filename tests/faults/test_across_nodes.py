"""Dispatch and combine over emulated nodes when ranks die, stop, abort, disagree, or send garbage: every rank of every
node raises in time, says who and where, closes, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ep_plugin import MoECommunicator
from ep_plugin.errors import EpPluginError, PeerAborted, PeerTimeout
from ep_plugin.moe.across_nodes.nodes import Nodes
from tests.faults.fault_cases import die_at_gate, nothing_left_behind, open_communicator, orphaned_names, tokens_for
from tests.ranks import run_ranks, values

DEADLINE_S = 2.0
GRACE_S = 5.0
PATIENCE_S = 20.0  # far more than any test here may take: nothing ends by a deadline
AT_ONCE_S = 1.5  # a second, and what a crowded machine adds
LEGS = 4  # of two nodes by default, and of three
TOKENS = 200
WIDE = 2048  # rows that no socket's buffer holds


def _nodes_of(comm: MoECommunicator) -> Nodes:
    return comm.new_dispatch.args[0]  # type: ignore[attr-defined]


def _open(size: int, **settings: Any) -> MoECommunicator:
    comm = open_communicator(size, **({"timeout_s": DEADLINE_S, "hidden_size": WIDE} | settings))
    assert len(_nodes_of(comm).legs) == LEGS
    return comm


def _round_trip(comm: MoECommunicator, hidden: int = WIDE) -> None:
    x, ids, weights = tokens_for(comm.rank, comm.size, TOKENS, hidden)
    out, handle = comm.dispatch(x, ids, weights)
    torch.testing.assert_close(comm.combine(out.tokens, handle, weights=out.weights), x)


def _fails(comm: MoECommunicator) -> tuple[EpPluginError, float]:
    """The error of this rank, which has lost a peer, and how long the call has lasted that raised it."""
    x, ids, weights = tokens_for(comm.rank, comm.size, TOKENS, WIDE)
    began = time.monotonic()
    with pytest.raises((PeerTimeout, PeerAborted)) as caught:
        for _ in range(3):
            began = time.monotonic()
            out, handle = comm.dispatch(x, ids, weights)
            began = time.monotonic()
            comm.combine(out.tokens, handle, weights=out.weights)
    return caught.value, time.monotonic() - began


def _ends(comm: MoECommunicator, error: EpPluginError) -> None:
    """Every later call raises `error` again, at once, and nothing of the communicator is left when it is closed."""
    x, ids, _ = tokens_for(comm.rank, comm.size, 3)
    began = time.monotonic()
    for call in (comm.check, lambda: comm.dispatch(x, ids), lambda: comm.dispatch_async(x, ids)):
        with pytest.raises(type(error)) as again:
            call()
        assert str(again.value) == str(error)
    comm.close()
    assert time.monotonic() - began < 1
    nothing_left_behind()


def _before_call(nodes: Nodes, method: str, number: int, act: Callable[[], None]) -> None:
    """Calls `act` before the call of this number, 1 for the next, of a method of `nodes`."""
    known, calls = getattr(nodes, method), iter(range(1, number + 1))

    def call(*args: Any, **kwargs: Any) -> Any:
        if next(calls, None) == number:
            act()
        return known(*args, **kwargs)

    setattr(nodes, method, call)


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# When the victim dies: in which call of Nodes, counted from the start of a round trip.
CROSSING = {
    "before the counts cross": ("exchange_counts", 1),
    "between counts and ids": ("start_leg", 1),
    "while ids cross": ("finish", 3),
    "before rows cross": ("start_leg", LEGS + 1),
    "while rows cross": ("finish", 1 + LEGS + 2),
    "before combine": ("agree", 1),
    "before sums return": ("start_leg", 2 * LEGS + 1),
    "while sums return": ("start_leg", 2 * LEGS + 3),
    "before sums land": ("finish", 2 + 2 * LEGS + 1),
}
GATES = ("plan", "notify", "dispatch_send", "dispatch_recv", "combine_send")


def _loses(rank: int, size: int, victim: int, when: str) -> tuple[EpPluginError, float]:
    if rank == victim and when in GATES:
        os.environ["EP_PLUGIN_TEST_GATE"] = when
    comm = _open(size)
    gate, comm.engine.comm.gate = comm.engine.comm.gate, 0
    _round_trip(comm)  # the pools are there when it happens
    comm.engine.comm.gate = gate
    dist.barrier()  # the deadline is for what follows
    if rank == victim and when in GATES:
        die_at_gate(comm)
    elif rank == victim:
        _before_call(_nodes_of(comm), *CROSSING[when], _kill)
    error, took = _fails(comm)
    _ends(comm, error)
    return error, took


def _assert_all_name(size: int, victim: int, outcomes: list[Any]) -> None:
    assert outcomes[victim].exitcode == -signal.SIGKILL
    survivors = [outcomes[rank] for rank in range(size) if rank != victim]
    for error, took in values(survivors):
        assert took < DEADLINE_S + GRACE_S
        assert error.rank == victim, repr(error)
        assert isinstance(error, PeerAborted) or error.step, repr(error)
    assert not orphaned_names()


@pytest.mark.parametrize("when", [*CROSSING, *GATES])
def test_a_rank_killed_on_another_node_is_named_by_every_survivor(when: str) -> None:
    began = time.monotonic()
    outcomes = run_ranks(4, _loses, 4, 3, when, env={"EP_PLUGIN_RANKS_PER_NODE": "2"})
    assert time.monotonic() - began < 2 * (DEADLINE_S + GRACE_S), "a survivor did not end"
    _assert_all_name(4, 3, outcomes)


@pytest.mark.parametrize("when", ["between counts and ids", "notify", "before sums land"])
def test_a_rank_killed_on_one_of_three_nodes_of_one_rank(when: str) -> None:
    _assert_all_name(3, 1, run_ranks(3, _loses, 3, 1, when, env={"EP_PLUGIN_RANKS_PER_NODE": "1"}))
