"""Connects the ranks of a rail by one backend of c10d, which all communicators of the process share.

Over gloo and NCCL the backend is our own. It is no group of torch.distributed: making a group may need every rank of
the job, for example where NCCL splits the largest communicator, and perhaps only the ranks of this group call us. A
failure breaks our connections, and the user's process group stays usable. Gloo uses the devices of the user's group,
and NCCL its configuration, so rows take the network that the job has chosen. Over any other backend a rail is the
user's group.

Communicators find a rail by its ranks. The ranks compare which rail they have, and make a new one together unless all
have the same. A rail that has failed is found no more, and all communicators that have it fail with it. A rail that
CUDA graphs may hold stays open for later communicators.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import datetime
import os
import threading
from collections.abc import Sequence
from queue import Empty
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ep_plugin.transport import nccl
from ep_plugin.transport.groups import backend_of
from ep_plugin.transport.progress import Progress
from ep_plugin.transport.threads import call_in_thread

_LAST_CALLS_S = 1.0  # how long the end of a rail waits for a thread that starts messages
_GRAPHS_S = 1.0  # how long the abort of a rail waits for CUDA graphs; kernels of NCCL end sooner


Message: TypeAlias = tuple[int, torch.Tensor, int, int, bool, int]
"""A message of the rail: a node, a contiguous uint8 tensor of one dimension, where the message begins in it, its bytes,
whether it is sent to the node or received from it, and a tag. Gloo matches messages by their tag. These are plain
tuples of whole tensors, so that a message costs no call of Python, and no view unless the backend needs one."""


class NotBegun(RuntimeError):
    """A message of a `node` has not begun."""

    def __init__(self, node: int, error: RuntimeError) -> None:
        super().__init__(str(error))
        self.node = node


class User(Protocol):
    """Is what a rail knows of a communicator that uses it."""

    def rail_ends(self, reason: str) -> None:
        """Is called, by any thread, when another user ends the rail. Messages that are under way then bring no data."""


class Rail:
    """Sends and receives over a backend of our own. A node is a rank of the backend.

    Attributes:
        ident: a name that is the same on all ranks of the rail, and that no other rail has.
        users: the communicators that have the rail; the last one closes it.
        gathers: whether `gather` uses more of the network's bandwidth than sends do.
        together: whether messages begin all together, after torch's current stream, which also waits for them.
        captures: whether a CUDA graph can capture the messages.
        held: whether CUDA graphs may have its operations. NCCL ends a communicator when the last of them is gone.
        progress: says which works the device has come to; None where the host waits.
        takes_shorter: whether a message may be shorter than its receiver expects.
    """

    def __init__(
        self, backend: Any, ident: str, progress: Progress | None = None, direct: nccl.Direct | None = None
    ) -> None:
        """direct: starts messages without the backend; None where only the backend can."""
        self._backend, self.ident, self.progress, self._direct = backend, ident, progress, direct
        self.users: set[User] = set()
        self.gathers = self.together = self.captures = progress is not None
        self.takes_shorter = progress is None  # gloo does
        self._ended = self.held = False

    def begin(self, messages: Sequence[Message], number: int = 0) -> list[Any]:
        """Begins the messages, and returns the work of each, or if they begin together one work for all.

        number: what the messages write while it is their turn (Progress.begin).

        RuntimeError when the backend refuses one or has ended.
        """
        if self._ended:
            raise _ended()
        if self._direct is not None:
            return [self._direct.begin(messages, number)]
        backend, together = self._backend, self.together
        works, node = [], -1
        if together:
            backend._start_coalescing()
        try:
            for node, tensor, begin, size, sent, tag in messages:
                part = [tensor.narrow(0, begin, size)]
                works.append(backend.send(part, node, tag) if sent else backend.recv(part, node, tag))
        except RuntimeError as error:
            if together:
                # A group of NCCL that stays open would swallow this thread's later calls, also the user's.
                with contextlib.suppress(RuntimeError):
                    backend._end_coalescing()
            raise NotBegun(node, error) from error
        return [nccl.OnStream(backend._end_coalescing())] if together else works

    def gather(self, everyones: torch.Tensor, part: torch.Tensor, number: int = 0) -> Any:
        """Begins to fill `everyones` with the `part` of every node, by node. number: as in `begin`."""
        if self._ended:
            raise _ended()
        if self._direct is not None:
            return self._direct.gather(everyones, part, number)
        work = self._backend._allgather_base(everyones, part)
        return nccl.OnStream(work) if self.together else work

    def interrupt(self, node: int, tag: int, user: User, reason: str) -> None:
        """Ends the waits of other threads and of streams, for `user`.

        Args:
            node: any other node.
            tag: a tag that no message has.
            user: the communicator that has failed.
            reason: is told to all other users.
        """
        if self.together:
            # Streams that wait go on then. First all other users are told that the data that follows is invalid.
            try:
                for other in list(self.users):
                    if other is not user and not self._ended:
                        other.rail_ends(reason)
            finally:
                self.abort()
            return
        # Only an overdue wait ends gloo's other waits: it closes all connections of its backend.
        with contextlib.suppress(RuntimeError):
            nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
            self._backend.recv([nothing], node, tag).wait(datetime.timedelta(milliseconds=1))

    def abort(self) -> None:
        self._end("abort")

    def close(self) -> None:
        """Closes the connections. Peers still receive what this rank has sent."""
        self._end("shutdown")

    def _end(self, how: str) -> None:
        if self._ended:
            return
        self._ended = True
        if self._direct is not None:
            self._direct.end(_LAST_CALLS_S)
        end = getattr(self._backend, how)
        with contextlib.suppress(RuntimeError, Empty):
            if self.held:
                call_in_thread(end).get(timeout=_GRAPHS_S)
            else:
                end()


def _ended() -> RuntimeError:
    return RuntimeError("the rail has ended, by a failure of a communicator that shares it")


class GroupRail:
    """Serves as a Rail, over the user's group. Communicators neither share nor close it."""

    gathers = captures = held = takes_shorter = False
    ident, progress = "", None

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int], together: bool) -> None:
        """ranks: for each node, the rank of the group that is on this rail."""
        self._group, self._ranks, self.together = group, ranks, together

    def begin(self, messages: Sequence[Message], number: int = 0) -> list[Any]:
        group, ranks = self._group, self._ranks
        if type(group) is dist.ProcessGroup and self.together:
            operations = [
                dist.P2POp(
                    dist.isend if sent else dist.irecv,
                    tensor.narrow(0, begin, size),
                    group=group,
                    tag=tag,
                    group_peer=ranks[node],
                )
                for node, tensor, begin, size, sent, tag in messages
            ]
            return list(dist.batch_isend_irecv(operations))
        # A class of Python has no backends below it, and batch_isend_irecv of PyTorch 2.15 asks for one.
        works = []
        for node, tensor, begin, size, sent, tag in messages:
            part = tensor.narrow(0, begin, size)
            try:
                if sent:
                    works.append(dist.isend(part, group=group, tag=tag, group_dst=ranks[node]))
                else:
                    works.append(dist.irecv(part, group=group, tag=tag, group_src=ranks[node]))
            except RuntimeError as error:
                raise NotBegun(node, error) from error
        return works

    def gather(self, everyones: torch.Tensor, part: torch.Tensor, number: int = 0) -> Any:
        raise NotImplementedError("a group's messages are sent and received")

    def interrupt(self, node: int, tag: int, user: User, reason: str) -> None:
        """Nothing here ends a wait before its deadline."""

    def close(self) -> None: ...


Key = tuple[tuple[int, ...], torch.device, str]
"""The ranks of a rail in the job, by node, the device whose memory crosses, and the name of the group's backend."""
_known: dict[Key, Rail] = {}  # the rails that a new communicator may find
_open: set[Rail] = set()
_of_the_parent: list[Rail] = []  # never closed by a forked child, which would talk in its parent's place
_lock = threading.RLock()


def find(key: Key, user: User) -> Rail | None:
    """Returns this process's rail, None if there is none. It has one more user, who must call `release`."""
    with _lock:
        rail = _known.get(key)
        if rail is not None:
            rail.users.add(user)
        return rail


def make(
    key: Key,
    user: User,
    group: dist.ProcessGroup,
    ranks: Sequence[int],
    node: int,
    ident: str,
    store: Any,
    timeout_s: float,
) -> Rail | GroupRail:
    """Makes a rail for one user, who must call `release`. Collective over the rail.

    Args:
        key: the key by which `find` finds the rail.
        user: the communicator that uses it.
        group: the user's process group.
        ranks: for each node, the rank of the group that is on this rail.
        node: the node of this rank.
        ident: a name that no other rail has.
        store: a store for this communicator alone.
        timeout_s: how long to wait for the other ranks.

    Raises:
        RuntimeError: the ranks cannot be connected.
    """
    device = key[1]
    rail = _connected(device, backend_of(group, device), len(ranks), node, ident, store, timeout_s)
    if rail is None:
        return GroupRail(group, ranks, together=device.type == "cuda")
    with _lock:
        rail.users.add(user)
        _known[key] = rail
        _open.add(rail)
    return rail


def drop(rail: Rail | GroupRail) -> None:
    """Makes later communicators not find this rail."""
    with _lock:
        for key, known in list(_known.items()):
            if known is rail:
                del _known[key]


def release(rail: Rail | GroupRail, user: User) -> None:
    """Gives a rail back, and closes it after its last user, unless CUDA graphs may hold it."""
    if isinstance(rail, GroupRail):
        return
    with _lock:
        rail.users.discard(user)
        if rail.users or rail.held:
            return
        drop(rail)
        _open.discard(rail)
    rail.close()


def _connected(
    device: torch.device, theirs: Any, num_nodes: int, node: int, ident: str, store: Any, timeout_s: float
) -> Rail | None:
    """Returns a rail over a backend like `theirs`, the user's, or None where a rail has to use the user's group."""
    theirs = getattr(theirs, "wrapped_pg", theirs)  # torch.distributed wraps it where it debugs
    store = c10d.PrefixStore(f"rail {ident}", store)
    kind = nccl.kind_of(theirs) if device.type == "cuda" else None
    if kind is not None:
        # A connection of its own to the store: a rank that is late blocks it.
        backend = nccl.connect(kind, store.clone(), node, num_nodes, nccl.options_like(theirs), device, timeout_s)
        # When it is connected, all ranks have read the keys, of which each class of PyTorch sets one.
        progress = Progress(device)
        direct = nccl.direct_of(backend, device, progress)
        progress.is_written = direct is not None
        rail = Rail(backend, ident, progress, direct)
        keys = ["0", "nccl2/nccl_storekey_0"] if node == 0 else []
    elif device.type == "cpu" and c10d.is_gloo_available() and isinstance(theirs, c10d.ProcessGroupGloo):
        options = _gloo_options(theirs, timeout_s)
        rail = Rail(c10d.ProcessGroupGloo(store, node, num_nodes, options), ident)
        _greet(rail, node, num_nodes, timeout_s)
        keys = [f"{number}/{node}" for number in range(len(options._devices))]
    else:
        return None
    with contextlib.suppress(RuntimeError):  # a store that cannot delete
        for key in keys:
            store.delete_key(key)
    return rail


def _gloo_options(theirs: Any, timeout_s: float) -> Any:
    kind: Any = c10d.ProcessGroupGloo
    options = kind._Options()
    options._devices = theirs.options._devices
    options._threads = 1  # sends and receives need none
    options._timeout = datetime.timedelta(seconds=timeout_s)
    return options


def _greet(rail: Rail, node: int, num_nodes: int, timeout_s: float) -> None:
    """Returns when all ranks are connected, and have read the keys by which they found each other."""
    messages = [
        ((node + step) % num_nodes, torch.zeros(1, dtype=torch.uint8, device="cpu"), 0, 1, sent, 0)
        for sent in (True, False)
        for step in range(1, num_nodes)
    ]
    for work in rail.begin(messages):
        work.wait(datetime.timedelta(seconds=timeout_s))


def _forget() -> None:
    global _lock
    _lock = threading.RLock()  # a thread that is not in the child may hold it
    _of_the_parent.extend(_open)
    _known.clear()
    _open.clear()


os.register_at_fork(after_in_child=_forget)


@atexit.register
def _abort_open() -> None:
    """Aborts the rails that are open when the process ends, since NCCL warns of communicators that are left.

    A shutdown could wait for dead peers.
    """
    for rail in list(_open):
        if rail.held:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(rail))  # its destructor would wait for graphs
        elif rail.together:
            rail.abort()
