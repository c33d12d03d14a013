"""The caller's tensors as shards: one uint8 ``[bytes]`` tensor for each rank, in rank order.

Shapes: R ranks, n elements of a shard.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ep_plugin.runtime.tensors import check_memory

MAX_ORDERED_DIMS = 12  # of a tensor that is not contiguous


def cut(whole: torch.Tensor, count: int) -> list[torch.Tensor]:
    """A contiguous tensor as `count` shards."""
    return list(flat(whole).view(count, -1).unbind()) if whole.numel() else [flat(whole)] * count


def check_cut(name: str, whole: torch.Tensor, count: int, like_name: str, like: torch.Tensor) -> None:
    """ValueError unless `whole` has `count` times the elements of `like`, and both are contiguous in memory."""
    check_alike(name, whole, like_name, like)
    if whole.numel() != count * like.numel():
        raise ValueError(
            f"{name}: expected {count} x {like.numel()} elements, one {like_name} for each rank, got {whole.numel()}"
        )
    check_contiguous(name, whole)
    check_contiguous(like_name, like)


def listed(
    name: str, tensors: Sequence[torch.Tensor], count: int, like_name: str, like: torch.Tensor
) -> list[torch.Tensor]:
    """`tensors` as shards; ValueError unless they are `count` tensors of n elements, as many as `like` has."""
    if len(tensors) != count:
        raise ValueError(f"{name}: expected {count} tensors, one for each rank, got {len(tensors)}")
    for rank, tensor in enumerate(tensors):
        check_alike(f"{name}[{rank}]", tensor, like_name, like)
        if tensor.numel() != like.numel():
            raise ValueError(f"{name}[{rank}]: expected {like.numel()} elements, got {tensor.numel()}")
    return [as_bytes(f"{name}[{rank}]", tensor) for rank, tensor in enumerate(tensors)]


def check_apart(name: str, one: torch.Tensor, whole_name: str, shards: Sequence[torch.Tensor], rank: int) -> None:
    """ValueError if `one` shares memory with a shard, unless it is this rank's. All are flat and equally long."""
    begin, nbytes = one.data_ptr(), one.numel()
    for place, shard in enumerate(shards if not one.is_meta else ()):
        apart = abs(shard.data_ptr() - begin)
        if apart < nbytes and (apart or place != rank):
            raise ValueError(
                f"{name}: expected the part of rank {rank} in {whole_name}, or memory apart from it, got one that "
                f"shares {nbytes - apart} bytes with the part of rank {place}"
            )


def check_alike(name: str, tensor: torch.Tensor, like_name: str, like: torch.Tensor) -> None:
    """ValueError unless both are tensors of one dtype and one device."""
    for argument, value in ((name, tensor), (like_name, like)):
        if not isinstance(value, torch.Tensor):
            raise ValueError(f"{argument}: expected a tensor, got {type(value).__name__}")
    if tensor.dtype != like.dtype:
        raise ValueError(f"{name}: expected dtype {like.dtype} as of {like_name}, got {tensor.dtype}")
    if tensor.device != like.device:
        raise ValueError(f"{name}: expected device {like.device} as of {like_name}, got {tensor.device}")


def as_bytes(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` as uint8 ``[bytes]`` in the same memory; ValueError unless it is contiguous and has its values there."""
    check_contiguous(name, tensor)
    return flat(tensor)


def check_contiguous(name: str, tensor: torch.Tensor) -> None:
    """ValueError unless `tensor` is contiguous and has its values in its memory."""
    check_memory(name, tensor)
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: expected a contiguous tensor, got strides {tuple(tensor.stride())}")


def as_bytes_in_order(name: str, tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Does what `as_bytes` does, also for a tensor without gaps whose dimensions lie in another order.

    A channels_last tensor is an example.

    Returns:
        The bytes, and the dimensions of more than one element from the outermost in memory to the innermost; () for a
        contiguous tensor.
    """
    check_memory(name, tensor)
    if tensor.is_contiguous():
        return flat(tensor), ()
    strides, shape = tensor.stride(), tensor.shape
    order = sorted((dim for dim, extent in enumerate(shape) if extent > 1), key=strides.__getitem__, reverse=True)
    inner = [math.prod(shape[dim] for dim in order[place + 1 :]) for place in range(len(order))]
    if [strides[dim] for dim in order] != inner or tensor.dim() > MAX_ORDERED_DIMS:
        raise ValueError(
            f"{name}: expected a contiguous tensor, or one of at most {MAX_ORDERED_DIMS} dimensions without gaps or "
            f"overlaps, got shape {tuple(shape)} with strides {tuple(strides)}"
        )
    return flat(tensor), tuple(order)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as uint8 ``[bytes]`` in the same memory."""
    if tensor.requires_grad or tensor.dim() != 1 or tensor.stride(0) != 1:  # one element may have any stride
        tensor = tensor.detach().as_strided((tensor.numel(),), (1,))
    return tensor.view(torch.uint8)
