"""What the tests of all-gather and reduce-scatter share: inputs that every rank can work out, and their oracles."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from ep_plugin import HierarchicalAllGather, HierarchicalReduceScatter
from ep_plugin.collectives.base import Collective

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
# Elements of a shard: one byte to many chunks, on and beside the sizes of cells and rail chunks.
SIZES = (1, 3, 16, 129, 4097, 65536, 262143, 600_001)
DTYPES = (torch.uint8, torch.bool, torch.int16, BF16, FP32, FP64, torch.complex64, torch.float8_e4m3fn)


def shard(seed: int, rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Rank's shard ``[count]``: random bytes of `dtype`, for sums small random numbers."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype in (BF16, FP16, FP32, FP64):
        return torch.randn(count, generator=generator, dtype=dtype)
    high = 2 if dtype == torch.bool else 256
    return torch.randint(0, high, (count * dtype.itemsize,), generator=generator, dtype=torch.uint8).view(dtype)


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    return torch.equal(first.reshape(-1).view(torch.uint8), second.reshape(-1).view(torch.uint8))


def gathered_by_gloo(mine: torch.Tensor) -> torch.Tensor:
    """The oracle of an all-gather, over bytes since gloo does not know all dtypes."""
    parts = [torch.empty(mine.numel() * mine.itemsize, dtype=torch.uint8) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine.reshape(-1).view(torch.uint8))
    return torch.cat(parts).view(mine.dtype)


def reduced(whole: list[torch.Tensor], rank: int, per_node: int, scale: float) -> torch.Tensor:
    """The oracle of a reduce-scatter. whole: every rank's input ``[R, n]``; sums as documented, so bit for bit."""
    wide = FP64 if whole[0].dtype == FP64 else FP32
    sums = []
    for first in range(0, len(whole), per_node):
        total = whole[first][rank].to(wide)
        for other in range(first + 1, first + per_node):
            total = total + whole[other][rank]
        sums.append((total * scale if scale != 1 else total).to(whole[0].dtype))
    if len(sums) == 1:
        return sums[0]
    total = sums[0].to(wide)
    for part in sums[1:]:
        total = total + part
    return total.to(whole[0].dtype)


def poisoned(count: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((count * dtype.itemsize,), 0xA5, dtype=torch.uint8).view(dtype)


def _numbered(shard: torch.Tensor, step: int, every: int) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Parts of `shard`, of `step` elements: one of `every`, and the last. The part's index, the part, and a number for
    each element that tells it from those around it."""
    numbers = torch.arange(min(step, len(shard)), dtype=torch.int32, device=shard.device) % 8191
    parts = shard.split(step)
    for index, part in enumerate(parts):
        if index % every == 0 or index == len(parts) - 1:
            yield index, part, numbers[: len(part)] + 7 * index


def fill_numbered(shard: torch.Tensor, added: int, step: int, every: int = 1) -> None:
    """A shard of gigabytes: numbers that go round, and `added`. Parts between those of `every` stay as they are."""
    for _, part, numbers in _numbered(shard, step, every):
        part.copy_(numbers + added)


def assert_numbered(
    shard: torch.Tensor, expected: Callable[[torch.Tensor], torch.Tensor], step: int, every: int = 1
) -> None:
    """That each element of these parts of `shard` is what `expected` makes of the numbers."""
    for index, part, numbers in _numbered(shard, step, every):
        assert torch.equal(part, expected(numbers).to(part.dtype)), f"elements from {index * step} on"


def gather_ones(comm: Collective, count: int) -> torch.Tensor:
    """What a gather of `count` ones from each rank brings."""
    assert isinstance(comm, HierarchicalAllGather)
    out = torch.empty(comm.group.size() * count)
    comm(out, torch.ones(count))
    return out


def scatter_ones(comm: Collective, count: int) -> torch.Tensor:
    """What is left of `count` ones for each rank, summed."""
    assert isinstance(comm, HierarchicalReduceScatter)
    out = torch.empty(count)
    comm(out, torch.ones(comm.group.size() * count))
    return out


def tell_when_it_closes(engine: Any) -> None:
    """Lets `await_close_of_a_peer` return on other ranks when close() of this engine has begun to wait."""
    drained = engine._drained

    def told() -> Exception | None:
        dist.distributed_c10d._get_default_store().set("closes", "")
        return drained()

    engine._drained = told


def await_close_of_a_peer() -> None:
    dist.distributed_c10d._get_default_store().wait(["closes"], datetime.timedelta(seconds=30))
