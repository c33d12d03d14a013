"""The collectives that the parameter groups of a process share: one pair for each set of ranks and device.

Not for each process group: with ``reshard_after_forward=int`` every FSDP module brings a process group of its own over
the same ranks, and memory for each of them would be memory for each layer.
"""

from __future__ import annotations

import threading
import weakref
from functools import cached_property

import torch
import torch.distributed as dist

from ep_plugin.collectives import HierarchicalAllGather, HierarchicalReduceScatter
from ep_plugin.memory.exchange import is_alive


class Pair:
    """The collectives over ``group`` on ``device``, each made, collectively, when it is first asked for."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.device = group, device
        self.users: weakref.WeakSet[object] = weakref.WeakSet()

    @cached_property
    def all_gather(self) -> HierarchicalAllGather:
        return HierarchicalAllGather(self.group)

    @cached_property
    def reduce_scatter(self) -> HierarchicalReduceScatter:
        return HierarchicalReduceScatter(self.group)

    def close(self) -> None:
        for name in ("all_gather", "reduce_scatter"):
            made = self.__dict__.pop(name, None)
            if made is not None:
                made.close()


_pairs: dict[tuple[tuple[int, ...], torch.device], Pair] = {}
_lock = threading.Lock()  # backward runs in a thread of autograd's


def of(user: object, group: dist.ProcessGroup, device: torch.device) -> Pair:
    """The pair that serves ``group`` on ``device``; ``user`` keeps it open until `leave`."""
    key = (tuple(dist.get_process_group_ranks(group)), device)
    with _lock:
        pair = _pairs.get(key)
        if pair is None or not is_alive(pair.group):
            if pair is not None:
                pair.close()
            pair = _pairs[key] = Pair(group, device)
        pair.users.add(user)
        return pair


def leave(user: object) -> None:
    """Closes the pairs that served ``user`` and now serve nobody."""
    with _lock:
        for key, pair in list(_pairs.items()):
            pair.users.discard(user)
            if not pair.users:
                del _pairs[key]
                pair.close()
