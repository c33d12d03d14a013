"""The shards of all ranks, uint8 ``[bytes]`` each: a list of tensors, or one tensor that is cut on demand, which saves
the host the cutting."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class CutShards(Sequence[torch.Tensor]):
    """`whole`, uint8 ``[count * bytes]``, as `count` tensors in order."""

    def __init__(self, whole: torch.Tensor, count: int) -> None:
        self.whole, self._count = whole, count
        self._bytes = whole.numel() // count
        self.first = whole.data_ptr()

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> torch.Tensor:  # type: ignore[override]  # no slices
        if not 0 <= index < self._count:
            raise IndexError(f"expected an index from 0 to {self._count - 1}, got {index}")
        return self.whole.narrow(0, index * self._bytes, self._bytes)

    def address(self, index: int) -> int:
        return self.first + index * self._bytes


def address_of(shards: Sequence[torch.Tensor], index: int) -> int:
    return shards.address(index) if isinstance(shards, CutShards) else shards[index].data_ptr()


def addresses_of(shards: Sequence[torch.Tensor]) -> tuple[int, ...]:
    return tuple(address_of(shards, index) for index in range(len(shards)))


def key_of(shards: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """The least that says, with their size, where all of them are."""
    return (shards.first,) if isinstance(shards, CutShards) else addresses_of(shards)


def storage_of(shards: Sequence[torch.Tensor]) -> int | None:
    """Address of the storage that all of them lie in; None if they lie in several."""
    if isinstance(shards, CutShards):
        return shards.whole.untyped_storage().data_ptr()
    first, *others = (shard.untyped_storage().data_ptr() for shard in shards)
    return first if all(other == first for other in others) else None
