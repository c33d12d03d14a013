"""What HierarchicalAllGather and HierarchicalReduceScatter have in common: a group, an engine made late, a close."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import TypeVar

import torch
import torch.distributed as dist

from ep_plugin.collectives.engine import CollectiveEngine
from ep_plugin.collectives.work import CollectiveWork
from ep_plugin.errors import CommunicatorClosed
from ep_plugin.runtime.base import leave, resolve_device
from ep_plugin.runtime.tensors import PLAIN
from ep_plugin.transport.exchange import checked_group

C = TypeVar("C", bound="Collective")
PATHS = ("auto", "copy_engine", "sm")


class Collective:
    """One operation over one process group. All ranks of the group call its methods in the same order."""

    _sum_sms: int | None = None
    maps_nothing_on: tuple[str, ...] = ()
    """Devices on which any memory is as good as what peers map: there `allocate` hands out ordinary memory."""

    def __init__(self, group: dist.ProcessGroup | None = None, *, num_buffers: int = 2, path: str = "auto") -> None:
        """Talks to nobody: the first `allocate` or operation is collective, and decides the device.

        `group`: None is the default group. `num_buffers`: blocks of one size that `allocate` makes before it hands one
        out again; those beyond the tensors alive let hosts drift apart by as many calls. ValueError unless it is a
        positive integer.
        `path`: how gathers go inside a node on GPUs, "copy_engine" or "sm"; "auto" decides by the size, and takes a
        kernel of its own for small gathers and sums. CPUs have one way.
        """
        if path not in PATHS:
            raise ValueError(f"path: expected one of {', '.join(PATHS)}, got {path!r}")
        if not isinstance(num_buffers, int) or isinstance(num_buffers, bool) or num_buffers < 1:
            raise ValueError(f"num_buffers: expected an integer of at least 1, got {num_buffers!r}")
        self.group = checked_group(group)
        self._num_buffers, self.path = num_buffers, path
        self._engine: CollectiveEngine | None = None
        self._making = threading.RLock()
        self._closed = False

    def allocate(
        self, size: int | Sequence[int], dtype: torch.dtype, device: torch.device | str | None = None
    ) -> torch.Tensor:
        """An uninitialised tensor of `size` that peers have mapped, so that operations on it copy nothing twice.

        All ranks call it with the same size in bytes. It belongs to whoever holds it; when none of its views is left on
        any rank, a later call may return the same memory, on a stream that follows the one of this call: whoever reads
        it on another joins the two before dropping it, since `record_stream` does nothing for it. While 64 such tensors
        are held, more of them are ordinary ones. `device`: None is the current CUDA device for a group with a backend
        of GPUs (NCCL), else the CPU. Raises ValueError for a negative extent or another device than the first call's,
        DisagreementError where ranks ask for different sizes, PeerTimeout and PeerAborted when peers fail, and
        CaptureRefused where a CUDA graph is being captured and no block is free.
        """
        shape = (size,) if isinstance(size, int) else tuple(int(extent) for extent in size)
        if any(extent < 0 for extent in shape):
            raise ValueError(f"size: expected no negative extent, got {shape}")
        device = resolve_device(self.group, device)
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes == 0 or self.group.size() == 1 or device.type in self.maps_nothing_on:
            self.check()
            return torch.empty(shape, dtype=dtype, device=device)
        engine = self.engine_on(device)
        found = engine.run("allocate", lambda _: engine.blocks.allocate(nbytes))
        if found is None:
            return torch.empty(shape, dtype=dtype, device=device)
        tensor = found.view(dtype)
        return tensor if len(shape) == 1 else tensor.view(shape)

    def maps(self, tensor: torch.Tensor) -> bool:
        """Whether peers have mapped what `tensor` lies in, as they have most of what `allocate` returns."""
        return self._engine is not None and self._engine.blocks.place_of([tensor]) is not None

    @property
    def rail_bytes_sent(self) -> int:
        """Bytes that this rank has sent to other nodes, over all operations so far."""
        return 0 if self._engine is None else self._engine.rails.bytes_sent

    def check(self) -> None:
        """Raises the first error of this object, if there is one. Costs no synchronisation."""
        if self._engine is not None:
            self._engine.check()
        elif self._closed:
            raise CommunicatorClosed("expected an open communicator, got a closed one")

    def _check_enqueued(self) -> None:
        """Raises the first error of operations that were enqueued, whether this object is open or closed."""
        if self._engine is not None:
            self._engine.check_enqueued()

    def abort(self, reason: str) -> None:
        """Tells the peers that this rank has failed: their waits raise PeerAborted(rank, reason) at once."""
        if self._engine is not None:
            self._engine.abort(reason)

    def close(self) -> None:
        """Gives the memory back but for tensors that are still held. Not collective; works after a fault, and again.

        It returns when what was enqueued is over: a Work may be waited for after it as before.
        """
        self._closed = True
        if self._engine is not None:
            self._engine.close()

    def __enter__(self: C) -> C:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        leave(self, error)

    def engine_on(self, device: torch.device) -> CollectiveEngine:
        """The engine, made on first use; ValueError when it is on another device."""
        engine = self._engine
        if engine is None:
            with self._making:
                if self._closed:
                    raise CommunicatorClosed("expected an open communicator, got a closed one")
                if self._engine is None:
                    self._engine = CollectiveEngine(
                        checked_group(self.group), device, self._num_buffers, self.path, self._sum_sms
                    )
                engine = self._engine
        if engine.device != device:
            raise ValueError(f"device: expected {engine.device} as in the first call, got {device}")
        return engine

    def _check_group(self, group: dist.ProcessGroup | None) -> None:
        if group is not None and group is not self.group:
            raise ValueError(f"group: expected {self.group.group_name}, which this object serves, got {group}")

    def _done(self, outputs: list[torch.Tensor], async_op: bool) -> CollectiveWork | None:
        if not async_op:
            return None
        event = None
        if outputs[0].is_cuda:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(outputs[0].device))
        return CollectiveWork(outputs, self._check_enqueued, event)


def as_bytes(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` as uint8 ``[bytes]`` in the same memory; ValueError unless it is contiguous, and all there."""
    if type(tensor) not in PLAIN and type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise ValueError(f"{name}: expected a tensor with memory of its own, got {type(tensor).__name__}")
    if tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor():
        raise ValueError(
            f"{name}: expected a tensor that is in memory as it is, got one whose conjugation, sign or zeros are "
            "pending; pass its resolve_conj(), resolve_neg() or clone()"
        )
    if tensor.layout != torch.strided or not tensor.is_contiguous():
        raise ValueError(f"{name}: expected a contiguous tensor, got strides {tuple(tensor.stride())}")
    if tensor.requires_grad or tensor.dim() != 1 or tensor.stride(0) != 1:  # of one element it may be anything
        tensor = tensor.detach().as_strided((tensor.numel(),), (1,))
    return tensor.view(torch.uint8)


def check_alike(name: str, tensor: torch.Tensor, other: str, like: torch.Tensor) -> None:
    """ValueError unless both are tensors of one dtype and one device."""
    for named, value in ((name, tensor), (other, like)):
        if not isinstance(value, torch.Tensor):
            raise ValueError(f"{named}: expected a tensor, got {type(value).__name__}")
    if tensor.dtype != like.dtype:
        raise ValueError(f"{name}: expected dtype {like.dtype} as of {other}, got {tensor.dtype}")
    if tensor.device != like.device:
        raise ValueError(f"{name}: expected device {like.device} as of {other}, got {tensor.device}")
