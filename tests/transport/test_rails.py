"""The rails that communicators of a process share: how many there are, who closes them, and what survives a failure."""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ep_plugin import HierarchicalAllGather, HierarchicalReduceScatter, MoECommunicator, MoECommunicatorConfig
from ep_plugin.errors import DisagreementError, EpPluginError, PeerAborted
from ep_plugin.transport import rail, threads
from tests.faults.fault_cases import open_communicator, open_with_deadline, round_trip, signal_self, tokens_for
from tests.ranks import run_ranks, values

TWO_NODES = {"EP_PLUGIN_RANKS_PER_NODE": "2"}
DEADLINE_S = 2.0


def _users() -> list[int]:
    return sorted(len(each.users) for each in rail._open)


def _shares(rank: int) -> list[int]:
    """Bytes that each communicator counts for itself."""
    alike = dist.new_group()
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    first, second = open_communicator(4), MoECommunicator(alike, first_config(8))
    gather, scatter = HierarchicalAllGather(), HierarchicalReduceScatter(pairs[rank % 2])
    gather(torch.empty(40), torch.zeros(10))
    scatter(torch.empty(10), torch.zeros(20))
    round_trip(first)
    round_trip(second)
    round_trip(second)
    assert _users() == [4], "one rail for all: its ranks are those of the pair, too"
    sent = [first.rail_bytes_sent, second.rail_bytes_sent, gather.rail_bytes_sent, scatter.rail_bytes_sent]
    for left, made in zip((3, 2, 1, 0), (gather, second, scatter, first), strict=True):
        made.close()
        made.close()
        assert _users() == ([left] if left else [])
    return sent


def first_config(num_experts: int, **settings: Any) -> MoECommunicatorConfig:
    return MoECommunicatorConfig(num_experts=num_experts, hidden_size=8, topk=2, **settings)


def test_communicators_of_the_same_ranks_share_one_rail() -> None:
    for first, second, gathered, summed in values(run_ranks(4, _shares, env=TWO_NODES)):
        assert second == 2 * first > 0 and gathered == summed == 40


def _leaves_no_keys(rank: int) -> list[int]:
    """The keys of the store after each of several communicators."""
    store, counts = dist.distributed_c10d._get_default_store(), []
    for _ in range(3):
        with open_communicator(4) as comm:
            round_trip(comm)
        until = time.monotonic() + 20
        while len(threads._idle) < sum(one.name == "ep_plugin calls" for one in threading.enumerate()):
            assert time.monotonic() < until  # a thread deletes keys
            time.sleep(0.01)
        dist.barrier()
        counts.append(store.num_keys())
        dist.barrier()
    assert rail._open == set() and rail._known == {}
    return counts


def test_a_rail_leaves_no_keys_in_the_store() -> None:
    for _, second, third in values(run_ranks(4, _leaves_no_keys, env=TWO_NODES)):
        assert second == third


def _remakes(rank: int) -> None:
    """Rank 0 has closed its rail, which the others still have: all come to a new one."""
    old = open_communicator(4)
    (first,) = rail._open
    if rank == 0:
        old.close()
    dist.barrier()
    with open_communicator(4) as comm:
        round_trip(comm)
        assert _users() == {0: [1], 2: [1, 1]}.get(rank, [2])
        old.close()
        assert _users() == [1]
        assert (rail._open == {first}) == (rank % 2 == 1)
        round_trip(comm)
    with open_communicator(4) as comm:
        round_trip(comm)
        assert {each.ident for each in rail._open}.isdisjoint({first.ident})


def test_ranks_that_have_different_rails_make_a_new_one() -> None:
    values(run_ranks(4, _remakes, env=TWO_NODES))


def _aborts(rank: int, waiting: bool) -> None:
    """Rank 1 aborts, alone or while the others wait for it. Then the group is used, by itself and for a new rail."""
    comm = open_communicator(4)
    round_trip(comm)
    dist.barrier()
    known = {each.ident for each in rail._known.values()}
    if rank == 1:
        comm.abort("no room")
    with pytest.raises(PeerAborted, match="rank 1 aborted: no room"):
        while rank == 1 or not waiting:
            comm.check()
        while True:
            round_trip(comm)
    comm.close()
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total == 4 and rail._known == {}
    with open_communicator(4) as again:
        round_trip(again)
        assert {each.ident for each in rail._known.values()}.isdisjoint(known)


@pytest.mark.parametrize("waiting", [False, True], ids=["idle", "waiting"])
def test_a_group_outlives_an_abort_and_gets_a_new_rail(waiting: bool) -> None:
    values(run_ranks(4, _aborts, waiting, env=TWO_NODES))


def _dies(rank: int) -> int:
    """Rank 3 dies in a dispatch. The others still reach each other over the group."""
    comm = open_with_deadline(4, DEADLINE_S)
    round_trip(comm)
    dist.barrier()
    if rank == 3:
        signal_self(signal.SIGKILL)
    with pytest.raises(EpPluginError):
        for _ in range(3):
            comm.dispatch(*tokens_for(rank, 4, 200))
    comm.close()
    assert rail._known == {}
    found = torch.tensor([rank])
    for sender, receiver in ((0, 2), (2, 1), (1, 0)):
        if rank == sender:
            dist.send(torch.tensor([sender]), receiver)
        elif rank == receiver:
            dist.recv(found, sender)
    return int(found)


@pytest.mark.deadline
def test_survivors_keep_their_group() -> None:
    outcomes = run_ranks(4, _dies, env=TWO_NODES)
    assert values(outcomes[:3]) == [1, 2, 0] and outcomes[3].exitcode == -signal.SIGKILL


def _forks(rank: int) -> None:
    with open_communicator(4) as comm:
        child = os.fork()
        if child == 0:
            os._exit(0 if rail._known == {} and rail._open == set() and not rail._lock._is_owned() else 1)
        assert os.waitpid(child, 0)[1] == 0
        round_trip(comm)
        assert _users() == [1]


def test_a_forked_child_has_no_rail() -> None:
    values(run_ranks(4, _forks, env=TWO_NODES))


def _disagrees(rank: int) -> None:
    os.environ["EP_PLUGIN_RAIL"] = "c10d" if rank == 2 else "auto"
    with pytest.raises(DisagreementError, match="ranks disagree on EP_PLUGIN_RAIL: auto on rank 0, c10d on rank 2"):
        open_communicator(4)
    os.environ["EP_PLUGIN_RAIL"] = "c10d"
    with open_communicator(4) as comm:
        round_trip(comm)


def test_ranks_agree_on_the_rail() -> None:
    values(run_ranks(4, _disagrees, env=TWO_NODES))


class _OnlyMessages(dist.ProcessGroup):
    """A backend of Python, as programs register their own: gloo's messages, and nothing else of it."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> Any:
        return self._gloo.send(tensors, to, tag)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> Any:
        return self._gloo.recv(tensors, source, tag)

    def getBackendName(self) -> str:
        return "only_messages"


def _over_the_group(rank: int) -> None:
    dist.Backend.register_backend("only_messages", _OnlyMessages, devices=["cpu"])
    group = dist.new_group(backend="only_messages")
    with MoECommunicator(group, first_config(8)) as comm, HierarchicalAllGather(group) as gather:
        for _ in range(3):
            round_trip(comm)
        out = torch.empty(4)
        gather(out, torch.full((1,), float(rank)))
        assert out.tolist() == [0, 1, 2, 3]
        assert isinstance(comm.engine.rails._rail, rail.GroupRail) and not rail._open
        assert comm.rail_bytes_sent > 0


def test_other_backends_carry_rows_over_the_group() -> None:
    values(run_ranks(4, _over_the_group, env=TWO_NODES))


class _HeldByAGraph:
    """As NCCL's backend, whose calls return when a graph is gone."""

    def __init__(self) -> None:
        self.gone = threading.Event()
        self.ended: queue.SimpleQueue[str] = queue.SimpleQueue()

    def shutdown(self) -> None:
        assert self.gone.wait(20)
        self.ended.put("shutdown")

    def abort(self) -> None:
        assert self.gone.wait(20)
        self.ended.put("abort")


def _held() -> rail.Rail:
    backend: Any = _HeldByAGraph()
    held = rail.Rail(backend, "rail")
    held.held = True
    return held


def test_an_abort_does_not_wait_for_graphs_that_hold_a_rail() -> None:
    held, began = _held(), time.monotonic()
    held.abort()
    assert time.monotonic() - began < rail._GRAPHS_S + 5 and held._backend.ended.empty()
    held._backend.gone.set()
    assert held._backend.ended.get(timeout=20) == "abort"


def test_a_rail_that_graphs_hold_stays_open_for_the_next_communicator(monkeypatch: pytest.MonkeyPatch) -> None:
    held, key = _held(), ((0, 2), torch.device("cpu"), "nccl")
    user: Any = object()
    held.users.add(user)
    monkeypatch.setattr(rail, "_known", {key: held})
    monkeypatch.setattr(rail, "_open", {held})
    rail.release(held, user)
    assert rail.find(key, user) is held and held.users == {user}
    rail.release(held, user)
    rail._abort_open()
    assert not held._ended
