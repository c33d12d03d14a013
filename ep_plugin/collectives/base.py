"""The base of HierarchicalAllGather and HierarchicalReduceScatter: a group, an engine made at first use, a Work."""

from __future__ import annotations

import datetime
import math
import operator
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Work

from ep_plugin import _C
from ep_plugin.collectives.engine import CollectiveEngine
from ep_plugin.counts import held_bytes
from ep_plugin.errors import CommunicatorClosed, EpPluginError, PeerTimeout
from ep_plugin.runtime.base import leave
from ep_plugin.runtime.streams import caller_stream, resolve_device
from ep_plugin.transport.groups import Group, checked_group, name_of
from ep_plugin.transport.peer import PeerBuffer

PATHS = ("auto", "copy_engine", "sm")
_MOST_BYTES = 1 << 47  # a process can address no more


class Collective:
    """One operation over one process group. All ranks of the group call its methods in the same order."""

    _name: str
    _sum_sms: int | None = None  # the most for sums; None: the object gathers
    maps_nothing_on: tuple[str, ...] = ()
    """Types of device on which operations gain nothing from mapped memory: `allocate` returns ordinary memory there."""

    def __init__(self, group: Group = None, *, num_buffers: int = 2, path: str = "auto") -> None:
        """Exchanges nothing with peers. The first `allocate` or operation is collective and fixes the device.

        Args:
            group: the process group, a DeviceMesh of one dimension, or None for the default group.
            num_buffers: the number of blocks of one size that `allocate` makes before it uses one again, at least 1.
                Hosts may drift apart by as many calls as there are blocks beyond the tensors alive.
            path: what pushes shards inside a node on GPUs, "copy_engine" or "sm". "auto" decides by the size, and uses
                a kernel for small gathers and sums.

        Raises:
            ValueError: no process group, or an argument outside these values.
        """
        if path not in PATHS:
            raise ValueError(f"path: expected one of {', '.join(PATHS)}, got {path!r}")
        if not isinstance(num_buffers, int) or isinstance(num_buffers, bool) or num_buffers < 1:
            raise ValueError(f"num_buffers: expected an integer of at least 1, got {num_buffers!r}")
        self.group = checked_group(group)
        self._num_buffers, self.path = num_buffers, path
        self._engine: CollectiveEngine | None = None
        self._making = threading.RLock()
        self._known = _C.KnownCollective(self._name, self._sum_sms is None, self.group.size() == 1)
        self._in_c = self._known.function()
        self._closed = False

    def allocate(
        self, size: int | Sequence[int], dtype: torch.dtype, device: torch.device | str | None = None
    ) -> torch.Tensor:
        """Returns an uninitialised tensor that peers have mapped, so that operations need no extra copy. Collective.

        The tensor is yours. When no view of it is left on any rank, a later call may return the same memory, on a
        stream ordered after the current one. If you read it on another stream, join the two before you drop it:
        `record_stream` has no effect. While 64 such tensors are alive, further ones are ordinary memory.

        Args:
            size: one extent or a sequence of them. All ranks pass the same size in bytes.
            dtype: any dtype.
            device: None is the current CUDA device for a group with a backend for GPUs (NCCL), else the CPU.

        Raises:
            ValueError: a wrong size or dtype, or another device than in the first call. No peer is disturbed.
            DisagreementError: ranks ask for different sizes.
            PeerTimeout, PeerAborted: a peer is late or has failed.
            CaptureRefused: a CUDA graph is being captured and no block is free.
        """
        shape = _shape_of(size)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"dtype: expected a torch.dtype, got {dtype!r}")
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes > _MOST_BYTES:
            raise ValueError(f"size: expected at most {_MOST_BYTES} bytes, got {nbytes}, {shape} of {dtype}")
        device = resolve_device(self.group, device)
        mapped = None
        if nbytes == 0 or self.group.size() == 1 or device.type in self.maps_nothing_on:
            self.check()
        else:
            mapped = self.engine_on(device).run(
                "allocate", lambda engine: engine.blocks.allocate(nbytes), nbytes=nbytes
            )
        if mapped is None:
            return torch.empty(shape, dtype=dtype, device=device)
        tensor = mapped.view(dtype)
        return tensor if len(shape) == 1 else tensor.view(shape)

    def maps(self, tensor: torch.Tensor) -> bool:
        """Whether peers have mapped the memory of `tensor`, as is true of most tensors from `allocate`."""
        return self._engine is not None and self._engine.inside.block_of(tensor) >= 0

    @property
    def rail_bytes_sent(self) -> int:
        """Bytes of shards that this rank has sent to other nodes, over all operations so far."""
        return 0 if self._engine is None else self._engine.rail_bytes_sent

    @property
    def peer_bytes(self) -> int:
        """Bytes of memory that this rank holds for the object, and that peers map: blocks of `allocate`, staging and
        control memory, which the collectives of a group share. 0 before the first `allocate` or operation."""
        return held_bytes([self])

    def peer_buffers(self) -> list[PeerBuffer]:
        """The open blocks of that memory."""
        return [] if self._engine is None else self._engine.peer_buffers()

    def check(self) -> None:
        """Raises the first error of this object, if there is one. Costs no synchronisation."""
        if self._engine is not None:
            self._engine.check()
        elif self._closed:
            raise CommunicatorClosed("expected an open communicator, got a closed one")

    def abort(self, reason: str) -> None:
        """Ends the waits of all peers, which raise PeerAborted(rank, reason).

        Peers on this rank's node raise at once, those on other nodes within a second.
        """
        if self._engine is not None:
            self._engine.abort(reason)

    def close(self) -> None:
        """Releases the memory; tensors that are still alive keep theirs. Is not collective.

        Waits until everything that was enqueued is over. Works after a fault, and may be called again. A Work may still
        be waited for afterwards.
        """
        self._closed = True
        self._known.is_alone = False
        if self._engine is not None:
            self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        leave(self, error)

    def engine_on(self, device: torch.device) -> CollectiveEngine:
        """The engine, made at first use; ValueError if it is on another device."""
        with self._making:
            if self._engine is None:
                if self._closed:
                    raise CommunicatorClosed("expected an open communicator, got a closed one")
                self._engine = CollectiveEngine(
                    checked_group(self.group), device, self._num_buffers, self.path, self._sum_sms
                )
                if not (self._engine.rails.nodes or self._engine.has_ranges):
                    self._known.node = self._engine.inside
        if self._engine.device != device:
            raise ValueError(f"device: expected {self._engine.device} as in the first call, got {device}")
        return self._engine

    def _check_enqueued(self) -> None:
        """Raises the first error of operations that were enqueued, whether this object is open or closed."""
        if self._engine is not None:
            self._engine.check_enqueued()

    def _check_group(self, group: dist.ProcessGroup | None) -> None:
        if group is not None and group is not self.group:
            raise ValueError(f"group: expected {name_of(self.group)}, which this object serves, got {group}")

    def _run(self, operation: Callable[..., None], alone: Callable[..., object], *args: Any) -> None:
        """Runs operation(engine, *args), or alone(*args) in a group of one rank. args[0]: of the size of a shard."""
        if self.group.size() == 1:
            self.check()
            alone(*args)
        else:
            engine = self.engine_on(args[0].device)
            engine.run(self._name, operation, *args, nbytes=args[0].numel())
            engine.check()

    def _work(self, outputs: list[torch.Tensor], async_op: bool) -> CollectiveWork | None:
        """The Work of the operation that has just been called."""
        if not async_op:
            return None
        event, device = None, outputs[0].device
        if device.type == "cuda":
            event = torch.cuda.Event()
            event.record(caller_stream(device))
        return CollectiveWork(outputs, self._check_enqueued, event)


def _shape_of(size: int | Sequence[int]) -> tuple[int, ...]:
    """ValueError unless `size` is one extent or a sequence of them."""
    extents = size if isinstance(size, Sequence) and not isinstance(size, str) else (size,)
    try:
        if any(isinstance(extent, bool) for extent in extents):
            raise TypeError
        shape = tuple(operator.index(extent) for extent in extents)
    except TypeError:
        raise ValueError(f"size: expected an integer or a sequence of integers, got {size!r}") from None
    if any(extent < 0 for extent in shape):
        raise ValueError(f"size: expected no negative extent, got {shape}")
    return shape


def check_timeout(timeout: datetime.timedelta | None) -> None:
    """ValueError unless a Work can wait for `timeout`. A timedelta of 0 is none, as in torch.distributed."""
    if not isinstance(timeout, (datetime.timedelta, type(None))):
        raise ValueError(f"timeout: expected a timedelta, got {timeout!r}")
    if timeout is not None and timeout < datetime.timedelta():
        raise ValueError(f"timeout: expected a timedelta of at least 0, got {timeout.total_seconds():g} s")


class CollectiveWork(Work):
    """The `torch.distributed.Work` of an operation with ``async_op=True``.

    On GPUs the operation has been enqueued; on CPUs it is over. The work keeps the outputs alive and reports how the
    operation ended, also after the communicator has been closed.
    """

    def __init__(self, outputs: list[torch.Tensor], check: Callable[[], None], event: Any = None) -> None:
        """check: raises the communicator's first error. event: recorded behind the operation; None on CPUs."""
        super().__init__()
        self._outputs = outputs
        self._check = check
        self._event = event
        self._has_succeeded = event is None

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Orders the caller's stream after the operation. With a timeout the host waits, too, at most so long.

        Returns True. Raises the communicator's error as far as it is known, and PeerTimeout after the timeout.
        """
        check_timeout(timeout)
        if self._event is None:
            return True
        self._check()
        if timeout:
            deadline = time.monotonic() + timeout.total_seconds()
            while not self._event.query():
                self._check()
                if time.monotonic() > deadline:
                    raise PeerTimeout(f"wait: expected the operation to end within {timeout}, it has not", None, "wait")
                time.sleep(0.0005)
            self._check()
        caller_stream(self._outputs[0].device).wait_event(self._event)
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        """Whether the operation is over, with or without an error."""
        return self._event is None or bool(self._event.query())

    def is_success(self) -> bool:
        """Whether the operation is over and has its result."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> Exception | None:
        """The error that the operation ended with; None if it has none so far."""
        if self._has_succeeded:
            return None
        over = self.is_completed()
        try:
            self._check()
        except (EpPluginError, ValueError) as error:
            return error
        self._has_succeeded = over  # a later error is no fault of this operation
        return None

    def result(self) -> list[torch.Tensor]:
        return self._outputs

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A future of the outputs, completed on a stream ordered after the operation. Raises like `wait`."""
        self.wait()
        devices: list[int | str | torch.device] = [self._outputs[0].device] if self._event is not None else []
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future(devices=devices)
        future.set_result(self._outputs)
        return future
