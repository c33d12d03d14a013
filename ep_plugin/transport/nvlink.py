"""Maps memory between the GPUs of one node through PyTorch's symmetric memory.

PyTorch allocates, exports and maps the blocks. This module avoids its traps:

- PyTorch numbers the exchanges of handles per process, not per group: ranks that have exchanged different numbers of
  times wait for each other's keys for ever. Here a stand-in for the store pairs exchanges by turn, over our Exchange.
  So the numbers do not matter, and waits have a deadline and name the missing ranks.
- Handles are exchanged in a group of our own without a backend: the process group may be gloo, NCCL or any other.
- Each block is allocated by itself, and zeroed. Reuse from PyTorch's pool can pair different blocks.
- Releasing a block synchronises the device, and ends the process if the device is in an error. So only ``close``
  releases a block. After an error of the device, or without ``close``, the block stays for good.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import os
import socket
import threading
from collections.abc import Callable
from typing import Any, cast

import torch
from torch._C._distributed_c10d import ProcessGroup, Store, _register_process_group, _unregister_process_group

from ep_plugin import env
from ep_plugin.errors import EpPluginError, NotSupported, text_of
from ep_plugin.transport.exchange import Exchange
from ep_plugin.transport.peer import PeerMemory, attempt, raise_together
from ep_plugin.transport.topology import check_peer_access

_ALIGNMENT = 128

# PyTorch's handle exchange uses one socket and one counter per process.
_rendezvous_lock = threading.Lock()
_group_numbers = itertools.count()


class NvlinkMemory(PeerMemory):
    """Maps memory of the ranks of ``exchange`` on their GPUs. Ranks may share a GPU. PeerMemory states the contract.

    Raises:
        NotSupported: two of the GPUs cannot reach each other, or the process has switched PyTorch's symmetric memory to
            another backend than CUDA.
    """

    def __init__(self, exchange: Exchange, device: torch.device) -> None:
        if device.type != "cuda":
            raise ValueError(f"device: expected cuda, got {device}")
        if device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        super().__init__(exchange, device)
        check_peer_access(self._reports, self.node_map, exchange.ranks)
        _, error = attempt(_use_cuda_backend, device)
        raise_together(exchange, "choice of PyTorch's symmetric memory backend", error)
        # Ranks hand each other descriptors over sockets in this directory, and would hang if it differed.
        exchange.agree("TMPDIR", env.socket_directory())
        self._group = _HandleGroup(exchange)

    def close(self) -> None:
        super().close()
        self._group.close()

    def _map_blocks(self, nbytes: int, what: str) -> tuple[tuple[int, ...], Callable[[], None]]:
        with _rendezvous_lock, torch.cuda.device(self.device):
            block, error = attempt(_zeroed_block, nbytes, self.device, self._group.name)
            kept = _Kept(block)
            try:
                raise_together(self.exchange, f"allocation of {what} ({nbytes} bytes of GPU memory)", error)
                handle = self._rendezvous(block, what)
                kept.add(handle)
                ptrs = tuple(handle.buffer_ptrs)
                raise_together(self.exchange, f"mapping of {what}", self._fault_in(ptrs, block))
            except BaseException:
                del block  # held by `kept` alone, as it must be to be given back
                _release(kept, self.device)
                raise
        return ptrs, functools.partial(_release, kept, self.device)

    def _rendezvous(self, block: torch.Tensor, what: str) -> Any:
        """Returns the handle of the mapped blocks. A rank that fails aborts the exchange, in which its peers wait."""
        try:
            _remove_stale_socket()
            with env.symmetric_memory_variables():
                return _symmetric_memory().rendezvous(block, self._group.name)
        except EpPluginError:
            raise
        except (RuntimeError, OSError) as error:
            self.exchange.abort(f"mapping of {what} failed: {text_of(error)}")
            raise EpPluginError(f"rank {self.exchange.group_rank}: mapping of {what} failed: {error}") from error

    def _fault_in(self, ptrs: tuple[int, ...], block: torch.Tensor) -> Exception | None:
        """Returns an error if PyTorch returned wrong addresses."""
        listing = [hex(ptr) for ptr in ptrs]
        if len(ptrs) != self.exchange.size or ptrs[self.exchange.rank] != block.data_ptr():
            return EpPluginError(f"expected one address per rank and this rank's own among them, got {listing}")
        if not all(ptrs) or any(ptr % _ALIGNMENT for ptr in ptrs):
            return EpPluginError(f"expected addresses that are multiples of {_ALIGNMENT}, got {listing}")
        return None


class _HandleGroup:
    """Registers a process group, over a _HandleStore, that symmetric memory finds by ``name``."""

    def __init__(self, exchange: Exchange) -> None:
        self.name = cast(Any, f"ep_plugin/{exchange.name}/{next(_group_numbers)}")  # torch wants a type of its own
        self._store = _HandleStore(exchange)  # held here: torch keeps only the C++ half alive
        self._group = ProcessGroup(self._store, exchange.rank, exchange.size)
        self._group._set_group_name(self.name)
        _register_process_group(self.name, self._group)
        self._registered = True

    def close(self) -> None:
        if self._registered:
            self._registered = False
            with contextlib.suppress(RuntimeError):  # destroy_process_group() may have dropped all names already
                _unregister_process_group(self.name)


class _HandleStore(Store):
    """Serves one pattern of a store: every rank sets ``<step>/<its rank>`` and reads the keys of all ranks.

    ``set`` of a rank's own key is the exchange: it returns when every rank has set its key of that turn. The steps may
    have different names on the ranks. A barrier, ``add`` then ``wait``, is a turn of its own.
    """

    def __init__(self, exchange: Exchange) -> None:
        super().__init__()
        self._exchange = exchange
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes | str) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        step, _, last = key.rpartition("/")
        if last != str(self._exchange.rank):
            self._values[key] = data
            return
        turn = self._exchange.all_gather("exchange memory handles", data.hex())
        self._values = {f"{step}/{rank}": bytes.fromhex(text) for rank, text in enumerate(turn)}

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def add(self, key: str, amount: int) -> int:
        self._exchange.barrier("exchange memory handles: barrier")
        return self._exchange.size * amount

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def wait(self, keys: list[str], timeout: Any = None) -> None:
        if not self.check(keys):
            raise EpPluginError(f"symmetric memory asked for {keys} without setting its own key first")


class _Kept:
    """Keeps objects alive until ``drop``, also when this object is gone. Without ``drop`` they stay for good."""

    def __init__(self, first: Any) -> None:
        self._objects: list[Any] = [first]
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._objects))

    def add(self, another: Any) -> None:
        self._objects.append(another)

    def drop(self) -> None:
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(self._objects))
        while self._objects:
            self._objects.pop()  # the handle before the block that it was made of


def _zeroed_block(nbytes: int, device: torch.device, group_name: str) -> torch.Tensor:
    block = _symmetric_memory().empty_strided_p2p((nbytes,), (1,), torch.uint8, device, group_name)
    block.zero_()
    torch.cuda.current_stream(device).synchronize()
    return block


def _release(kept: _Kept, device: torch.device) -> None:
    """Releases the blocks, unless the device has failed: then the release would end the process."""
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return
    with torch.cuda.device(device):
        kept.drop()


def _use_cuda_backend(device: torch.device) -> None:
    """Makes PyTorch allocate by mapping memory itself, and not through another library."""
    backend = _symmetric_memory().get_backend(device)
    if backend is None:
        _symmetric_memory().set_backend("CUDA")
    elif backend != "CUDA":
        raise NotSupported(
            f"PyTorch's symmetric memory backend {backend} is not supported: expected CUDA, got {backend}, which this "
            "process has chosen by TORCH_SYMMMEM or set_backend"
        )


def _symmetric_memory() -> Any:
    try:
        from torch._C._distributed_c10d import _SymmetricMemory
    except ImportError as error:
        raise NotSupported(f"PyTorch {torch.__version__} has no symmetric memory: expected 2.11 or later") from error
    return _SymmetricMemory


def _remove_stale_socket() -> None:
    """Removes the socket of an earlier process with this process's id, which was killed."""
    path = f"{env.socket_directory()}/symm_mem-{os.getpid()}"
    if not os.path.exists(path):
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
