"""All-gather and reduce-scatter under PyTorch's modes (another default device, inference), and given other tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from ep_plugin import HierarchicalAllGather, HierarchicalReduceScatter
from tests.gpu_stand_in import as_on_gpus
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
        as_on_gpus(gather, "sm", 2)
        as_on_gpus(scatter, "sm", 2)
        _gather_and_sum(rank, 5, gather, scatter, allocated=True)
    gather.close()
    scatter.close()


def test_torchs_default_device_is_nothing_to_us() -> None:
    values(run_ranks(2, _another_default_device))


def _fake(shape: int) -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(shape)


def _distributed(shape: int) -> torch.Tensor:
    return DTensor.from_local(torch.empty(shape), init_device_mesh("cpu", (2,)), [Replicate()])


# What is passed in place of a tensor: how it is made of a number of elements, and what is said of it.
NOT_THERE: dict[str, tuple[Callable[[int], Any], str]] = {
    "fake": (_fake, "expected a tensor with memory of its own, got FakeTensor"),
    "distributed": (_distributed, "expected a tensor with memory of its own, got DTensor"),
    "mkldnn": (lambda count: torch.ones(count).to_mkldnn(), "expected a dense tensor, got one of layout torch._mkldnn"),
    "negative": (lambda count: torch.ones(count)._neg_view(), "expected a tensor that is in memory as it is"),
    "zeros": (lambda count: torch._efficientzerotensor(count), "expected a tensor that is in memory as it is"),
    "a list": (lambda count: [1.0] * count, "expected a tensor, got list"),
}


def _calls_with(make: Callable[[int], Any], gather: HierarchicalAllGather, scatter: HierarchicalReduceScatter) -> Any:
    """Each place of an argument, of 5 elements a shard."""
    yield lambda: gather(torch.empty(10), make(5))
    yield lambda: gather(make(10), torch.ones(5))
    yield lambda: gather.all_gather([torch.empty(5), make(5)], torch.ones(5))
    yield lambda: gather.all_gather([torch.empty(5), torch.empty(5)], make(5))
    yield lambda: scatter(make(5), torch.ones(10))
    yield lambda: scatter.reduce_scatter(torch.empty(5), [torch.ones(5), make(5)])


def _tensors_that_are_not_there(rank: int) -> None:
    gather, scatter = _both(rank, 5, allocated=False)
    for make, said in NOT_THERE.values():
        for call in _calls_with(make, gather, scatter):
            with pytest.raises(ValueError, match=said):
                call()
    conjugate = torch.ones(5, dtype=torch.complex64).conj()
    with pytest.raises(ValueError, match="input_tensor: expected a tensor that is in memory as it is"):
        gather(torch.empty(10, dtype=torch.complex64), conjugate)
    _gather_and_sum(rank, 5, gather, scatter, allocated=False)  # nothing was launched
    gather(torch.empty(10), torch.ones(5).as_subclass(_Plain))


class _Plain(torch.Tensor):
    """A subclass that has memory as any other tensor."""


def test_tensors_without_memory_of_their_own_are_refused() -> None:
    values(run_ranks(2, _tensors_that_are_not_there))


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
