"""ep_plugin's CUDA kernels on CPUs: their sources, compiled by the C++ compiler, run by fibers (simt.h)."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import itertools
import sysconfig
import time
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ep_plugin import _C
from ep_plugin.collectives import messages
from ep_plugin.moe.high_throughput import engine, sms
from ep_plugin.moe.low_latency import sms as low_latency_sms
from ep_plugin.runtime.streams import Streams

# A CTA is a thread of the system, so few of them.
SMS = sms.KernelSms(2, 3)
LOW_LATENCY_SMS = 2

KERNELS = [
    "table",
    "low_latency_over_nodes",
    "plan",
    "positions",
    "notify",
    "place",
    "dispatch_send",
    "dispatch_recv",
    "combine_send",
    "combine_recv",
    "dispatch",
    "combine",
    "weight_grad",
    "quantize",
    "pack",
    "combine_add",
    "add_counts",
    "layout",
]


class _Keeping(TorchDispatchMode):
    """Keeps what torch makes, as the memory of a GPU's stream is kept until the stream has used it."""

    def __init__(self, kept: list[Any]) -> None:
        super().__init__()
        self._made = kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self._made.append(made)
        return made


class EmulatedStreams(Streams):
    """The caller's stream and the own one. A stream that must wait for another one waits on the host, and so does the
    caller at the end of an operation."""

    own, _caller = 1, 2

    def __init__(self, module: ModuleType) -> None:
        self._synchronize = module.synchronize
        self._kept: list[Any] = []

    def caller(self) -> int:
        return self._caller

    def order_after(self, stream: int, *earlier: int) -> None:
        for one in earlier:
            self._synchronize(one)

    def enter(self, sms: int = 0) -> int:
        self.join()
        return self.caller()

    def enter_on(self, stream: int, sms: int, needed: int) -> None:
        if sms == 0:
            self.join()

    @contextlib.contextmanager
    def on_own(self) -> Iterator[None]:
        """torch's operations run on the host, when the stream has come so far. Kernels may use what they make."""
        self._synchronize(self.own)
        with _Keeping(self._kept):
            yield

    def join(self) -> None:
        self.order_after(self.caller(), self.own, self.caller())
        self._kept.clear()

    def drain(self) -> None:
        self.join()

    def record(self, *tensors: torch.Tensor | None) -> None:
        self._kept += tensors


class EmulatedLanes(Streams):
    """The streams of one object's messages, and what its part in C calls in CUDA's place.

    What the caller's stream has is done. A mark is a number of kernels of a stream.
    """

    _numbers = itertools.count(3)  # after those of EmulatedStreams

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._lanes: list[int] = []
        self._marks: dict[int, tuple[int, int]] = {}
        self.load_message_kernels = module.load_message_kernels
        self.send_message, self.receive_message = module.send_message, module.receive_message

    def make_stream(self, device: int) -> int:
        self._lanes.append(next(self._numbers))
        return self._lanes[-1]

    def drop_stream(self, stream: int) -> None: ...

    def mark(self, stream: int, device: int) -> int:
        number = next(self._numbers)
        self._marks[number] = stream, self._module.enqueued(stream)
        return number

    def drop_mark(self, mark: int) -> None:
        del self._marks[mark]

    def is_over(self, mark: int) -> bool:
        stream, count = self._marks[mark]
        return bool(self._module.ended(stream) >= count)

    def order_after(self, stream: int, mark: int) -> None:
        self.wait_on_host(mark)

    def wait_on_host(self, mark: int) -> None:
        while not self.is_over(mark):
            time.sleep(0.0001)

    def fill(self, to: int, byte: int, count: int, stream: int) -> None:
        ctypes.memset(to, byte, count)

    def drain(self) -> None:
        for number in self._lanes:
            self._module.synchronize(number)


def load() -> ModuleType:
    """The module of the kernels; compiles it if need be."""
    from tests.emulation.build import build  # needs pybind11, which nothing else here does

    path = build() / f"_simt{sysconfig.get_config_var('EXT_SUFFIX')}"
    spec = importlib.util.spec_from_file_location("_simt", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def serve_cpus() -> None:
    """From now on this process's communicators on CPUs run the kernels of GPUs."""
    module = load()
    for name in KERNELS:
        setattr(_C.cpu, name, getattr(module, name))
    streams = EmulatedStreams(module)
    engine.high_throughput_streams = lambda device: streams
    torch.cuda.synchronize = lambda device=None: streams.drain()
    messages._moves_by_kernels = lambda device: True
    _serve_messages(module)
    sms.for_dispatch = lambda *shape: SMS
    sms.for_combine = lambda *shape: SMS
    low_latency_sms.for_device = lambda device, sharing: LOW_LATENCY_SMS


def _serve_messages(module: ModuleType) -> None:
    made: list[EmulatedLanes] = []
    gpu_messages: Any = _C.GpuMessages

    def lanes(device: torch.device) -> EmulatedLanes:
        made.append(EmulatedLanes(module))
        return made[-1]

    messages.CudaStreams = lanes  # type: ignore[assignment,misc]
    messages.budget_of = lambda device: _C.SmBudget(0, 2**20, lambda *_: 0, lambda *_: None)
    _C.GpuMessages = lambda comm, board, budget, _: gpu_messages(comm, board, budget, 0, calls=made[-1])  # type: ignore[assignment,misc]
