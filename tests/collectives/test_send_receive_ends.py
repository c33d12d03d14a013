"""SendReceive on CPU ranks: deadlines, signals, threads, forks, the end of a process, and ranks of other nodes."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

from ep_plugin import EpPluginError, PeerTimeout, Receive, SendReceive
from tests.faults.fault_cases import set_deadline
from tests.ranks import run_ranks, values


def _hears_others(rank: int) -> tuple[int | None, float]:
    """Rank 1 is dead. Rank 0 waits for it while another thread exchanges with rank 2."""
    p2p, x, got = SendReceive(), torch.ones(1), torch.zeros(1)
    set_deadline(p2p._engine, 1.0)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began, until = time.monotonic(), time.monotonic() + 8

    def talk() -> None:
        try:
            while time.monotonic() < until:
                p2p.exchange(x, got, 2 - rank, 2 - rank).wait()
        except EpPluginError:
            pass  # rank 0 has ended it

    thread = threading.Thread(target=talk)
    thread.start()
    if rank == 2:
        thread.join()
        return None, 0.0
    with pytest.raises(PeerTimeout) as caught:
        p2p.receive(x, 1).wait()
    seconds = time.monotonic() - began
    thread.join()
    return caught.value.rank, seconds


def test_other_messages_do_not_put_off_a_deadline() -> None:
    peer, seconds = values(run_ranks(3, _hears_others)[:1])[0]
    assert peer == 1 and seconds < 6


def _moved_by_others(rank: int) -> None:
    """The messages of a Work come one by one, and other threads move them."""
    with SendReceive() as p2p:
        set_deadline(p2p._engine, 1.0)
        dist.barrier()
        if rank == 1:
            for number in range(12):
                time.sleep(0.2)
                p2p.send(torch.tensor([number]), 0)
            return
        got = torch.zeros(12, dtype=torch.int64)
        work = p2p.batch([Receive(one, 1) for one in got.split(1)])

        def look() -> None:
            while not work.is_completed():
                pass

        threads = [threading.Thread(target=look) for _ in range(3)]
        for thread in threads:
            thread.start()
        work.wait()
        for thread in threads:
            thread.join()
        assert got.tolist() == list(range(12))


def test_progress_by_other_threads_counts() -> None:
    values(run_ranks(2, _moved_by_others))
