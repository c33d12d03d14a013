"""Sends and receives one communicator's messages to the ranks with the same local rank on all other nodes.

Communicators share the connections, which `rail.py` makes. This module knows what a communicator sends over them, how
long it waits, and its errors. Over gloo, tags tell the messages of communicators apart. Over NCCL, the order of calls
does, which is the same on all ranks.
"""

from __future__ import annotations

import datetime
import functools
import operator
import secrets
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from ep_plugin.errors import NotSupported, PeerTimeout
from ep_plugin.ranges import opener
from ep_plugin.transport import rail
from ep_plugin.transport.exchange import Exchange
from ep_plugin.transport.groups import backends_of, serves_gpus
from ep_plugin.transport.rail import GroupRail, Message, NotBegun, Rail
from ep_plugin.transport.topology import NodeMap

Piece: TypeAlias = tuple[int, torch.Tensor, int, int]
"""A node, and where a message to it or from it is: a tensor, its first byte there, and its bytes."""

CHUNK_BYTES = {"cpu": 1 << 20, "cuda": 8 << 20}
_node_of = operator.itemgetter(0)  # of a message


@dataclass(frozen=True, kw_only=True)
class UnderWay:
    """Holds sends and receives that have begun.

    Attributes:
        works: pairs of a node and the backend's work. The node is None for a work that serves all nodes.
        what: describes the messages in errors.
        copies: pairs of a source and a destination, to be copied when the works are over.
        captured: the event behind the works, where a CUDA graph captures them.
    """

    works: list[tuple[int | None, Any]]
    what: str = ""
    copies: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    captured: torch.cuda.Event | None = None


def check_backend(group: dist.ProcessGroup, device: torch.device) -> None:
    """Raises NotSupported if the group's backend cannot send the memory of `device` to other nodes."""
    if device.type == "cuda" and not serves_gpus(group):
        raise NotSupported(
            "group: expected a backend that sends GPU memory between nodes, such as NCCL, got "
            f"{dist.get_backend_config(group)} for {device}"
        )
    if device.type == "cpu" and "cpu" not in backends_of(group):
        raise NotSupported(
            f"group: expected a backend for CPU memory, such as gloo, got {dist.get_backend_config(group)} for {device}"
        )


class Rails:
    """Represents this rank on its rail.

    A rail is open after `open`, which all ranks call with what all of them have offered.

    Attributes:
        bytes_sent: the bytes that this object has sent to other nodes.
        bytes_received: the bytes that it has received from them.
        waited_ns: for each rank of the group, how long the host has waited for its messages. Empty on GPUs.
    """

    def __init__(
        self,
        exchange: Exchange,
        group: dist.ProcessGroup,
        node_map: NodeMap,
        device: torch.device,
        failed: Callable[[str], None],
    ) -> None:
        """Prepares the rail, and connects nothing.

        Args:
            exchange: connects the ranks of `group`.
            failed: is called with a reason, by any thread, when another communicator ends the rail that both use.
        """
        self._group, self._device, self._failed = group, device, failed
        self._rank = exchange.rank
        self._timeout_s = exchange.timeout_s
        self._name = exchange.name
        # With its size it makes a message's tag. A message meets only messages of the same communicator and size: gloo
        # ends a process that gets a longer message than it expects, and takes a shorter one for whole.
        self._named = zlib.crc32(f"ep_plugin {self._name} ".encode())
        self._range = opener()
        self.bytes_sent = self.bytes_received = 0
        self.waited_ns: Counter[int] = Counter()
        self.chunk_bytes = CHUNK_BYTES[device.type]
        self._ranks = node_map.rail(node_map.local_rank_of(self._rank))  # by node
        own = self._node = node_map.node_of(self._rank)
        # The next node first, so that no two nodes send to one at a time.
        self.nodes = [(own + step) % node_map.num_nodes for step in range(1, node_map.num_nodes)]
        self._rail: Rail | GroupRail | None = None
        self._owner = object()  # stands for this communicator in the rail's progress, which outlives it
        self._aborted = self._waiting = False

    def offer(self) -> list[str]:
        """Returns the name of the rail that this process has ("" if none), and a name for a new rail.

        A group of one node needs no rail: the list is empty.
        """
        if not self.nodes:
            return []
        found = self._rail = rail.find(self._key, self)
        return ["" if found is None else found.ident, secrets.token_hex(8)]

    def open(self, exchange: Exchange, offers: Sequence[list[str]]) -> None:
        """Takes the rail that all of its ranks have, or makes one with them. Collective.

        Args:
            exchange: connects the ranks of the group.
            offers: what `offer` has returned on each rank of the group.

        Raises:
            PeerTimeout: ranks of the rail do not connect.
        """
        if not self.nodes:
            return
        idents = [offers[peer][0] for peer in self._ranks]
        if self._rail is not None and all(ident == self._rail.ident for ident in idents):
            return
        self._give_back()
        name, store = offers[self._ranks[0]][1], exchange.store(f"rail{self._ranks[0]}")
        try:
            self._rail = rail.make(self._key, self, self._group, self._ranks, self._node, name, store, self._timeout_s)
        except RuntimeError as error:
            raise self._lost(error) from error

    def gather(self, part: torch.Tensor, landing: Mapping[int, torch.Tensor]) -> UnderWay:
        """Begins to send `part` to all other nodes, and to receive a part of the same size from each.

        Args:
            part: a uint8 tensor.
            landing: for each other node, the uint8 tensor that receives its part.
        """
        opened = self._opened()
        if not opened.gathers:
            size = part.numel()
            return self.start(
                [(node, part, 0, size) for node in self.nodes],
                [(node, into, 0, size) for node, into in landing.items()],
            )
        everyones = part.new_empty(len(self._ranks) * part.numel())
        nbytes = len(self.nodes) * part.numel()
        self.bytes_received += nbytes
        works, captured = self._begin(opened, "", nbytes, lambda number: [opened.gather(everyones, part, number)])
        arrived = everyones.chunk(len(self._ranks))
        copies = [(arrived[node], into) for node, into in landing.items()]
        return UnderWay(works=[(None, work) for work in works], copies=copies, captured=captured)

    def start(
        self, sends: Iterable[Piece], receives: Iterable[Piece], what: str = "", label: str | None = None
    ) -> UnderWay:
        """Begins to send and receive. On GPUs the messages are ordered after the caller's stream.

        Args:
            sends: for each message the node that gets it, a contiguous uint8 tensor of one dimension, and where in it
                the message begins, and its bytes.
            receives: the same of each message that comes from a node.
            what: describes the messages in errors.
            label: lets messages meet by this text, in place of their size. A receiver then states the most bytes that
                may come, and `bytes_received` does not count them. Only with `takes_shorter`.
        """
        opened = self._opened()
        messages: list[Message] = []
        nbytes = 0
        named = 0 if label is None else zlib.crc32(label.encode(), self._named) >> 1
        for node, tensor, begin, size in sends:
            nbytes += size
            tag = named if label is not None else zlib.crc32(b"%d" % size, self._named) >> 1
            messages.append((node, tensor, begin, size, True, tag))
        for node, tensor, begin, size in receives:
            if label is None:
                self.bytes_received += size
            tag = named if label is not None else zlib.crc32(b"%d" % size, self._named) >> 1
            messages.append((node, tensor, begin, size, False, tag))
        if not messages:
            return UnderWay(works=[], what=what)
        works, captured = self._begin(opened, what, nbytes, functools.partial(opened.begin, messages))
        nodes = map(_node_of, messages) if len(works) == len(messages) else [None]  # one for all
        return UnderWay(works=list(zip(nodes, works, strict=True)), what=what, captured=captured)

    def _begin(
        self, opened: Rail | GroupRail, what: str, nbytes: int, begin: Callable[[int], list[Any]]
    ) -> tuple[list[Any], torch.cuda.Event | None]:
        """Calls `begin` with its number, which sends `nbytes` bytes. Returns its works and the event of a capture."""
        self.bytes_sent += nbytes
        progress, captured = opened.progress, None
        try:
            number = 0 if progress is None else progress.begin(self._owner, what)
            if self._range is None:
                works = begin(number)
            else:
                with self._range(self._step(f"send and receive, {nbytes} bytes", what)):
                    works = begin(number)
            if progress is not None and number == 0:
                captured = progress.follow(works[0])
                opened.held |= captured is not None
        except RuntimeError as error:
            node = error.node if isinstance(error, NotBegun) and not opened.together else None
            raise self._lost(error, node, what) from error
        return works, captured

    def wait(self, under_way: UnderWay) -> None:
        """Waits for the messages. On GPUs the caller's stream waits, on CPUs the host, with a deadline."""
        self._waiting = True  # before the look for an abort, which interrupts those that wait
        try:
            opened = self._opened()
            if self._range is None:
                self._wait_for_works(opened, under_way)
            else:
                with self._range(self._step("wait", under_way.what)):
                    self._wait_for_works(opened, under_way)
        finally:
            self._waiting = False
        for arrived, into in under_way.copies:
            into.copy_(arrived)

    def _wait_for_works(self, opened: Rail | GroupRail, under_way: UnderWay) -> None:
        for node, work in under_way.works:
            since = time.monotonic_ns()
            try:
                if opened.together:
                    work.wait()  # with a timeout the host would wait too
                else:
                    work.wait(timeout=datetime.timedelta(seconds=self._timeout_s))
            except RuntimeError as error:
                raise self._lost(error, node, under_way.what) from error
            if node is not None and self._device.type == "cpu":
                self.waited_ns[self._ranks[node]] += time.monotonic_ns() - since
        if under_way.captured is not None:
            under_way.captured.wait()

    @property
    def takes_shorter(self) -> bool:
        """Returns whether a message may be shorter than its receiver expects."""
        return self._rail is not None and self._rail.takes_shorter

    @property
    def captures(self) -> bool:
        """Returns whether a CUDA graph can capture messages of this rail."""
        return self._rail is not None and self._rail.captures

    def settle(self) -> None:
        """Orders the caller's stream after all messages that have begun, so that it may use their memory again.

        On CPUs this does nothing.
        """
        progress = None if self._rail is None else self._rail.progress
        if progress is not None:
            progress.settle()

    def record(self, *tensors: torch.Tensor | None) -> None:
        """Keeps the freed memory of `tensors` unused until all messages that have begun are over. GPUs only."""
        progress = None if self._rail is None else self._rail.progress
        if progress is not None:
            progress.record(tensors)

    def running(self) -> bool:
        """Returns whether messages of this communicator cross, or wait for a peer. False on CPUs."""
        return self._running() is not None

    def overdue(self) -> PeerTimeout | None:
        """Returns the error of messages that are overdue, None if there are none. None on CPUs."""
        running = self._running()
        # The deadlines of kernels begin later, with this rank's own sender: it waits for what crosses.
        if running is None or running[1] < self._timeout_s - min(0.1 * self._timeout_s, 0.25):
            return None
        return self._lost(RuntimeError("they are overdue"), None, running[0])

    def _running(self) -> tuple[str, float] | None:
        """Returns which messages of this communicator are crossing, and for how many seconds. Calls nothing of CUDA."""
        progress = None if self._rail is None else self._rail.progress
        running = None if progress is None else progress.running()
        return None if running is None or running[0] is not self._owner else running[1:]

    def close(self) -> None:
        """Gives the rail back. Not collective. Peers still receive what this rank has sent."""
        self._give_back()

    def abort(self) -> None:
        """Ends waits for a rank that is gone, also waits of another thread. No message begins afterwards."""
        self._aborted = True
        opened = self._rail
        if opened is None:
            return
        rail.drop(opened)
        if self._waiting or self.running():
            reason = f"communicator {self._name}, which shares a rail with this one, has failed"
            opened.interrupt(self.nodes[0], zlib.crc32(b"-1", self._named) >> 1, self, reason)

    def rail_ends(self, reason: str) -> None:
        self._failed(reason)

    @property
    def _key(self) -> rail.Key:
        job = dist.get_process_group_ranks(self._group)
        return tuple(job[rank] for rank in self._ranks), self._device, backends_of(self._group)[self._device.type]

    def _step(self, step: str, what: str) -> str:
        """Returns the name of a range."""
        return f"rail of communicator {self._name}: {step}{what and f' ({what})'}"

    def _opened(self) -> Rail | GroupRail:
        opened = self._rail
        if self._aborted or opened is None:
            raise self._lost(RuntimeError("the rail was aborted" if self._aborted else "the rail is closed"))
        return opened

    def _give_back(self) -> None:
        opened, self._rail = self._rail, None
        if opened is not None:
            rail.release(opened, self)

    def _lost(self, error: RuntimeError, node: int | None = None, what: str = "") -> PeerTimeout:
        """Returns the error of a work for `node`.

        The rank that it names is a guess, since a backend raises one kind of error for all failures.
        """
        if self._rail is not None:
            rail.drop(self._rail)
        others = [self._ranks[other] for other in ([node] if node is not None else self.nodes)]
        return PeerTimeout(
            f"rank {self._rank} waited at most {self._timeout_s:g} s for rank{'s' if len(others) > 1 else ''} "
            f"{', '.join(map(str, others))} at step rail{what and f' ({what})'}: {error}",
            others[0] if len(others) == 1 else None,
            "rail",
        )
