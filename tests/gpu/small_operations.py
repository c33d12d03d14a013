"""Operations whose words carry flags (small_exchange.cu): more than a flag has numbers for, of mixed sizes, and ranks
that disagree where nothing but the kernels compares what they call. On GPUs and in the emulation.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ep_plugin import HierarchicalAllGather, HierarchicalReduceScatter
from ep_plugin.collectives.base import Collective
from ep_plugin.errors import DisagreementError, PeerAborted
from tests.collectives.collective_cases import BF16, FP16, FP32
from tests.gpu.checks import device_of

# Operations after which a flag says the same again: of their number it has 11 bits.
PERIOD = 1 << 11
COUNTS = (1, 129, 3, 700, 16)  # elements of a shard
# Of a few operations, even and odd: most of the words that these leave are no other operation's, and are as they were
# when the number comes round unless they have expired.
LARGE, LARGE_AT = 20_001, (1, 6)
SUMMED = (FP32, BF16, FP16)


def _count_of(call: int) -> int:
    """The same one PERIOD later, as is the element of a sum, so that flags are the same too."""
    number = call % PERIOD
    return LARGE if number in LARGE_AT else COUNTS[number % len(COUNTS)]


def gathers(gather: HierarchicalAllGather, rank: int, size: int, device: torch.device, calls: int) -> list[int]:
    """The calls whose output is wrong. At most 4 ranks: more would leave int16."""
    starts = {
        count: (5000 * torch.arange(size)[:, None] + torch.arange(count) % 10_007).to(torch.int16).to(device)
        for count in (*COUNTS, LARGE)
    }
    given = {count: torch.empty_like(start[rank]) for count, start in starts.items()}
    outs, expected = ({count: torch.empty_like(start) for count, start in starts.items()} for _ in range(2))
    wrong = torch.zeros(calls, dtype=torch.bool, device=device)
    for call in range(calls):
        count = _count_of(call)
        torch.add(starts[count], call, out=expected[count])
        given[count].copy_(expected[count][rank])
        gather(outs[count], given[count])
        torch.any(outs[count] != expected[count], out=wrong[call])
    return wrong.nonzero().flatten().tolist()


def sums(scatter: HierarchicalReduceScatter, rank: int, size: int, device: torch.device, calls: int) -> list[int]:
    """The calls whose output is wrong. At most 4 ranks: sums of more would leave bfloat16's whole numbers."""
    starts = {count: torch.arange(size * count, device=device) % 31 for count in (*COUNTS, LARGE)}
    wrong = torch.zeros(calls, dtype=torch.bool, device=device)
    for call in range(calls):
        count, dtype = _count_of(call), SUMMED[call % PERIOD % len(SUMMED)]
        added = call % 29  # other than one PERIOD ago
        out = torch.full((count,), -1, dtype=dtype, device=device)
        scatter(out, (starts[count] + (added + rank)).to(dtype))
        mine = starts[count][rank * count : (rank + 1) * count]
        torch.any(out != size * (mine + added) + size * (size - 1) // 2, out=wrong[call])
    return wrong.nonzero().flatten().tolist()


KINDS: dict[str, tuple[type[Collective], Callable[..., list[int]]]] = {
    "gathers": (HierarchicalAllGather, gathers),
    "sums": (HierarchicalReduceScatter, sums),
}


def come_round(rank: int, size: int, kind: str) -> list[int]:
    """The calls that are wrong, of so many on a GPU that flags come again."""
    made, operations = KINDS[kind]
    with made() as comm:
        return operations(comm, rank, size, device_of(rank), PERIOD + 200)


def _gather_of(gather: Any, count: int, device: torch.device, dtype: torch.dtype = FP32) -> None:
    size = gather.group.size()
    gather(torch.empty(size * count, dtype=dtype, device=device), torch.ones(count, dtype=dtype, device=device))


def _sum_of(scatter: Any, count: int, device: torch.device, dtype: torch.dtype = FP32) -> None:
    size = scatter.group.size()
    scatter(torch.empty(count, dtype=dtype, device=device), torch.ones(size * count, dtype=dtype, device=device))


SMALL, MORE_THAN_SMALL = 1000, 300_000  # elements of a shard
# What all make; what the odd rank and then the others call; and of what the error speaks.
DIFFERENT: dict[str, tuple[type[Collective], list[tuple[Callable[..., None], int, torch.dtype]], str]] = {
    "gathers of other sizes": (
        HierarchicalAllGather,
        [(_gather_of, SMALL - 1, FP32), (_gather_of, SMALL, FP32)],
        "gather: bytes of a shard",
    ),
    "a gather that is not small": (
        HierarchicalAllGather,
        [(_gather_of, MORE_THAN_SMALL, FP32), (_gather_of, SMALL, FP32)],
        "gather: bytes of a shard",
    ),
    "sums of other sizes": (
        HierarchicalReduceScatter,
        [(_sum_of, SMALL - 4, FP32), (_sum_of, SMALL, FP32)],
        "scatter: bytes of a shard",
    ),
    "a sum that is not small": (
        HierarchicalReduceScatter,
        [(_sum_of, MORE_THAN_SMALL, FP32), (_sum_of, SMALL, FP32)],
        "scatter: bytes of a shard",
    ),
    "sums of other elements": (
        HierarchicalReduceScatter,
        [(_sum_of, SMALL, FP16), (_sum_of, SMALL, BF16)],
        "scatter: element",
    ),
}


def told_by_kernels(made: Collective, name: str, odd: bool, device: torch.device) -> str:
    """What this rank is told when the odd one calls something else and no host compares."""
    _, calls, _ = DIFFERENT[name]
    for operation, count, dtype in calls:  # both ways' memory, which ranks make together
        operation(made, count, device, dtype)
    _synchronize(device)
    made.engine_on(device).inside.compares_calls = False
    dist.barrier()
    operation, count, dtype = calls[0 if odd else 1]
    with pytest.raises((DisagreementError, PeerAborted)) as caught:
        operation(made, count, device, dtype)
        for _ in range(200):
            _synchronize(device)
            made.check()
            time.sleep(0.05)
    made.close()
    return f"{type(caught.value).__name__}: {caught.value}"


def differs(rank: int, name: str, odd: int) -> str:
    """What a rank on a GPU is told by its kernels."""
    return told_by_kernels(DIFFERENT[name][0](), name, rank == odd, device_of(rank))


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
