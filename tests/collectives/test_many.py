"""Fifty thousand small all-gathers of two groups in turn: every output is right, and a process does not grow."""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ep_plugin import HierarchicalAllGather
from tests.faults.fault_cases import nothing_left_behind
from tests.ranks import run_ranks, values

COUNTS = range(1, 9)  # elements of a shard
KEPT, KEEP_EVERY = 4, 97
MOST_GROWTH = 1 << 19  # bytes, in the second half: less than 21 of each gather


class _Gathers:
    """The gathers of one group, each of values that no earlier one of its size had; some outputs are kept for long."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.gather = HierarchicalAllGather(group)
        ranks = dist.get_process_group_ranks(group)
        shards = {count: [_of(rank, count) for rank in ranks] for count in COUNTS}
        self._mine = {count: shards[count][ranks.index(dist.get_rank())] for count in COUNTS}
        self._expected = {count: torch.cat(shards[count]) for count in COUNTS}
        self._kept: deque[tuple[torch.Tensor, torch.Tensor]] = deque()

    def call(self, number: int) -> None:
        count = COUNTS[number * 5 % len(COUNTS)]
        mine, expected = self._mine[count].add_(1), self._expected[count].add_(1)
        out = self.gather.allocate(expected.numel(), torch.int32)
        self.gather(out, mine)
        assert torch.equal(out, expected), f"gather {number}"
        if number % KEEP_EVERY == 0:
            self._kept.append((out, expected.clone()))
            self.check_kept(KEPT)

    def check_kept(self, most: int) -> None:
        """Looks at the outputs that have been kept longest, and drops them, until `most` are left."""
        while len(self._kept) > most:
            out, expected = self._kept.popleft()
            assert torch.equal(out, expected), "an output that was kept"


def _of(rank: int, count: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.int32) + 1_000_000 * rank


def _process() -> dict[str, int]:
    """What this process takes: bytes of resident memory, and numbers of open files and of mappings of files."""
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    mappings = sum("/" in line for line in Path("/proc/self/maps").read_text().splitlines())  # not threads' stacks
    return {"resident": resident, "files": len(os.listdir("/proc/self/fd")), "mappings": mappings}


def _two_groups(rank: int, size: int, calls: int) -> tuple[dict[str, int], dict[str, int]]:
    """Every rank is in the group of all and in another one: of all, too, or of every other rank."""
    others = [dist.new_group(range(first, size, size // 2)) for first in range(size // 2)]
    both = [_Gathers(None), _Gathers(others[rank % len(others)])]
    for number in range(calls):
        if number == calls // 2:
            before = _process()
        for each in both:
            each.call(number)
    after = _process()
    for each in both:
        assert len(each.gather.engine_on(torch.device("cpu")).blocks) <= KEPT + 2
        each.check_kept(0)
        each.gather.close()
    nothing_left_behind()
    return before, after


@pytest.mark.slow
@pytest.mark.parametrize(("size", "calls"), [(2, 5000), (4, 1000)])
def test_very_many_small_gathers_of_two_groups_lose_and_leak_nothing(size: int, calls: int) -> None:
    outcomes: list[Any] = values(run_ranks(size, _two_groups, size, calls, timeout_s=600))
    for before, after in outcomes:
        assert after["files"] == before["files"] and after["mappings"] == before["mappings"], (before, after)
        assert after["resident"] - before["resident"] < MOST_GROWTH, (before, after)
