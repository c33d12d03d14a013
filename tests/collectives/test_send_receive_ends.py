"""SendReceive on CPU ranks: deadlines, signals, threads, forks, the end of a process, and ranks of other nodes."""

from __future__ import annotations

import datetime
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ep_plugin import EpPluginError, PeerAborted, PeerTimeout, Receive, Send, SendReceive
from tests.collectives.collective_cases import await_close_of_a_peer, tell_when_it_closes
from tests.faults.fault_cases import nothing_left_behind, set_deadline
from tests.ranks import run_ranks, values

MIB = 2**20
ONE_PER_NODE = {"EP_PLUGIN_RANKS_PER_NODE": "1"}


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


@pytest.mark.deadline
def test_other_messages_do_not_put_off_a_deadline() -> None:
    peer, seconds = values(run_ranks(3, _hears_others)[:1])[0]
    assert peer == 1 and seconds < 6


def _moved_by_others(rank: int) -> None:
    """The messages of a Work come one by one, and other threads move them."""
    with SendReceive() as p2p:
        set_deadline(p2p._engine, 2.0)
        dist.barrier()
        if rank == 1:
            for number in range(12):
                time.sleep(0.25)
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


@pytest.mark.deadline
def test_progress_by_other_threads_counts() -> None:
    values(run_ranks(2, _moved_by_others))


def _closes_in_a_handler(rank: int) -> float:
    p2p = SendReceive()
    dist.barrier()
    if rank == 1:
        with pytest.raises(PeerAborted, match="closed by a signal handler"):
            p2p.receive(torch.zeros(1), 0).wait()
        p2p.close()
        return 0.0
    signal.signal(signal.SIGALRM, lambda *_: p2p.close())
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    began = time.monotonic()
    with pytest.raises(PeerAborted, match="closed by a signal handler"):
        p2p.receive(torch.zeros(1), 1).wait()
    nothing_left_behind()
    return time.monotonic() - began


def test_close_in_a_signal_handler_ends_the_wait() -> None:
    assert max(values(run_ranks(2, _closes_in_a_handler, timeout_s=20))) < 5


_LEAVES = """
import atexit, sys
atexit.register(lambda: print(work.is_completed(), work.is_success()))  # called last
import torch, torch.distributed as dist
from ep_plugin import SendReceive
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
p2p, data = SendReceive(), torch.ones(2**25, dtype=torch.uint8)
work = p2p.receive(data, 1 - rank)
dist.barrier()
"""


def test_messages_end_before_the_interpreter_frees_their_tensors(tmp_path: Any) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _LEAVES, str(rank), tmp_path / "store"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    for rank in ranks:
        said, warned = rank.communicate(timeout=60)
        assert (rank.returncode, said.decode()) == (0, "True False\n"), warned.decode()


def _waits_in_a_child(rank: int) -> bool:
    with SendReceive() as p2p:
        if rank == 1:
            dist.barrier()
            p2p.send(torch.ones(1), 0)
            dist.barrier()
            return True
        got = torch.zeros(1)
        work = p2p.receive(got, 1)
        dist.barrier()
        child = os.fork()
        if child == 0:
            signal.alarm(10)
            refused = 0
            for call in (work.wait, work.is_completed, work.is_success):
                try:
                    call()
                except EpPluginError as error:
                    refused += "forked child" in str(error)
            os._exit(refused)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        dist.barrier()
        work.wait()
        return code == 3 and got.item() == 1


def test_a_forked_child_may_not_wait() -> None:
    assert values(run_ranks(2, _waits_in_a_child)) == [True, True]


def _sends_many(rank: int, count: int) -> int:
    """How often open calls are looked for while nobody waits."""
    with SendReceive() as p2p:
        x = torch.ones(1)
        engine: Any = p2p._engine
        works = [p2p.send(x, 1) if rank == 0 else p2p.receive(x, 0) for _ in range(count)] if rank == 0 else []
        dist.barrier()
        for _ in range(count if rank else 0):
            p2p.receive(torch.zeros(1), 0).wait()
        for work in works:
            work.wait()
        assert rank or not engine.control.kept()
        return int(engine.control.num_looks)


def test_posting_does_not_slow_down_with_open_messages() -> None:
    assert max(values(run_ranks(2, _sends_many, 2000))) <= 3 * 2000


def _bad_timeouts(rank: int) -> None:
    with SendReceive() as p2p:
        got = torch.zeros(1)
        work = p2p.exchange(torch.ones(1), got, 1 - rank, 1 - rank)
        with pytest.raises(ValueError, match=r"timeout: expected a timedelta, got 3"):
            work.wait(3)  # type: ignore[arg-type]
        assert work.wait(datetime.timedelta.max) and got.item() == 1


def test_timeouts_of_any_length_and_no_other_type() -> None:
    values(run_ranks(2, _bad_timeouts))


def _fails_in_a_batch(rank: int) -> None:
    """The second operation raises when the first has begun: its tensor must stay."""
    from ep_plugin.collectives import messages

    p2p = SendReceive()
    if rank == 0:
        data = torch.zeros(MIB)
        messages.dist.isend = _raises  # type: ignore[assignment]
        with pytest.raises(RuntimeError, match="no connection"):
            p2p.batch([Receive(data, 1), Send(torch.ones(1), 2)])
        (kept,) = p2p._engine.control.kept()  # type: ignore[union-attr]
        assert data.data_ptr() in [one.data_ptr() for one in kept.memory]
    dist.barrier()  # rank 2 ends after the receive of its header has begun
    p2p.close()
    nothing_left_behind()


def _raises(*_: Any, **__: Any) -> None:
    raise RuntimeError("no connection")


def test_tensors_stay_when_a_batch_fails() -> None:
    values(run_ranks(4, _fails_in_a_batch, env={"EP_PLUGIN_RANKS_PER_NODE": "2"}))


def _across_nodes(rank: int) -> None:
    with SendReceive() as one, SendReceive() as two:
        got = torch.zeros(2)
        if rank == 0:
            work = one.receive(got[:1], 1)
            assert not work.is_success() and not work.is_completed()
            other = two.receive(got[1:], 1)
        dist.barrier()
        if rank == 1:
            sent = [two.send(torch.tensor([2.0]), 0), one.send(torch.tensor([1.0]), 0)]
            for send in sent:
                assert send.wait() and send.is_success()
            return
        threads = [threading.Thread(target=work.wait) for _ in range(3)]  # one of them asks gloo
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()
        assert other.wait() and work.is_success() and work.is_completed() and got.tolist() == [1, 2]


def test_objects_do_not_meet_across_nodes() -> None:
    values(run_ranks(2, _across_nodes, env=ONE_PER_NODE))


def _closes_across_nodes(rank: int) -> bool:
    """Nobody waits for the send's Work."""
    got = torch.zeros(MIB)
    p2p = SendReceive()
    if rank == 1:
        tell_when_it_closes(p2p._engine)
        work = p2p.send(torch.ones(MIB), 0)
        p2p.close()
        assert work.wait() and work.is_success()
        del p2p, work
    else:
        await_close_of_a_peer()
        p2p.receive(got, 1).wait()
        unanswered = p2p.receive(torch.zeros(1), 1)
        p2p.close()
        with pytest.raises(EpPluginError, match="closed"):
            unanswered.wait()
    dist.barrier()
    return rank == 1 or bool(got.all())


def test_close_waits_for_sends_to_other_nodes() -> None:
    assert values(run_ranks(2, _closes_across_nodes, env=ONE_PER_NODE)) == [True, True]


def _waits_for_a_silent_rank(rank: int) -> int | None:
    """Rank 3 sends nothing. Ranks 1, on its node, and 2 wait for it, and rank 0 for rank 1."""
    group = dist.new_group([3, 1, 2, 0])  # all ranks, in another order
    order, store = dist.get_process_group_ranks(group), dist.distributed_c10d._get_default_store()
    p2p = SendReceive(group)
    set_deadline(p2p._engine, 2.0)
    dist.barrier()
    if rank == 3:
        store.wait(["0", "1", "2"])
        return None
    with pytest.raises((PeerTimeout, PeerAborted)) as caught:
        p2p.receive(torch.zeros(1), order.index({0: 1, 1: 3, 2: 3}[rank])).wait()
    store.set(str(rank), "")
    p2p.close()
    found: int | None = caught.value.rank
    return None if found is None else order[found]


@pytest.mark.deadline
def test_a_silent_rank_of_another_node_is_named() -> None:
    assert values(run_ranks(4, _waits_for_a_silent_rank, env={"EP_PLUGIN_RANKS_PER_NODE": "2"}))[:3] == [3, 3, 3]
