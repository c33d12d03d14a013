"""The shards of all ranks: tensors, uint8 ``[bytes]`` each, or one tensor cut on demand, as to cut costs the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Chunks(Sequence[torch.Tensor]):
    """`whole`, uint8 ``[count * bytes]``, as `count` tensors in order."""

    def __init__(self, whole: torch.Tensor, count: int) -> None:
        self.whole, self._count = whole, count
        self._bytes = whole.numel() // count
        self.first = whole.data_ptr()

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> torch.Tensor:  # type: ignore[override]  # slices are nobody's business
        if not 0 <= index < self._count:
            raise IndexError(f"expected an index from 0 to {self._count - 1}, got {index}")
        return self.whole.narrow(0, index * self._bytes, self._bytes)

    def addresses(self) -> tuple[int, ...]:
        return tuple(self.address(index) for index in range(self._count))

    def address(self, index: int) -> int:
        return self.first + index * self._bytes


def addresses_of(shards: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Where each of them begins."""
    if isinstance(shards, Chunks):
        return shards.addresses()
    return tuple(shard.data_ptr() for shard in shards)


def address_of(shards: Sequence[torch.Tensor], index: int) -> int:
    """Where one of them begins."""
    return shards.address(index) if isinstance(shards, Chunks) else shards[index].data_ptr()


def key_of(shards: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """What, with their size, says where they are."""
    return (shards.first,) if isinstance(shards, Chunks) else addresses_of(shards)


def storage_of(shards: Sequence[torch.Tensor]) -> int | None:
    """Where the storage begins that all of them lie in; None: they lie in several."""
    if isinstance(shards, Chunks):
        return shards.whole.untyped_storage().data_ptr()
    first, *others = (shard.untyped_storage().data_ptr() for shard in shards)
    return first if all(other == first for other in others) else None
