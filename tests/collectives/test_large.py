"""All-gather and reduce-scatter of shards above 2 GiB: no count of bytes or elements fits 32 bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ep_plugin import HierarchicalAllGather, HierarchicalReduceScatter
from tests.collectives.collective_cases import assert_numbered, fill_numbered
from tests.ranks import run_ranks, values

RANKS = 2
WORDS = (1 << 29) + 1025  # of 4 bytes, of a shard
STEP = 1 << 18  # words that are filled or looked at together
NEEDED = 2 * RANKS * RANKS * WORDS * 4  # bytes, of which the ranks' tensors are half


def _available() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))


needs_memory = pytest.mark.skipif(_available() < NEEDED, reason=f"needs {NEEDED >> 30} GiB of free memory")


def _gather(rank: int, memory: str) -> None:
    with HierarchicalAllGather() as gather:
        make = gather.allocate if memory == "mapped" else torch.empty
        out = make(RANKS * WORDS, dtype=torch.int32, device="cpu")
        shards = out.split(WORDS)
        fill_numbered(shards[rank], 1000 * rank, STEP)
        gather(out, shards[rank])
        for source, shard in enumerate(shards):
            assert_numbered(shard, lambda numbers, source=source: numbers + 1000 * source, STEP)


@needs_memory
@pytest.mark.slow
@pytest.mark.parametrize("memory", ["mapped", "foreign"])
def test_a_gather(memory: str) -> None:
    values(run_ranks(RANKS, _gather, memory, timeout_s=200))


def _sum(rank: int) -> None:
    with HierarchicalReduceScatter() as scatter:
        given = scatter.allocate(RANKS * WORDS, dtype=torch.float32, device="cpu")
        shards = given.split(WORDS)
        for to, shard in enumerate(shards):
            fill_numbered(shard, 2000 * rank + 1000 * to, STEP)
        scatter(shards[rank], given)
        assert_numbered(shards[rank], lambda numbers: RANKS * (numbers + 1000 * rank) + 2000, STEP)


@needs_memory
@pytest.mark.slow
def test_a_sum() -> None:
    values(run_ranks(RANKS, _sum, timeout_s=200))
