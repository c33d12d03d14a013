"""The collectives of a group share control memory, and nothing else: which sets, failures, and the end."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ep_plugin import HierarchicalAllGather, HierarchicalReduceScatter, SendReceive
from ep_plugin.collectives import control as control_module
from ep_plugin.collectives.control import SETS
from ep_plugin.errors import EpPluginError, PeerAborted
from ep_plugin.transport.peer import PeerMemory
from tests.faults.fault_cases import nothing_left_behind
from tests.ranks import run_ranks, values

CPU = torch.device("cpu")
GROUPS = {"one node": (2, {}), "two nodes": (4, {"EP_PLUGIN_RANKS_PER_NODE": "2"})}


@contextmanager
def _allocations() -> Iterator[list[str]]:
    """What this process allocates of peer memory, by name."""
    names: list[str] = []
    allocate = PeerMemory.allocate

    def recorded(memory: PeerMemory, nbytes: int, what: str) -> Any:
        names.append(what)
        return allocate(memory, nbytes, what)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PeerMemory, "allocate", recorded)
        yield names


def _engine(made: HierarchicalAllGather | HierarchicalReduceScatter | SendReceive) -> Any:
    return made._engine if isinstance(made, SendReceive) else made.engine_on(CPU)


def _latest_of(made: HierarchicalAllGather) -> Any:
    return control_module._latest[made.group][CPU, _engine(made).within.ranks]


def _works(made: HierarchicalAllGather | HierarchicalReduceScatter | SendReceive) -> None:
    """One operation of the default group's ranks, with the right result."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if isinstance(made, HierarchicalAllGather):
        out = torch.empty(size)
        made(out, torch.tensor([float(rank)]))
        assert out.tolist() == list(range(size))
    elif isinstance(made, HierarchicalReduceScatter):
        out = torch.empty(1)
        made(out, torch.arange(size, dtype=torch.float32))
        assert out.item() == rank * size
    else:
        received = torch.empty(1)
        right, left = (rank + 1) % size, (rank - 1) % size
        made.exchange(torch.tensor([float(rank)]), received, right, left).wait()
        assert received.item() == left


def _shares(rank: int) -> None:
    with _allocations() as names:
        gather = HierarchicalAllGather()
        _works(gather)
        first = list(names)
        scatter, messages = HierarchicalReduceScatter(), SendReceive()
        _works(scatter)
        _works(messages)
    assert sorted(first) == ["control", "host words"]
    assert names.count("control") == names.count("host words") == 1
    blocks = {_engine(made).control.block for made in (gather, scatter)}
    boards = {_engine(made).boards.address for made in (gather, scatter, messages)}
    assert len(blocks) == 2 and len(boards) == 3
    exchanges = [_engine(made).within._count for made in (gather, scatter, messages)]
    assert exchanges[1] <= exchanges[0] - 4, "the second maps no control memory"
    gather.close()  # it has made the memory
    _works(scatter)
    _works(messages)
    scatter.close()
    messages.close()
    nothing_left_behind()


@pytest.mark.parametrize("case", GROUPS)
def test_the_collectives_of_a_group_share_one_allocation(case: str) -> None:
    size, environment = GROUPS[case]
    values(run_ranks(size, _shares, env=environment))


def _takes_many(rank: int) -> None:
    sets: list[tuple[str, int]] = []
    kept: list[HierarchicalAllGather] = []
    with _allocations() as names:
        for number in range(2 * SETS + 1):
            gather = HierarchicalAllGather()
            _works(gather)
            sets.append((_latest_of(gather).ident, _engine(gather).boards.address))
            kept.append(gather)
            if number % 2:
                kept.pop(0).close()
    assert len(set(sets)) == len(sets), "a set was taken again while its memory was open"
    assert names.count("control") == 3
    for gather in kept:
        _works(gather)
        gather.close()
    nothing_left_behind()


def test_a_set_is_taken_once_and_more_are_allocated_when_all_are_taken() -> None:
    values(run_ranks(2, _takes_many))


def _allocates_again(rank: int) -> None:
    with _allocations() as names:
        for _ in range(3):
            gather = HierarchicalAllGather()
            _works(gather)
            gather.close()
            nothing_left_behind()
    assert names.count("control") == 3


def test_memory_that_nobody_uses_goes_and_is_not_taken_again() -> None:
    values(run_ranks(2, _allocates_again))


def _other_groups(rank: int) -> None:
    groups = [None, dist.new_group([0, 1, 2]), dist.new_group([0, 1])]
    with _allocations() as names:
        made = [HierarchicalAllGather(group) for group in groups[: 2 if rank == 2 else 3]]
        for gather in made:
            gather(torch.empty(gather.group.size()), torch.zeros(1))
    assert names.count("control") == len(made)
    for gather in made:
        gather.close()
    dist.destroy_process_group(groups[1])
    again = HierarchicalAllGather(dist.new_group([0, 1, 2]))
    again(torch.empty(3), torch.zeros(1))
    again.close()
    nothing_left_behind()


def test_other_groups_have_memory_of_their_own() -> None:
    values(run_ranks(3, _other_groups))


def _counts_differ(rank: int, peers: tuple[int, ...], allocations: int) -> None:
    """As after a construction that failed on some ranks only: the first rank's number counts, while all have it."""
    with _allocations() as names:
        made = [HierarchicalAllGather()]
        _works(made[0])
        latest = _latest_of(made[0])
        for peer in peers:
            if rank == peer:
                with contextlib.ExitStack() as failed:
                    assert latest.reserve(failed) is not None
            made.append(HierarchicalAllGather())
            _works(made[-1])
    assert names.count("control") == allocations
    addresses = [_engine(gather).boards.address for gather in made]
    assert len(set(addresses)) == len(made)
    for gather in made:
        gather.close()
    nothing_left_behind()


@pytest.mark.parametrize(
    ("peers", "allocations"),
    [pytest.param((1, 0), 1, id="each once"), pytest.param((1, 1), 2, id="rank 1 has no set left for the last")],
)
def test_ranks_that_have_counted_apart_take_the_same_sets(peers: tuple[int, ...], allocations: int) -> None:
    values(run_ranks(2, _counts_differ, peers, allocations))


def _one_fails(rank: int, kind: str) -> None:
    """The error of one collective reaches its peers at once, and none of the others, which go on."""
    with HierarchicalAllGather() as gather, HierarchicalReduceScatter() as scatter, SendReceive() as messages:
        made = {"gather": gather, "scatter": scatter, "messages": messages}
        for one in made.values():
            _works(one)
        failing = made.pop(kind)
        dist.barrier()
        if rank == 0:
            failing.abort("on purpose")
            with pytest.raises(PeerAborted, match="on purpose"):
                failing.check()
        else:
            with pytest.raises(PeerAborted, match="on purpose"):
                _works(failing)
        for one in made.values():
            _works(one)
            one.check()
        failing.close()
        for one in made.values():
            _works(one)
        with HierarchicalAllGather() as another:
            _works(another)
    nothing_left_behind()


@pytest.mark.parametrize("kind", ["gather", "scatter", "messages"])
def test_a_failure_stays_with_its_collective(kind: str) -> None:
    values(run_ranks(2, _one_fails, kind))


def _lacks_memory(rank: int) -> None:
    from ep_plugin.transport import shm

    def check(nbytes: int) -> None:
        raise MemoryError("none is left")

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(shm, "_check_available", check)
        with pytest.raises(EpPluginError, match=r"host words .* failed: MemoryError: none is left") as caught:
            HierarchicalAllGather().engine_on(CPU)
        assert isinstance(caught.value, PeerAborted) == (rank == 0)
    nothing_left_behind()
    with HierarchicalAllGather() as gather:
        _works(gather)
    nothing_left_behind()


def test_a_rank_without_memory_fails_for_all_and_leaves_nothing() -> None:
    values(run_ranks(2, _lacks_memory))


def _splits_again(rank: int) -> None:
    """The variable that splits a host into nodes is read for each collective."""
    with contextlib.ExitStack() as stack:
        for nodes_of in ("2", "1", "2", "1"):
            os.environ["EP_PLUGIN_RANKS_PER_NODE"] = nodes_of
            gather = stack.enter_context(HierarchicalAllGather())
            _works(gather)
            assert len(_engine(gather).control.board) == int(nodes_of)
    nothing_left_behind()


def test_another_split_into_nodes_has_other_memory() -> None:
    values(run_ranks(2, _splits_again))


@pytest.mark.parametrize("page", [4096, 65536])
def test_parts_lie_on_pages_of_their_own(page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_module, "_PAGE_BYTES", page)
    allocate = SimpleNamespace(device=CPU, allocate=lambda nbytes, what: _Buffer(nbytes), disown=lambda buffer: None)
    memory = control_module._ControlMemory(SimpleNamespace(ident="one"), allocate)  # type: ignore[arg-type]
    pages = [
        begin // page + number
        for taken in (memory.set_at(place) for place in range(SETS))
        for name, nbytes in control_module._HOST_PARTS.items()
        for begin in getattr(taken, name)
        for number in range(-(-nbytes // page))
    ]
    assert len(pages) == len(set(pages))


class _Buffer:
    """Memory of one rank that nobody uses."""

    def __init__(self, nbytes: int) -> None:
        self.ptrs, self.close = (1 << 20,), lambda: None


def _forks(rank: int) -> None:
    gather = HierarchicalAllGather()
    _works(gather)
    child = os.fork()
    if child == 0:
        os._exit(bool(control_module._latest))
    assert os.waitpid(child, 0)[1] == 0, "the child could take sets of its parent"
    with HierarchicalReduceScatter() as scatter:
        _works(scatter)
    gather.close()
    nothing_left_behind()


def test_a_forked_child_takes_no_set_of_its_parent() -> None:
    values(run_ranks(2, _forks))
