"""Messages inside a node of GPUs. A kernel serves each end of a message, on a stream for each lane and direction.

The host waits only in a wait with a limit and in `close`.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from ep_plugin import _C
from ep_plugin.runtime.board import Boards
from ep_plugin.runtime.streams import LaneMark, LaneStreams

_KEPT = 16  # with fewer receives, nobody looks for those that are over
_PAUSE_S = 0.0005
_DONE, _FAILED, _OVERDUE = 0, 1, 3  # as _C.CpuMessages.wait returns them


class Rank(Protocol):
    """What messages need to know of the engine. state: the device memory of its kernels, uint8."""

    boards: Boards
    comm: _C.Comm
    kernels: Any
    state: torch.Tensor


class Ticket:
    """One message.

    Attributes:
        mark: the place of its kernel on the stream of its lane.
        joined: whether a stream of the caller's waits for it. `close` then also waits for it.
        failed: whether `close` has given it up.
        done: whether it has arrived. A later failure does not change that.
    """

    def __init__(self, mark: LaneMark) -> None:
        self.mark = mark
        self.joined = self.failed = self.done = False


class CudaMessages:
    """The messages of one GPU rank, with the methods of `_C.CpuMessages`."""

    def __init__(self, rank: Rank, streams: LaneStreams) -> None:
        self._rank: Rank = weakref.proxy(rank)
        self._streams = streams
        self._last_sends: dict[Any, Ticket] = {}  # by lane
        self._receives: list[Ticket] = []
        self._sweep_at = _KEPT
        self._set_fault(0)  # makes the stream and loads the kernel, for which the driver may wait for kernels that spin

    def post(self, message: _C.Message) -> Ticket:
        """Enqueues a message, after what the caller's stream has now."""
        kernels, lane = self._rank.kernels, (message.peer, message.channel, message.receives)
        stream = self._streams.begin(lane, _C.message_sms(message))
        args = _C.DeviceMessageArgs(comm=self._rank.comm, message=message, stream=stream)
        (kernels.receive_message if message.receives else kernels.send_message)(args)
        ticket = Ticket(self._streams.end(lane))
        if not message.receives:
            self._last_sends[lane] = ticket
            return ticket
        if len(self._receives) >= self._sweep_at and not self._streams.capturing():
            self._receives = [one for one in self._receives if not self.is_over(one)]
            self._sweep_at = max(_KEPT, 2 * len(self._receives))
        self._receives.append(ticket)
        return ticket

    def is_over(self, ticket: Ticket) -> bool:
        return ticket.mark.is_over()

    def is_done(self, ticket: Ticket) -> bool:
        if not ticket.done:
            ticket.done = self.is_over(ticket) and not ticket.failed and self._rank.boards.quiet()
        return ticket.done

    def wait(self, tickets: Sequence[Ticket], limit_ns: int, timeout_ns: int) -> int:
        """Orders the caller's stream after the messages. With a limit the host waits, too, at most so long."""
        deadline = time.monotonic_ns() + limit_ns
        while limit_ns and self._rank.boards.quiet() and not all(self.is_over(ticket) for ticket in tickets):
            if time.monotonic_ns() > deadline:
                return _OVERDUE
            time.sleep(_PAUSE_S)
        for ticket in tickets:
            ticket.mark.join()
            ticket.joined = True
        has_failed = not self._rank.boards.quiet() or any(ticket.failed for ticket in tickets)
        return _FAILED if has_failed else _DONE

    def wait_for_sends(self, timeout_ns: int) -> int:
        """Blocks the host until all sends are over, and all receives that a stream waits for. Other receives fail."""
        for ticket in [*self._last_sends.values(), *(one for one in self._receives if one.joined)]:
            ticket.mark.block()
        still_open = [ticket for ticket in self._receives if not self.is_over(ticket)]
        for ticket in still_open:
            ticket.failed = True
        if still_open:
            self._set_fault(1)  # kernels that see it give up
        return _DONE

    def close(self) -> None:
        self._receives.clear()
        self._last_sends.clear()
        self._streams.close()

    def _set_fault(self, value: int) -> None:
        with self._streams.aside():
            self._rank.state[_C.fault_offset : _C.fault_offset + 8].view(torch.int64).fill_(value)
