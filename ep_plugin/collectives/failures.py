"""How a failure on one node reaches the other nodes of a group. Inside a node the boards carry it.

- A key of the group's store. The first rank that fails writes its rank and the reason. One thread per process polls the
  keys of the groups that are open, and passes on what it finds: within half a second a failure is known everywhere.
- A status word, sent behind the last rows of each sum. It is a copy of the sender's fault word, taken on the stream
  after the sums that it vouches for, so no host waits: 0 says that the rows are good.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from ep_plugin import _C
from ep_plugin.runtime.board import Boards

STATUS_BYTES = 8
_POLL_S = 0.25
_POST_S = 1.0  # the longest that a failing rank waits for the store, which may be gone
_KEY = "failure"


class GroupFailure:
    """The first failure of one communicator that spans nodes. Only the polling thread talks to the store, which may be
    gone, so nobody else waits for it without a bound."""

    def __init__(self, store: Any, rank: int, found: Callable[[int, str], None]) -> None:
        """store: for this communicator alone. rank: this one, in the group. found: called with the failed rank and its
        reason, by the polling thread, again at each poll until `close`."""
        self._store = store.clone()  # a connection of its own: a poll delays no other use of the store
        self._rank, self._found = rank, found
        self._reason: str | None = None
        self._posted = threading.Event()
        self.first: tuple[int, str] | None = None
        """The other rank that failed first, and its reason, as far as this process knows."""
        self._open = True
        self._guard = threading.RLock()  # a poll may drop the last reference to what `close` belongs to
        _start_polling(self)

    def post(self, reason: str) -> None:
        """Publishes this rank's failure, unless another was first."""
        if self._reason is None:
            self._reason = reason
            _wake.set()
            self._posted.wait(_POST_S)

    def wait(self, timeout_s: float) -> None:
        """Returns when the failure of another rank is known, or after `timeout_s` seconds."""
        until = time.monotonic() + timeout_s
        while self.first is None and time.monotonic() < until:
            _wake.set()
            time.sleep(0.02)

    def close(self) -> None:
        """From here on `found` is not called."""
        with self._guard:
            self._open = False

    def poll(self) -> bool:
        """Publishes what is to be published, and passes on what another rank has published. False once closed."""
        with contextlib.suppress(RuntimeError):  # the store is gone, and the group with it
            if self._reason is not None and not self._posted.is_set():
                self._store.compare_set(_KEY, "", json.dumps([self._rank, self._reason]))
            if self.first is None and self._store.check([_KEY]):
                rank, reason = json.loads(self._store.get(_KEY))
                self.first = None if rank == self._rank else (rank, reason)
        if self._reason is not None:
            self._posted.set()
        with self._guard:
            if self._open and self.first is not None:
                self._found(*self.first)
            return self._open


_polled: list[GroupFailure] = []
_lock = threading.Lock()
_wake = threading.Event()
_thread: threading.Thread | None = None


def _start_polling(failure: GroupFailure) -> None:
    global _thread
    with _lock:
        _polled.append(failure)
        if _thread is None:
            _thread = threading.Thread(target=_poll, name="ep_plugin failures", daemon=True)
            _thread.start()


def _poll() -> None:
    while True:
        _wake.wait(_POLL_S)
        _wake.clear()
        with _lock:
            polled = list(_polled)
        closed = [failure for failure in polled if not failure.poll()]
        with _lock:
            _polled[:] = [failure for failure in _polled if failure not in closed]


class RailStatus:
    """The status words of one communicator: the one that it sends and those that it has received, by node."""

    def __init__(self, state: torch.Tensor, num_nodes: int) -> None:
        """state: the communicator's device state, uint8, which holds its fault word."""
        self.bytes_sent = 0
        self._fault = state[_C.fault_offset : _C.fault_offset + STATUS_BYTES]
        self._received = torch.zeros(num_nodes, STATUS_BYTES, dtype=torch.uint8, device=state.device)
        self._on_host = torch.zeros(num_nodes, STATUS_BYTES, dtype=torch.uint8, pin_memory=state.is_cuda)
        self._words = (ctypes.c_uint64 * num_nodes).from_address(self._on_host.data_ptr())

    def attach(self, status: torch.Tensor) -> None:
        """Writes the word to be sent: uint8 ``[STATUS_BYTES]``."""
        status.copy_(self._fault)
        self.bytes_sent += STATUS_BYTES

    def receive(self, node: int, status: torch.Tensor) -> None:
        """Takes in what came from `node`. After a bad word kernels leave at once, and what this rank sends is bad."""
        self._received[node].bitwise_or_(status)
        self._fault.bitwise_or_(status)
        self._on_host[node].copy_(self._received[node], non_blocking=True)

    def bad_node(self) -> int | None:
        """The first node that has sent a bad word, as far as the device has come."""
        return next((node for node, word in enumerate(self._words) if word), None)


class GroupBoards(Boards):
    """The boards of a node whose group spans nodes: an abort reaches the other nodes, too."""

    failure: GroupFailure
    status: RailStatus

    def quiet(self) -> bool:
        return super().quiet() and self.status.bad_node() is None

    def tell_abort(self, reason: str) -> None:
        super().tell_abort(reason)
        self.failure.post(reason)

    def pass_on(self, rank: int, reason: str) -> None:
        """Marks the boards of the node for `rank` of another one, which is kept behind the ranks of the node."""
        with self._guard:
            for address in () if self._closed else self._block.ptrs:
                _C.abort_board(address, self.size + rank, reason)
