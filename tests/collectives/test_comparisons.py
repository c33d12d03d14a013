"""Hosts compare what they enqueue on GPUs, on CPUs: a device that takes everything and does nothing stands in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ep_plugin import _C, HierarchicalAllGather, HierarchicalReduceScatter
from ep_plugin.collectives.base import Collective
from ep_plugin.errors import DisagreementError
from tests.collectives.collective_cases import BF16, FP32
from tests.gpu_stand_in import serve_with
from tests.ranks import run_ranks, values


class _Device:
    """It takes whatever is enqueued, and does nothing; the host goes on."""

    def all_gather(self, args: Any) -> None: ...

    reduce_scatter = small_exchange = all_gather


def _on_a_device(made: Collective, path: str = "copy_engine") -> Collective:
    serve_with(made, path, _Device())
    engine = made.engine_on(torch.device("cpu"))
    for number in (_C.words_block, _C.staging_block if engine.gathers else _C.cells_block):
        engine.make_workspace(number)  # the first operation that needs it meets the others
    dist.barrier()  # and a rank that is still in there would hear of what the others do next
    return made


def _gather_of(gather: Any, count: int, dtype: torch.dtype = FP32, allocated: bool = False) -> None:
    size = gather.group.size() * count
    gather(gather.allocate(size, dtype) if allocated else torch.empty(size, dtype=dtype), torch.ones(count).to(dtype))


def _scatter_of(scatter: Any, dtype: torch.dtype, count: int = 8) -> None:
    scatter(torch.empty(count, dtype=dtype), torch.ones(count * scatter.group.size(), dtype=dtype))


# What is made, what all call of which rank 1 calls it otherwise, and what the error says.
DIFFERENT: dict[str, tuple[type[Collective], Callable[[Any, bool], None], str]] = {
    "sizes": (
        HierarchicalAllGather,
        lambda gather, odd: _gather_of(gather, 11 if odd else 10),
        "at step all_gather: bytes of a shard is 4",
    ),
    "pieces of the staging block": (
        HierarchicalAllGather,
        lambda gather, odd: _gather_of(gather, 40_000 if odd else 20_000),
        "at step all_gather: bytes of a shard is ",
    ),
    "sizes that go different ways": (
        HierarchicalAllGather,
        lambda gather, odd: _gather_of(gather, 3_000_000 if odd else 10),
        "at step all_gather: bytes of a shard is ",
    ),
    "nothing to gather": (
        HierarchicalAllGather,
        lambda gather, odd: _gather_of(gather, 0 if odd else 10),
        "at step all_gather: bytes of a shard is ",
    ),
    "nothing to sum": (
        HierarchicalReduceScatter,
        lambda scatter, odd: _scatter_of(scatter, BF16, 0 if odd else 8),
        "at step reduce_scatter: bytes of a shard is ",
    ),
    "small sums": (
        HierarchicalReduceScatter,
        lambda scatter, odd: _scatter_of(scatter, torch.float16 if odd else BF16),
        "at step reduce_scatter: element is",
    ),
    "a block and other memory": (
        HierarchicalAllGather,
        lambda gather, odd: _gather_of(gather, 10, allocated=not odd),
        "none (not from allocate) on rank 1",
    ),
    "elements of a sum": (
        HierarchicalReduceScatter,
        lambda scatter, odd: _scatter_of(scatter, torch.float16 if odd else BF16),
        "at step reduce_scatter: element is",
    ),
}


def _differs(rank: int, name: str) -> list[str]:
    """What a rank is told by its call, if it was not the first to make it, and by its next checks."""
    kind, operation, _ = DIFFERENT[name]
    made = _on_a_device(kind(), "auto" if name in ("sizes that go different ways", "small sums") else "copy_engine")
    if name == "a block and other memory" and rank == 1:
        made.allocate(30, FP32)  # which all ranks call
    said = []
    try:
        operation(made, rank == 1)
    except DisagreementError as error:
        said.append(str(error))
    dist.barrier()
    for _ in range(2):
        with pytest.raises(DisagreementError) as caught:
            made.check()
        said.append(str(caught.value))
    with pytest.raises(DisagreementError):
        operation(made, False)
    made.close()
    return said


@pytest.mark.parametrize("name", DIFFERENT)
def test_hosts_compare_what_copy_engines_do_not(name: str) -> None:
    for said in values(run_ranks(3, _differs, name)):
        for sentence in said:
            assert "ranks disagree on one call of communicator" in sentence, sentence
            assert DIFFERENT[name][2] in sentence and "on rank 1" in sentence, sentence


def _far_apart(rank: int) -> None:
    """One rank's host is further ahead than calls are remembered, then the other; then they differ."""
    gather = _on_a_device(HierarchicalAllGather())
    for ahead in (0, 1):
        for turn in range(2):
            if (turn == 0) == (rank == ahead):
                for call in range(1500):
                    _gather_of(gather, 1 + call % 7)
            dist.barrier()
    if rank == 1:
        _gather_of(gather, 5)
    dist.barrier()
    if rank == 0:
        with pytest.raises(DisagreementError, match="bytes of a shard is 24 on rank 0, 20 on rank 1"):
            _gather_of(gather, 6)
    dist.barrier()
    with pytest.raises(DisagreementError, match="bytes of a shard is 24 on rank 0, 20 on rank 1"):
        gather.check()


def test_a_host_that_is_far_ahead_is_no_disagreement() -> None:
    values(run_ranks(2, _far_apart))


def _at_once(rank: int, calls: int) -> int:
    """Hosts call freely, so that posts are read while they change."""
    gather = _on_a_device(HierarchicalAllGather())
    for call in range(calls):
        _gather_of(gather, 1 + call % 5)
    dist.barrier()
    gather.check()
    return calls


def test_posts_that_change_as_they_are_read_are_no_disagreement() -> None:
    values(run_ranks(3, _at_once, 6000))
