"""All-gather and reduce-scatter under PyTorch's modes: another default device, inference."""

from __future__ import annotations

import torch

from ep_plugin import _C, HierarchicalAllGather, HierarchicalReduceScatter
from ep_plugin.collectives.calls import Calls
from tests.ranks import run_ranks, values

CPU = torch.device("cpu")


def _both(rank: int, count: int, *, allocated: bool) -> tuple[HierarchicalAllGather, HierarchicalReduceScatter]:
    """A gather and a sum of 2 ranks by collectives of their own, judged here."""
    gather, scatter = HierarchicalAllGather(), HierarchicalReduceScatter()
    _gather_and_sum(rank, count, gather, scatter, allocated=allocated)
    return gather, scatter


def _gather_and_sum(
    rank: int, count: int, gather: HierarchicalAllGather, scatter: HierarchicalReduceScatter, *, allocated: bool
) -> None:
    make = gather.allocate if allocated else torch.empty
    out = make(2 * count, dtype=torch.float32, device=CPU)
    gather(out, torch.full((count,), rank + 1.0, device=CPU))
    assert out.tolist() == [1.0] * count + [2.0] * count
    make = scatter.allocate if allocated else torch.empty
    total = torch.empty(count, device=CPU)
    scatter(total, make(2 * count, dtype=torch.float32, device=CPU).fill_(rank + 1.0))
    assert total.tolist() == [3.0] * count


def _another_default_device(rank: int) -> None:
    with torch.device("meta"):
        gather, scatter = _both(rank, 5, allocated=True)
        _gather_and_sum(rank, 5, gather, scatter, allocated=False)
        calls = Calls(gather.engine_on(CPU))  # as GPUs have it
        calls.compare(_C.Step.GATHER, 8, 0, 0)
    gather.close()
    scatter.close()


def test_torchs_default_device_is_nothing_to_us() -> None:
    values(run_ranks(2, _another_default_device))


def _first_used_in_inference_mode(rank: int) -> None:
    with torch.inference_mode():
        gather, scatter = _both(rank, 5, allocated=True)
    engine = gather.engine_on(CPU)
    engine.state.fill_(0)  # as the watchdog does, in a thread of its own
    for count in (5, 70_000):  # the second makes blocks, which are entered into what the first call has made
        _gather_and_sum(rank, count, gather, scatter, allocated=True)
    with torch.inference_mode():
        _gather_and_sum(rank, 300_000, gather, scatter, allocated=True)
    gather.close()
    scatter.close()


def test_first_used_in_inference_mode() -> None:
    values(run_ranks(2, _first_used_in_inference_mode))
