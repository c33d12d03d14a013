"""The engine of one SendReceive object: lanes inside a node, and the group's backend to other nodes.

Shapes: R ranks in the group, N nodes of G ranks each, R = N * G.

Messages between CPUs of different nodes. Both ends send each other a header and compare it with their own, so a
disagreement raises on both. Gloo matches a receive with a send by the tag, and ends the process of a rank that gets
more bytes than it expects. So the tag of data says how many bytes it has: a message goes in parts of 1 to 1023 bytes,
KiB, MiB or GiB, and only parts of equal size meet.
"""

from __future__ import annotations

import datetime
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ep_plugin import _C, env
from ep_plugin.collectives.control import take_set
from ep_plugin.errors import CommunicatorClosed, EpPluginError, NotSupported, PeerTimeout
from ep_plugin.runtime.base import running
from ep_plugin.runtime.faults import disagreement
from ep_plugin.runtime.group import GroupEngine
from ep_plugin.runtime.sms import budget_of
from ep_plugin.runtime.streams import CudaStreams, Streams, kernels_for, on_device
from ep_plugin.transport import open_memory, transport_for
from ep_plugin.transport.exchange import Exchange

_LONGEST_NS = 2**62
# A tag is _TAGS + [object][channel][unit][count], below 2**31. A count of 0 marks a header, of the sender or of the
# receiver.
_TAGS, _OBJECTS, _UNITS, _COUNTS = 2**30, 2**14, 4, 2**10
_OF_SENDER, _OF_RECEIVER = (0, 0), (1, 0)
_BYTES, _DTYPE = 0, 1  # fields on which both ends agree: MessageField of csrc
# Ranks compare positions in this list.
_DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
_DTYPE_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}
_DTYPE_BITS, _DIM_BITS = 8, 4  # of the number that stands for a dtype and an order of dimensions
# Of messages with CPUs of other nodes, the calls that were open when their object was closed.
_open_at_close: weakref.WeakKeyDictionary[dist.ProcessGroup, list[Transfers]] = weakref.WeakKeyDictionary()
# The objects in tags whose messages may still come: those in use, and those that closed before all was received.
_used_in_tags: weakref.WeakKeyDictionary[dist.ProcessGroup, set[int]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Posted:
    """One end of a message, as the caller has asked for it.

    Attributes:
        tensor: the caller's memory as uint8 ``[bytes]``. `dtype` is the caller's.
        order: the caller's dimensions from the outermost in memory to the innermost, ``()`` for a contiguous tensor.
        peer: the rank of the group at the other end.
        receives: whether this end receives.
    """

    tensor: torch.Tensor
    dtype: torch.dtype
    order: tuple[int, ...]
    peer: int
    channel: int
    receives: bool


@dataclass
class Transfer:
    """One send or receive of the group's backend, for `op`. header: it receives the peer's header into this tensor,
    int64 ``[2]``; None if it moves something else."""

    op: Posted
    work: dist.Work
    header: torch.Tensor | None = None


class Transfers:
    """The messages of one call with ranks of other nodes.

    Attributes:
        open: those that have not been waited for.
    """

    def __init__(self, engine: MessageEngine) -> None:
        self._engine: MessageEngine = weakref.proxy(engine)
        self.open: list[Transfer] = []
        self._waiting = threading.Lock()  # of the thread that waits. Gloo's second wait for a message would never end

    def wait(self, seconds: float | None) -> bool:
        """Waits until all are over; False if `seconds` have passed."""
        until = None if seconds is None else time.monotonic() + seconds
        if not self._waiting.acquire(timeout=-1 if seconds is None else seconds):
            return False
        try:
            while self.open:
                self._engine.check_transfers()
                self._engine.wait_for(self.open[0], until)
                self.open.pop(0)
        finally:
            self._waiting.release()
        return True

    def wait_for_sends(self) -> None:
        """Waits for what this rank sends, unless another thread waits."""
        if not self._waiting.acquire(blocking=False):
            return
        try:
            for one in self.open:
                if not one.op.receives:
                    self._engine.wait_for(one)
            self.open = [one for one in self.open if one.op.receives]
        finally:
            self._waiting.release()

    def is_over(self) -> bool:
        return all(one.work.is_completed() or self._engine.has_failed for one in self.open)

    def is_done(self) -> bool:
        return all(one.work.is_completed() and one.work.is_success() for one in self.open)


def leave_to_python(*given: Any) -> None:
    """Takes the place of `MessageEngine.start`, for calls that Python takes."""


class MessageEngine(GroupEngine):
    """The messages of one SendReceive object. Its construction is collective over `group`.

    Attributes:
        control: starts messages inside the node, and waits for all messages, in C.
        start: starts the messages of a call. Its arguments are, for each of them, whether it receives, the tensor, the
            other rank and the channel. It returns None for a call that Python must take: one that is wrong, or has
            messages to this rank or to other nodes, or tensors that are not contiguous or not plain memory.
    """

    in_order = False
    _in_tags = -1
    """The object in the tags of messages between CPUs of different nodes."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, num_channels: int) -> None:
        self.num_channels = num_channels
        self._group = group
        super().__init__(Exchange(group), device, group)

    def _construct(self, group: dist.ProcessGroup) -> None:
        transport_for(self.device)
        self.kernels = kernels_for(self.device)
        mine = f"{self.device.type}, {self.num_channels}, torch {torch.__version__}"
        self.exchange.agree("the device, num_channels and version of torch", mine)
        super()._construct(group)

    def _agree_on_tags(self) -> int:
        """Returns the object in the tags of this one, the same on all ranks. No message of another can meet them.

        Each rank sends the numbers that it knows to be in use: those of open objects, and of closed ones whose messages
        were not all received. So the exchange grows with the ranks times these objects, not with those closed in order.
        """
        known = _used_in_tags.setdefault(self._group, set())
        used = {number for one in self.exchange.all_gather("choose tags", sorted(known)) for number in one}
        first = self.exchange.number
        free = (number % _OBJECTS for number in range(first, first + _OBJECTS) if number % _OBJECTS not in used)
        found = next(free, None)
        if found is None:
            raise NotSupported(
                f"{self.name}: expected fewer than {_OBJECTS} SendReceive objects of the group to be open, or to have "
                f"been closed before their messages were received, got {len(used)}; make another group"
            )
        known.add(found)
        return found

    def _construct_node(self) -> None:
        by_kernels = _moves_by_kernels(self.device)
        self.memory = self._own(open_memory(self.within, self.device))
        control = take_set(self._group, self.within, self.memory)  # lanes are used in place of its block
        self._resources.callback(control.close)
        self.shared = control.buffers
        self._make_boards(control.board)
        memory_bytes = _C.device_message_memory_bytes if by_kernels else _C.message_memory_bytes
        block = self.memory.allocate(memory_bytes(self.node_size, self.num_channels), "messages")
        plain = env.settings().plain_kernels
        self.comm = self._comm_struct(block.ptrs, num_experts=self.node_size, plain=plain)
        queue: _C.MessageQueue
        if by_kernels:
            self.streams = CudaStreams(self.device)
            queue = _C.GpuMessages(self.comm, self.boards.address, budget_of(self.device), self.device.index)
        else:
            self.streams = Streams()
            queue = _C.CpuMessages(self.comm, list(block.ptrs), self.num_channels)
        if self.device.type == "cpu" and self.rails.nodes:
            self._in_tags = self._agree_on_tags()
        self._places = {rank: index for index, rank in enumerate(self.node_ranks)}
        others = self._places | {self.rank: -1}
        self.control = _C.Messages(
            self,
            running,
            self.device,
            self.call_log,
            self.name,
            self.boards.address,
            -1 if self.device.type == "cpu" else self.device.index,
            self.comm,
            queue,
            [others.get(rank, -1) for rank in range(self.size)],
            self.num_channels,
            by_kernels,
            _DTYPE_CODES,
        )
        self.start: Callable[..., _C.StartedMessages | None] = (
            self.control.start_function() if self.is_direct else leave_to_python
        )
        # Also at the end of the process: its thread must not use tensors that the interpreter frees.
        self._resources.callback(weakref.finalize(self, self.control.close))
        self._resources.callback(self._let_go)

    def post(self, ops: Sequence[Posted]) -> _C.StartedMessages:
        """Starts the operations."""
        # Memory is kept first, since an operation may raise when others have begun.
        started = self.control.keep(self.last_call, [op.tensor.untyped_storage() for op in ops])
        if others := [op for op in ops if op.peer not in self._places]:
            started.transfers = Transfers(self)
            self._post_to_nodes(others, started.transfers)
        self.control.post(started, [self._message(op) for op in ops if op.peer in self._places])
        return started

    def _message(self, op: Posted) -> _C.Message:
        return _C.Message(
            peer=self._places[op.peer],
            channel=op.channel,
            receives=op.receives,
            data=op.tensor.data_ptr(),
            bytes=op.tensor.numel(),
            dtype=_dtype_and_order(op),
        )

    def _post_to_nodes(self, ops: Sequence[Posted], transfers: Transfers) -> None:
        """Starts messages with ranks of other nodes. NCCL has no tags: the messages of one call move together. Their
        ends compare nothing, because the host would have to wait for the headers."""
        if self.device.type == "cuda":
            calls = [
                dist.P2POp(dist.irecv if op.receives else dist.isend, op.tensor, group=self._group, group_peer=op.peer)
                for op in ops
            ]
            transfers.open += [Transfer(ops[0], work) for work in dist.batch_isend_irecv(calls)]
            return
        for op in ops:
            mine = torch.tensor(self._header(op), device="cpu")
            theirs = torch.empty_like(mine)
            tags = (_OF_RECEIVER, _OF_SENDER) if op.receives else (_OF_SENDER, _OF_RECEIVER)
            # The receive goes first: when the peer gets this rank's header, its own is on its way.
            transfers.open.append(Transfer(op, self._transfer(op, theirs, True, tags[1]), theirs))
            transfers.open.append(Transfer(op, self._transfer(op, mine, False, tags[0])))
            for part, tag in _parts(op.tensor):
                transfers.open.append(Transfer(op, self._transfer(op, part, op.receives, tag)))
        transfers.open.sort(key=lambda one: one.header is None)  # data arrives only if the ends agree

    def _transfer(self, op: Posted, tensor: torch.Tensor, receives: bool, place: tuple[int, int]) -> dist.Work:
        """place: the unit and the count of the tag."""
        lane = self._in_tags * _C.max_message_channels + op.channel
        tag = _TAGS + (lane * _UNITS + place[0]) * _COUNTS + place[1]
        begin, peer = (dist.irecv, "group_src") if receives else (dist.isend, "group_dst")
        work = begin(tensor, group=self._group, tag=tag, **{peer: op.peer})
        assert work is not None
        return work

    def wait(self, started: _C.StartedMessages, timeout: datetime.timedelta | None) -> bool:
        """Waits until the operations are over; False if `timeout` has passed. Raises if one has failed. On GPUs the
        caller's stream waits, and the host only with a timeout."""
        limit = 0 if not timeout else min(max(1, int(timeout.total_seconds() * 1e9)), _LONGEST_NS)
        with on_device(self.device), self.ranged("send-receive", "wait", started.nbytes):
            return bool(started.wait(limit))

    def close(self) -> None:
        if self.control.is_waiting:  # a signal handler's call: the wait below it uses the memory
            self._to_close = True
            return self.abort("closed by a signal handler during a wait")
        super().close()

    def is_over(self, started: _C.StartedMessages) -> bool:
        if self._is_copy:
            self.check()
        return started.is_over() and (started.transfers is None or started.transfers.is_over())

    def is_done(self, started: _C.StartedMessages) -> bool:
        if self._is_copy:
            self.check()
        return started.is_done() and (started.transfers is None or started.transfers.is_done())

    @property
    def has_failed(self) -> bool:
        return self._error is not None

    def check_transfers(self) -> None:
        """Raises the error of messages that have failed, if there is one."""
        if self.closed or self.has_failed:
            raise self.error()

    def error(self) -> Exception:
        """The error of messages that have failed."""
        try:
            self.check_enqueued()
        except (EpPluginError, ValueError) as error:
            return error
        return CommunicatorClosed(f"{self.name}: closed before its messages were over")

    def described(self, field: int, value: int) -> tuple[str, str]:
        if field == _BYTES:
            return "bytes of the message", str(value)
        code, digits = value & (1 << _DTYPE_BITS) - 1, value >> _DTYPE_BITS
        if value < 0 or code >= len(_DTYPES):
            return "dtype", f"number {value}"
        order: list[int] = []
        while digits:
            order.insert(0, digits % (1 << _DIM_BITS) - 1)
            digits >>= _DIM_BITS
        return "dtype", f"{_DTYPES[code]}" + (f" with dimensions in the order {order}" if order else "")

    def is_on_this_node(self, peer: int) -> bool:
        return peer in self._places

    def _header(self, op: Posted) -> list[int]:
        """What both ends of a message compare: each field in its place."""
        return [op.tensor.numel(), _dtype_and_order(op)]

    def wait_for(self, transfer: Transfer, until: float | None = None) -> None:
        """until: a time.monotonic(); None: the group's timeout."""
        op, work = transfer.op, transfer.work
        seconds = self.timeout_s if until is None else max(1e-3, until - time.monotonic())
        try:
            if self.device.type == "cuda" and until is None:
                work.wait()  # with a time, the host would wait
            else:
                work.wait(datetime.timedelta(seconds=seconds))
        except RuntimeError as error:
            said = f"rank {self.rank} waited for rank {op.peer} of another node at step send-receive: {error}"
            late = PeerTimeout(f"{self.name}: {said}", op.peer, "send-receive")
            self.raise_of_rail(late)  # a failure on another node may be known
        if transfer.header is not None:
            for of, (mine, theirs) in enumerate(zip(self._header(op), transfer.header.tolist(), strict=True)):
                if mine != theirs:
                    raise disagreement(self, "send-receive", op.peer, of, mine, theirs)

    def _transfers(self) -> list[Transfers]:
        return [started.transfers for started in self.control.kept() if started.transfers is not None]

    def _let_go(self) -> None:
        """Hands the open messages with CPUs of other nodes to their group, which keeps their tensors: if data came for
        a receive that is gone, gloo would move nothing more between the two ranks."""
        if self.device.type == "cpu":
            open_ones = [one for one in self._transfers() if one.open]
            _open_at_close.setdefault(self._group, []).extend(open_ones)
            if not open_ones and self._error is None:
                _used_in_tags.get(self._group, set()).discard(self._in_tags)

    def _drained(self) -> Exception | None:
        if self._error is None and self.boards.quiet():
            self.control.wait_for_sends()
            try:
                for one in self._transfers():
                    one.wait_for_sends()
            except EpPluginError as error:
                return error
        return super()._drained()

    def settle(self) -> None:
        """Does nothing: messages that an earlier call has started go on."""

    def record(self, *tensors: Any) -> None: ...


def _parts(data: torch.Tensor) -> Iterator[tuple[torch.Tensor, tuple[int, int]]]:
    """The parts of `data`, uint8 ``[bytes]``, each with the unit (0: bytes, 1: KiB, 2: MiB, 3: GiB) and the count of
    its size."""
    begin = 0
    for unit in reversed(range(_UNITS)):
        unit_bytes = _COUNTS**unit
        while count := min((len(data) - begin) // unit_bytes, _COUNTS - 1):
            yield data[begin : begin + count * unit_bytes], (unit, count)
            begin += count * unit_bytes


def _dtype_and_order(op: Posted) -> int:
    digits = 0
    for dim in op.order:
        digits = digits << _DIM_BITS | dim + 1
    return digits << _DTYPE_BITS | _DTYPE_CODES[op.dtype]


def _moves_by_kernels(device: torch.device) -> bool:
    return device.type == "cuda"
