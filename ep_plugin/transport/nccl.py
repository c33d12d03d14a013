"""What a rail needs of NCCL: a backend of PyTorch that connects its ranks, and messages started without it.

PyTorch has several classes of backends over NCCL. A rail makes one of the kind that the user's group has. Where PyTorch
names the backend's communicator, C calls the functions of the loaded NCCL (csrc/control/nccl_rail.h), which takes the
host a fifth of the time.
"""

from __future__ import annotations

import ctypes
import datetime
import functools
import os
from collections.abc import Sequence
from queue import Empty
from typing import Any, NamedTuple

import torch
from torch.distributed import distributed_c10d as c10d

from ep_plugin import _C, env
from ep_plugin.transport.progress import Progress
from ep_plugin.transport.threads import call_in_thread

MOST_CTAS = 8  # of a kernel of NCCL; dispatch and combine leave as many SMs to it
_NEVER_S = 24 * 3600.0  # PyTorch's watchdog would end the process
# PyTorch's backends over NCCL, and the backend that a rail makes where the user has it. ProcessGroupNCCLLazy connects
# each pair of ranks when they first exchange a message; a rail connects all of its ranks at once.
KINDS = {
    "ProcessGroupNCCL": "ProcessGroupNCCL",
    "ProcessGroupNCCL2": "ProcessGroupNCCL2",
    "ProcessGroupNCCLLazy": "ProcessGroupNCCL2",
}
FUNCTIONS = ("ncclGroupStart", "ncclGroupEnd", "ncclSend", "ncclRecv", "ncclAllGather", "ncclGetErrorString")


class OnStream(NamedTuple):
    """Wraps a work of NCCL, whose own `wait` would block the host, since the backend has no watchdog."""

    work: Any

    def wait(self) -> None:
        """Orders torch's current stream after the work."""
        self.work.synchronize()


class _Started(NamedTuple):
    """Messages that NCCL has started without PyTorch. It holds their memory."""

    direct: _C.NcclRail
    ticket: int
    device: torch.device
    tensors: Any

    def wait(self) -> None:
        """Orders torch's current stream after the messages."""
        self.direct.wait(self.ticket, _current_stream(self.device))


def kind_of(theirs: Any) -> Any | None:
    """Returns the class of PyTorch for a rail of a user's NCCL backend, None for any other backend."""
    for name, own in KINDS.items():
        if isinstance(theirs, getattr(c10d, name, ())):
            return getattr(c10d, own)
    return None


def options_like(theirs: Any) -> Any:
    """Returns the options of a rail's backend: those of the user's backend, with fewer CTAs and without a watchdog."""
    options: Any = c10d.ProcessGroupNCCL.Options()  # all classes take these
    options._timeout = datetime.timedelta(seconds=_NEVER_S)
    options.config = theirs.options.config
    options.config.blocking = 1  # NCCL's functions return when their work is enqueued
    if options.config.net_name is not None:
        options.config.net_name = options.config.net_name  # a copy, since NCCL may free a communicator's name
    asked = options.config.max_ctas
    options.config.max_ctas = min(asked, MOST_CTAS) if asked > 0 else MOST_CTAS  # below 1: not set
    options.config.min_ctas = min(options.config.min_ctas, options.config.max_ctas)
    return options


def connect(
    kind: Any, store: Any, node: int, num_nodes: int, options: Any, device: torch.device, timeout_s: float
) -> Any:
    """Makes a backend of class `kind`, and returns it when it is connected.

    Raises:
        RuntimeError: ranks do not come in time. NCCL itself would wait for them for ever.
    """

    def connected() -> Any:
        with torch.cuda.device(device):
            try:
                # From PyTorch 2.15 on ProcessGroupNCCL2 connects here, and without a device would choose one.
                backend = kind(store, node, num_nodes, options, device)
            except TypeError:  # of an older version or class, which takes no device
                backend = kind(store, node, num_nodes, options)
            backend.eager_connect_single_device(device)
            return backend

    try:
        with env.rail_variables():
            backend, error = call_in_thread(connected).get(timeout=timeout_s)
    except Empty:
        raise RuntimeError(f"NCCL has not connected within {timeout_s:g} s") from None
    if error is not None:
        raise error
    return backend


class Direct:
    """Starts messages on the communicator of a backend, without the backend."""

    def __init__(self, rail: _C.NcclRail, device: torch.device) -> None:
        self._rail, self._device = rail, device

    def begin(self, messages: Sequence[Any], number: int) -> _Started:
        """Begins the messages, as Rail.begin does."""
        given = [(node, tensor.data_ptr() + begin, size, sent) for node, tensor, begin, size, sent, _ in messages]
        return self._started(self._rail.start(_current_stream(self._device), number, given), messages)

    def gather(self, everyones: torch.Tensor, part: torch.Tensor, number: int) -> _Started:
        """Begins to fill `everyones`, as Rail.gather does."""
        given = _current_stream(self._device), number, part.data_ptr(), everyones.data_ptr(), part.numel()
        return self._started(self._rail.gather(*given), (everyones, part))

    def end(self, most_s: float) -> None:
        """Lets no message begin any more. Waits at most so long for a thread that begins some."""
        self._rail.end(most_s)

    def _started(self, ticket: int, tensors: Any) -> _Started:
        return _Started(self._rail, ticket, self._device, tensors)


def direct_of(backend: Any, device: torch.device, progress: Progress) -> Direct | None:
    """Returns what starts messages on the communicator of `backend` without it. None if PyTorch does not name the
    communicator, or if its NCCL cannot be found: then the backend starts them, in some five times as long."""
    named = getattr(backend, "_comm_ptr", None)
    functions = functions_of_nccl() if named is not None else None
    if named is None or functions is None:
        return None
    with torch.cuda.device(device):
        comm = named()
    if not comm:
        return None
    return Direct(_C.NcclRail(functions, comm, progress.stream, device.index, progress.word), device)


@functools.cache
def functions_of_nccl() -> list[int] | None:
    """Returns the addresses of the functions of PyTorch's NCCL, as csrc/control/nccl_rail.h orders them, or None."""
    try:
        loaded = ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        number = ctypes.c_int()
        if loaded.ncclGetVersion(ctypes.byref(number)) != 0 or number.value != version_of_nccl():
            return None  # PyTorch has one of its own
        return [ctypes.cast(getattr(loaded, name), ctypes.c_void_p).value or 0 for name in FUNCTIONS]
    except (OSError, AttributeError):
        return None


def version_of_nccl() -> int:
    """Returns the version of PyTorch's NCCL as NCCL numbers it, such as 22809."""
    major, minor, patch = torch.cuda.nccl.version()[:3]
    return major * 10000 + minor * 100 + patch


def _current_stream(device: torch.device) -> int:
    stream: int = torch._C._cuda_getCurrentRawStream(device.index)
    return stream
