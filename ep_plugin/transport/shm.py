"""Peer memory between processes of one host: anonymous shared memory that every rank maps.

A block is an unnamed file in memory (memfd) that peers open through /proc/<pid>/fd. The kernel frees it with its last
mapping, also when processes are killed. Where a rank may not open another's files (other process namespaces, other
users), all ranks use named shared memory. They remove the names as soon as everyone has mapped the blocks. Names that a
crash before that leaves behind are removed by the survivors, or by the next process that allocates. Space is reserved
before it is mapped: a full machine is then an error, not a SIGBUS in the middle of a copy.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import glob
import mmap
import os
import re
import secrets
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ep_plugin.transport.exchange import Exchange
from ep_plugin.transport.peer import PeerMemory, attempt, raise_together, undo_on_error

_DIRECTORY = "/dev/shm"
_PREFIX = "ep_plugin-"
_CGROUP_ROOT = "/sys/fs/cgroup"
_CGROUPS_OF_PROCESS = "/proc/self/cgroup"
_CGROUP_V2 = ("memory.max", "memory.current", "inactive_file")
_CGROUP_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_MAP_FAILED = ctypes.c_void_p(-1).value

# The C library's own calls: mmap.mmap would hold a descriptor per mapping, and unmap when it is garbage-collected.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


@dataclass(frozen=True, kw_only=True)
class _Block:
    """This rank's own block until its peers have mapped it."""

    fd: int
    path: str
    token: str

    def close(self) -> None:
        """Gives up the descriptor and the name, if it has one; mappings stay."""
        with contextlib.suppress(OSError):
            if self.path.startswith(_DIRECTORY):
                os.unlink(self.path)
        with contextlib.suppress(OSError):
            os.close(self.fd)


class ShmMemory(PeerMemory):
    """Shared memory of the ranks of ``exchange``, all on one host. See PeerMemory for the contract."""

    def __init__(self, exchange: Exchange) -> None:
        import torch

        super().__init__(exchange, torch.device("cpu"))
        self._named = False

    def _map_blocks(self, nbytes: int, what: str) -> tuple[tuple[int, ...], Callable[[], None]]:
        ptrs = None if self._named else self._share(nbytes, what, _create_anonymous)
        if ptrs is None:
            self._named = True
            try:
                ptrs = self._share(nbytes, what, _create_named)
            except BaseException:
                _sweep()
                raise
            assert ptrs is not None
        return tuple(ptrs), functools.partial(_unmap, ptrs, nbytes)

    def _share(self, nbytes: int, what: str, create: Callable[[int], _Block]) -> list[int] | None:
        """The addresses of all ranks' blocks here; None, on all ranks, if some rank cannot use unnamed blocks."""
        exchange, unnamed = self.exchange, create is _create_anonymous
        step = f"allocation of {what} ({nbytes} bytes of shared memory per rank)"
        _, error = attempt(_check_available, nbytes * exchange.size)
        raise_together(exchange, step, error)  # before any rank reserves its part
        block, error = attempt(create, nbytes)
        with undo_on_error() as mapped, contextlib.closing(block) if block else contextlib.nullcontext():
            if unnamed and _is_refusal(error):
                error = None  # peers find no offer, and all ranks use names
            offers = raise_together(exchange, step, error, None if block is None else [block.path, block.token])
            ptrs, error = attempt(_map_all, offers, exchange.ranks, nbytes)
            mapped.callback(_unmap, ptrs or [], nbytes)
            if not unnamed:
                raise_together(exchange, f"mapping of {what}", error)
            elif any(exchange.all_gather(f"map unnamed {what}", error is not None)):
                mapped.close()
                return None
        return ptrs


def _create_anonymous(nbytes: int) -> _Block:
    token = secrets.token_hex(8)
    fd = os.memfd_create(_PREFIX + token, os.MFD_CLOEXEC)
    with undo_on_error() as made:
        made.callback(os.close, fd)
        _reserve(fd, nbytes)
    return _Block(fd=fd, path=f"/proc/{os.getpid()}/fd/{fd}", token=token)


def _create_named(nbytes: int) -> _Block:
    """A named block, locked by this process for as long as it has its name."""
    _sweep()
    while True:
        token = secrets.token_hex(8)
        path = f"{_DIRECTORY}/{_PREFIX}{token}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        block = _Block(fd=fd, path=path, token=token)
        with undo_on_error() as made:
            made.callback(block.close)
            fcntl.flock(fd, fcntl.LOCK_EX)
            # A peer's sweep may have come between the two calls and taken the file for an orphan.
            if os.fstat(fd).st_nlink > 0:
                _reserve(fd, nbytes)
                return block
        os.close(fd)


def _check_available(nbytes: int) -> None:
    """Raises MemoryError when the machine has less. The kernel would not refuse: it would kill processes for memory."""
    available = min(_machine_available(), _container_available())
    if nbytes > available:
        raise MemoryError(f"expected at most the {available} bytes that this machine has available, got {nbytes}")


def available_bytes() -> tuple[int, int]:
    """The bytes that are available on this machine, and to this process's container. sys.maxsize: not known."""
    return _machine_available(), _container_available()


def try_block(nbytes: int) -> OSError | None:
    """Makes and releases a block of this process, as an allocation does.

    Returns:
        None for unnamed memory. If that is refused and named memory works, the refusal.

    Raises:
        MemoryError, OSError: neither kind of memory can be had.
    """
    _check_available(nbytes)
    block, error = attempt(_create_anonymous, nbytes)
    if error is not None:
        if not (isinstance(error, OSError) and _is_refusal(error)):
            raise error
        block = _create_named(nbytes)
    assert block is not None
    block.close()
    return error


def _machine_available() -> int:
    try:
        with open("/proc/meminfo") as file:
            fields = dict(line.split(":", 1) for line in file)
        return sum(int(fields[name].split()[0]) * 1024 for name in ("MemAvailable", "SwapFree"))
    except (OSError, KeyError):
        return sys.maxsize


def _container_available() -> int:
    """The bytes that this process's memory cgroup and those above it leave it. File caches count as free.

    A cgroup whose files cannot be read sets no limit. In a container the path may be the host's: then only the root of
    the hierarchy can be read, which is the container's own cgroup.
    """
    try:
        lines = _read_text(_CGROUPS_OF_PROCESS).splitlines()
    except OSError:
        lines = ["0::/"]
    left = sys.maxsize
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            mount, files = _CGROUP_ROOT, _CGROUP_V2
        elif "memory" in controllers.split(","):
            mount, files = f"{_CGROUP_ROOT}/memory", _CGROUP_V1
        else:
            continue
        parts = [part for part in path.split("/") if part]
        for depth in range(len(parts), -1, -1):
            left = min(left, _cgroup_available("/".join([mount, *parts[:depth]]), *files))
    return left


def _cgroup_available(directory: str, limit: str, usage: str, cache: str) -> int:
    try:
        most, used, counters = (_read_text(f"{directory}/{name}") for name in (limit, usage, "memory.stat"))
        cached = dict(line.split() for line in counters.splitlines())[cache]
        return int(most) - int(used) + int(cached)
    except (OSError, KeyError, ValueError):  # not there, or "max"
        return sys.maxsize


def _read_text(path: str) -> str:
    with open(path) as file:
        return file.read().strip()


def _reserve(fd: int, nbytes: int) -> None:
    os.ftruncate(fd, nbytes)
    os.posix_fallocate(fd, 0, nbytes)


def _map_all(offers: list[Any], ranks: Sequence[int], nbytes: int) -> list[int]:
    """Maps the blocks of all ranks. OSError if one cannot be mapped; nothing stays mapped then."""
    ptrs: list[int] = []
    with undo_on_error() as mapped:
        mapped.callback(_unmap, ptrs, nbytes)
        for rank, offer in zip(ranks, offers, strict=True):
            if offer is None:
                raise PermissionError(f"rank {rank} cannot make unnamed shared memory")
            with _opened(offer, nbytes) as fd:
                ptr = _libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
            if ptr == _MAP_FAILED:
                code = ctypes.get_errno()
                raise OSError(code, os.strerror(code))
            ptrs.append(ptr)
    return ptrs


@contextlib.contextmanager
def _opened(offer: Any, nbytes: int) -> Iterator[int]:
    """The descriptor of a peer's block of `nbytes` bytes, from its offer: a path and a token.

    PermissionError unless it is the peer's. The offer comes from a store, and elsewhere the peer's process id may be
    another process.
    """
    if not (isinstance(offer, list) and len(offer) == 2 and all(isinstance(text, str) for text in offer)):
        raise PermissionError(f"expected a path and a token, got {offer!r}")
    path, token = offer
    if not re.fullmatch("[0-9a-f]{16}", token):
        raise PermissionError(f"token: expected 16 hexadecimal digits, got {token!r}")
    name = f"{_DIRECTORY}/{_PREFIX}{token}"
    anonymous = re.fullmatch("/proc/[0-9]+/fd/[0-9]+", path) is not None
    if anonymous:
        # Opening a special file may have effects, so look first. The link itself must be followed.
        target = os.readlink(path)
        if target != f"/memfd:{_PREFIX}{token} (deleted)":
            raise PermissionError(f"{path} is {target}, not the peer's block")
    elif path != name:
        raise PermissionError(f"expected {name} or a descriptor in /proc, got {path!r}")
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | (0 if anonymous else os.O_NOFOLLOW))
    try:
        if anonymous and os.readlink(f"/proc/self/fd/{fd}") != target:  # the descriptor was reused in between
            raise PermissionError(f"{path} is no longer the peer's block")
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_size != nbytes or found.st_uid != os.geteuid():
            raise PermissionError(
                f"{path}: expected a regular file of {nbytes} bytes of user {os.geteuid()}, got mode "
                f"{found.st_mode:o}, {found.st_size} bytes, user {found.st_uid}"
            )
        yield fd
    finally:
        os.close(fd)


def _unmap(ptrs: list[int], nbytes: int) -> None:
    for ptr in ptrs:
        _libc.munmap(ptr, nbytes)


def _sweep() -> None:
    """Removes names whose owners died before everyone had mapped their blocks: a live owner holds a lock.

    Any user may put links, pipes and devices into the folder. They stay as they are.
    """
    for path in glob.glob(f"{_DIRECTORY}/{_PREFIX}*"):
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                if stat.S_ISREG(os.fstat(fd).st_mode):
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(path)
            finally:
                os.close(fd)


def _is_refusal(error: Exception | None) -> bool:
    """Whether the error says that this process cannot have unnamed memory at all, however little."""
    return isinstance(error, OSError) and error.errno in (errno.EPERM, errno.EACCES, errno.ENOSYS)
