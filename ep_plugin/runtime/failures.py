"""How a failure on one node reaches the other nodes of a group. Inside a node the boards carry it.

- Keys of the group's store. The first rank that fails writes its rank and the reason there. One thread per process
  polls the keys of the open groups and passes a failure on, so that within half a second every rank knows of it. A
  rank that has waited in vain first writes for which rank, so that all can find the rank at fault.
- A status word, sent behind the last rows of each sum. It is a copy of the sender's fault word, taken on the stream
  after the sums that it describes, so no host waits. 0 means that the rows are good.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ep_plugin import _C
from ep_plugin.runtime.board import Boards
from ep_plugin.runtime.faults import culprit
from ep_plugin.runtime.poller import Poller

STATUS_BYTES = 8
_POST_S = 1.0  # the longest that a failing rank waits for the store, which may be gone
_KEY = "failure"
_READS = 64  # ranks whose waits one poll looks for
_poller = Poller("ep_plugin failures", pause_s=0.01, idle_s=0.25)


class GroupBoards(Boards):
    """The boards of one node of a group that spans nodes, and the communicator's failures on other nodes.

    Only the polling thread uses the store. The store may be gone, and no other thread may wait for it without a bound.
    """

    def __init__(
        self,
        boards: Sequence[int],
        index: int,
        num_totals: int,
        state: torch.Tensor,
        num_nodes: int,
        store: Any,
        rank: int,
        group_size: int,
        found: Callable[[int, str], None],
    ) -> None:
        """
        Args:
            boards, index, num_totals: as for Boards.
            state: the communicator's device state, uint8. It contains the fault word.
            store: Exchange.polled_store, for keys of this communicator alone.
            rank: this rank, of `group_size` ranks in the group.
            found: after another rank has failed, the polling thread calls it at each poll until `close`, with that rank
                and its reason.
        """
        self._store = store
        self._rank, self._group_size, self._found = rank, group_size, found
        self._waited_for: int | None = None
        self._waits: dict[int, int] = {}
        """By rank, the rank that it has waited for in vain. Replaced as a whole, since another thread reads it."""
        self._unknown = deque(other for other in range(group_size) if other != rank)
        """The ranks that are not in `_waits`. The next poll begins with the first one."""
        self._reason: str | None = None
        self._posted = threading.Event()
        self._post_until = 0.0
        self._begun = self._done = 0  # polls: how many have begun, and the number of the latest one that is over
        self.first: tuple[int, str] | None = None
        """The other rank that failed first, and its reason, as far as this process knows."""
        self._polling = threading.RLock()  # a poll may drop the last reference to the object that calls `close`
        self.status_bytes_sent = 0
        self._fault = state[_C.fault_offset : _C.fault_offset + STATUS_BYTES]
        self._received = torch.zeros(num_nodes, STATUS_BYTES, dtype=torch.uint8, device=state.device)
        self._on_host = torch.zeros(num_nodes, STATUS_BYTES, dtype=torch.uint8, device="cpu", pin_memory=state.is_cuda)
        self._words = (ctypes.c_uint64 * num_nodes).from_address(self._on_host.data_ptr())
        super().__init__(boards, index, num_totals, state.device)
        _poller.add(self)

    def quiet(self) -> bool:
        # In the path of every operation: a loop would grow with the nodes.
        with self._guard:
            return self._closed or (_C.board_quiet(self.address) and not bytes(self._words).strip(b"\0"))

    def tell_abort(self, reason: str) -> None:
        super().tell_abort(reason)
        self.post(reason)

    def post(self, reason: str) -> None:
        """Publishes this rank's failure to the other nodes, unless another rank was first."""
        if self._reason is None:
            self._post_until = time.monotonic() + _POST_S
            self._reason = reason
            _poller.wake()
            self._wait_until_posted()

    def _wait_until_posted(self) -> None:
        """Waits for the store, until `_POST_S` after `post` at the latest."""
        if not _poller.is_current():
            self._posted.wait(max(0.0, self._post_until - time.monotonic()))

    def wait_for_first(self, timeout_s: float) -> tuple[int, str] | None:
        """Returns `first` when it is known, or after `timeout_s` seconds."""
        until = time.monotonic() + timeout_s
        while self.first is None and time.monotonic() < until:
            _poller.wake()
            time.sleep(0.02)
        return self.first

    def culprit(self, waited_for: int | None) -> int | None:
        """Returns the rank at fault after this rank has waited in vain for `waited_for`. None: not known.

        It reads the store at least once, and returns early when `first` is known.
        """
        self._waited_for = -1 if waited_for is None else waited_for
        return culprit(self._rank, self._group_size, waited_for, self._look, lambda: self.first is not None)

    def _look(self) -> dict[int, int]:
        """Returns `_waits` after a poll that begins now.

        A rank that fails posts its reason before it closes its connections. So `first` has the reason after such a
        poll, whatever this rank saw of the connections.
        """
        begun, until = self._begun, time.monotonic() + _POST_S
        while self._done <= begun and time.monotonic() < until:
            _poller.wake()
            time.sleep(0.005)
        return self._waits

    def poll(self) -> bool:
        """Publishes this rank's failure and passes on another rank's."""
        self._begun += 1
        with contextlib.suppress(RuntimeError):  # the store is gone, and the group with it
            if self._waited_for is not None:
                self._store.set(f"{self._rank} waits", str(self._waited_for))
                self._read_waits()
            if self.first is None:
                self._exchange_first()
        if self._reason is not None:
            self._posted.set()
        self._done = self._begun
        with self._polling:
            if not self._closed and self.first is not None:
                self._found(*self.first)
        return False

    def _read_waits(self) -> None:
        """Looks for the waits of some of the ranks that are not known to wait: a poll's cost has a bound."""
        for _ in range(min(_READS, len(self._unknown))):
            rank = self._unknown.popleft()
            waited_for = _wait_in(self._standing(f"{rank} waits"), self._group_size)
            if waited_for is None:
                self._unknown.append(rank)
            else:
                self._waits = {**self._waits, rank: waited_for}

    def _exchange_first(self) -> None:
        """Publishes this rank's failure if no other is published, and learns another rank's."""
        text = self._standing(_KEY)
        found = _failure_in(text, self._group_size)
        if found is None and self._reason is not None and not self._posted.is_set():
            mine = json.dumps([self._rank, self._reason])
            if text is None:
                found = _failure_in(self._store.compare_set(_KEY, "", mine), self._group_size)
            else:
                self._store.set(_KEY, mine)
        if found is not None and found[0] != self._rank:
            self.first = found

    def _standing(self, key: str) -> bytes | None:
        """Returns the value of a key of the store. None: there is none."""
        return self._store.get(key) if self._store.check([key]) else None

    def mark(self, rank: int, reason: str) -> None:
        """Marks the boards of this node with the failure of `rank`, which is on another node.

        The boards name it by an index behind those of the node's ranks.
        """
        self._mark(self.size + rank, reason)

    def attach_status(self, status: torch.Tensor) -> None:
        """Writes the status word of this rank to `status`, uint8 ``[STATUS_BYTES]``."""
        status.copy_(self._fault)
        self.status_bytes_sent += STATUS_BYTES

    def receive_status(self, node: int, status: torch.Tensor) -> None:
        """Adds the word that `node` has sent to this rank's own. If it is bad, later kernels exit."""
        self._received[node].bitwise_or_(status)
        self._fault.bitwise_or_(status)
        self._on_host[node].copy_(self._received[node], non_blocking=True)

    def bad_node(self) -> int | None:
        """Returns the first node that has sent a bad word, as far as the device has come. None: there is none."""
        return next((node for node, word in enumerate(self._words) if word), None)

    def close(self) -> None:
        """Ends all calls of `found` and all use of the boards."""
        if self._reason is not None:
            self._wait_until_posted()  # another thread may be publishing it
        _poller.discard(self)
        with self._polling:
            super().close()


def _wait_in(text: bytes | None, group_size: int) -> int | None:
    """Reads the rank that another one has waited for (-1: not known) from the store's text. None: it is not one."""
    try:
        rank = int(text or b"")
    except ValueError:
        return None
    return rank if -1 <= rank < group_size else None


def _failure_in(text: bytes | None, group_size: int) -> tuple[int, str] | None:
    """Reads the rank that has failed and its reason from the store's text. None: they are not there."""
    try:
        match json.loads(text or b"null"):
            case [int(rank), str(reason)] if not isinstance(rank, bool) and 0 <= rank < group_size:
                return rank, reason
    except (ValueError, RecursionError):
        pass
    return None
