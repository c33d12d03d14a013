"""The collectives that the parameter groups of a process share: one pair for each set of ranks and device.

Not for each process group: with ``reshard_after_forward=int`` every FSDP module brings a process group of its own over
the same ranks, and memory for each of them would be memory for each layer.
"""

from __future__ import annotations

import itertools
import threading

import torch
import torch.distributed as dist

from ep_plugin.collectives import HierarchicalAllGather, HierarchicalReduceScatter
from ep_plugin.memory.exchange import is_alive


class Pair:
    """The collectives over ``group`` on ``device``. Making it talks to nobody; the first use of each is collective."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.device = group, device
        self.all_gather = HierarchicalAllGather(group)
        self.reduce_scatter = HierarchicalReduceScatter(group)
        # By user: bytes of its gathers, and of its reductions' inputs.
        self._sizes: dict[int, int] = {}
        self._input_sizes: dict[int, int] = {}

    def allocate(self, user: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """``[numel]``, uninitialised, for ``user``'s next gather: memory that peers map, if others gather as much.

        Such memory is kept from step to step. Two layers' worth, which layers of one size use in turn, is what stock
        FSDP2 needs at its peak; what only one module needs, such as a large embedding, would add to that peak, so it is
        ordinary memory, and the gather copies.
        """
        return self._allocate(self.all_gather, self._sizes, user, numel, dtype)

    def allocate_input(self, user: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The same for the input of ``user``'s next reduction, which lives until the next layer's is reduced."""
        return self._allocate(self.reduce_scatter, self._input_sizes, user, numel, dtype)

    def _allocate(
        self,
        collective: HierarchicalAllGather | HierarchicalReduceScatter,
        sizes: dict[int, int],
        user: int,
        numel: int,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        nbytes = numel * dtype.itemsize
        sizes[user] = nbytes
        if any(other != user and nbytes <= 2 * size and size <= 2 * nbytes for other, size in sizes.items()):
            return collective.allocate(numel, dtype=dtype, device=self.device)
        return torch.empty(numel, dtype=dtype, device=self.device)

    def forget(self, user: int) -> None:
        self._sizes.pop(user, None)
        self._input_sizes.pop(user, None)

    def close(self) -> None:
        self.all_gather.close()
        self.reduce_scatter.close()


_pairs: dict[tuple[tuple[int, ...], torch.device], Pair] = {}
_users: dict[int, set[tuple[tuple[int, ...], torch.device]]] = {}
_numbers = itertools.count()
_lock = threading.Lock()  # backward runs in a thread of autograd's


def new_user() -> int:
    """A number for who uses the pairs: never a weak reference, since ranks may collect garbage at different times."""
    return next(_numbers)


def of(user: int, group: dist.ProcessGroup, device: torch.device) -> Pair:
    """The pair that serves ``group`` on ``device``; it stays open for ``user`` until `leave`."""
    key = (tuple(dist.get_process_group_ranks(group)), device)
    with _lock:
        pair = _pairs.get(key)
        if pair is not None and not is_alive(pair.group):
            pair.close()
            pair = None
        if pair is None:
            pair = _pairs[key] = Pair(group, device)
        _users.setdefault(user, set()).add(key)
        return pair


def leave(user: int) -> None:
    """Closes the pairs that nobody but ``user`` still uses."""
    with _lock:
        left = _users.pop(user, set())
        for key in left.difference(*_users.values()):
            _pairs.pop(key).close()
        for key in left & _pairs.keys():
            _pairs[key].forget(user)
