"""A GPU of few SMs in the emulation: the caller has streams, and kernels wait for each other and for SMs on the device.

The host waits for nothing, as with a GPU. So everything that torch makes is kept.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch

from ep_plugin import _C, HierarchicalAllGather
from ep_plugin.moe.high_throughput import engine, sms
from ep_plugin.moe.low_latency import engine as low_latency_engine
from ep_plugin.moe.low_latency import sms as low_latency_sms
from ep_plugin.runtime.streams import Streams
from tests import emulation
from tests.emulation import EmulatedStreams
from tests.gpu import sms as sms_rounds
from tests.gpu_stand_in import serve_with

FIRST, SECOND = 1001, 1002  # streams of the caller
PRESENT = 6
"""SMs of the device. Low-latency kernels take all, and so do notify on one SM, 2 that send and 3 that receive."""
DEADLINE_S = 60.0


class FewSms(EmulatedStreams):
    """The streams of all communicators of this process.

    Attributes:
        current: the caller's current stream.
    """

    def __init__(self, module: ModuleType, budget: _C.SmBudget) -> None:
        super().__init__(module)
        self.current, self._module, self._budget = FIRST, module, budget
        self._throughput, self.order = _C.StreamOrder(budget), _C.StreamOrder(budget)

    def caller(self) -> int:
        return self.current

    def order_after(self, stream: int, *earlier: int) -> None:
        for one in earlier:
            self._module.order(stream, one)

    def enter_on(self, stream: int, sms: int, needed: int) -> None:
        self._throughput.enter(stream, sms, needed)

    def enter(self, sms: int = 0) -> int:
        entered: int = self.order.enter(self.current, sms)
        return entered

    @property
    def usable_sms(self) -> int:
        usable: int = self._budget.usable
        return usable

    def of_gathers(self) -> Streams:
        """The streams of one all-gather object."""
        streams = Streams()
        streams.order = _C.StreamOrder(self._budget)
        streams.caller = self.caller  # type: ignore[method-assign]
        return streams

    def drain(self) -> None:
        for stream in (FIRST, SECOND, self.own):
            self._synchronize(stream)


def serve_with_few_sms(budgeted: int) -> FewSms:
    """From now on this process's communicators run on a device of PRESENT SMs, and count on `budgeted` SMs."""
    module = emulation.load()
    module.limit_sms(PRESENT)
    streams = FewSms(
        module, _C.SmBudget(0, budgeted, lambda stream, device: 0, lambda *given: module.order(*given[:2]))
    )
    engine.high_throughput_streams = lambda device: streams
    low_latency_engine.low_latency_streams = lambda device: streams
    make_control = low_latency_engine.control_of

    def control_of(*given: Any) -> _C.LowLatency:
        control = make_control(*given)
        control.set_caller(streams)
        return control

    low_latency_engine.control_of = control_of
    low_latency_sms.for_device = lambda device, sharing: PRESENT
    sms.for_dispatch = sms.for_combine = lambda *shape: sms.KernelSms(2, 3)
    torch.cuda.synchronize = lambda device=None: streams.drain()
    return streams


def serve_gather(gather: HierarchicalAllGather, streams: FewSms) -> None:
    """Makes the object run its kernels on the device, too."""
    gather.engine_on(torch.device("cpu")).streams = streams.of_gathers()
    serve_with(gather, "sm", emulation.load())


def turn(streams: FewSms) -> sms_rounds.Turn:
    """How a rank runs the rounds of tests/gpu/sms.py here."""
    module, numbers = emulation.load(), (FIRST, SECOND)

    @contextlib.contextmanager
    def on(stream: int) -> Iterator[None]:
        streams.current = numbers[stream]
        yield

    def late(stream: int) -> Callable[[], None]:
        module.shut(numbers[stream])
        return lambda: module.open(numbers[stream])

    return sms_rounds.Turn(3, on, late, streams.drain)


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < deadline, "it does not come about"
        time.sleep(0.001)
