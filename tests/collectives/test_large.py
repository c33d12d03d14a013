"""All-gather, reduce-scatter and messages of gigabytes: no count of bytes fits 32 bits with a sign; of shards and
messages above 2 GiB, none fits 32 bits. Memory that ranks share takes the system long to make, so there EP_TEST_LONG=1
asks for such shards."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from ep_plugin import HierarchicalAllGather, HierarchicalReduceScatter, SendReceive
from tests.collectives.collective_cases import assert_numbered, fill_numbered
from tests.ranks import run_ranks, values

RANKS = 2
WORDS = (1 << 29) + 1025  # of 4 bytes, of a shard
SHARED_WORDS = WORDS if os.environ.get("EP_TEST_LONG") == "1" else (1 << 28) + 1025
STEP = 1 << 18  # words that are filled or looked at together
EVERY = 8  # parts, of which one is filled and looked at. An offset that loses bits lands in another of these
NEEDED = 2 * RANKS * RANKS * WORDS * 4  # bytes, of which the ranks' tensors are half


def _available() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))


needs_memory = pytest.mark.skipif(_available() < NEEDED, reason=f"needs {NEEDED >> 30} GiB of free memory")


def _gather(rank: int, memory: str) -> None:
    with HierarchicalAllGather() as gather:
        make, words = (gather.allocate, SHARED_WORDS) if memory == "mapped" else (torch.empty, WORDS)
        out = make(RANKS * words, dtype=torch.int32, device="cpu")
        shards = out.split(words)
        fill_numbered(shards[rank], 1000 * rank, STEP, EVERY)
        gather(out, shards[rank])
        for source, shard in enumerate(shards):
            assert_numbered(shard, lambda numbers, source=source: numbers + 1000 * source, STEP, EVERY)


@needs_memory
@pytest.mark.slow
@pytest.mark.parametrize("memory", ["mapped", "foreign"])
def test_a_gather(memory: str) -> None:
    values(run_ranks(RANKS, _gather, memory, timeout_s=200))


def _sum(rank: int) -> None:
    with HierarchicalReduceScatter() as scatter:
        given = scatter.allocate(RANKS * SHARED_WORDS, dtype=torch.float32, device="cpu")
        shards = given.split(SHARED_WORDS)
        for to, shard in enumerate(shards):
            fill_numbered(shard, 2000 * rank + 1000 * to, STEP, EVERY)
        scatter(shards[rank], given)
        assert_numbered(shards[rank], lambda numbers: RANKS * (numbers + 1000 * rank) + 2000, STEP, EVERY)


@needs_memory
@pytest.mark.slow
def test_a_sum() -> None:
    values(run_ranks(RANKS, _sum, timeout_s=200))


def _message(rank: int) -> None:
    tensor = torch.empty(WORDS, dtype=torch.int32)
    with SendReceive() as p2p:
        if rank == 0:
            fill_numbered(tensor, 7, STEP, EVERY)
            p2p.send(tensor, 1).wait()
        else:
            p2p.receive(tensor, 0).wait()
            assert_numbered(tensor, lambda numbers: numbers + 7, STEP, EVERY)


@needs_memory
@pytest.mark.slow
def test_a_message() -> None:
    values(run_ranks(RANKS, _message, timeout_s=200))
