"""The history of a communicator's dispatches: the latest routings, and how many rows each one brought."""

from __future__ import annotations

import collections
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ep_plugin.moe.layout import DispatchHandle, Routing

_MOST_ROUTINGS = 256  # layers that share a communicator use their routings again in backward
REMEMBERED = 16  # dispatches
SPARE_ROWS = 256
MOST_SPREAD = 16  # remembered counts may differ by this part of the largest, plus SPARE_ROWS


class Routings:
    """The latest routings. Their handles need no second check. It keeps no tensor alive."""

    def __init__(self) -> None:
        self._by_plan: dict[int, _Made] = {}  # by the plan's id

    def remember(self, tensors: Sequence[torch.Tensor], struct: Any, totals: list[int]) -> None:
        """Remembers a routing. tensors: the handle's tensors. struct, totals: as in Routing."""
        if len(self._by_plan) == _MOST_ROUTINGS:
            del self._by_plan[next(iter(self._by_plan))]
        plan = id(tensors[1])
        self._by_plan.pop(plan, None)  # the entry of a tensor that is gone and had the same id
        made = _Made(tuple(map(weakref.ref, tensors)), [tensor.shape for tensor in tensors], struct, totals)
        self._by_plan[plan] = made

    def find(self, handle: DispatchHandle) -> Routing | None:
        """Returns the routing of `handle` if its tensors are the remembered objects, with their shapes and memory."""
        ids, plan, recv_rows, totals, _ = handle
        made = self._by_plan.get(id(plan))
        if made is None:
            return None
        same_ids, same_plan, same_recv_rows, same_totals = made.tensors
        if (
            same_ids() is ids
            and same_plan() is plan
            and same_recv_rows() is recv_rows
            and same_totals() is totals
            and plan is not None  # a reference to a tensor that is gone returns None
            and made.shapes == [ids.shape, plan.shape, recv_rows.shape, totals.shape]
            and made.struct.lies_at(ids.data_ptr(), plan.data_ptr(), recv_rows.data_ptr())
        ):
            return Routing(handle, made.struct, made.totals)
        return None


class _Made(NamedTuple):
    tensors: tuple[weakref.ref[torch.Tensor], ...]
    shapes: list[torch.Size]
    struct: Any
    totals: list[int]


class Rows(NamedTuple):
    """Numbers of a dispatch's output rows and of its received slots: how many there are, or how many have room."""

    output: int
    slots: int

    def fit(self, room: Rows) -> bool:
        return self.output <= room.output and self.slots <= room.slots


class Expected:
    """Guesses how many rows a dispatch brings, from the latest dispatches that made a routing from ids of that shape.

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
        """Returns room that is probably enough for the next dispatch, and little more. None: no guess is possible."""
        if shape != self._shape or not self._seen:
            return None
        output, slots = (_room_for(counts) for counts in zip(*self._seen, strict=True))
        return None if output is None or slots is None else Rows(output, slots)


def _room_for(seen: tuple[int, ...]) -> int | None:
    """Returns the largest count `seen`, plus a 64th of it, plus SPARE_ROWS. None if the counts differ much."""
    least, most = min(seen), max(seen)
    return None if most - least > most // MOST_SPREAD + SPARE_ROWS else most + most // 64 + SPARE_ROWS
