"""Low-latency operations between their halves: at most two of a kind are un-received at a time.

Starting an operation enqueues its send half. Collecting it enqueues its receive half. Two operations of a kind may be
collected in either order. No other call receives an operation, except after its caller has dropped it: then the next
but one operation of its kind does, since both use the same slots.
"""

from __future__ import annotations

import itertools
import weakref
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any, ClassVar, TypeAlias, TypeVar

import torch

from ep_plugin import _C, counts
from ep_plugin.errors import CaptureRefused, EpPluginError
from ep_plugin.moe.arguments import address, bulk_ready
from ep_plugin.moe.in_flight import RECEIVE_PART, SEND_PART, Operation, Tensors
from ep_plugin.moe.low_latency.engine import LowLatencyEngine
from ep_plugin.runtime.streams import caller_stream, record_stream
from ep_plugin.runtime.tensors import call_of

T = TypeVar("T")
SEND, RECEIVE = int(_C.LlPhase.SEND), int(_C.LlPhase.RECEIVE)


class LowLatencyOperation(Operation):
    """An operation whose halves may also be one kernel."""

    kind: ClassVar[int]
    _engine: LowLatencyEngine
    _wait_cost: torch.Tensor | None
    _call: Hashable = None  # the key by which the engine finds calls like this one, see `call_of`
    _form: bytes | None = None
    _known: Any = None  # the result of `describe` for one of these calls
    buffer_call: tuple[bytes | None, tuple[Hashable, ...]] | None = None
    """The form and the settings of a call of deep_ep.Buffer that C does not know. Buffer sets them."""

    @abstractmethod
    def describe(self) -> tuple[Any, ...]:
        """Returns the kernel's arguments as far as all calls of one form share them, then sizes that follow from the
        form. Call `check` first."""

    @abstractmethod
    def remember(self) -> None:
        """Calls `remember_for` for the communicator's own call, unless that has no such arguments."""

    @abstractmethod
    def remember_for(self, is_for_buffer: bool, form: bytes | None, settings: tuple[Hashable, ...]) -> None:
        """Passes the result of `describe` to C, which then runs calls of this form and these settings."""

    @abstractmethod
    def fill(self, args: Any, known: Any) -> None:
        """Allocates the results, and sets all addresses in `args`. known: the result of `describe`."""

    @abstractmethod
    def launch(self, phases: int) -> None:
        """Enqueues the kernel. phases: SEND, RECEIVE or both. Call `prepare` first."""

    def prepare(self) -> None:
        """Allocates the results, and sets the kernel's arguments."""
        engine = self._engine
        engine.ensure_memory()
        if self._known is None:
            self._known = self.describe()
            engine.known.remember(self._call, self._known)
        if self._call is not None and engine.runs_in_c:  # C forgets calls, too
            if self.buffer_call is None:
                self.remember()
            else:
                self.remember_for(True, *self.buffer_call)
        args = self._args = self._known[0].copy()
        self.fill(args, self._known)
        op = args.op
        op.comm, op.slot = engine.comm, engine.next_slot(self.kind)
        counted = engine.load.wait_cost() if self._wait_cost is None else self._wait_cost
        op.wait_cost = address(counted)

    def _is_known(self, form: bytes | None, *settings: Hashable) -> bool:
        """Whether an earlier call of this form and these settings passed all checks."""
        self._form, self._call = form, call_of(form, self.kind, *settings)
        self._known = self._engine.known.find(self._call)
        return self._known is not None

    def _align(self, name: str, rows: torch.Tensor) -> None:
        """Sets `rows` to ``[N, H]`` as kernels take them. If that needs a copy, no other call is like this one."""
        self.rows = bulk_ready(name, rows)
        if self.rows is not rows:
            self._call = None

    def _ready(self, phases: int) -> Any:
        """Returns the kernel's arguments for `phases` on the caller's stream."""
        op, streams = self._args.op, self._engine.streams
        op.num_sms = min(op.num_sms, streams.usable_sms)
        op.phases, op.stream = phases, streams.enter(op.num_sms)
        return self._args

    def start(self) -> None:
        self.prepare()
        self.launch(SEND)

    def finish(self) -> Tensors:
        self.launch(RECEIVE)
        return self.results()

    def whole(self) -> Tensors:
        """Enqueues both halves in one kernel."""
        self.prepare()
        self.launch(SEND | RECEIVE)
        return self.results()

    @abstractmethod
    def results(self) -> Tensors:
        """Returns the operator's results. They exist from `start` on, and have their values after the receive half."""


Started: TypeAlias = "LowLatencyOperation | _C.StartedOperation"


class LowLatencyInFlight:
    """The un-received operations of one communicator."""

    def __init__(self, engine: LowLatencyEngine) -> None:
        self._engine = engine
        self.serves = ""
        self._numbers = itertools.count(1)
        self._by_number: weakref.WeakValueDictionary[int, Started] = weakref.WeakValueDictionary()
        # The latest two operations of each kind, the older one first; None: it is received.
        self._latest: tuple[deque[Started | None], ...] = (deque(maxlen=2), deque(maxlen=2))

    @property
    def serves(self) -> str:
        """The integration that counts the operations."""
        return self._serves

    @serves.setter
    def serves(self, name: str) -> None:
        self._serves = name
        self._engine.control.set_serves(name)

    def run(self, operation: LowLatencyOperation) -> Tensors:
        """Runs the whole of `operation` and returns its results. Un-received operations stay un-received."""
        with self._engine.lock:
            self._check(operation)
            counts.served(self.serves, kind=counts.DISPATCHES)
            result = self._engine.run(operation.name, lambda _: operation.whole(), nbytes=operation.rows.nbytes)
            self._append(operation.kind, None)
            return result

    def start(self, operation: LowLatencyOperation) -> LowLatencyOperation:
        """Starts `operation`, which is then un-received until `collect`."""
        engine = self._engine
        with engine.lock:
            self._check(operation)
            counts.served(self.serves, kind=counts.DISPATCHES)
            engine.run(operation.name, lambda _: operation.start(), nbytes=operation.rows.nbytes, part=SEND_PART)
            operation.call = engine.last_call
            operation.capture = engine.streams.capturing()
            self._add(operation)
            return operation

    def start_in_c(self, kind: int, start: Callable[..., Any], *given: Any) -> _C.StartedOperation | None:
        """Starts an operation like an earlier one by `start`, a function of C. None: Python must start it."""
        with self._engine.lock:
            latest = self._latest[kind]
            if len(latest) == 2 and latest[0] is not None:
                return None
            operation: _C.StartedOperation | None = start(*given)
            if operation is not None:
                self._add(operation)
            return operation

    def receive(self, operation: _C.StartedOperation, otherwise: Callable[[], T]) -> T:
        """Receives an operation of `start_in_c` by C, and returns what C has made. `otherwise`: the way by Python."""
        with self._engine.lock:
            if operation in self._latest[operation.kind]:
                try:
                    made: T | None = operation.receive()
                finally:
                    if operation.is_received:
                        self._forget(operation)
                if made is not None:
                    return made
        return otherwise()

    def collect(self, number: int) -> Tensors:
        """Receives a started operation, and returns its results."""
        engine = self._engine
        with engine.lock:
            operation = self._by_number[number]
            capture = engine.streams.capturing()
            if operation.capture != capture:
                engine.check()
                raise CaptureRefused(
                    f"{engine.name}: expected both halves of {operation.name} in the same capture of a CUDA graph, or "
                    f"both outside of one, got the send half {_where(operation.capture)} and the receive half "
                    f"{_where(capture)}"
                )
            if operation not in self._latest[operation.kind]:
                engine.check()
                raise EpPluginError(
                    "wait(): expected an un-received operation, got one whose receiving has failed before"
                )
            self._forget(operation)
            call = operation.call
            assert call is not None
            result: Tensors = engine.run(
                operation.name, lambda _: operation.finish(), nbytes=call.nbytes, part=RECEIVE_PART, continues=call
            )
            if engine.device.type == "cuda":  # it may have been started on another stream
                record_stream(caller_stream(engine.device), (operation.tensors(), result))
            return result

    def complete(self) -> None:
        """Does nothing: only `Work.wait()` receives an operation."""

    def _check(self, operation: LowLatencyOperation) -> None:
        """Checks the operation's arguments, and that the last but one operation of its kind is received.

        Both operations use the same slots. If the caller has dropped the earlier one, it is received now.
        """
        operation.check()
        latest, capture = self._latest[operation.kind], self._engine.streams.capturing()
        for earlier in list(latest):
            if earlier is not None and earlier.capture not in (0, capture):
                self._forget(earlier)  # its capture is over: its kernels are in the graph and have not run
        if len(latest) == 2 and latest[0] is not None and latest[0].is_dropped and latest[0].capture == capture:
            self.collect(latest[0].number)
        if len(latest) == 2 and latest[0] is not None:
            un_received = 2 if latest[1] is not None else 1
            raise ValueError(
                f"{operation.name}: expected the last but one {operation.name} to be received by its wait(), since "
                f"two may be un-received, got a new one with {un_received} un-received"
            )

    def _add(self, operation: Started) -> None:
        operation.number = next(self._numbers)
        self._by_number[operation.number] = operation
        self._append(operation.kind, operation)

    def _forget(self, operation: Started) -> None:
        latest = self._latest[operation.kind]
        latest[latest.index(operation)] = None
        self._append(operation.kind)

    def _append(self, kind: int, *newest: Started | None) -> None:
        latest = self._latest[kind]
        latest.extend(newest)
        self._engine.control.set_busy(kind, any(one is not None for one in latest))  # then Python runs the next


def _where(capture: int) -> str:
    return "in a capture" if capture else "outside"
