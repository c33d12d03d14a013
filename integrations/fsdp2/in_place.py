"""Gathers parameters into the memory that the module computes with, so that nothing is copied out. On CPUs.

FSDP2 gathers into a buffer, ordered by rank, and copies every parameter out of it. Here the parameters of a group are
parts of one block. Each rank copies or casts its shards to their places there, and a gather brings the others to
theirs. Everything else is FSDP2's own code, and results are equal bit for bit.

Storages
    A parameter keeps its storage, which views that autograd has saved share. The storage gets the part's memory by a
    swap when FSDP2 unshards, and gives it back when FSDP2 frees it. The block is free again with the last part.
Blocks
    Peers map a block, and it stays, if another group of the model has about its size. Otherwise it is ordinary memory,
    which goes when FSDP2 reshards, and each part is a gather of its own.
Left to FSDP2's own copies
    Groups over several nodes, and on GPUs. Groups with a parameter that is offloaded to the host, has
    ``fsdp_pre_all_gather``, is of a class of its own, is sharded over another dimension than the first, or has memory
    that FSDP2 keeps while it is sharded.
Versions
    This relies on private code of FSDP2, as read in PyTorch 2.13 to 2.15. Older versions cannot swap memory.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from ep_plugin.collectives import HierarchicalAllGather
from ep_plugin.collectives.blocks import tensor_at
from ep_plugin.integrations.fsdp2.adapters import PluginAllGather
from ep_plugin.integrations.fsdp2.one_rank import is_known, is_plain, outside_functorch

_PART_BYTES = 256  # a parameter begins at a multiple


def serve(group: Any) -> None:
    """Makes FSDP2's parameter group gather in place, if its device and this PyTorch allow."""
    can_swap = is_known and hasattr(torch.UntypedStorage, "_swap_data_ptr_")
    if can_swap and group.device.type == "cpu" and group.__class__ is FSDPParamGroup:
        group.__class__ = _InPlaceGroup


def leave(group: Any) -> None:
    """Makes the group FSDP2's own again. Parameters that are unsharded keep their memory until FSDP2 frees it."""
    if group.__class__ is _InPlaceGroup:
        if group.parts is not None:
            group.wait_for_unshard()
        group.__class__ = FSDPParamGroup  # type: ignore[assignment]


class _OneRank:
    """Stands for a process group. FSDP2 gathers nothing over one rank."""

    @staticmethod
    def size() -> int:
        return 1


class _InPlaceGroup(FSDPParamGroup):
    _is_alone = False

    @property
    def _all_gather_process_group(self) -> Any:
        return _OneRank if self._is_alone else super()._all_gather_process_group

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """FSDP2's code decides, waits and keeps its states as ever in this context, and moves nothing."""
        every, self.fsdp_params, self._is_alone = self.fsdp_params, [], True
        try:
            yield
        finally:
            self.fsdp_params, self._is_alone = every, False

    @property
    def parts(self) -> list[torch.Tensor] | None:
        """The gathered memory of each parameter, between `unshard` and `wait_for_unshard`; None at other times."""
        output = self._all_gather_result and self._all_gather_result.all_gather_output
        return output if isinstance(output, list) else None

    @outside_functorch
    def unshard(self, async_op: bool = False) -> None:
        is_idle = self._all_gather_result is None and not self.is_unsharded
        all_gather = self._gatherer() if is_idle else None
        if all_gather is None:
            super().unshard(async_op)
            return
        with self._alone():
            super().unshard(async_op)
        result, self._all_gather_result = self._all_gather_result, None
        if result is not None:  # else FSDP2 does not need the parameters
            parts = self._gather(all_gather)
            self._all_gather_result = result._replace(all_gather_output=parts)  # type: ignore[arg-type]

    @outside_functorch
    def wait_for_unshard(self) -> None:
        parts = self.parts
        if parts is None:
            super().wait_for_unshard()
            return
        with self._alone():
            super().wait_for_unshard()
        with torch.inference_mode(False):  # training uses what the first forward makes
            for fsdp_param, part in zip(self.fsdp_params, parts, strict=True):
                _lend(part, fsdp_param)
                fsdp_param.to_unsharded()

    def _gatherer(self) -> HierarchicalAllGather | None:
        """Returns what gathers in place, the same on all ranks; None: FSDP2's code is to gather. May be collective."""
        comm = self._all_gather_comm
        if not (isinstance(comm, PluginAllGather) and all(map(_has_a_place, self.fsdp_params))):
            return None
        return comm.in_node(self._all_gather_process_group)

    def _gather(self, all_gather: HierarchicalAllGather) -> list[torch.Tensor]:
        """Gathers the parameters into one block. Returns each one, 1-D, which is all of its storage. Collective."""
        rank, size = all_gather.group.rank(), all_gather.group.size()
        shards = list(map(_shard_of, self.fsdp_params))
        dtypes = [fsdp_param.param_dtype or fsdp_param.orig_dtype for fsdp_param in self.fsdp_params]
        places, end = [], 0
        for shard, dtype in zip(shards, dtypes, strict=True):
            nbytes = shard.numel() * dtype.itemsize
            places.append((end, nbytes))
            end += -(-size * nbytes // _PART_BYTES) * _PART_BYTES
        block = self._all_gather_comm.allocate((end,), dtype=torch.uint8, device=shards[0].device)
        address = block.data_ptr()
        parts = [
            tensor_at(address + begin, size * nbytes, block.device, block).view(dtype)
            for (begin, nbytes), dtype in zip(places, dtypes, strict=True)
        ]
        with torch.no_grad():
            torch._foreach_copy_([part.view(size, -1)[rank] for part in parts], shards)
        with self._all_gather_comm.counted():  # type: ignore[attr-defined]
            all_gather.gather_parts(block, places)
        return parts


def _has_a_place(fsdp_param: Any) -> bool:
    """Returns whether the unsharded parameter is the shards of all ranks in their order, and its memory is ours."""
    is_kept = getattr(fsdp_param, "keep_unsharded_storage", False)  # from 2.15 on
    is_whole = fsdp_param.fsdp_placement.dim == 0 and fsdp_param._sharded_param_data.numel() > 0
    return is_whole and not is_kept and is_plain(fsdp_param)


def _shard_of(fsdp_param: Any) -> torch.Tensor:
    if fsdp_param.sharded_state.name == "SHARDED":
        return fsdp_param._sharded_param_data
    return fsdp_param._sharded_post_forward_param_data  # with reshard_after_forward=int


def _lend(part: torch.Tensor, fsdp_param: Any) -> None:
    """Makes the memory of ``part`` that of the unsharded parameter until FSDP2 frees it."""
    if not fsdp_param.all_gather_outputs:
        fsdp_param.all_gather_outputs = [part.new_empty(0)]
    (whole,) = fsdp_param.all_gather_outputs
    lent, storage = part.untyped_storage(), whole.untyped_storage()
    storage._swap_data_ptr_(lent)
    whole.resize_(part.numel())
    fsdp_param.init_unsharded_param()
    fsdp_param.free_unsharded_param = functools.partial(_give_back, fsdp_param, storage, lent)


def _give_back(fsdp_param: Any, storage: torch.UntypedStorage, lent: torch.UntypedStorage) -> None:
    """Stands for a parameter's `free_unsharded_param`, since memory that FSDP2 has not allocated is not its to free."""
    del fsdp_param.free_unsharded_param
    storage._swap_data_ptr_(lent)  # type: ignore[attr-defined]
