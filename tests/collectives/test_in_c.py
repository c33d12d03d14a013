"""All-gathers and reduce-scatters that are like earlier ones run in C, all others in Python, with the same results."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from ep_plugin import _C, HierarchicalAllGather, HierarchicalReduceScatter
from ep_plugin.collectives.base import Collective
from ep_plugin.errors import CommunicatorClosed, EpPluginError, PeerAborted
from tests.faults.fault_cases import at_gate, nothing_left_behind, signal_self
from tests.ranks import run_ranks, values

CPU = torch.device("cpu")
COUNT = 6


def _in_c(made: Collective, call: Callable[[], object]) -> bool:
    """Whether `call` ran in C."""
    before = made._known.num_calls
    call()
    return made._known.num_calls == before + 1


def _gathers(rank: int, size: int, gather: HierarchicalAllGather, **given: Any) -> tuple[bool, bool]:
    """Whether a gather ran in C, and whether it was right. given: tensors in place of new ones."""
    mine = torch.full((COUNT,), rank + 1.0)
    given = {"input_tensor": mine, "output_tensor": torch.full((size * COUNT,), -1.0)} | given
    ran = _in_c(gather, lambda: gather(**given))
    expected = torch.arange(1.0, size + 1).repeat_interleave(COUNT)
    return ran, torch.equal(given["output_tensor"].detach().as_subclass(torch.Tensor).flatten(), expected)


def _known_calls(rank: int, size: int) -> None:
    gather, scatter = HierarchicalAllGather(), HierarchicalReduceScatter()
    assert _gathers(rank, size, gather) == (False, True)
    assert _gathers(rank, size, gather) == (True, True)
    allocated = gather.allocate(size * COUNT, torch.float32)
    part = allocated.narrow(0, rank * COUNT, COUNT).fill_(rank + 1.0)
    _gathers(rank, size, gather, output_tensor=allocated, input_tensor=part)
    assert _gathers(rank, size, gather, output_tensor=allocated, input_tensor=part) == (True, True)
    for shape in ((size, COUNT), (size * COUNT,)):
        _gathers(rank, size, gather, output_tensor=torch.empty(shape))
        assert _gathers(rank, size, gather, output_tensor=torch.empty(shape)) == (True, True)
    work = gather(allocated, part, async_op=True)
    assert work is not None and work.wait() and work.result()[0] is allocated
    total = torch.empty(COUNT)
    for turn, (op, scale) in enumerate(
        [(dist.ReduceOp.SUM, 1.0), (dist.ReduceOp.SUM, 1.0), (dist.ReduceOp.AVG, 1.0 / size)]
    ):
        given = torch.full((size * COUNT,), rank + 1.0 + turn)
        assert _in_c(scatter, lambda op=op, given=given: scatter(total, given, op=op)) == (turn > 0)
        assert total.tolist() == [scale * sum(source + 1.0 + turn for source in range(size))] * COUNT
    nothing = [torch.empty(0), torch.empty(0)]
    gather(*nothing)
    assert _in_c(gather, lambda: gather(*nothing))
    calls = [kept[1] for kept in _C.kept_calls()]
    assert size == 1 or {"all-gather", "reduce-scatter"} <= set(calls), "calls in C are logged, too"
    del allocated, part, work
    for made in (gather, scatter):
        made.close()
    for call in (lambda: _gathers(rank, size, gather), lambda: scatter(total, torch.ones(size * COUNT))):
        with pytest.raises(CommunicatorClosed):
            call()
    nothing_left_behind()


@pytest.mark.parametrize("size", [1, 2])
def test_known_calls_run_in_c(size: int) -> None:
    values(run_ranks(size, _known_calls, size))


def test_calls_across_nodes_run_in_python() -> None:
    values(run_ranks(2, _across_nodes, env={"EP_PLUGIN_RANKS_PER_NODE": "1"}))


def _across_nodes(rank: int) -> None:
    with HierarchicalAllGather() as gather:
        assert [_gathers(rank, 2, gather) for _ in range(2)] == [(False, True)] * 2


class _Plain(torch.Tensor):
    """A subclass that has memory as any other tensor."""


class _Sees(TorchDispatchMode):
    seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        return func(*args, **(kwargs or {}))


def _others(rank: int, size: int) -> None:
    gather, scatter = HierarchicalAllGather(), HierarchicalReduceScatter()
    mine = torch.full((COUNT,), rank + 1.0)
    for _ in range(2):
        _gathers(rank, size, gather)
        scatter(torch.empty(COUNT), torch.ones(size * COUNT))
    freed = torch.empty(size * COUNT)
    freed.untyped_storage().resize_(0)
    wrong: list[tuple[Callable[[], object], str]] = [
        (lambda: gather(torch.empty(2 * size * COUNT)[::2], mine), "output_tensor: expected a contiguous tensor"),
        (lambda: gather(torch.empty(size * COUNT), torch.ones(2 * COUNT)[::2]), "input_tensor: expected a contiguous"),
        (lambda: gather(freed, mine), "output_tensor: expected a storage of at least"),
        (lambda: gather(torch.empty(size * COUNT), mine.double()), "expected dtype torch.float64 as of input_tensor"),
        (lambda: gather(torch.empty(size * COUNT + 1), mine), "output_tensor: expected .* elements, one input_tensor"),
        (lambda: scatter(torch.empty(COUNT), torch.ones(size * COUNT), op=dist.ReduceOp.MAX), "op: expected SUM"),
        (lambda: scatter(torch.empty(COUNT).int(), torch.ones(size * COUNT).int()), "dtype: expected one of"),
        (lambda: scatter(torch.empty(COUNT), freed), "input_tensor: expected a storage of at least"),
    ]
    for call, said in wrong:
        with pytest.raises(ValueError, match=said):
            call()
    assert _gathers(rank, size, gather) == (True, True), "nothing was launched"
    assert _gathers(rank, size, gather, input_tensor=mine.as_subclass(_Plain)) == (False, True)
    with _Sees() as mode:
        assert _gathers(rank, size, gather) == (False, True)
    assert mode.seen > 0
    needs_grad = mine.clone().requires_grad_()
    output = torch.full((size * COUNT,), -1.0)
    assert _gathers(rank, size, gather, input_tensor=needs_grad, output_tensor=output)[1]
    assert not output.requires_grad, "collectives are not differentiable"
    for made in (gather, scatter):
        made.close()


@pytest.mark.parametrize("size", [1, 2])
def test_other_calls_run_in_python(size: int) -> None:
    values(run_ranks(size, _others, size))


def _overlaps(rank: int, size: int) -> None:
    """Before and after C knows calls of this form. The communicators live on."""
    gather, scatter = HierarchicalAllGather(), HierarchicalReduceScatter()
    memory = torch.ones((size + 1) * COUNT)
    whole = memory.narrow(0, 0, size * COUNT)
    places = [rank * COUNT + 1] + [other * COUNT for other in range(size) if other != rank]
    for _ in range(3):
        for place in places:
            one = memory.narrow(0, place, COUNT)
            said = f"expected the part of rank {rank} in .*, or memory apart from it, got one that shares "
            with pytest.raises(ValueError, match=f"^input_tensor: {said}"):
                gather(whole, one)
            with pytest.raises(ValueError, match=f"^output_tensor: {said}"):
                scatter(one, whole)
            with pytest.raises(ValueError, match=f"^tensor: {said}"):
                gather.all_gather(list(whole.split(COUNT)), one)
            with pytest.raises(ValueError, match=f"^output: {said}"):
                scatter.reduce_scatter(one, list(whole.split(COUNT)))
        whole.fill_(rank)
        gather(whole, whole.narrow(0, rank * COUNT, COUNT))
        assert whole.view(size, COUNT).eq(torch.arange(size)[:, None]).all()
        scatter(whole.narrow(0, rank * COUNT, COUNT), whole)
        assert whole.narrow(0, rank * COUNT, COUNT).eq(size * rank).all()
    gather.close()
    scatter.close()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_memory_that_input_and_output_share_is_refused(size: int) -> None:
    values(run_ranks(size, _overlaps, size))


def _held(rank: int) -> HierarchicalAllGather:
    """A gather whose known calls are held in the kernel of rank 0."""
    gather = HierarchicalAllGather()
    for _ in range(2):
        _gathers(rank, 2, gather)
    engine = gather.engine_on(CPU)
    if rank == 0:
        engine.comm.gate = _C.Step.ALL_GATHER
        at_gate(SimpleNamespace(engine=engine), lambda: signal_self(signal.SIGUSR1))  # type: ignore[arg-type]
    return gather


def _handler_closes(rank: int) -> None:
    gather = _held(rank)
    if rank == 0:
        signal.signal(signal.SIGUSR1, lambda *_: gather.close())
    with pytest.raises(PeerAborted, match="rank 0 aborted: closed by a signal handler during an operation"):
        for _ in range(2):  # rank 1 has the shard of rank 0, which is held behind it
            _gathers(rank, 2, gather)
    gather.close()
    with pytest.raises(CommunicatorClosed):
        gather.check()
    nothing_left_behind()


def _handler_operates(rank: int) -> None:
    gather = _held(rank)
    refused = []

    def handler(*_: Any) -> None:
        with pytest.raises(EpPluginError, match="expected no operation during one of .*, got all-gather in the hand"):
            _gathers(rank, 2, gather)
        refused.append(True)
        _C.open_gate(gather.engine_on(CPU).boards.address)

    signal.signal(signal.SIGUSR1, handler)
    assert _gathers(rank, 2, gather) == (True, True)
    assert refused == [True] * (rank == 0)
    gather.close()


def _handler_raises(rank: int) -> None:
    def handler(*_: Any) -> None:
        raise KeyboardInterrupt

    gather = _held(rank)
    signal.signal(signal.SIGUSR1, handler)
    with pytest.raises(KeyboardInterrupt if rank == 0 else PeerAborted):
        for _ in range(2):
            _gathers(rank, 2, gather)
    gather.close()


def _peer_fails(rank: int) -> None:
    gather = HierarchicalAllGather()
    for _ in range(2):
        _gathers(rank, 2, gather)
    engine, store = gather.engine_on(CPU), dist.distributed_c10d._get_default_store()
    if rank == 0:
        engine.comm.gate = _C.Step.ALL_GATHER
        at_gate(SimpleNamespace(engine=engine), lambda: store.set("rank 0 is held", ""))  # type: ignore[arg-type]
    else:
        store.wait(["rank 0 is held"])
        gather.abort("MemoryError: no room")
    with pytest.raises(PeerAborted, match="rank 1 aborted: MemoryError: no room"):
        _gathers(rank, 2, gather)
    with pytest.raises(PeerAborted):
        _gathers(rank, 2, gather)
    gather.close()


def _two_threads(rank: int) -> None:
    """Each thread has an object of its own; the ranks take turns in one order because a lock of the test says so."""
    made = [HierarchicalAllGather() for _ in range(2)]
    for gather in made:
        for _ in range(2):
            _gathers(rank, 2, gather)
    turns = [threading.Semaphore(1), threading.Semaphore(0)]
    found: list[tuple[bool, bool]] = []

    def work(number: int) -> None:
        for _ in range(50):
            turns[number].acquire()
            found.append(_gathers(rank, 2, made[number]))
            turns[1 - number].release()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [(True, True)] * 100
    for gather in made:
        gather.close()


@pytest.mark.parametrize("case", [_handler_closes, _handler_operates, _handler_raises, _peer_fails, _two_threads])
def test_what_may_happen_during_a_call(case: Callable[[int], None]) -> None:
    values(run_ranks(2, case))
