"""The collectives that the parameter groups of a process share: a pair for each set of ranks, timeout and device.

Not for each process group: with ``reshard_after_forward=int`` every FSDP module brings a process group of its own over
the same ranks, and memory for each of them would be memory for each layer.

What is remembered of a model goes with it. But ranks collect garbage at different times, so nothing that they must do
alike, as mapping a buffer or closing a pair, may depend on whether a model that was dropped is gone yet: sizes are
compared within one model, and pairs count whoever has used them and has not left.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
import torch.distributed as dist

from ep_plugin.collectives import HierarchicalAllGather, HierarchicalReduceScatter
from ep_plugin.transport.exchange import is_alive, timeout_of

_SUM_SMS = 24  # backward has the others
# Bytes that each user asks for, by what stands for its model.
_Sizes = weakref.WeakKeyDictionary[Any, dict["User", int]]


class Pair:
    """The collectives over ``group`` on ``device``. Making it talks to nobody; the first use of each is collective."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, num_users: int = 0) -> None:
        self.group, self.device, self.num_users = group, device, num_users
        self.all_gather = HierarchicalAllGather(group)
        self.reduce_scatter = HierarchicalReduceScatter(group, sms=_SUM_SMS)
        self._sizes: _Sizes = weakref.WeakKeyDictionary()
        self._input_sizes: _Sizes = weakref.WeakKeyDictionary()

    def allocate(self, user: User, model: Any, numel: int, dtype: torch.dtype) -> torch.Tensor | None:
        """``[numel]``, uninitialised, for ``user``'s next gather, which peers map; None unless others gather as much.

        Such memory is kept from step to step, two layers' worth, which layers of one size use in turn. Kept for what
        only one module needs, such as a large embedding, it would add to stock's peak as much again: any other memory
        serves that, and costs a copy. ``model``: any object that the parameter groups of one model share, and that
        lives as long as they do.
        """
        return self._allocate(self.all_gather, self._sizes, user, model, numel, dtype)

    def allocate_input(self, user: User, model: Any, numel: int, dtype: torch.dtype) -> torch.Tensor | None:
        """The same for the input of ``user``'s next reduction, which lives until the next layer's is reduced. Where
        peers map no inputs, None too."""
        if self.device.type in self.reduce_scatter.maps_nothing_on:
            return None
        return self._allocate(self.reduce_scatter, self._input_sizes, user, model, numel, dtype)

    def _allocate(
        self,
        collective: HierarchicalAllGather | HierarchicalReduceScatter,
        all_sizes: _Sizes,
        user: User,
        model: Any,
        numel: int,
        dtype: torch.dtype,
    ) -> torch.Tensor | None:
        nbytes, sizes = numel * dtype.itemsize, all_sizes.setdefault(model, {})
        sizes[user] = nbytes
        if any(other is not user and nbytes <= 2 * size and size <= 2 * nbytes for other, size in sizes.items()):
            return collective.allocate(numel, dtype=dtype, device=self.device)
        return None

    def forget(self, user: User) -> None:
        for sizes in (*self._sizes.values(), *self._input_sizes.values()):
            sizes.pop(user, None)

    def close(self) -> None:
        self.all_gather.close()
        self.reduce_scatter.close()


_Key = tuple[tuple[int, ...], float, torch.device]
_pairs: dict[_Key, Pair] = {}
# Ranks, and the timeout as it was when the group came: scripts that change it after their first step go on with the
# pair that they have.
_groups: weakref.WeakKeyDictionary[Any, tuple[tuple[int, ...], float]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()  # backward runs in a thread of autograd's


class User:
    """Who uses pairs: each stays open for this user until it leaves, also when it is dropped without that."""

    def __init__(self) -> None:
        self._keys: set[_Key] = set()

    def pair(self, group: dist.ProcessGroup, device: torch.device) -> Pair:
        """The pair that serves ``group`` on ``device``."""
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
        """Closes the pairs that nobody else uses."""
        with _lock:
            for key in self._keys:
                pair = _pairs[key]
                pair.num_users -= 1
                if pair.num_users == 0:
                    _pairs.pop(key).close()
                else:
                    pair.forget(self)
            self._keys.clear()
