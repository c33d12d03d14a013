"""Which block `allocate` hands out: the same on all ranks, whatever each of them holds, and without waiting in vain."""

from __future__ import annotations

import gc
import os
import random
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ep_plugin import HierarchicalAllGather
from ep_plugin.collectives import blocks as blocks_module
from tests.ranks import run_ranks, values

COUNT = 3000
BYTES = 4 * COUNT


def _number(gather: HierarchicalAllGather, tensor: torch.Tensor) -> int:
    found = gather.engine_on(tensor.device).inside.block_of(tensor)
    assert found >= 0
    return found


def _holds_some(rank: int, calls: int, sizes: list[int]) -> list[int]:
    """The numbers of the blocks of `calls` calls, between which this rank drops what it likes, also in a thread."""
    mine, alike = random.Random(rank), random.Random(99)
    gather = HierarchicalAllGather()
    held: list[torch.Tensor] = []
    numbers = []
    for _ in range(calls):
        tensor = gather.allocate(alike.choice(sizes), torch.uint8)
        numbers.append(_number(gather, tensor))
        held.append(tensor)
        del tensor
        if mine.random() < 0.3:
            time.sleep(0.002 * mine.random())
        while len(held) > 4 or (held and mine.random() < 0.5):
            dropped = [held.pop(mine.randrange(len(held)))]
            if mine.random() < 0.3:
                threading.Timer(0.001 * mine.random(), dropped.clear).start()
            del dropped
    assert len(gather.engine_on(torch.device("cpu")).blocks) <= 16
    dist.barrier()
    gather.close()
    return numbers


def test_ranks_choose_the_same_blocks_whatever_each_of_them_holds() -> None:
    for sizes in ([BYTES], [BYTES, 3 * BYTES // 2]):
        first, *others = values(run_ranks(3, _holds_some, 400, sizes))
        assert all(numbers == first for numbers in others)
        assert len(set(first)) > 2  # some were held: there was something to agree on


def _runs_ahead(rank: int) -> None:
    gather = HierarchicalAllGather()
    shard = torch.full((COUNT,), float(rank))
    for _ in range(4):
        gather(gather.allocate(2 * COUNT, torch.float32), shard)
    here = torch.zeros(1)
    if rank == 0:
        for _ in range(2):  # rank 1 does not call before it is told that these are through
            gather.allocate(2 * COUNT, torch.float32)
        dist.send(here, 1)
    else:
        dist.recv(here, 0)
        for _ in range(2):
            gather.allocate(2 * COUNT, torch.float32)
    gather.close()


def test_a_host_that_is_ahead_does_not_wait_for_one_that_has_released_the_blocks() -> None:
    values(run_ranks(2, _runs_ahead))


def _one_holds(rank: int) -> list[int]:
    gather = HierarchicalAllGather()
    held: Any = gather.allocate(BYTES, torch.uint8)
    kept = _number(gather, held)
    if rank == 0:
        held = None
    numbers = [_number(gather, gather.allocate(BYTES, torch.uint8)) for _ in range(5)]
    assert kept not in numbers, "a block that rank 1 holds was handed out"
    held = None
    later = [_number(gather, gather.allocate(BYTES, torch.uint8)) for _ in range(3)]
    assert kept in later, "a block that nobody holds was not handed out again"
    dist.barrier()
    gather.close()
    return [*numbers, *later]


def test_what_one_rank_holds_no_rank_gets() -> None:
    first, *others = values(run_ranks(3, _one_holds))
    assert all(numbers == first for numbers in others)


def _repeats(rank: int) -> None:
    gather = HierarchicalAllGather()
    blocks = gather.engine_on(torch.device("cpu")).blocks
    for step in range(6):
        held = [gather.allocate(BYTES, torch.uint8) for _ in range(10)]
        held.append(gather.allocate(19 * BYTES // 10, torch.uint8))
        del held
        if step == 2:
            settled = [block.key for block in blocks._blocks.values()]
    assert [block.key for block in blocks._blocks.values()] == settled, "blocks were made and closed again in each step"
    gather.close()


def test_a_step_that_repeats_makes_no_more_blocks() -> None:
    values(run_ranks(2, _repeats))


def _is_not_told(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if rank == 0:
        silent = SimpleNamespace(**vars(blocks_module._C) | {"release_dead_block": lambda *_: None})
        monkeypatch.setattr(blocks_module, "_C", silent)
    gather = HierarchicalAllGather()
    numbers = {_number(gather, gather.allocate(BYTES, torch.uint8)) for _ in range(12)}
    assert len(numbers) <= 3, "a release that nobody was told of costs a block"
    dist.barrier()
    gather.close()


def test_a_release_that_is_lost_is_made_up_for() -> None:
    values(run_ranks(2, _patched, _is_not_told))


def _patched(rank: int, function: Any) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        function(rank, monkeypatch)


def _forks(rank: int) -> None:
    gather = HierarchicalAllGather()
    held = gather.allocate(BYTES, torch.uint8)
    kept = _number(gather, held)
    child = os.fork()
    if child == 0:
        del held
        os._exit(0)
    os.waitpid(child, 0)
    numbers = [_number(gather, gather.allocate(BYTES, torch.uint8)) for _ in range(4)]
    assert kept not in numbers, "what a forked child dropped was taken for this rank's"
    dist.barrier()
    gather.close()


def test_a_forked_child_releases_nothing() -> None:
    values(run_ranks(2, _forks))


def _outlives(rank: int) -> None:
    gather = HierarchicalAllGather()
    held = gather.allocate(BYTES, torch.uint8)
    held.fill_(rank + 1)
    gather.close()
    assert int(held.sum()) == BYTES * (rank + 1)
    del held  # there is nothing left to tell anybody of it


def test_a_tensor_may_outlive_its_communicator() -> None:
    values(run_ranks(2, _outlives))


def _outlives_a_cycle(rank: int) -> None:
    gather = HierarchicalAllGather()
    tensor = gather.allocate(COUNT, torch.float32).fill_(rank)
    gather.itself = gather  # type: ignore[attr-defined]
    del gather
    gc.collect()
    assert bool((tensor == rank).all()) and bool((tensor.fill_(7.0) == 7.0).all())


def test_a_tensor_may_outlive_a_communicator_that_the_garbage_collector_closes() -> None:
    values(run_ranks(2, _outlives_a_cycle))
