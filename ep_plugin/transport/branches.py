"""Splits the ranks of an exchange into branches, so that no rank has to read what every other rank posts.

A branch is consecutive ranks. Its first rank, the leader, reads their posts and passes them on to rank 0. R ranks form
at most about sqrt(R) branches of about as many ranks, so rank 0 reads the posts of about 2 sqrt(R) ranks. On N nodes of
G ranks that is at most N + G. Branches need not be nodes, because ranks agree before they know their nodes.
"""

from __future__ import annotations

import math

_LEAST = 8  # ranks of a branch: rank 0 reads the posts of fewer without another step


class Branches:
    """The branches of `size` ranks, as `rank` sees them.

    Attributes:
        own: the ranks of this rank's branch, in order. The first one leads it.
        leaders: on rank 0, the leaders of the other branches, in order. Empty on other ranks.
        passes_on: whether this rank leads a branch other than that of rank 0.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._width = max(_LEAST, math.isqrt(size - 1) + 1)
        leader = rank - rank % self._width
        self.own = range(leader, min(leader + self._width, size))
        self.leaders = range(self._width, size, self._width) if rank == 0 else range(0)
        self.passes_on = rank == leader > 0

    def source(self, rank: int) -> int:
        """Returns the rank whose posts bring those of `rank` here: itself in this branch, else its leader."""
        return rank if rank in self.own else rank - rank % self._width
