"""Low-latency operations between their halves: at most two of a kind are un-received at a time.

C runs them (`csrc/control/low_latency.h`). Python checks the first of the calls that are alike, and keeps the rules of
un-received operations. Starting an operation enqueues its send half. Collecting it enqueues its receive half. Two
operations of a kind may be collected in either order. No other call receives an operation, except after its caller has
dropped it: then the next but one operation of its kind does, since both use the same slots.
"""

from __future__ import annotations

import itertools
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import torch

from ep_plugin import _C
from ep_plugin.errors import CaptureRefused, EpPluginError
from ep_plugin.moe.arguments import bulk_ready
from ep_plugin.moe.in_flight import RECEIVE_PART, SEND_PART, Serving, Tensors
from ep_plugin.moe.low_latency.engine import LowLatencyEngine
from ep_plugin.runtime.streams import caller_stream, on_device, record_stream
from ep_plugin.runtime.tensors import as_plain

T = TypeVar("T")


class LowLatencyCall(ABC):
    """The arguments of one operation, as its operator or a deep_ep.Buffer takes them."""

    name: ClassVar[str]
    kind: ClassVar[int]
    rows: torch.Tensor
    """The rows that this rank passes in. `check` may replace them by a copy."""
    buffer_rest: tuple[Any, ...] | None = None
    """The arguments of a Buffer's function after the rows. None: this is a call of the operator."""
    _engine: LowLatencyEngine

    @abstractmethod
    def check(self) -> None:
        """Raises ValueError for wrong arguments."""

    @abstractmethod
    def remember(self) -> None:
        """Lets C run this call and those like it. Call `check` first."""

    @abstractmethod
    def for_operator(self) -> tuple[Any, ...]:
        """Returns the arguments of the operator's function of C."""

    def run(self, prefix: str) -> Any:
        """Calls the function of C. Returns None if C does not know such a call. prefix: "" or "start_"."""
        if self.buffer_rest is None:
            given = self.for_operator()
            return getattr(self._engine.functions, f"{prefix}operator_{self.name}")(*given)
        return getattr(self._engine.functions, f"{prefix}buffer_{self.name}")(self.rows, *self.buffer_rest)

    def _align(self, name: str, rows: torch.Tensor) -> None:
        """Sets `rows` to ``[N, H]`` as kernels take them."""
        ready = bulk_ready(name, rows)
        if ready is not rows:
            self.rows = ready.view(self.rows.shape)

    def _become_plain(self, *names: str) -> None:
        """Replaces checked tensors, which may be of a subclass that stands for no other values, as C takes them."""
        for name in ("rows", "buffer_rest", *names):
            setattr(self, name, as_plain(getattr(self, name)))


class LowLatencyInFlight(Serving):
    """The un-received operations of one communicator."""

    def __init__(self, engine: LowLatencyEngine) -> None:
        self._engine = engine
        self.serves = ""
        self._numbers = itertools.count(1)
        self._by_number: weakref.WeakValueDictionary[int, _C.StartedOperation] = weakref.WeakValueDictionary()

    def run(self, call: LowLatencyCall) -> Any:
        """Runs the whole of an operation. Returns the operator's results, or those of a Buffer's function.

        Un-received operations stay un-received.
        """
        return self._run(call, "", "")

    def start(self, call: LowLatencyCall) -> _C.StartedOperation:
        """Starts an operation, which is then un-received until `collect`."""
        with self._engine.lock:
            return self._add(self._run(call, "start_", SEND_PART))

    def start_in_c(self, start: Callable[..., Any], *given: Any) -> _C.StartedOperation | None:
        """Starts an operation by `start`, a function of C. None: C does not know such a call."""
        operation: _C.StartedOperation | None = start(*given)
        return None if operation is None else self._add(operation)

    def receive(self, operation: _C.StartedOperation, otherwise: Callable[[], T]) -> T:
        """Receives an operation of `start_in_c`, and returns what C has made. otherwise: the way of watched calls."""
        made: T | None = operation.receive() if self._engine.is_direct else None
        return otherwise() if made is None else made

    def collect(self, number: int) -> Tensors:
        """Receives a started operation, and returns its results."""
        return self._collect(self._by_number[number])

    def _collect(self, operation: _C.StartedOperation) -> Tensors:
        engine = self._engine
        with engine.lock:
            capture = engine.streams.capturing()
            if operation.capture != capture:
                engine.check()
                raise CaptureRefused(
                    f"{engine.name}: expected both halves of {operation.name} in the same capture of a CUDA graph, or "
                    f"both outside of one, got the send half {_where(operation.capture)} and the receive half "
                    f"{_where(capture)}"
                )
            if operation.is_received:
                engine.check()
                raise EpPluginError(
                    "wait(): expected an un-received operation, got one whose receiving has failed before"
                )
            engine.check_turn(operation.name)
            with on_device(engine.device), engine.ranged(operation.name, RECEIVE_PART, operation.nbytes):
                result: Tensors = self._checked(operation.collect())
            if engine.device.type == "cuda":  # it may have been started on another stream
                record_stream(caller_stream(engine.device), (operation.tensors(), result))
            return result

    def complete(self) -> None:
        """Does nothing: only `Work.wait()` receives an operation."""

    def _run(self, call: LowLatencyCall, prefix: str, part: str) -> Any:
        engine, nbytes = self._engine, call.rows.numel() * call.rows.element_size()  # sparse tensors have no nbytes
        with engine.lock, on_device(engine.device), engine.ranged(call.name, part, nbytes):
            made = None if engine.checks_gpu_ids else call.run(prefix)
            if made is None:
                call.check()
                self._make_room(call)
                engine.check_turn(call.name)
                if engine.comm is None:
                    engine.run("low-latency memory", LowLatencyEngine.ensure_memory)
                call.remember()
                made = self._checked(call.run(prefix))
            return made

    def _checked(self, made: T | None) -> T:
        """Returns what C has made of a call that passed all checks."""
        if made is None:
            self._engine.check()  # a kernel may have found a fault meanwhile
        assert made is not None, "C left a call that was checked"
        return made

    def _make_room(self, call: LowLatencyCall) -> None:
        """Checks that the last but one operation of its kind is received, since both use the same slots.

        If the caller has dropped the earlier one, it is received now.
        """
        control, capture = self._engine.control, self._engine.streams.capturing()
        earlier, last = (control.un_received(call.kind, newest) for newest in (False, True))
        if earlier is None:
            return
        if earlier.capture not in (0, capture):
            control.forget(earlier)  # its capture is over: its kernels are in the graph and have not run
        elif earlier.is_dropped and earlier.capture == capture:
            self._collect(earlier)
        else:
            un_received = 1 if last is None or last.capture not in (0, capture) else 2
            raise ValueError(
                f"{call.name}: expected the last but one {call.name} to be received by its wait(), since two may be "
                f"un-received, got a new one with {un_received} un-received"
            )

    def _add(self, operation: _C.StartedOperation) -> _C.StartedOperation:
        operation.number = next(self._numbers)
        self._by_number[operation.number] = operation
        return operation


def _where(capture: int) -> str:
    return "in a capture" if capture else "outside"
