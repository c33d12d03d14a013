"""Spares the copies of parameter groups whose shards one rank holds, such as experts under ``ep_size = fsdp_size``.

For such a group FSDP2 gathers and reduces nothing, but copies: the shard into an unsharded parameter before every use,
and the gradient into a buffer and from there into another. Here the unsharded parameter is the shard's memory, and the
shard's gradient is the tensor that autograd has made. Where dtypes differ, each is cast once. Everything else is
FSDP2's own code, and results are equal bit for bit.

Left to FSDP2's own copies
    Parameters that are offloaded to the host, have ``fsdp_pre_all_gather`` or are of a class of their own. Gradients
    that are reduced over replicas or passed to an all-reduce hook, that a DTensor has yet to redistribute, or that
    FSDP2 divides in several steps. All gradients of a group under ``set_reduce_scatter_unused_params``.
Versions
    This relies on private code of FSDP2, as read in PyTorch 2.11 to 2.15. Other versions copy.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor

is_known = (2, 11) <= tuple(map(int, torch.__version__.split(".")[:2])) <= (2, 15)
# FSDP2's own wrappers of the methods that are replaced here. Older versions have none.
outside_functorch = getattr(_fsdp_common, "_disable_functorch_if_active", lambda method: method)
_outside_dynamo = getattr(_fsdp_common, "_dynamo_disable", lambda method: method)


def serve(group: Any) -> None:
    """Spares the copies of FSDP2's parameter group, if one rank holds its shards and this PyTorch is known."""
    is_alone = group.mesh_info.shard_mesh_size == 1 and group.post_forward_mesh_info in (None, group.mesh_info)
    if is_known and is_alone and group.__class__ is FSDPParamGroup:
        group.__class__ = _OneRankGroup


def leave(group: Any) -> None:
    """Makes the group FSDP2's own again."""
    if group.__class__ is _OneRankGroup:
        for fsdp_param in group.fsdp_params:
            _separate(fsdp_param)
        group.__class__ = FSDPParamGroup  # type: ignore[assignment]


class _OneRankGroup(FSDPParamGroup):
    @outside_functorch
    def wait_for_unshard(self) -> None:
        if self._all_gather_result is None:
            return  # unshard() has not been called, or had nothing to do
        every, ours = self.fsdp_params, list(filter(is_plain, self.fsdp_params))
        self.fsdp_params = [fsdp_param for fsdp_param in every if fsdp_param not in ours]  # those that FSDP2 copies
        for fsdp_param in self.fsdp_params:
            _separate(fsdp_param)
        try:
            super().wait_for_unshard()
        finally:
            self.fsdp_params = every
        with torch.inference_mode(False):  # training uses what the first forward makes
            for fsdp_param in ours:
                _unshard(fsdp_param)
                fsdp_param.to_unsharded()

    @_outside_dynamo
    def post_backward(self, *unused: Any) -> None:
        gradients = self._take_gradients()
        super().post_backward(*unused)  # reshards, and reduces what is left
        while gradients:
            _give(*gradients.pop(0), self.gradient_divide_factor)

    def _take_gradients(self) -> list[tuple[Any, torch.Tensor, torch.dtype]]:
        """Takes what FSDP2's code would reduce: parameters, their gradients and the dtype of the reduction.

        Takes nothing if that code does more than divide once and cast.
        """
        is_reduced = not isinstance(self.mesh_info, DDPMeshInfo) and self._all_reduce_hook is None
        if not (self.reduce_grads and is_reduced) or getattr(self, "reduce_scatter_unused_params", False):
            return []
        found = {
            fsdp_param: gradient
            for fsdp_param in self.fsdp_params
            if hasattr(fsdp_param, "_unsharded_param") and (gradient := _gradient(fsdp_param)) is not None
        }
        if not all(_is_final(fsdp_param, gradient) for fsdp_param, gradient in found.items()):
            return []
        local = [gradient._local_tensor if isinstance(gradient, DTensor) else gradient for gradient in found.values()]
        if local and hasattr(self, "_get_reduce_dtype"):  # from 2.15 on
            dtypes = [self._get_reduce_dtype(list(found), local)] * len(local)
        else:
            dtypes = [self._reduce_dtype or gradient.dtype for gradient in local]
        divides_twice = self.force_sum_reduction_for_comms or not {*dtypes} <= {torch.float32, torch.bfloat16}
        if self.gradient_divide_factor not in (None, 1) and divides_twice:
            return []
        for fsdp_param, gradient in found.items():
            if fsdp_param._unsharded_param.grad is gradient:
                fsdp_param._unsharded_param.grad = None
            else:
                fsdp_param.unsharded_accumulated_grad = None
        return list(zip(found, local, dtypes, strict=True))


def _gradient(fsdp_param: Any) -> torch.Tensor | None:
    """Returns the gradient of the unsharded parameter, over all backwards since the last reduction."""
    if hasattr(fsdp_param, "accumulate_unsharded_grad_if_needed"):  # from 2.15 on, autograd accumulates
        fsdp_param.accumulate_unsharded_grad_if_needed()
    accumulated = fsdp_param.unsharded_accumulated_grad
    return fsdp_param._unsharded_param.grad if accumulated is None else accumulated


def _is_final(fsdp_param: Any, gradient: torch.Tensor) -> bool:
    """Returns whether the gradient is one tensor's memory, which no other mesh has yet to reduce."""
    if fsdp_param.offload_to_cpu or gradient.requires_grad:
        return False
    if not fsdp_param.is_dtensor:
        return type(gradient) is torch.Tensor
    unsharded = fsdp_param._unsharded_param
    if not (isinstance(gradient, DTensor) and isinstance(unsharded, DTensor)):
        return False
    return gradient.placements == unsharded.placements and type(gradient._local_tensor) is torch.Tensor


def _give(fsdp_param: Any, gradient: torch.Tensor, dtype: torch.dtype, factor: float | None) -> None:
    """Gives a gradient to the sharded parameter, with the roundings of a reduction in ``dtype``."""
    sharded = fsdp_param.sharded_param
    factor = None if factor == 1 else factor
    is_first, given = sharded.grad is None, gradient
    # Otherwise the cast would change no value.
    if factor is not None or torch.promote_types(gradient.dtype, dtype) != dtype:
        gradient = gradient.to(dtype)
    target = getattr(fsdp_param, "sharded_grad_dtype", fsdp_param.orig_dtype) or dtype  # the former from 2.15 on
    is_kept = factor is not None or (is_first and gradient.dtype == target)
    if gradient is given and is_kept and not _is_sole(gradient):
        gradient = gradient.clone(memory_format=torch.contiguous_format)
    if factor is not None:
        gradient.div_(factor)
    gradient = gradient.to(target).contiguous()
    if is_first:
        sharded.grad = fsdp_param.to_sharded_dtensor(gradient)
    else:
        sharded.grad._local_tensor += gradient
    for hook in (getattr(sharded, "_post_accumulate_grad_hooks", None) or {}).values():
        hook(sharded)


def _is_sole(gradient: torch.Tensor) -> bool:
    """Returns whether the tensor is all of its memory, and nobody else has a tensor in it."""
    storage = gradient.untyped_storage()
    is_whole = gradient.is_contiguous() and storage.nbytes() == gradient.nbytes
    return is_whole and torch._C._storage_Use_Count(storage._cdata) == 2  # `gradient` and `storage`


def is_plain(fsdp_param: Any) -> bool:
    """Returns whether the unsharded parameter is the shard, or the shard in another dtype."""
    shard = fsdp_param._sharded_param_data
    if fsdp_param.offload_to_cpu or hasattr(fsdp_param._sharded_local_tensor, "fsdp_pre_all_gather"):
        return False
    return type(shard) is torch.Tensor and shard.device == fsdp_param.device


def _unshard(fsdp_param: Any) -> None:
    """Fills the unsharded parameter: its memory is the shard's if dtypes allow, else the shard is cast into its own."""
    shard = fsdp_param._sharded_param_data
    if shard.dtype == (fsdp_param.param_dtype or fsdp_param.orig_dtype):
        fsdp_param.all_gather_outputs = [shard.data]  # .data: with a count of versions of its own, as a copy has
        _place(fsdp_param)
        fsdp_param.all_gather_outputs = []  # that FSDP2 frees when it reshards
        fsdp_param.free_unsharded_param = _free_nothing  # 2.11 would free the parameter itself under compiled autograd
    else:
        vars(fsdp_param).pop("free_unsharded_param", None)
        _copy_to_own_memory(fsdp_param, shard)


def _separate(fsdp_param: Any) -> None:
    """Gives the unsharded parameter memory of its own, if it is the shard's."""
    if vars(fsdp_param).pop("free_unsharded_param", None):
        _copy_to_own_memory(fsdp_param, fsdp_param._sharded_param_data)
        if fsdp_param.sharded_state.name != "UNSHARDED":
            fsdp_param.free_unsharded_param()


def _copy_to_own_memory(fsdp_param: Any, shard: torch.Tensor) -> None:
    dtype = fsdp_param.param_dtype or fsdp_param.orig_dtype
    fsdp_param.init_all_gather_outputs([shard.numel()], [dtype], 1, fsdp_param.device)
    (whole,) = fsdp_param.all_gather_outputs
    fsdp_param.alloc_all_gather_outputs()
    with _unsafe_preserve_version_counter(whole):
        whole.copy_(shard)
    _place(fsdp_param)


def _place(fsdp_param: Any) -> None:
    """Makes the all-gather output the memory of the unsharded parameter, which stays the object that it is."""
    (whole,) = fsdp_param.all_gather_outputs
    if not hasattr(fsdp_param, "_unsharded_param"):
        fsdp_param.init_unsharded_param()
    unsharded = fsdp_param._unsharded_param
    local = unsharded._local_tensor if isinstance(unsharded, DTensor) else unsharded
    if local.data_ptr() == whole.data_ptr():
        return
    if isinstance(unsharded, DTensor):
        unsharded._local_tensor = whole.view(fsdp_param._orig_size)
    else:
        unsharded.data = whole.view(fsdp_param._orig_size)


def _free_nothing() -> None:
    """Stands for a parameter's `free_unsharded_param` while its memory is the shard's."""
