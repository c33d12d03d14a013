"""Ranks of a node compare, on their hosts, what they enqueue on their devices.

Each rank posts its call, under a number that counts them, in host memory that all map, and then looks for the peers'
posts of that number: whoever calls second compares, so nobody waits for anybody. It raises before it enqueues anything,
and its abort ends what the others have enqueued.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from ep_plugin import _C
from ep_plugin.faults import disagreement

if TYPE_CHECKING:
    from ep_plugin.collectives.engine import CollectiveEngine


class Calls:
    """The calls of one communicator. Making it is collective over the node."""

    def __init__(self, engine: CollectiveEngine) -> None:
        self._engine = weakref.proxy(engine)
        self._rings = engine.posts.allocate(_C.call_ring_bytes, "calls").ptrs
        self._number = 0

    def compare(self, step: _C.Step, words: tuple[int, int, int, int]) -> None:
        """words: this call's operation, bytes of a shard, element of a sum, and place in peer memory.

        Raises DisagreementError, naming this rank and the first whose call of this number has other words.
        """
        self._number += 1
        engine = self._engine
        found = _C.post_call(self._rings, engine.index, self._number, words)
        if found is not None:
            peer, field, mine, theirs = found
            raise disagreement(engine, step.name.lower(), peer, field, mine, theirs)
