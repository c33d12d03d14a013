"""How many rows a dispatch will bring, by those before it: so that the device need not wait for the host.

Memory is what this costs: an output made before its size is known has some room that it does not need.
"""

from __future__ import annotations

import collections
from typing import NamedTuple

REMEMBERED = 16  # dispatches
SPARE_ROWS = 256  # beside a 64th
MOST_SPREAD = 16  # of the most rows among those, the part by which the least may be below


class Rows(NamedTuple):
    """Rows of a dispatch's output, and received slots."""

    output: int
    slots: int

    def fit(self, room: Rows | None) -> bool:
        return room is not None and self.output <= room.output and self.slots <= room.slots


class Expected:
    """The rows of a communicator's last dispatches, which made their routing from topk_ids of one `shape`."""

    def __init__(self) -> None:
        self._shape: tuple[int, ...] = ()
        self._seen: collections.deque[Rows] = collections.deque(maxlen=REMEMBERED)

    def saw(self, shape: tuple[int, ...], rows: Rows) -> None:
        if shape != self._shape:
            self._shape = tuple(shape)
            self._seen.clear()
        self._seen.append(rows)

    def rows(self, shape: tuple[int, ...]) -> Rows | None:
        """Room that the next dispatch will likely not exceed, nor leave much of it; None where there is no telling."""
        if shape != self._shape or not self._seen:
            return None
        least, most = (Rows(*map(of, zip(*self._seen, strict=True))) for of in (min, max))
        if any(high - low > high // MOST_SPREAD + SPARE_ROWS for low, high in zip(least, most, strict=True)):
            return None
        return Rows(*(rows + rows // 64 + SPARE_ROWS for rows in most))
