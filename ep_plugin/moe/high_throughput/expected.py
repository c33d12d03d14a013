"""How many rows a dispatch will bring, by those before it: so that the device need not wait for the host.

Memory is what this costs: an output made before its size is known has some room that it does not need.
"""

from __future__ import annotations

import collections
from typing import NamedTuple

REMEMBERED = 16  # dispatches
SPARE_ROWS = 256
MOST_SPREAD = 16  # the least rows among those may be below the most by this part of them, and SPARE_ROWS


class Rows(NamedTuple):
    """Rows of a dispatch's output, and received slots."""

    output: int
    slots: int

    def fit(self, room: Rows) -> bool:
        return self.output <= room.output and self.slots <= room.slots


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
        output, slots = (_room_for(counts) for counts in zip(*self._seen, strict=True))
        return None if output is None or slots is None else Rows(output, slots)


def _room_for(seen: tuple[int, ...]) -> int | None:
    """A 64th and SPARE_ROWS more than the most `seen`; None where they differ much."""
    least, most = min(seen), max(seen)
    return None if most - least > most // MOST_SPREAD + SPARE_ROWS else most + most // 64 + SPARE_ROWS
