"""Operations between their start and their end.

Starting an operation enqueues its sending kernels. Finishing it enqueues its receiving kernels. A plain call does both.
An asynchronous call only starts its operation, which is *in flight* until its `Work.wait()` or the communicator's next
operation completes it. The result then stays until `wait()` collects it.
"""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Generic, ParamSpec, TypeAlias, TypeVar

import torch
from torch._compile import _disable_dynamo

from ep_plugin import _C, counts
from ep_plugin.errors import CaptureRefused, EpPluginError
from ep_plugin.moe.layout import DispatchHandle, DispatchOutput
from ep_plugin.runtime.base import BaseEngine

P = ParamSpec("P")
T = TypeVar("T")
Tensors: TypeAlias = tuple[torch.Tensor | None, ...]
SEND_PART, RECEIVE_PART = "send half", "receive half"  # two calls run one operation


class Operation(ABC):
    """One dispatch or combine, made from its operator's arguments. It holds every tensor that its kernels read."""

    name: ClassVar[str]
    call: _C.Call | None = None  # the call that has started it
    number = 0  # the operator finds a started operation by it
    capture = 0  # the CUDA graph capture that it was started in; 0: none
    result: Tensors | None = None  # the operator's results, between finish and collect
    is_dropped = False  # the caller has deleted its Work without waiting
    shares_memory = True  # small results may be views of one block, which torch's operators must not return
    rows: torch.Tensor
    """The rows that this rank passes in."""

    @abstractmethod
    def check(self) -> None:
        """Raises ValueError for wrong arguments. Called before anything is launched."""

    @abstractmethod
    def start(self) -> None:
        """Enqueues the kernels that send."""

    @abstractmethod
    def finish(self) -> Tensors:
        """Enqueues the kernels that receive, and orders the caller's stream after them."""

    def whole(self) -> Tensors:
        """Starts and finishes the operation."""
        self.start()
        return self.finish()

    @abstractmethod
    def tensors(self) -> Tensors:
        """Returns every tensor that a kernel enqueued by `start` reads or writes."""


class Serving:
    """Holds the name of the integration that counts a communicator's operations, also for C."""

    _engine: Any

    @property
    def serves(self) -> str:
        """The integration that counts the operations."""
        return self._serves

    @serves.setter
    def serves(self, name: str) -> None:
        self._serves = name
        self._engine.control.set_serves((name, counts.DISPATCHES))


class InFlight(Serving):
    """The operations of one communicator. At most one is in flight."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine  # a HighThroughputEngine
        self.serves = ""
        self._started: Operation | None = None
        self._numbers = itertools.count(1)
        self._by_number: weakref.WeakValueDictionary[int, Operation] = weakref.WeakValueDictionary()

    @property
    def _started(self) -> Operation | None:
        return self._in_flight

    @_started.setter
    def _started(self, operation: Operation | None) -> None:
        self._in_flight = operation
        self._engine.control.is_busy = operation is not None  # then Python runs the next

    def run(self, operation: Operation) -> Tensors:
        """Completes the operation in flight, then runs the whole of `operation`. Returns its results."""
        with self._engine.lock:
            self.complete()
            operation.check()
            counts.served(self._serves, kind=counts.DISPATCHES)
            return self._engine.run(operation.name, lambda _: operation.whole(), nbytes=operation.rows.nbytes)

    def start(self, operation: Operation) -> Operation:
        """Completes the operation in flight, then starts `operation`, which is in flight from then on."""
        with self._engine.lock:
            self.complete()
            operation.check()
            counts.served(self._serves, kind=counts.DISPATCHES)
            self._engine.run(operation.name, self._start, operation, nbytes=operation.rows.nbytes, part=SEND_PART)
            operation.call = self._engine.last_call
            operation.number = next(self._numbers)
            self._by_number[operation.number] = operation
            return operation

    def collect(self, number: int) -> Tensors:
        """Returns the results of a started operation, and orders the caller's stream after them."""
        engine = self._engine
        with engine.lock:
            operation = self._by_number[number]
            if operation is self._started:
                self.complete()
            elif operation.result is None:
                engine.check()
                raise EpPluginError(
                    "wait(): expected an operation in flight, got one whose completion has failed before"
                )
            else:
                capture = engine.streams.capturing()
                if capture not in (0, operation.capture):  # the capture would wait for a kernel outside of it
                    raise self._torn(operation, capture)
                engine.streams.join()
            result, operation.result = operation.result, None
            assert result is not None
            engine.streams.record_caller(*result)
            return result

    def complete(self) -> None:
        """Finishes the operation in flight, if there is one.

        Raises CaptureRefused if a CUDA graph would capture only the start or only the end of the operation. Autograd
        records nothing here, since the caller may be another operator or a backward. It records at `wait()`.
        """
        operation, engine = self._in_flight, self._engine
        if operation is None:
            return
        capture = engine.streams.capturing()
        if operation.capture != capture:
            engine.check()
            if operation.capture:
                self._started = None  # its kernels are in the graph and have not run
            raise self._torn(operation, capture)
        engine.check_not_running(operation.name)  # else the operation stays in flight
        self._started = None
        nbytes = operation.rows.nbytes
        operation.result = engine.run(
            operation.name, lambda _: operation.finish(), nbytes=nbytes, part=RECEIVE_PART, continues=operation.call
        )

    def _start(self, engine: BaseEngine, operation: Operation) -> None:
        operation.start()
        self._started = operation
        operation.capture = engine.streams.capturing()
        engine.record(*operation.tensors())  # a fault may keep the caller from ever joining the streams

    def _torn(self, operation: Operation, capture: int) -> CaptureRefused:
        """Returns the error for an operation that would finish in another capture than it started in. Running outside
        of captures counts as one."""
        began = "in the capture of a CUDA graph" if operation.capture else "before the capture of a CUDA graph began"
        now = ("in another" if operation.capture else "in it") if capture else "after it"
        return CaptureRefused(
            f"{self._engine.name}: expected an operation that was begun {began} to be completed and waited for there "
            f"too, got its wait(), or the next operation, {now}"
        )


def untraced(function: Callable[P, T]) -> Callable[P, T]:
    """Returns `function`, kept out of torch.compile, which cannot trace locks, peer memory and kernels.

    Compiled code calls it between two graphs; with fullgraph=True torch raises an error. torch.compiler.disable would
    import the compiler here, which takes seconds, and would add a microsecond to every call.
    """
    disabled = _disable_dynamo(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return disabled(*args, **kwargs) if torch.compiler.is_compiling() else function(*args, **kwargs)

    return call


class Work(Generic[T]):
    """An asynchronous operation. `wait()` returns the result that the plain call would have returned."""

    def __init__(self, operation: Operation | _C.StartedOperation, complete: Callable[[], T]) -> None:
        self._operation: Operation | _C.StartedOperation | None = operation
        self._complete: Callable[[], T] | None = complete
        self._result: T | None = None
        self._waiting = threading.RLock()

    @property
    def done(self) -> bool:
        """Whether this work's `wait()` or a later call has completed the operation."""
        operation = self._operation
        return operation is None or operation.result is not None

    @untraced
    def wait(self) -> T:
        """Completes the operation and orders the caller's stream after it. Several threads may call it, repeatedly.

        Returns:
            The result of the plain call. Every call returns the same objects.

        Raises:
            PeerTimeout, PeerAborted: a peer failed.
            CaptureRefused: the capture of a CUDA graph began or ended since the operation started.
        """
        with self._waiting:
            if self._result is None:
                assert self._complete is not None
                self._result = self._complete()
                self._complete = self._operation = None  # they hold the arguments
            return self._result

    def __del__(self) -> None:
        if self._operation is not None:
            self._operation.is_dropped = True


DispatchWork: TypeAlias = Work[tuple[DispatchOutput, DispatchHandle]]
CombineWork: TypeAlias = Work[torch.Tensor]
