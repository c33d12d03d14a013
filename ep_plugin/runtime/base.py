"""What every communicator is made of: one lock per device, a first error that stays, peers that are told, a close.

A subclass brings its peer memory, kernels and operations, and what a fault on its board means.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import multiprocessing.util
import os
import sys
import threading
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from ep_plugin import _C
from ep_plugin.errors import CaptureRefused, CommunicatorClosed, EpPluginError, PeerAborted, PeerTimeout
from ep_plugin.runtime.board import Boards
from ep_plugin.runtime.faults import aborted_error
from ep_plugin.transport.exchange import Exchange
from ep_plugin.transport.rails import serves_gpus

_NOTHING_TO_DO = contextlib.nullcontext()

T = TypeVar("T")
_enqueue_locks: dict[torch.device, threading.RLock] = {}
_live: tuple[weakref.ref[BaseEngine], ...] = ()  # replaced as a whole, under the lock; may be read without it
_live_lock = threading.Lock()


class Lanes(Protocol):
    """Where a communicator's kernels run, as far as its life and death need to know."""

    def join(self) -> None:
        """The caller's stream goes on after what has been enqueued."""

    def drain(self) -> None:
        """The host waits for what has been enqueued."""

    def capturing(self) -> int:
        """Whether the caller's stream is recording a CUDA graph; 0 where it is not."""


class BaseEngine(ABC):
    """What one communicator owns. A subclass's `_construct` sets `boards` and `lanes`, and fills `_resources`."""

    boards: Boards
    lanes: Lanes
    closed = True  # nothing to give back so far

    def __init__(self, exchange: Exchange, device: torch.device, *given: Any) -> None:
        """`given` goes on to `_construct`, and is not kept."""
        self.device = device
        self.exchange = exchange
        self.rank, self.size, self.timeout_s = exchange.rank, exchange.size, exchange.timeout_s
        self.lock = _enqueue_locks.setdefault(device, threading.RLock())
        self.used_by: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        self._owner = os.getpid()
        self._error: Exception | None = None
        self._captured = False
        self._running = False
        self._to_close = False
        self._resources = contextlib.ExitStack()
        self._resources.callback(exchange.close)
        try:
            with torch.inference_mode(False):  # what is made now may be written outside of the caller's mode
                self._construct(*given)
        except BaseException as error:
            self._give_back_after(error)
            raise
        self.closed = False
        _add_to_live(self)
        _abort_on_uncaught_exceptions()

    @property
    def name(self) -> str:
        return f"communicator {self.exchange.name}"

    def _give_back_after(self, error: BaseException) -> None:
        """Aborts peers and closes what has been made. A step that fails is noted on `error`, and the next one runs."""
        for step in (functools.partial(self.exchange.abort, f"{type(error).__name__}: {error}"), self._resources.close):
            try:
                step()
            except Exception as second:
                error.add_note(f"{self.name}: giving back failed, too: {type(second).__name__}: {second}")

    @abstractmethod
    def _construct(self, *given: Any) -> None:
        """Collective: makes what the communicator owns. What it puts on `_resources` is closed at the end."""

    @abstractmethod
    def found_error(self) -> EpPluginError | ValueError | None:
        """The exception for what this communicator's board shows, or None when it is well."""

    @abstractmethod
    def described(self, field: int, value: int) -> tuple[str, str]:
        """The name of a word that ranks must say alike, and `value` as a reader knows it."""

    def group_rank(self, index: int) -> int:
        """The rank within the group of whoever has the board of this index."""
        if not 0 <= index < self.size:
            raise IndexError(f"expected an index below {self.size}, got {index}")
        return index

    def run(self, what: str, operation: Callable[..., T], *args: Any) -> T:
        """operation(self, *args): refused after a fault or a close, told to peers when it fails here."""
        with self.lock, on_device(self.device):
            self.check()
            self.used_by.add(threading.current_thread())
            _C.announce(f"in {what} of {self.name}")  # to the peers of all communicators, for their messages
            self._captured |= bool(self.lanes.capturing())
            try:
                self._running = True
                return operation(self, *args)
            except BaseException as error:
                if not isinstance(error, CaptureRefused):  # which comes before anything is enqueued
                    with contextlib.suppress(Exception):
                        self.lanes.join()  # memory that kernels still use must not be given away meanwhile
                self._fail(error, what)
                raise
            finally:
                self._running = False
                if self._to_close:
                    self.close()

    def check(self) -> None:
        """Raises the communicator's first error, if there is one; CommunicatorClosed after close; EpPluginError in a
        forked child, which shares the rank's memory and would exchange in its place."""
        if os.getpid() != self._owner:
            raise EpPluginError(
                f"{self.name}: expected to be used by the process that made it, {self._owner}, got a forked child of "
                f"it, {os.getpid()}"
            )
        if self._error is None and not self.closed and self.boards.quiet():
            return
        if self.closed:
            raise CommunicatorClosed(f"{self.name}: expected an open communicator, got a closed one")
        self.check_enqueued()

    def check_enqueued(self) -> None:
        """Raises the first error of what was enqueued, also after close, which has waited for the end of all of it."""
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
        """Ends every wait in this communicator, here and on the peers, with PeerAborted(this rank, reason)."""
        if os.getpid() != self._owner:  # a forked child is not the rank
            return
        with contextlib.suppress(EpPluginError, ValueError):
            self.check()  # after a fault the peers know, or find out by their own deadline
            self._error = aborted_error(self, self.rank, reason)
            self.boards.tell_abort(reason)

    def close(self) -> None:
        """Gives everything back; works whatever state this rank, the device or the peers are in."""
        with self.lock:
            if self.closed:
                return
            if self._running:  # the caller is a signal's handler: the memory is in use until the operation has left
                self._to_close = True
                return self.abort("closed by a signal handler during an operation")
            self.closed = True
            try:
                error = self._drained()
                self._error = self._error or error
            finally:
                self._resources.close()

    def _drained(self) -> Exception | None:
        """What went wrong with what was enqueued, now that all of it is over: every kernel ends by itself."""
        try:
            self.lanes.drain()
            return self._error or self.found_error()
        except Exception as error:  # a broken device has nothing to drain, and must not keep anything open
            return EpPluginError(f"{self.name}: closed before what was enqueued was over: {error}")

    def __del__(self) -> None:
        if self.closed or sys.is_finalizing():  # the end of the process gives everything back
            return
        if self.device.type == "cuda":  # giving back waits for the device: not from wherever garbage is collected
            self.boards.unlist()
            warnings.warn(f"{self.name} was dropped without close(); its memory is kept", ResourceWarning, stacklevel=1)
            return
        with contextlib.suppress(Exception):
            self.close()

    def _fail(self, error: BaseException, what: str) -> None:
        """An operation ends with `error` here: peers must not wait for the rest of it, nor later calls go on."""
        if self.closed or self._error is not None or isinstance(error, CaptureRefused):
            return
        if isinstance(error, EpPluginError):
            self._remember(error)
            return
        reason = f"{type(error).__name__} in {what}: {error}".removesuffix(": ")
        self._error = EpPluginError(f"{self.name}: failed earlier on this rank: {reason}")
        self.boards.tell_abort(reason)

    def _remember(self, error: EpPluginError | ValueError) -> None:
        """The first error stays. Peers are told of one that they cannot see for themselves."""
        self._error = copy.copy(error)
        if not isinstance(error, (PeerTimeout, PeerAborted)):
            self.boards.tell_abort(str(error))


def _add_to_live(engine: BaseEngine) -> None:
    global _live
    with _live_lock:
        _live = (*(ref for ref in _live if ref() is not None), weakref.ref(engine))


def _live_engines() -> list[BaseEngine]:
    return [engine for ref in _live if (engine := ref()) is not None and not engine.closed]


class _Closable(Protocol):
    def abort(self, reason: str) -> None: ...
    def close(self) -> None: ...


def leave(comm: _Closable, error: BaseException | None) -> None:
    """The end of a ``with`` block by `error`: peers are told of a failure, which the end of a generator or a script's
    ``sys.exit(0)`` is not."""
    clean = isinstance(error, GeneratorExit) or (isinstance(error, SystemExit) and error.code in (None, 0))
    if error is not None and not clean:
        comm.abort(f"{type(error).__name__}: {error}")
    comm.close()


def abort_all(reason: str) -> None:
    """Tells the peers of every open communicator of this process that this rank has failed."""
    for engine in _live_engines():
        engine.abort(reason)


@functools.cache
def _abort_on_uncaught_exceptions() -> None:
    """Peers of a script, thread, or multiprocessing child that dies of an exception need not wait for a deadline."""
    of_script, of_thread = sys.excepthook, threading.excepthook

    def script_hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        abort_all(f"{kind.__name__}: {error}")
        of_script(kind, error, trace)

    def thread_hook(args: threading.ExceptHookArgs) -> None:
        for engine in _live_engines():  # a thread that used none of them is no part of the rank's exchange
            if args.thread in engine.used_by:
                engine.abort(f"{args.exc_type.__name__}: {args.exc_value}")
        of_thread(args)

    sys.excepthook, threading.excepthook = script_hook, thread_hook
    multiprocessing.util.Finalize(None, _abort_when_process_fails, exitpriority=100)


def _abort_when_process_fails() -> None:
    """A multiprocessing child catches its exception itself, and runs finalizers while that is in flight."""
    error = sys.exc_info()[1]
    if error is not None and not (isinstance(error, SystemExit) and error.code in (None, 0)):
        abort_all(f"{type(error).__name__}: {error}")


def on_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Kernels are launched on the current device."""
    if device.type == "cpu" or torch._C._cuda_getDevice() == device.index:
        return _NOTHING_TO_DO
    return torch.cuda.device(device)


def stream_of(device: torch.device) -> int:
    """The caller's stream on `device`, as kernels take it. (PyTorch's object of it takes ten times as long.)"""
    return 0 if device.type == "cpu" else torch._C._cuda_getCurrentRawStream(device.index)


def kernels_for(device: torch.device) -> Any:
    if device.type == "cpu":
        return _C.cpu
    if device.type != "cuda":
        raise ValueError(f"device: expected cpu or cuda, got {device}")
    if not hasattr(_C, "cuda"):
        raise ValueError(
            "device: expected cpu, since this build of ep_plugin has no CUDA kernels (no nvcc was found when it was "
            f"built), got {device}"
        )
    return _C.cuda


def resolve_device(group: dist.ProcessGroup | None, device: torch.device | str | None) -> torch.device:
    """`device`, with its index; None: this process's CUDA device for a group with a backend of GPUs, else the CPU."""
    if device is None:
        device = "cuda" if serves_gpus(group) else "cpu"
    if not isinstance(device, torch.device):
        device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device
