"""The streams of a communicator's kernels, and their order. A stream is a raw handle (int), which kernels take.

- `Streams` serves CPUs. A kernel is done when its launch returns, so nothing needs ordering.
- `CudaStreams` serves GPUs. Kernels run on the caller's streams, in the order of the calls. Each collective has an
  order of its own. All high-throughput communicators of a device share one, and so do all low-latency communicators,
  whose kernels take all SMs. Messages run on streams of their own, which csrc/control/gpu_messages.h orders after the
  caller's.
- Dispatch and combine run on the *own* stream while they are in flight, and over nodes. It has a higher priority than
  the caller's. The code that enqueues a kernel there keeps its memory alive until `join`. If `join` may come on another
  stream, or never, it calls `record`. Otherwise the allocator would reuse memory that kernels still use.

Every kernel that waits for peers enters a `_C.StreamOrder` before it is enqueued. These orders share the SMs of the
device: a kernel runs beside others only if it fits (csrc/control/stream_order.h).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ep_plugin import _C
from ep_plugin.runtime.sms import budget_of
from ep_plugin.transport.groups import serves_gpus

_SAME: contextlib.AbstractContextManager[Any] = _C.StreamSwitch()


class Streams:
    """The order of a device's kernels. This class serves CPUs."""

    own = 0
    """The stream of operations in flight and over nodes."""
    order: Any = None
    """The _C.StreamOrder of `enter`; None on CPUs."""

    def caller(self) -> int:
        """Returns the caller's current stream."""
        return 0

    def order_after(self, stream: int, *earlier: int) -> None:
        """Orders later work on `stream` after the work that is now enqueued on the `earlier` streams."""

    def on_own(self) -> contextlib.AbstractContextManager[Any]:
        """Makes torch's operations in the block run on the own stream, with memory made for it.

        The block may launch no kernels of ours.
        """
        return _SAME

    def to_host(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], bool] | None]:
        """Copies `tensor` to the host on torch's current stream. Returns the copy, and a test for its arrival; None if
        it is there."""
        return tensor, None

    def join(self) -> None:
        """Orders the caller's stream after all earlier operations."""

    def record(self, *tensors: torch.Tensor | None) -> None:
        """Keeps the freed memory of `tensors` unused until the kernels that are enqueued when it is freed are done."""

    def record_caller(self, *tensors: torch.Tensor | None) -> None:
        """Does the same for the caller's stream. `tensors` may have been made on another stream."""

    def drain(self) -> None:
        """Blocks the host until all enqueued kernels are done."""

    def wait(self) -> None:
        """Blocks the host until all earlier operations are done, and what the caller's stream has before them."""
        self.drain()

    def capturing(self) -> int:
        """Returns the id of the CUDA graph capture of the caller's stream. 0: none."""
        return 0

    def follow(self, earlier: int | None) -> int:
        """Returns the caller's stream, ordered after the stream `earlier`."""
        return 0

    def enter(self, sms: int = 0) -> int:
        """Returns the caller's stream, ordered after all earlier operations, for a kernel that waits on `sms` SMs."""
        return 0

    @property
    def usable_sms(self) -> int:
        """The SMs that one kernel may have."""
        return 2**31 - 1


class CudaStreams(Streams):
    """The caller's streams, on which operations run in the order of the calls, and a stream beside them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.order = _C.StreamOrder(budget_of(device))

    @functools.cached_property
    def _own(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._device, priority=-1)

    @property
    def own(self) -> int:  # type: ignore[override]
        stream: int = self._own.cuda_stream
        return stream

    def caller(self) -> int:
        return current_stream(self._device)

    def order_after(self, stream: int, *earlier: int) -> None:
        for one in earlier:
            _C.order_streams(stream, one, self._device.index)

    def on_own(self) -> contextlib.AbstractContextManager[Any]:
        return on_stream(self._own)

    def to_host(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], bool] | None]:
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        copy.copy_(tensor, non_blocking=True)
        over = torch.cuda.Event()
        over.record(caller_stream(self._device))
        return copy, over.query

    def join(self) -> None:
        self.enter()
        if "_own" in vars(self):  # an operation over nodes goes on there after others have entered
            self.follow(self.own)

    def record(self, *tensors: torch.Tensor | None) -> None:
        record_stream(self._own, tensors)

    def record_caller(self, *tensors: torch.Tensor | None) -> None:
        record_stream(caller_stream(self._device), tensors)

    def drain(self) -> None:
        torch.cuda.synchronize(self._device)

    def wait(self) -> None:
        self.join()
        caller_stream(self._device).synchronize()

    def capturing(self) -> int:
        return _C.stream_capture(self.caller(), self._device.index)

    def follow(self, earlier: int | None) -> int:
        """Orders as Streams does, if both are in one capture of a CUDA graph or in none. Others cannot be ordered."""
        current = self.caller()
        if earlier is None or earlier == current:
            return current
        if self.capturing() == _C.stream_capture(earlier, self._device.index):
            self.order_after(current, earlier)
        return current

    def enter(self, sms: int = 0) -> int:
        entered: int = self.order.enter(self.caller(), sms)
        return entered

    @property
    def usable_sms(self) -> int:
        usable: int = self.order.usable
        return usable


@functools.cache
def high_throughput_streams(device: torch.device) -> Streams:
    """The streams of dispatch and combine on `device`, which all communicators of the process share."""
    return Streams() if device.type == "cpu" else CudaStreams(device)


@functools.cache
def low_latency_streams(device: torch.device) -> Streams:
    """The streams of low-latency operations on `device`, which all communicators of the process share."""
    return Streams() if device.type == "cpu" else CudaStreams(device)


def record_stream(stream: torch.cuda.Stream, values: Any) -> None:
    """Tells the allocator that `stream` uses the CUDA tensors in `values`, which may be nested in tuples and lists."""
    if isinstance(values, torch.Tensor):
        if values.is_cuda:
            values.record_stream(stream)
    elif isinstance(values, (tuple, list)):
        for value in values:
            record_stream(stream, value)


def current_stream(device: torch.device) -> int:
    """The caller's stream on `device`."""
    return 0 if device.type == "cpu" else torch._C._cuda_getCurrentRawStream(device.index)


def caller_stream(device: torch.device) -> torch.cuda.Stream:
    """The caller's stream on the GPU `device`. torch.cuda.current_stream makes another object at each call."""
    return _stream_object(*torch._C._cuda_getCurrentStream(device.index))


@functools.lru_cache(maxsize=256)
def _stream_object(stream_id: int, device_index: int, device_type: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(stream_id=stream_id, device_index=device_index, device_type=device_type)


def on_stream(stream: torch.cuda.Stream) -> contextlib.AbstractContextManager[Any]:
    """Makes `stream` the current one, as torch.cuda.stream does, which makes several objects for it."""
    if torch._C._cuda_getDevice() != stream.device_index:
        return torch.cuda.stream(stream)
    functions = torch._C._cuda_getCurrentStream, torch._C._cuda_setStream
    return _C.StreamSwitch(*functions, stream.stream_id, stream.device_index, stream.device_type)


def on_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Makes `device` the current one, so that kernels are launched on it."""
    if device.type == "cpu" or torch._C._cuda_getDevice() == device.index:
        return _SAME
    return torch.cuda.device(device)


def kernels_for(device: torch.device) -> Any:
    """The kernel table for `device`. ValueError if this build has none."""
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
    """`device` with its index. None: the current CUDA device if the group has a backend for GPUs, else the CPU.

    Raises:
        ValueError: there is no such device. `kernels_for` refuses devices that this build does not serve.
    """
    if device is None:
        device = "cuda" if serves_gpus(group) else "cpu"
    if not isinstance(device, torch.device):
        try:
            device = torch.device(device)
        except (RuntimeError, TypeError):
            raise ValueError(f"device: expected cpu, cuda, or cuda with an index, got {device!r}") from None
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda":
        return device
    if not torch.cuda.is_available():
        kernels_for(device)  # a build without CUDA says that
        raise ValueError(f"device: expected cpu, since PyTorch {torch.__version__} finds no CUDA device, got {device}")
    if device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    if device.index >= torch.cuda.device_count():
        raise ValueError(f"device: expected one of {torch.cuda.device_count()} CUDA devices, got {device}")
    return device
