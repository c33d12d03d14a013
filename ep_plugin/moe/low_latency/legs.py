"""Sends the legs of low-latency operations to other nodes, and receives theirs.

C calls `Legs` between the kernels of an operation (csrc/control/low_latency_operation.cpp).
csrc/common/low_latency_legs.h has the protocol, and the memory in which legs are.

Shapes: R ranks on N nodes.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import torch

from ep_plugin.errors import PeerTimeout
from ep_plugin.runtime.group import GroupEngine
from ep_plugin.transport.rails import UnderWay

Piece: TypeAlias = tuple[int, int, int]
"""A node, and where its leg is in this rank's block: the first byte, and the number of bytes."""

_NAMES = {0: "rows of a dispatch", 1: "weights of a combine", 2: "sums of a combine"}  # by LlLeg


class Legs:
    """The legs of one communicator.

    Attributes:
        pads: whether both ends of a leg must expect the same number of bytes. Over gloo a receiver may expect more.
    """

    def __init__(self, engine: GroupEngine, block: torch.Tensor) -> None:
        """block: this rank's block, uint8. It stays mapped while legs are under way."""
        self._rails, self._block = engine.rails, block
        self.abandoned: list[UnderWay] = []
        """The legs for which nobody will wait."""
        self._ranks = engine.node_map.rail(engine.index)
        self._engine = weakref.ref(engine)  # C holds this object for the engine
        self.pads = not engine.rails.takes_shorter

    def start(self, leg: int, slot: int, sends: Sequence[Piece], receives: Sequence[Piece]) -> UnderWay:
        """Begins to send and receive the legs of one kind.

        Args:
            leg: LlLeg.
            slot: the operation's entry, which tells legs of two operations apart.
            sends: where the leg to each other node is.
            receives: where the leg of each other node will be. The bytes are the most that may come.
        """
        name, block = _NAMES[leg], self._block
        out = [(node, block, begin, size) for node, begin, size in sends]
        into = [(node, block, begin, size) for node, begin, size in receives]
        with self._in_time():
            return self._rails.start(out, into, name, None if self.pads else f"{name}, entry {slot}")

    def wait(self, under_way: UnderWay) -> list[int]:
        """Waits for legs that have begun. On CPUs the host waits, with a deadline.

        Returns:
            The nanoseconds that the host has waited for each node.
        """
        waited = self._rails.waited_ns
        before = [waited[rank] for rank in self._ranks]
        try:
            with self._in_time():
                self._rails.wait(under_way)
        finally:
            under_way.works.clear()  # an error would keep them, and the block may be unmapped
        return [waited[rank] - begun for rank, begun in zip(self._ranks, before, strict=True)]

    def abandon(self, under_way: UnderWay) -> None:
        """Keeps legs for which nobody will wait. If their works were dropped, a message that comes for one of them
        would stop all later messages of its sender over this rail."""
        self.abandoned.append(under_way)

    @contextlib.contextmanager
    def _in_time(self) -> Iterator[None]:
        """Raises an error of the rails as the communicator does."""
        try:
            yield
        except PeerTimeout as error:
            engine = self._engine()
            assert engine is not None, "C has called for an engine"
            engine.raise_of_rail(error)
