"""A communicator's memory of its dispatches: the routing made last, and how many rows each brought."""

from __future__ import annotations

import collections
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ep_plugin.moe.layout import DispatchHandle, Routing

REMEMBERED = 16  # dispatches
SPARE_ROWS = 256
MOST_SPREAD = 16  # remembered counts may differ by this part of the largest, plus SPARE_ROWS


class LatestRouting:
    """The routing made last. Most calls use it, and its handle needs no second check. Keeps no tensor alive."""

    def __init__(self) -> None:
        self._tensors: list[weakref.ref[torch.Tensor]] = []

    def remember(self, tensors: Sequence[torch.Tensor], struct: Any, totals: list[int]) -> None:
        """tensors: a handle's. struct and totals: as in Routing."""
        self._tensors = [weakref.ref(tensor) for tensor in tensors]
        self._shapes = [tensor.shape for tensor in tensors]
        self._struct, self._totals = struct, totals

    def find(self, handle: DispatchHandle) -> Routing | None:
        """The routing of `handle`, if its tensors are the very ones that were made, of the same shapes and memory."""
        if not self._tensors:
            return None
        ids, plan, recv_rows, totals, _ = handle
        same_ids, same_plan, same_recv_rows, same_totals = self._tensors
        if (
            ids is not None  # as a reference to a tensor that is gone returns
            and plan is not None
            and recv_rows is not None
            and totals is not None
            and same_ids() is ids
            and same_plan() is plan
            and same_recv_rows() is recv_rows
            and same_totals() is totals
            and self._shapes == [ids.shape, plan.shape, recv_rows.shape, totals.shape]
            and self._struct.lies_at(ids.data_ptr(), plan.data_ptr(), recv_rows.data_ptr())
        ):
            return Routing(handle, self._struct, self._totals)
        return None


class Rows(NamedTuple):
    """Rows of a dispatch's output, and received slots: how many there are, or how many there is room for."""

    output: int
    slots: int

    def fit(self, room: Rows) -> bool:
        return self.output <= room.output and self.slots <= room.slots


class Expected:
    """Guesses how many rows a dispatch brings from those before it that made a routing from ids of the same shape.

    An output that is made before its size is known takes memory that it may not need.
    """

    def __init__(self) -> None:
        self._shape: tuple[int, ...] = ()
        self._seen: collections.deque[Rows] = collections.deque(maxlen=REMEMBERED)

    def saw(self, shape: tuple[int, ...], rows: Rows) -> None:
        if shape != self._shape:
            self._shape = tuple(shape)
            self._seen.clear()
        self._seen.append(rows)

    def rows(self, shape: tuple[int, ...]) -> Rows | None:
        """Room that is likely enough for the next dispatch, and little more. None: no guess is possible."""
        if shape != self._shape or not self._seen:
            return None
        output, slots = (_room_for(counts) for counts in zip(*self._seen, strict=True))
        return None if output is None or slots is None else Rows(output, slots)


def _room_for(seen: tuple[int, ...]) -> int | None:
    """A 64th and SPARE_ROWS more than the largest count `seen`; None when the counts differ much."""
    least, most = min(seen), max(seen)
    return None if most - least > most // MOST_SPREAD + SPARE_ROWS else most + most // 64 + SPARE_ROWS
