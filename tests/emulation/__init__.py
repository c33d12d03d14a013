"""ep_plugin's CUDA kernels on CPUs: their sources, compiled by the C++ compiler, run by fibers (simt.h)."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import sysconfig
import time
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
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
    "plan",
    "notify",
    "dispatch_send",
    "wait_for_sender",
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
    "send_message",
    "receive_message",
    "load_message_kernels",
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
    """A send and a receive stream beside the caller's. A stream that must wait for another one waits on the host."""

    send, receive = 1, 2

    def __init__(self, module: ModuleType) -> None:
        self._synchronize = module.synchronize
        self._kept: list[Any] = []

    def order_after(self, stream: int, *earlier: int) -> None:
        for one in earlier:
            if one != self.caller():
                self._synchronize(one)
        if self.receive in earlier:
            self._kept.clear()

    @contextlib.contextmanager
    def on(self, stream: int) -> Iterator[None]:
        """torch's operations run on the host, when the stream has come so far. Kernels may use what they make."""
        self._synchronize(stream)
        with _Keeping(self._kept):
            yield

    def join(self) -> None:
        self.order_after(self.caller(), self.send, self.receive)

    def drain(self) -> None:
        self.join()

    def record(self, *tensors: torch.Tensor | None) -> None:
        self._kept += tensors


class EmulatedLanes(Streams):
    """As LaneStreams, with a stream of the emulation for each lane. What the caller's stream has is done."""

    _numbers = itertools.count(3)

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._lanes: dict[Any, int] = {}

    def begin(self, lane: Any, sms: int) -> int:
        return self._lanes.setdefault(lane, next(self._numbers))

    def end(self, lane: Any) -> Any:
        stream = self._lanes[lane]
        count = self._module.enqueued(stream)

        def is_over() -> bool:
            return bool(self._module.ended(stream) >= count)

        def wait() -> None:
            while not is_over():
                time.sleep(0.0001)

        return SimpleNamespace(is_over=is_over, join=wait, block=wait)

    def aside(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def drain(self) -> None:
        for number in self._lanes.values():
            self._module.synchronize(number)

    def close(self) -> None: ...


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
    messages.LaneStreams = lambda device: EmulatedLanes(module)  # type: ignore[assignment,misc]
    sms.for_dispatch = lambda *shape: SMS
    sms.for_combine = lambda *shape: SMS
    low_latency_sms.for_device = lambda device, sharing: LOW_LATENCY_SMS
