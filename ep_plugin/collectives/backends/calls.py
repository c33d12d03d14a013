"""Ranks of a node compare, on their hosts, what they enqueue on their devices.

Each rank posts its call, under a number that counts them, in host memory that all map, and then looks for the peers'
posts of that number: whoever calls second compares, so nobody waits for anybody. It raises before it enqueues anything,
and its abort ends what the others have enqueued.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import TYPE_CHECKING

from ep_plugin import _C
from ep_plugin.runtime.faults import disagreement

if TYPE_CHECKING:
    from ep_plugin.collectives.engine import CollectiveEngine


class Calls:
    """The calls of one communicator. Making it is collective over the node."""

    def __init__(self, engine: CollectiveEngine) -> None:
        self._engine = weakref.proxy(engine)
        self._rings = (ctypes.c_int64 * engine.node_size)(*engine.posts.allocate(_C.call_ring_bytes, "calls").ptrs)
        self._who = (ctypes.addressof(self._rings), engine.node_size, engine.index)
        self._number = 0

    def compare(self, step: _C.Step, nbytes: int, element: int, place: int) -> None:
        """nbytes: of a shard. element: of a sum, 0 without. place: in peer memory, see place_word.

        Raises DisagreementError, naming this rank and the first whose call of this number says otherwise.
        """
        self._number += 1
        found = _C.post_call(*self._who, self._number, nbytes, element, place)
        if found is not None:
            raise disagreement(self._engine, step.name.lower(), *found)
