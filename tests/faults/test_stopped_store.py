"""A stopped process that serves the group's store: pools that grow raise in time, and close does not wait for long."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ep_plugin import MoECommunicator
from ep_plugin.errors import PeerTimeout
from tests.faults.fault_cases import nothing_left_behind, open_with_deadline, round_trip, tokens_for, wait_until_stopped
from tests.ranks import run_ranks, values

SIZE = 3
SERVES = 0  # the rank that serves the store, and stops
DEADLINE_S = 2.0
GRACE_S = 5.0


def _serve_the_store(rank: int, outer: dist.Store) -> None:
    """A default group whose store is in rank `SERVES`, in the place of one whose store outlives all ranks."""
    dist.destroy_process_group()
    server = None
    if rank == SERVES:
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        outer.set("port", str(server.port))
    store = server or dist.TCPStore("127.0.0.1", int(outer.get("port")), is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=SIZE)


def _stop_at(comm: MoECommunicator, pool: str) -> None:
    """This process stops when it has agreed with its peers that `pool` grows."""
    allocate = comm.engine.memory.allocate

    def stop(nbytes: int, name: str) -> Any:
        if name == pool:
            os.kill(os.getpid(), signal.SIGSTOP)
        return allocate(nbytes, name)

    comm.engine.memory.allocate = stop  # type: ignore[method-assign]


def _grows(rank: int, pool: str) -> float:
    outer = dist.distributed_c10d._get_default_store()
    _serve_the_store(rank, outer)
    comm = open_with_deadline(SIZE, DEADLINE_S)
    round_trip(comm)
    x, ids, weights = tokens_for(rank, SIZE, 400)
    if rank == SERVES:
        outer.set("pid", str(os.getpid()))
        _stop_at(comm, pool)
    dist.barrier()
    try:
        waited = _fails_in_time(comm, pool, x, ids, weights)
    finally:
        if outer.add("survivors", 1) == SIZE - 1:
            os.kill(int(outer.get("pid")), signal.SIGKILL)
    comm.close()
    nothing_left_behind()
    return waited


def _fails_in_time(
    comm: MoECommunicator, pool: str, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> float:
    """The seconds until the operation whose pool grows has raised."""
    began = time.monotonic()
    with pytest.raises(
        PeerTimeout, match="the store of the process group does not answer at step '.*stopped"
    ) as caught:
        out, handle = comm.dispatch(x, ids, weights)
        assert pool == "combine pool"
        began = time.monotonic()
        comm.combine(out.tokens, handle, weights=out.weights)
    waited = time.monotonic() - began
    with pytest.raises(PeerTimeout) as again:
        comm.check()
    assert str(again.value) == str(caught.value)
    return waited


@pytest.mark.deadline
@pytest.mark.parametrize("pool", ["dispatch pool", "combine pool"])
def test_a_store_that_stops_while_a_pool_grows_is_an_error_by_the_deadline(pool: str) -> None:
    outcomes = run_ranks(SIZE, _grows, pool)
    assert outcomes[SERVES].exitcode == -signal.SIGKILL
    waited = values([outcome for rank, outcome in enumerate(outcomes) if rank != SERVES])
    assert all(DEADLINE_S / 2 < seconds < DEADLINE_S + GRACE_S for seconds in waited), waited


def _closes(rank: int) -> list[float]:
    """How long an abort and the closing of two communicators of three nodes take."""
    outer = dist.distributed_c10d._get_default_store()
    _serve_the_store(rank, outer)
    comms = [open_with_deadline(SIZE, DEADLINE_S) for _ in range(2)]
    for comm in comms:
        round_trip(comm)
    if rank == SERVES:
        outer.set("pid", str(os.getpid()))
    pid = int(outer.get("pid"))
    dist.barrier()
    if rank == SERVES:
        os.kill(pid, signal.SIGSTOP)
    try:
        wait_until_stopped(pid)
        took = []
        for act in (lambda: comms[0].abort("no room"), comms[0].close, comms[1].close):
            began = time.monotonic()
            act()
            took.append(time.monotonic() - began)
    finally:
        if outer.add("survivors", 1) == SIZE - 1:
            os.kill(pid, signal.SIGKILL)
    nothing_left_behind()
    return took


def test_close_waits_once_for_a_stopped_store() -> None:
    outcomes = run_ranks(SIZE, _closes, env={"EP_PLUGIN_RANKS_PER_NODE": "1"})
    assert outcomes[SERVES].exitcode == -signal.SIGKILL
    for aborted, first, second in values([outcome for rank, outcome in enumerate(outcomes) if rank != SERVES]):
        assert aborted < 2 and first < 2 and second < 0.9, (aborted, first, second)
