"""Gathers and sums of shards, and messages, above 2 GiB on GPUs: no count of bytes or elements fits 32 bits."""

from __future__ import annotations

import torch

from ep_plugin import HierarchicalAllGather, HierarchicalReduceScatter, SendReceive
from tests.collectives.collective_cases import assert_numbered, fill_numbered
from tests.gpu.checks import device_of

WORDS = (1 << 29) + 1028  # of 4 bytes, of a shard
STEP = 1 << 25  # words that are filled or looked at together


def gather(rank: int, size: int, path: str, memory: str) -> None:
    device = device_of(rank)
    with HierarchicalAllGather(path=path) as made:
        make = made.allocate if memory == "mapped" else torch.empty
        out = make(size * WORDS, dtype=torch.int32, device=device)
        shards = out.split(WORDS)
        fill_numbered(shards[rank], 1000 * rank, STEP)
        made(out, shards[rank])
        for source, shard in enumerate(shards):
            assert_numbered(shard, lambda numbers, source=source: numbers + 1000 * source, STEP)
        made.check()


def scatter(rank: int, size: int, path: str) -> None:
    device = device_of(rank)
    with HierarchicalReduceScatter(path=path) as made:
        given = torch.empty(size * WORDS, device=device)
        shards = given.split(WORDS)
        for to, shard in enumerate(shards):
            fill_numbered(shard, 2000 * rank + 1000 * to, STEP)
        made(shards[rank], given)
        added = 1000 * size * rank + 2000 * sum(range(size))
        assert_numbered(shards[rank], lambda numbers: size * numbers + added, STEP)
        made.check()


def exchange(rank: int, words: int) -> None:
    """Messages of so many words, both ways between two ranks."""
    device = device_of(rank)
    sent, got = (torch.empty(words, dtype=torch.int32, device=device) for _ in range(2))
    with SendReceive(device=device) as p2p:
        fill_numbered(sent, rank, STEP)
        p2p.exchange(sent, got, 1 - rank, 1 - rank).wait()
        assert_numbered(got, lambda numbers: numbers + 1 - rank, STEP)
        p2p.check()
