"""FSDP2's two communication interfaces, served by the collectives of ep_plugin. One adapter per parameter group.

A parameter group gathers over its shard group, and in backward, with ``reshard_after_forward=int``, over a smaller one:
FSDP2 names the group in the call but not in ``allocate``, so the adapter asks its parameter group. All parameter groups
under one root share its ``comm_ctx`` from the first forward on: it stands for the model.

The adapters of a process share a pair of collectives for each set of ranks, timeout and device. Not for each process
group: with ``reshard_after_forward=int`` every FSDP module brings one of its own over the same ranks, and each pair
keeps memory.

Sizes are remembered for each model and go with it. But ranks collect garbage at different times. So nothing that ranks
must do alike, such as mapping a buffer or closing a pair, may depend on whether a dropped model is gone yet: sizes are
compared within one model, and a pair stays open until every adapter that has used it has left, dropped ones included.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from ep_plugin.collectives import HierarchicalAllGather, HierarchicalReduceScatter
from ep_plugin.transport.exchange import is_alive, timeout_of

# By device, the gathered bytes from which PyTorch's own collective gathers into memory that peers have not mapped. On
# GPUs such a gather costs ours one more copy, by SMs that the model wants: on 4 H200s NCCL is faster from this size on
# (187 us to 207; at 256 MiB 657 to 810). CPUs have no such limit.
STOCK_FROM_BYTES = {"cuda": 64 << 20}
_SUM_SMS = 24  # backward has the others


class Pair:
    """The collectives over ``group`` on ``device``. Their first use is collective, as making them is not."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, num_users: int = 0) -> None:
        self.group, self.device, self.num_users = group, device, num_users
        self.all_gather = HierarchicalAllGather(group)
        self.reduce_scatter = HierarchicalReduceScatter(group, sms=_SUM_SMS)
        # By model, the bytes that each adapter asks for.
        self.sizes: weakref.WeakKeyDictionary[Any, weakref.WeakKeyDictionary[Any, int]] = weakref.WeakKeyDictionary()

    def close(self) -> None:
        self.all_gather.close()
        self.reduce_scatter.close()


_Key = tuple[tuple[int, ...], float, torch.device]
_pairs: dict[_Key, Pair] = {}
# Ranks and timeout of each process group as it was first seen: a script that changes the timeout later keeps its pair.
_groups: weakref.WeakKeyDictionary[Any, tuple[tuple[int, ...], float]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()  # backward runs in a thread of autograd's


class Adapter:
    """Serves one parameter group in place of ``replaced``. That still serves the calls left to it, and makes the memory
    that peers need not map. ``launches`` counts the other calls."""

    collective: str
    """The attribute of a Pair that serves."""

    def __init__(self, parameter_group: Any, replaced: Any) -> None:
        self.parameter_group, self.replaced, self.launches = parameter_group, replaced, 0
        self._keys: set[_Key] = set()

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, **options: Any
    ) -> dist.Work | None:
        collective = getattr(self.pair(group, output_tensor.device), self.collective)
        if not self._is_ours(collective, output_tensor):
            return self.replaced(output_tensor=output_tensor, input_tensor=input_tensor, group=group, **options)
        self.launches += 1
        return collective(output_tensor, input_tensor, **options)

    def pair(self, group: dist.ProcessGroup, device: torch.device) -> Pair:
        """The pair that serves ``group`` on ``device``. It stays open for this adapter until that leaves."""
        with _lock:
            found = _groups.get(group)
            if found is None:
                found = _groups[group] = tuple(dist.get_process_group_ranks(group)), timeout_of(group)
            key = (*found, device)
            pair = _pairs.get(key)
            if pair is None:
                pair = _pairs[key] = Pair(group, device)
            elif pair.group is not group and not is_alive(pair.group):
                pair.close()
                pair = _pairs[key] = Pair(group, device, pair.num_users)
            if key not in self._keys:
                self._keys.add(key)
                pair.num_users += 1
            return pair

    def leave(self) -> None:
        """Closes the pairs that no other adapter uses."""
        with _lock:
            for key in self._keys:
                pair = _pairs[key]
                pair.num_users -= 1
                if pair.num_users == 0:
                    _pairs.pop(key).close()
                for sizes in pair.sizes.values():
                    sizes.pop(self, None)
            self._keys.clear()

    def _is_ours(self, collective: Any, output: torch.Tensor) -> bool:
        """Whether ours serves this call; the same on all ranks, as sizes and memory are."""
        raise NotImplementedError

    def _allocate(
        self, group: dist.ProcessGroup, size: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Memory that peers map if another adapter of this kind in the model asks for about as much, else any other.

        Mapped memory is kept from step to step, two buffers of each size, which layers of one size use in turn. For a
        size that one module alone needs, such as a large embedding's, it would raise the peak by as much again. Any
        other memory serves that, and costs a copy.
        """
        pair = self.pair(group, device)
        collective = getattr(pair, self.collective)
        if device.type not in collective.maps_nothing_on:
            sizes = pair.sizes.setdefault(self.parameter_group.comm_ctx, weakref.WeakKeyDictionary())
            nbytes = sizes[self] = _numel(size) * dtype.itemsize
            for other, theirs in sizes.items():
                if other is not self and type(other) is type(self) and theirs <= 2 * nbytes and nbytes <= 2 * theirs:
                    return collective.allocate(_numel(size), dtype=dtype, device=device)
        return self.replaced.allocate(size, dtype=dtype, device=device)


class PluginAllGather(Adapter, AllGather):
    """Gathers one parameter group's shards."""

    collective = "all_gather"

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Returns an uninitialised, one-dimensional tensor."""
        return self._allocate(self.parameter_group._all_gather_process_group, size, dtype, device)

    def _is_ours(self, collective: Any, output: torch.Tensor) -> bool:
        limit = STOCK_FROM_BYTES.get(output.device.type)
        return limit is None or output.nbytes < limit or collective.maps(output)


class PluginReduceScatter(Adapter, ReduceScatter):
    """Reduces one parameter group's gradients."""

    collective = "reduce_scatter"
    _input_numel = 0  # of an input that was allocated, until its output is

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Returns an uninitialised, one-dimensional tensor. FSDP2 asks for an input and then for its output.

        On CPUs peers map the input. The output is ordinary memory: gradients are views of it, and live as long as they
        do.
        """
        numel, group = _numel(size), self.parameter_group._reduce_scatter_process_group
        if self._input_numel == numel * group.size():
            self._input_numel = 0
            return self.replaced.allocate(size, dtype=dtype, device=device)
        self._input_numel = numel
        return self._allocate(group, size, dtype, device)

    def _is_ours(self, collective: Any, output: torch.Tensor) -> bool:
        on_cpus = () if output.is_cuda else (torch.float64,)
        return output.dtype in (torch.bfloat16, torch.float16, torch.float32, *on_cpus)


def _numel(size: Sequence[int]) -> int:
    return math.prod(int(extent) for extent in size)
