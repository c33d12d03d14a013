"""How a rail ends on GPUs, where streams wait and not the host: by our deadline, or by a failure of another rank."""

from __future__ import annotations

import contextlib
import datetime
import os
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ep_plugin import HierarchicalAllGather
from ep_plugin.errors import EpPluginError, PeerAborted, PeerTimeout
from ep_plugin.runtime import group
from ep_plugin.runtime.group import RailWatch, weakly
from ep_plugin.transport import nccl, progress, rail
from ep_plugin.transport.progress import Progress
from ep_plugin.transport.rail import Rail
from tests.faults.fault_cases import open_communicator, open_with_deadline, tokens_for
from tests.ranks import run_ranks, values

ONE_EACH = {"EP_PLUGIN_RANKS_PER_NODE": "1"}
DEADLINE_S = 2.0


class _Stuck(Rail):
    """A rail over NCCL whose messages do not come. As its own progress it says for how long one has been waited for."""

    def __init__(self, known: Rail) -> None:
        super().__init__(known._backend, known.ident)
        self.together, self.progress, self.interrupted = True, self, 0
        self._running: tuple[Any, str, float] | None = None

    def begin(self, *given: Any) -> Any:
        if isinstance(given[1], str):  # as progress
            self._running = *given, time.monotonic()
            return 0
        return [SimpleNamespace(wait=lambda: None)]

    def follow(self, work: Any) -> None: ...

    def settle(self) -> None: ...

    def running(self) -> Any:
        return self._running and (*self._running[:2], time.monotonic() - self._running[2])

    def record(self, tensors: Any) -> None: ...

    def abort(self) -> None:
        self.interrupted += 1
        self.interrupted_at = time.monotonic()
        self._running = None


def _as_on_gpus(engine: Any) -> _Stuck:
    stuck = engine.rails._rail = rail._known[engine.rails._key] = _Stuck(engine.rails._rail)
    engine._rail_watch = RailWatch(weakly(engine._watch_rail))
    group._rail_poller.add(engine._rail_watch)
    return stuck


def _starts(engine: Any) -> None:
    row = torch.zeros(8, dtype=torch.uint8)
    engine.rails.start([(1, row, 0, 8)], [(1, row.clone(), 0, 8)], "rows of chunk 2")


def _error_of(comm: Any) -> EpPluginError:
    until = time.monotonic() + 20
    while time.monotonic() < until:
        try:
            comm.check()
        except EpPluginError as error:
            return error
        time.sleep(0.01)
    raise AssertionError("no error")


def _overdue(rank: int) -> tuple[EpPluginError, float] | None:
    comm = open_with_deadline(2, DEADLINE_S)
    if rank == 1:  # makes no call
        error = _error_of(comm)
        assert isinstance(error, PeerAborted) and error.rank == 0
        comm.close()
        return None
    stuck = _as_on_gpus(comm.engine)
    began = time.monotonic()
    _starts(comm.engine)
    error = _error_of(comm)
    took = time.monotonic() - began
    while not stuck.interrupted:
        time.sleep(0.01)
    assert stuck not in rail._known.values()
    with pytest.raises(PeerTimeout) as again:
        comm.dispatch(*tokens_for(rank, 2, 3))
    assert str(again.value) == str(error)
    with pytest.raises(PeerTimeout, match="the rail was aborted"):
        _starts(comm.engine)
    comm.close()
    return error, took


@pytest.mark.deadline
def test_overdue_messages_end_the_rail_and_are_named() -> None:
    error, took = values(run_ranks(2, _overdue, env=ONE_EACH))[0]
    assert isinstance(error, PeerTimeout) and (error.rank, error.step) == (1, "rail")
    assert "rank 0 waited at most 2 s for rank 1 at step rail (rows of chunk 2)" in str(error)
    assert DEADLINE_S - 0.3 < took < DEADLINE_S + 2


def _aborted(rank: int) -> None:
    """Rank 1 aborts while rank 0's stream waits for its rows, and before."""
    for waits in (True, False):
        comm = open_communicator(2, timeout_s=60)
        if rank == 0:
            stuck = _as_on_gpus(comm.engine)
            if waits:
                _starts(comm.engine)
        dist.barrier()
        if rank == 1:
            comm.abort("no room")
        began, error = time.monotonic(), _error_of(comm)
        assert isinstance(error, PeerAborted) and (error.rank, error.reason) == (1, "no room")
        if rank == 0:
            while waits and not stuck.interrupted:
                assert time.monotonic() - began < 5
                time.sleep(0.01)
            assert waits or not stuck.interrupted, "nothing waits for the rail, which others may use"
        comm.close()
        dist.barrier()


def test_an_abort_on_another_node_ends_the_rail() -> None:
    values(run_ranks(2, _aborted, env=ONE_EACH))


def _shared_by_failed(rank: int) -> str | None:
    """The messages of one communicator are overdue. Another one has messages behind them, which come to no end."""
    late, other = open_with_deadline(2, 0.5), open_communicator(2, timeout_s=60)
    if rank == 0:
        stuck = _as_on_gpus(late.engine)
        late.engine.rails._rail.users = {late.engine.rails, other.engine.rails}
        other.engine.rails._rail = stuck
        known_before_the_end: list[bool] = []
        end = stuck.abort
        stuck.abort = lambda: (known_before_the_end.append(not other.engine.boards.quiet()), end())  # type: ignore
        _starts(late.engine)
        while not stuck.interrupted:
            time.sleep(0.01)
        assert known_before_the_end[0]
    error = _error_of(other)
    assert isinstance(error, PeerAborted) and error.rank == 0
    for comm in (late, other):
        comm.close()
    return str(error)


@pytest.mark.deadline
def test_whoever_shares_an_ended_rail_knows_it_before_the_end() -> None:
    for said in values(run_ranks(2, _shared_by_failed, env=ONE_EACH)):
        assert "which shares a rail with this one, has failed" in said


def _others_messages(rank: int) -> None:
    """Two communicators share a rail; the messages of one are overdue."""
    late, other = open_with_deadline(2, 0.5), open_communicator(2, timeout_s=60)
    if rank == 0:
        stuck = _as_on_gpus(late.engine)
        other.engine.rails._rail = stuck
        _starts(other.engine)
        time.sleep(1)
        assert late.engine.rails.overdue() is None and not late.engine.rails.running()
        assert other.engine.rails.running() and other.engine.rails.overdue() is None
        late.check()
        assert not stuck.interrupted
    dist.barrier()
    late.close()
    other.close()


@pytest.mark.deadline
def test_a_deadline_is_that_of_the_communicator_whose_messages_cross() -> None:
    values(run_ranks(2, _others_messages, env=ONE_EACH))


def _gathers(rank: int) -> None:
    """A gather's rail has the same deadline."""
    gather = HierarchicalAllGather(dist.new_group(timeout=datetime.timedelta(seconds=DEADLINE_S)))
    gather(torch.empty(2), torch.ones(1))
    if rank == 0:
        engine = gather.engine_on(torch.device("cpu"))
        _as_on_gpus(engine)
        _starts(engine)
    error = _error_of(gather)
    assert isinstance(error, (PeerTimeout, PeerAborted))
    gather.close()


@pytest.mark.deadline
def test_a_gather_ends_by_the_same_deadline() -> None:
    values(run_ranks(2, _gathers, env=ONE_EACH))


class _Cuda:
    """torch, as far as Progress uses it, on a device whose streams do everything at once."""

    def __init__(self) -> None:
        stream = SimpleNamespace(wait_stream=lambda other: None, synchronize=lambda: None)
        event = SimpleNamespace(record=lambda stream: None)
        self.capturing, self.int64 = False, torch.int64
        self.cuda = SimpleNamespace(
            Stream=lambda device, priority: stream,
            Event=lambda: event,
            current_stream=lambda device: stream,
            stream=lambda stream: contextlib.nullcontext(),
            is_current_stream_capturing=lambda: self.capturing,
        )
        self.arange = torch.arange

    def zeros(self, *shape: int, pin_memory: bool = False, **given: Any) -> torch.Tensor:
        return torch.zeros(*shape, **given)


def test_progress_says_what_runs_and_tells_replays_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = _Cuda()
    monkeypatch.setattr(progress, "torch", cuda)
    monkeypatch.setattr(progress, "_NUMBERS", 4)
    made, work = Progress(torch.device("cpu")), SimpleNamespace(wait=lambda: None)
    assert made.running() is None
    numbers = []
    for call in range(4):
        assert made.begin("one", f"call {call}") == 0
        numbers.append(int(made._words[0]))
        owner, what, seconds = made.running()  # type: ignore[misc]
        assert (owner, what) == ("one", f"call {call}") and seconds < 1
        assert made.follow(work) is None and made.running() is None
    assert numbers == [1, 2, 3, 1]
    cuda.capturing = True
    assert made.begin("two", "captured") == 0
    first = made._words.tolist()
    kept = first[0]
    assert made.follow(work) is not None
    made._words[0] = kept  # as a replay writes
    made._counter.add_(1)
    made._words[1:].copy_(made._counter)
    assert made.running()[:2] == ("two", "captured") and made._words.tolist() != first  # type: ignore[index]
    cuda.capturing, made._words[0] = False, 0
    made.is_written = True  # whoever begins an operation then writes its number
    assert kept not in [made.begin("one", "") for _ in range(4)] and made._words[0] == 0
    made._words[0] = made.begin("three", "written")
    assert made.running()[:2] == ("three", "written")  # type: ignore[index]


def _config(max_ctas: int, min_ctas: int) -> SimpleNamespace:
    return SimpleNamespace(max_ctas=max_ctas, min_ctas=min_ctas, net_name=None)


class _Nccl:
    """torch's backend, which notes how it was made."""

    def __init__(self, store: Any = None, node: int = 0, size: int = 2, options: Any = None) -> None:
        self.store, self.options = store, options or SimpleNamespace(config=_config(-9, -9))
        self.made_with = [os.environ.get(f"TORCH_NCCL_{name}") for name in ("BLOCKING_WAIT", "ASYNC_ERROR_HANDLING")]

    Options = SimpleNamespace

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.store.set("0", "id")


@pytest.fixture
def over_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("PrefixStore", "ProcessGroupNCCL", "is_nccl_available", "is_gloo_available")
    kinds = (lambda prefix, store: store, _Nccl, lambda: True, lambda: True)
    for module in (rail, nccl):
        monkeypatch.setattr(module, "c10d", SimpleNamespace(**dict(zip(names, kinds, strict=True))))
    monkeypatch.setattr(rail, "Progress", lambda device: SimpleNamespace(device=device))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())


@pytest.mark.deadline
@pytest.mark.usefixtures("over_nccl")
def test_a_rank_that_does_not_connect_is_waited_for_until_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    late = threading.Event()
    monkeypatch.setattr(_Nccl, "eager_connect_single_device", lambda self, device: late.wait())
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r"NCCL has not connected within 0\.2 s"):
        rail._connected(torch.device("cuda", 0), _Nccl(), 2, 0, "name", dist.HashStore(), 0.2)
    assert time.monotonic() - began < 5
    late.set()


@pytest.mark.usefixtures("over_nccl")
@pytest.mark.parametrize(("asked", "bounded"), [(-9, 8), (4, 4), (32, 8)])
def test_nccl_of_a_rail_outlives_its_peers_and_leaves_room(
    monkeypatch: pytest.MonkeyPatch, asked: int, bounded: int
) -> None:
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    theirs, store = _Nccl(), dist.HashStore()
    theirs.options.config = _config(asked, 16)
    made = rail._connected(torch.device("cuda", 0), theirs, 2, 0, "name", store, 5.0)
    assert made is not None and made.together and made.captures and made.gathers and not store.check(["0"])
    backend = made._backend
    assert backend.options._timeout > datetime.timedelta(hours=1), "after any deadline of ours"
    assert backend.options.config.blocking == 1, "as our own calls of NCCL expect"
    assert (backend.options.config.max_ctas, backend.options.config.min_ctas) == (bounded, min(16, bounded))
    assert backend.made_with == ["1", "0"] and os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "1"
    assert "TORCH_NCCL_BLOCKING_WAIT" not in os.environ


def test_messages_over_nccl_begin_all_together() -> None:
    calls: list[Any] = []
    backend = SimpleNamespace(
        _start_coalescing=lambda: calls.append("begin"),
        send=lambda tensors, node, tag: calls.append(("send", node)),
        recv=lambda tensors, node, tag: calls.append(("receive", node)),
        _end_coalescing=lambda: calls.append("end") or SimpleNamespace(synchronize=lambda: calls.append("order")),
        abort=lambda: calls.append("abort"),
        shutdown=lambda: calls.append("shutdown"),
    )
    made = Rail(backend, "name", SimpleNamespace())  # type: ignore[arg-type]
    row = torch.zeros(1, dtype=torch.uint8)
    (work,) = made.begin([(1, row, 0, 1, True, 0), (2, row, 0, 1, False, 0)])
    work.wait()
    made.abort()
    made.abort()
    made.close()
    assert calls == ["begin", ("send", 1), ("receive", 2), "end", "order", "abort"]
