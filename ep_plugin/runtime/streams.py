"""Where kernels run and what orders them.

CUDA: one send stream and one receive stream per device, shared by all communicators, so that at most one sending and
one receiving kernel are resident; sends have the higher priority. Memory that a kernel touches is kept alive by whoever
enqueued it until `join` has ordered the caller's stream after both lanes; where that may happen on another stream, or
not at all, `record` tells the allocator.
CPU: kernels run to their end in the calling thread; the lanes are nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Protocol

import torch

from ep_plugin import _C
from ep_plugin.runtime.base import stream_of


class Lanes(Protocol):
    """The order of one device's kernels; `send` and `receive` are stream handles as integers."""

    send: int
    receive: int

    def fork(self) -> None:
        """The send lane goes on from the caller's stream."""

    def fork_receive(self) -> None:
        """The receive lane goes on from the caller's stream. (The kernel admit orders it after a sender.)"""

    def join(self, received: bool = True) -> None:
        """The caller's stream goes on from the send lane and, if anything was `received`, from the receive lane."""

    def meet(self) -> None:
        """Each lane goes on after what has been enqueued on the other."""

    def record(self, *tensors: torch.Tensor | None) -> None:
        """Keeps the memory of `tensors` from being used again before both lanes are done with it."""

    def hand_over(self, result: Iterable[object]) -> None:
        """Keeps the memory of tensors (and tuples of them) that were made on another stream for the caller's."""

    def drain(self) -> None:
        """The host waits for both lanes."""

    def capturing(self) -> int:
        """The number of the capture of a CUDA graph that the caller's stream is in; 0: none."""


class CpuLanes:
    send = 0
    receive = 0

    def fork(self) -> None: ...
    def fork_receive(self) -> None: ...
    def join(self, received: bool = True) -> None: ...
    def meet(self) -> None: ...
    def record(self, *tensors: torch.Tensor | None) -> None: ...
    def hand_over(self, result: Iterable[object]) -> None: ...
    def drain(self) -> None: ...
    def capturing(self) -> int:
        return 0


class CudaLanes:
    def __init__(self, device: torch.device) -> None:
        self._device, self._index = device, device.index
        self._send = torch.cuda.Stream(device, priority=-1)
        self._receive = torch.cuda.Stream(device, priority=0)
        self.send: int = self._send.cuda_stream
        self.receive: int = self._receive.cuda_stream

    def fork(self) -> None:
        _C.order_streams(self.send, stream_of(self._device), self._index)

    def fork_receive(self) -> None:
        _C.order_streams(self.receive, stream_of(self._device), self._index)

    def join(self, received: bool = True) -> None:
        caller = stream_of(self._device)
        _C.order_streams(caller, self.send, self._index)
        if received:
            _C.order_streams(caller, self.receive, self._index)

    def meet(self) -> None:
        _C.order_streams(self.receive, self.send, self._index)
        _C.order_streams(self.send, self.receive, self._index)

    def record(self, *tensors: torch.Tensor | None) -> None:
        for tensor in tensors:
            if tensor is not None and tensor.is_cuda:
                tensor.record_stream(self._send)
                tensor.record_stream(self._receive)

    def hand_over(self, result: Iterable[object]) -> None:
        for part in result:
            if isinstance(part, tuple):
                self.hand_over(part)
            elif isinstance(part, torch.Tensor) and part.is_cuda:
                part.record_stream(torch.cuda.current_stream(self._device))

    def drain(self) -> None:
        self._send.synchronize()
        self._receive.synchronize()

    def capturing(self) -> int:
        return _C.stream_capture(stream_of(self._device), self._index)


@functools.cache
def lanes_of(device: torch.device) -> Lanes:
    """The lanes of `device`, one pair per process."""
    return CpuLanes() if device.type == "cpu" else CudaLanes(device)
