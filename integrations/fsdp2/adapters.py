"""Implements FSDP2's two communication interfaces with ep_plugin's collectives, by one adapter per parameter group.

A parameter group gathers over its shard group, and in backward, with ``reshard_after_forward=int``, over a smaller one:
FSDP2 names the group in the call but not in ``allocate``, so the adapter asks its parameter group. All parameter groups
under one root share its ``comm_ctx`` from the first forward on: it stands for the model.

With ``reshard_after_forward=int`` every FSDP module brings a process group of its own over the same ranks. Adapters of
one model share one pair of collectives for them (pairs.py).

Sizes are remembered for each model and go with it. But ranks collect garbage at different times. So mapping a buffer,
closing a pair and everything else that ranks must do alike may not depend on whether a dropped model is gone yet: sizes
are compared within one model, and a pair stays open until every adapter that has used it has left, also the adapters of
dropped models.
"""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from ep_plugin.collectives import HierarchicalAllGather
from ep_plugin.integrations import hooks
from ep_plugin.integrations.fallback import falls_back
from ep_plugin.integrations.pairs import Pair, PairUser, can_sum
from ep_plugin.ranges import NOTHING, opener
from ep_plugin.runtime.tensors import PLAIN


class Adapter(PairUser):
    """Serves one parameter group in place of ``replaced``.

    ``replaced`` still serves the calls that are left to it, and makes the memory that peers need not map. ``launches``
    counts the calls that this adapter serves.
    """

    collective: str
    """The name of the attribute of a Pair that serves the calls."""

    def __init__(self, parameter_group: Any, replaced: Any) -> None:
        super().__init__("fsdp2")
        self.parameter_group, self.replaced, self.launches = parameter_group, replaced, 0
        self._range = opener()

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, **options: Any
    ) -> dist.Work | None:
        pair = self.pair(group, output_tensor.device, self.parameter_group.comm_ctx)
        is_ours = _is_memory(output_tensor) and _is_memory(input_tensor) and self._is_ours(pair, output_tensor)
        if not (is_ours and self._is_served(pair)):
            hooks.left("fsdp2")
            return self.replaced(output_tensor=output_tensor, input_tensor=input_tensor, group=group, **options)
        with self.counted():
            return getattr(pair, self.collective)(output_tensor, input_tensor, **options)

    def counted(self) -> AbstractContextManager[object]:
        """Counts a call that this adapter serves. Returns its range in a profile."""
        self.launches += 1
        hooks.served("fsdp2")
        return self._range(f"FSDP2 {getattr(self.parameter_group, '_module_fqn', '')}") if self._range else NOTHING

    def _is_served(self, pair: Pair) -> bool:
        """Returns whether ep_plugin serves the group.

        The first call is collective, and may raise NotSupported (fallback.py).
        """
        error = pair.refused(self.collective)
        if error is not None and not falls_back("fsdp2", error):
            raise copy.copy(error)  # a raised one would keep its callers' tensors
        return error is None

    def _is_ours(self, pair: Pair, output: torch.Tensor) -> bool:
        """Returns whether ep_plugin serves this call. All ranks return the same, as sizes and memory are the same."""
        raise NotImplementedError

    def _allocate(
        self, group: dist.ProcessGroup, size: Sequence[int | torch.SymInt], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Returns memory that peers map if another adapter of this kind in the model asks for about as much.

        Otherwise it returns any other memory.

        Mapped memory is kept from step to step, two buffers of each size, which layers of one size use in turn. For a
        size that one module alone needs, such as a large embedding's, it would raise the peak by as much again. Any
        other memory serves that, and costs a copy.
        """
        pair = self.pair(group, device, self.parameter_group.comm_ctx)
        collective = getattr(pair, self.collective)
        if device.type not in collective.maps_nothing_on:
            sizes = pair.sizes.setdefault(self.parameter_group.comm_ctx, weakref.WeakKeyDictionary())
            nbytes = sizes[self] = _numel(size) * dtype.itemsize
            for other, theirs in sizes.items():
                if other is not self and type(other) is type(self) and theirs <= 2 * nbytes and nbytes <= 2 * theirs:
                    if not self._is_served(pair):
                        break
                    return collective.allocate(_numel(size), dtype=dtype, device=device)
        return self.replaced.allocate(size, dtype=dtype, device=device)


class PluginAllGather(Adapter, AllGather):  # type: ignore[misc]
    """Gathers one parameter group's shards."""

    collective = "all_gather"

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Returns an uninitialised, one-dimensional tensor."""
        return self._allocate(self.parameter_group._all_gather_process_group, size, dtype, device)

    def in_node(self, group: dist.ProcessGroup) -> HierarchicalAllGather | None:
        """Returns the collective over ``group`` if ep_plugin serves it and it is on one node.

        The answer is the same on all ranks. The first call is collective, as in `_is_served`.
        """
        pair = self.pair(group, self.parameter_group.device, self.parameter_group.comm_ctx)
        if group.size() == 1 or not self._is_served(pair):
            return None
        return None if pair.all_gather.engine_on(pair.device).rails.nodes else pair.all_gather

    def _is_ours(self, pair: Pair, output: torch.Tensor) -> bool:
        return pair.gathers_well(output)


class PluginReduceScatter(Adapter, ReduceScatter):  # type: ignore[misc]
    """Reduces one parameter group's gradients."""

    collective = "reduce_scatter"
    _input_numel = 0  # of an input that was allocated, until its output is

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
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

    def _is_ours(self, pair: Pair, output: torch.Tensor) -> bool:
        return can_sum(output)


def _is_memory(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor's values are its memory.

    A class with operators of its own, such as one that wraps two tensors, has its values elsewhere. FSDP2 passes
    tensors of the class of a parameter that has no ``fsdp_pre_all_gather``. The class is the same on all ranks.
    """
    return type(tensor) in PLAIN or type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def _numel(size: Sequence[int | torch.SymInt]) -> int:
    return math.prod(int(extent) for extent in size)
