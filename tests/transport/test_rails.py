"""The rails that communicators of a process share: how many there are, who closes them, and what survives a failure."""

from __future__ import annotations

import contextlib
import datetime
import os
import queue
import signal
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ep_plugin import HierarchicalAllGather, HierarchicalReduceScatter, MoECommunicator, MoECommunicatorConfig
from ep_plugin.errors import DisagreementError, EpPluginError, PeerAborted
from ep_plugin.transport import nccl, rail, threads
from tests.faults.fault_cases import (
    RAIL_CHUNKS,
    open_communicator,
    open_with_deadline,
    round_trip,
    signal_self,
    tokens_for,
)
from tests.ranks import run_ranks, values

TWO_NODES = {"EP_PLUGIN_RANKS_PER_NODE": "2"}
DEADLINE_S = 2.0


def _users() -> list[int]:
    return sorted(len(each.users) for each in rail._open)


def _shares(rank: int) -> list[int]:
    """Bytes that each communicator counts for itself."""
    alike = dist.new_group()
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    first, second = open_communicator(4), MoECommunicator(alike, first_config(8, rail_chunks=RAIL_CHUNKS))
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
    settings = {"num_experts": 8, "hidden_size": 8, "topk": 2, "max_row_bytes": 32}
    with MoECommunicator(group, MoECommunicatorConfig(**settings, max_tokens_per_rank=9, mode="ll")) as comm:
        for count in (9, 0, 4):
            x, ids, weights = tokens_for(rank, 4, count)
            before = comm.rail_bytes_sent
            out, handle = comm.dispatch(x, ids)
            torch.testing.assert_close(comm.combine(out.tokens, handle, weights=weights), x)
            assert comm.rail_bytes_sent - before == 3 * 64 + 16 + 9 * (16 + 32) + 9 * 8 + 9 * 32  # legs have 9 rows


def test_other_backends_carry_rows_over_the_group() -> None:
    values(run_ranks(4, _over_the_group, env=TWO_NODES))


class _Nccl2:
    """ProcessGroupNCCL2 as PyTorch 2.14 publishes it: no ProcessGroupNCCL, but with its options. Gloo sends."""

    def __init__(self, store: dist.Store, rank: int, size: int, options: Any) -> None:
        self.options, self.made_with = options, os.environ.get("TORCH_NCCL_BLOCKING_WAIT")
        self.device: torch.device | None = None
        self._made_of = store, rank, size
        self._batch: list[Any] | None = None

    def eager_connect_single_device(self, device: torch.device) -> None:
        if self.device is None:
            store, rank, size = self._made_of
            dist.PrefixStore("nccl2", store).add("nccl_storekey_0", 1)
            self._gloo, self.device = dist.ProcessGroupGloo(store, rank, size, datetime.timedelta(seconds=20)), device
        assert self.device == device, "bound to another device"

    def _start_coalescing(self) -> None:
        assert self._batch is None, "startCoalescing called while a batch is already active"
        self._batch = []

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> None:
        assert self._batch is not None
        self._batch.append((self._gloo.send, tensors, to, tag))

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> None:
        assert self._batch is not None
        self._batch.append((self._gloo.recv, tensors, source, tag))

    def _end_coalescing(self) -> Any:
        assert self._batch is not None
        batch, self._batch = self._batch, None
        return _as_on_a_stream([call(*args) for call, *args in batch])

    def _allgather_base(self, output: torch.Tensor, part: torch.Tensor) -> Any:
        return _as_on_a_stream([self._gloo._allgather_base(output, part)])

    def abort(self) -> None:
        self._gloo.abort()

    def shutdown(self) -> None:
        self._gloo.shutdown()


class _Nccl2Of215(_Nccl2):
    """From 2.15 on it connects in the constructor, to the device that it is given or to one of its own choice."""

    def __init__(
        self, store: dist.Store, rank: int, size: int, options: Any, device_id: torch.device | None = None
    ) -> None:
        super().__init__(store, rank, size, options)
        self.eager_connect_single_device(device_id or torch.device("cuda", 1))


class _Lazy:
    """ProcessGroupNCCLLazy, as a user has it."""

    def __init__(self, options: Any) -> None:
        self.options = options


def _as_on_a_stream(works: list[Any]) -> SimpleNamespace:
    """A work that only `synchronize` waits for: `wait` would block the host, since a rail has no watchdog."""
    return SimpleNamespace(synchronize=lambda: [work.wait() for work in works])


def _over_nccl2(rank: int, kind: type[_Nccl2], lazy: bool) -> None:
    config = SimpleNamespace(max_ctas=-9, min_ctas=-9, net_name="fabric")
    theirs: Any = _Lazy(SimpleNamespace(config=config)) if lazy else kind.__new__(kind)
    theirs.options = SimpleNamespace(config=config)
    c10d = dist.distributed_c10d
    names = {"ProcessGroupNCCL": type("ProcessGroupNCCL", (), {"Options": SimpleNamespace})}
    names |= {"ProcessGroupNCCL2": kind, "ProcessGroupNCCLLazy": _Lazy, "PrefixStore": dist.PrefixStore}
    rail.c10d = SimpleNamespace(**names, is_gloo_available=c10d.is_gloo_available)  # type: ignore[attr-defined]
    nccl.c10d = rail.c10d  # type: ignore[attr-defined]
    rail.Progress = lambda device: SimpleNamespace()  # type: ignore[assignment, misc]
    torch.cuda.device = lambda device: contextlib.nullcontext()  # type: ignore[assignment, misc]
    store = c10d._get_default_store()
    made = rail._connected(torch.device("cuda", 0), theirs, 2, rank, "name", store, 20.0)
    assert made is not None and type(made._backend) is kind and made.together and made.captures
    backend = made._backend
    assert backend.made_with == "1" and backend.device == torch.device("cuda", 0)
    assert backend.options._timeout > datetime.timedelta(hours=1) and backend.options.config.max_ctas == nccl.MOST_CTAS
    sent, received = torch.full((3,), rank, dtype=torch.uint8), torch.empty(3, dtype=torch.uint8)
    (work,) = made.begin(
        [(1 - rank, sent, 0, sent.numel(), True, 0), (1 - rank, received, 0, received.numel(), False, 0)]
    )
    work.wait()
    everyones = torch.empty(6, dtype=torch.uint8)
    made.gather(everyones, sent).wait()
    assert received.tolist() == [1 - rank] * 3 and everyones.tolist() == [0, 0, 0, 1, 1, 1]
    dist.barrier()
    assert not store.check(["rail name/nccl2/nccl_storekey_0"])
    made.close()
    with pytest.raises(RuntimeError, match="the rail has ended"):
        made.begin([])


@pytest.mark.parametrize("lazy", [False, True], ids=["nccl2", "nccl-lazy"])
@pytest.mark.parametrize("kind", [_Nccl2, _Nccl2Of215], ids=["2.14", "2.15"])
def test_a_rail_over_nccl2_is_of_that_kind(kind: type[_Nccl2], lazy: bool) -> None:
    values(run_ranks(2, _over_nccl2, kind, lazy))


def test_pytorch_has_what_rails_over_nccl_use() -> None:
    """A build of PyTorch for CPUs alone has none of these classes."""
    used = ("eager_connect_single_device", "_allgather_base", "abort", "shutdown", "options")
    used += ("_start_coalescing", "send", "recv", "_end_coalescing")
    for name in nccl.KINDS:
        theirs = getattr(dist.distributed_c10d, name, None)
        if theirs is None:
            continue
        own = nccl.kind_of(theirs.__new__(theirs))
        assert own.__name__ == nccl.KINDS[name] and all(hasattr(own, method) for method in used)
        config = dist.ProcessGroupNCCL.Options().config
        config.net_name = "fabric"
        options = nccl.options_like(SimpleNamespace(options=SimpleNamespace(config=config)))
        assert (options.config.net_name, options.config.max_ctas) == ("fabric", nccl.MOST_CTAS)


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
