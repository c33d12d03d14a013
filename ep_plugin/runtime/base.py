"""The base of every communicator: one lock per device, the first error, its way to peers, and close.

A subclass brings its peer memory, kernels and operations, and the meaning of a fault on its board.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import sys
import threading
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch

from ep_plugin import _C
from ep_plugin.errors import (
    CaptureRefused,
    CommunicatorClosed,
    EpPluginError,
    NotSupported,
    PeerAborted,
    PeerTimeout,
    reason_of,
    text_of,
    type_and_text,
)
from ep_plugin.log import log
from ep_plugin.ranges import NOTHING, opener
from ep_plugin.runtime import uncaught
from ep_plugin.runtime.board import Boards
from ep_plugin.runtime.calls import Calls, failed
from ep_plugin.runtime.faults import aborted_error, seen_on_boards
from ep_plugin.runtime.streams import Streams, on_device
from ep_plugin.transport.exchange import Exchange
from ep_plugin.transport.peer import undo_on_error

T = TypeVar("T")
_enqueue_locks: dict[torch.device, threading.RLock] = {}
running: dict[torch.device, BaseEngine] = {}  # whose operation runs on a device, under the device's lock
os.register_at_fork(after_in_child=_enqueue_locks.clear)  # threads that are not in the child may hold them
os.register_at_fork(after_in_child=running.clear)


class BaseEngine(ABC):
    """The state of one communicator. A subclass's `_construct` sets `boards` and `streams` and fills `_resources`."""

    boards: Boards
    streams: Streams
    closed = True  # until it is constructed
    in_order = True
    """Whether all ranks call the same operations in the same order."""
    last_call: _C.Call

    def __init__(self, exchange: Exchange, device: torch.device, *given: Any) -> None:
        """given: the arguments of `_construct`, which are not kept."""
        self.device = device
        self.exchange = exchange
        self.rank, self.size, self.timeout_s = exchange.rank, exchange.size, exchange.timeout_s
        self.lock = _enqueue_locks.setdefault(device, threading.RLock())
        self.used_by: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        self._error: Exception | None = None
        self._captured = self._to_close = self._is_copy = False
        self.calls = Calls(exchange.job_ranks, exchange.rank, self.in_order, self.name)
        self.call_log = _C.CallLog(self.calls, self.calls.epochs)
        # What is made now may be written outside of the caller's inference mode.
        with torch.inference_mode(False), undo_on_error(self._not_constructed) as made:
            self._resources = made
            self._resources.callback(exchange.close)
            self._range = opener()
            call = self.call_log.begin("construction", "", 0, None)
            self._construct(*given)
            call.end()
        self._announced_name = self.name  # does not change any more
        self._identify()
        self.closed = False
        uncaught.watch(self)

    @property
    def name(self) -> str:
        return f"communicator {self.exchange.name}"

    def _identify(self) -> None:
        """Gives the kept calls their name. It holds once the ranks have agreed on their exchange."""
        self.calls.name, self.calls.ident = self.name, self.exchange.ident

    def _not_constructed(self, error: BaseException) -> None:
        try:
            self.exchange.abort(reason_of(error))
        finally:
            self._identify()
            if not isinstance(error, NotSupported):  # another exchange may serve the group
                failed(self.calls, error, dict)

    @abstractmethod
    def _construct(self, *given: Any) -> None:
        """Makes the communicator's parts, collectively. `_resources` closes them."""

    @abstractmethod
    def found_error(self) -> EpPluginError | ValueError | None:
        """Returns the exception for the fault or abort on this communicator's board. None: there is none."""

    @abstractmethod
    def described(self, field: int, value: int) -> tuple[str, str]:
        """Returns the name of a field on which ranks must agree, and `value` as text."""

    def group_rank(self, index: int) -> int:
        """Returns the rank within the group that has the board of this index."""
        if not 0 <= index < self.size:
            raise IndexError(f"expected an index below {self.size}, got {index}")
        return index

    def run(
        self,
        what: str,
        operation: Callable[..., T],
        *args: Any,
        nbytes: int = 0,
        part: str = "",
        continues: _C.Call | None = None,
    ) -> T:
        """Returns operation(self, *args). If the operation fails, peers abort.

        After a fault or a close it raises as `check` does, and calls nothing. nbytes, part, continues: see
        `_C.CallLog.begin`.
        """
        with self.lock, on_device(self.device):
            if self.device in running:  # here, since a call would cost each operation
                self.check_not_running(what)
            if self._error is None and not self.closed:
                self.last_call = self.call_log.begin(what, part, nbytes, continues)
            self.check()
            call = self.last_call
            try:
                running[self.device] = self  # from now on a handler of a signal cannot close it
                self.used_by_this_thread()
                _C.announce(f"in {what} of {self._announced_name}")  # for messages of the peers of all communicators
                self._captured |= bool(self.streams.capturing())
                if self._range is None:
                    result = operation(self, *args)
                else:
                    with self.ranged(what, part, nbytes):
                        result = operation(self, *args)
                call.end()
                return result
            except BaseException as error:
                if isinstance(error, CaptureRefused):  # nothing is enqueued
                    call.end()
                else:
                    self.operation_failed(error, what)
                raise
            finally:
                del running[self.device]
                if self._to_close:
                    self.close()

    def check_turn(self, what: str) -> None:
        """Raises an error if an operation cannot run now. Call it with the lock."""
        self.check_not_running(what)
        self.check()

    def check_not_running(self, what: str) -> None:
        """Raises EpPluginError in the handler of a signal that came during an operation. Call it with the lock."""
        if self.device in running:  # the lock lets its thread in again
            raise EpPluginError(
                f"{self.name}: expected no operation during one of {running[self.device].name}, got {what} in the "
                "handler of a signal"
            )

    def used_by_this_thread(self) -> None:
        """Remembers the calling thread: if an exception ends it, peers abort."""
        self.used_by.add(threading.current_thread())

    def operation_failed(self, error: BaseException, what: str) -> None:
        """Makes peers and later calls raise after an operation whose kernels may run has raised `error`."""
        with contextlib.suppress(Exception):
            self.settle()  # kernels still use memory that the caller would give back
        self._fail(error, what)

    @property
    def has_ranges(self) -> bool:
        """Whether profilers see operations as ranges."""
        return self._range is not None

    def ranged(self, what: str, part: str, nbytes: int) -> contextlib.AbstractContextManager[Any]:
        """Returns a range around an operation; nothing if profilers see none."""
        if self._range is None:
            return NOTHING
        return self._range(f"{what}{part and f' ({part})'} of {self._announced_name}, {nbytes} bytes")

    def settle(self) -> None:
        """Orders the caller's stream after all that is enqueued."""
        self.streams.join()

    def record(self, *tensors: torch.Tensor | None) -> None:
        """Keeps the freed memory of `tensors` unused until all that is enqueued when it is freed is over."""
        self.streams.record(*tensors)

    def check(self) -> None:
        """Raises the first error, if there is one, and CommunicatorClosed after close."""
        if self._error is None and not self.closed and self.boards.quiet():
            return
        if self.closed:
            raise CommunicatorClosed(f"{self.name}: expected an open communicator, got a closed one")
        self.check_enqueued()

    def check_enqueued(self) -> None:
        """Raises the first error of the enqueued operations. Works after close, which has waited for all of them."""
        if self._error is None:
            if self.boards.quiet():
                return
            error = self.found_error()
            if error is None:  # closed meanwhile
                return
            self._remember(error)
        assert self._error is not None
        raise copy.copy(self._error)  # a raised one would keep its callers' tensors alive

    def abort(self, reason: str) -> None:
        """Ends every wait in this communicator, here and on the peers, with PeerAborted(this rank, reason).

        reason: any text, which is never read as a reason of ours. It arrives as `text_of` returns it, but a
            board holds only its first 383 bytes.
        """
        try:
            self.check()
        except (EpPluginError, ValueError):
            return  # peers know of the fault, or find out by their own deadline
        reason = text_of(reason)
        self._error = aborted_error(self, self.rank, reason)
        self.boards.tell_abort(reason)
        self._dump(self._error)

    def disown(self) -> None:
        """Makes every call raise in a forked child, which shares the rank's memory and would exchange in its place."""
        self.lock, self._is_copy = threading.RLock(), True  # a thread of the parent may hold the old one
        self._error = EpPluginError(
            f"{self.name}: expected to be used by the process that made it, got its forked child {os.getpid()}"
        )

    def close(self) -> None:
        """Gives everything back. It works whatever state this rank, the device or the peers are in."""
        with self.lock:
            if self.closed or self._is_copy:
                return
            if running.get(self.device) is self:  # a signal handler's call: the operation below it uses the memory
                self._to_close = True
                return self.abort("closed by a signal handler during an operation")
            self.closed = True
            try:
                error = self._drained()
                if self._error is None and error is not None:
                    self._error = error
                    self._dump(error)
                    log().warning("%s: closed with an error that no call has raised: %s", self.name, error)
            finally:
                self._resources.close()

    def _drained(self) -> Exception | None:
        """Waits for the enqueued kernels, which all end by themselves, and returns the first error."""
        try:
            self.streams.drain()
            return self._error or self.found_error()
        except Exception as error:  # a broken device has nothing to drain, and must not keep memory open
            return EpPluginError(f"{self.name}: closed before what was enqueued was over: {text_of(error)}")

    def __del__(self) -> None:
        if self.closed or self._is_copy or sys.is_finalizing():  # the end of the process frees all memory
            return
        if self.device.type == "cuda":  # close waits for the device, which garbage collection must not
            self.boards.unlist()
            warnings.warn(f"{self.name} was dropped without close(); its memory is kept", ResourceWarning, stacklevel=1)
            return
        with contextlib.suppress(Exception):
            self.close()

    def _fail(self, error: BaseException, what: str) -> None:
        """Makes peers and later calls raise after an operation has raised `error`."""
        if self.closed or self._error is not None or isinstance(error, CaptureRefused):
            return
        if isinstance(error, EpPluginError):
            self._remember(error)
            return
        reason = f"{type(error).__name__} in {what}: {text_of(error)}".removesuffix(": ")
        self._error = EpPluginError(f"{self.name}: failed earlier on this rank: {reason}")
        self.boards.tell_abort(reason)
        self._dump(error)

    def _remember(self, error: EpPluginError | ValueError) -> None:
        """Keeps the first error."""
        self._error = copy.copy(error)
        self._publish(error)
        self._dump(error)

    def _publish(self, error: EpPluginError | ValueError) -> None:
        """Makes peers abort if they cannot see the error for themselves."""
        if not isinstance(error, (PeerTimeout, PeerAborted)):
            self.boards.tell_abort(reason_of(error))

    def _dump(self, error: BaseException) -> None:
        """Writes the calls of this process. It comes last, since peers do not wait for it."""
        failed(self.calls, error, functools.partial(seen_on_boards, self))


class _Closable(Protocol):
    def abort(self, reason: str) -> None: ...
    def close(self) -> None: ...


def leave(comm: _Closable, error: BaseException | None) -> None:
    """Closes `comm` at the end of a ``with`` block, which `error` has ended. After a failure peers abort.

    The block's error is raised. An error of abort or close becomes a note on it.
    """
    try:
        try:
            if uncaught.is_failure(error):
                comm.abort(type_and_text(error))
        finally:
            comm.close()
    except Exception as second:
        if not uncaught.is_failure(error):
            raise
        error.add_note(f"closing failed, too: {type_and_text(second)}")
