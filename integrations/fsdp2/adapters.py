"""FSDP2's two communication interfaces, served by the collectives of ep_plugin. One object per parameter group.

A parameter group gathers over its shard group, and in backward, with ``reshard_after_forward=int``, over a smaller one:
FSDP2 names the group in the call but not in ``allocate``, so the adapter asks its parameter group. All parameter groups
under one root share its ``comm_ctx`` from the first forward on: it stands for the model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from ep_plugin.integrations.fsdp2.communicators import User

# Gathered bytes from which on memory that peers have not mapped is left to what served the group before, by device. On
# GPUs it costs one more copy, by SMs that the model wants: on 4 H200s NCCL gathers faster from here on (187 us to 207;
# at 256 MiB 657 to 810). CPUs have no such limit.
STOCK_FROM_BYTES = {"cuda": 64 << 20}


class PluginAllGather(AllGather):
    """Gathers one parameter group's shards. ``replaced`` is what served the group before, and still serves what is left
    to it, and makes the memory that peers need not map; ``launches`` counts the calls that it did not serve.
    """

    def __init__(self, parameter_group: Any, replaced: AllGather) -> None:
        self._parameter_group = parameter_group
        self.replaced = replaced
        self.user = User()
        self.launches = 0

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Uninitialised and one-dimensional; see ``Pair.allocate``."""
        numel, model = math.prod(int(extent) for extent in size), self._parameter_group.comm_ctx
        mapped = self.user.pair(self._parameter_group._all_gather_process_group, device).allocate(
            self.user, model, numel, dtype
        )
        return self.replaced.allocate(size, dtype=dtype, device=device) if mapped is None else mapped

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        all_gather = self.user.pair(group, output_tensor.device).all_gather
        limit = STOCK_FROM_BYTES.get(output_tensor.device.type)  # sizes and memory are alike on all ranks
        if limit is not None and output_tensor.nbytes >= limit and not all_gather.maps(output_tensor):
            return self.replaced(output_tensor=output_tensor, input_tensor=input_tensor, group=group, async_op=async_op)
        self.launches += 1
        return all_gather(output_tensor, input_tensor, async_op=async_op)


class PluginReduceScatter(ReduceScatter):
    """Reduces one parameter group's gradients; the attributes are as PluginAllGather's."""

    def __init__(self, parameter_group: Any, replaced: ReduceScatter) -> None:
        self._parameter_group = parameter_group
        self.replaced = replaced
        self.user = User()
        self.launches = 0
        self._input_numel = 0  # of an input that was asked for, and its output not yet

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Uninitialised and one-dimensional. FSDP2 asks for an input and then for its output, a rank's share of it.

        On CPUs peers map the input. The output is ordinary memory: gradients are views of it, and live as long as they
        do.
        """
        numel = math.prod(int(extent) for extent in size)
        group = self._parameter_group._reduce_scatter_process_group
        if self._input_numel == numel * group.size():
            self._input_numel = 0
            return self.replaced.allocate(size, dtype=dtype, device=device)
        self._input_numel = numel
        model = self._parameter_group.comm_ctx
        mapped = self.user.pair(group, device).allocate_input(self.user, model, numel, dtype)
        return self.replaced.allocate(size, dtype=dtype, device=device) if mapped is None else mapped

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        reduce_scatter = self.user.pair(group, output_tensor.device).reduce_scatter
        if not _is_summed(output_tensor):
            return self.replaced(
                output_tensor=output_tensor, input_tensor=input_tensor, group=group, op=op, async_op=async_op
            )
        self.launches += 1
        return reduce_scatter(output_tensor, input_tensor, op=op, async_op=async_op)


def _is_summed(gradients: torch.Tensor) -> bool:
    """Whether ours sums gradients of this dtype on their device; what it does not, stock reduces."""
    wide = () if gradients.is_cuda else (torch.float64,)
    return gradients.dtype in (torch.bfloat16, torch.float16, torch.float32, *wide)
