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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from ep_plugin import _C, env
from ep_plugin.collectives.backends.messages import CudaMessages
from ep_plugin.collectives.control import take_set
from ep_plugin.errors import CommunicatorClosed, EpPluginError, NotSupported, PeerTimeout
from ep_plugin.runtime.faults import disagreement
from ep_plugin.runtime.group import GroupEngine
from ep_plugin.runtime.streams import LaneStreams, Streams, kernels_for
from ep_plugin.transport import open_memory, transport_for
from ep_plugin.transport.exchange import Exchange

_KEPT = 16  # with fewer calls, nobody looks for those that have finished
_OVERDUE = 3  # of _C.CpuMessages.wait
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
_open_at_close: weakref.WeakKeyDictionary[dist.ProcessGroup, list[Started]] = weakref.WeakKeyDictionary()
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


@dataclass
class Started:
    """The messages that one call has started.

    Attributes:
        tickets: the messages inside the node.
        transfers: what moves between nodes and has not been waited for.
        waiting: is held by the thread that waits for the transfers. Gloo's second wait for a message would never end.
    """

    call: _C.Call
    tickets: list[Any] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)
    waiting: Any = field(default_factory=threading.Lock)


class MessageEngine(GroupEngine):
    """The messages of one SendReceive object. Its construction is collective over `group`."""

    in_order = False
    _in_tags = -1
    """The object in the tags of messages between CPUs of different nodes."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, num_channels: int) -> None:
        self.num_channels = num_channels
        self._group = group
        self._kept: dict[int, tuple[Started, list[torch.Tensor]]] = {}
        self._sweep_at = _KEPT
        self._waiters: list[int] = []  # threads
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
        self.messages: Any
        if by_kernels:
            self.kernels.load_message_kernels()
            lanes = LaneStreams(self.device)
            self.streams, self.messages = lanes, CudaMessages(self, lanes)
        else:
            self.streams, self.messages = Streams(), _C.CpuMessages(self.comm, list(block.ptrs), self.num_channels)
        if self.device.type == "cpu" and self.rails.nodes:
            self._in_tags = self._agree_on_tags()
        self._resources.callback(self._let_go)
        # Also at the end of the process: its thread must not use tensors that the interpreter frees.
        self._resources.callback(weakref.finalize(self, self.messages.close))
        self._places = {rank: index for index, rank in enumerate(self.node_ranks)}

    def post(self, ops: Sequence[Posted]) -> Started:
        """Starts the operations."""
        started = Started(self.last_call)
        self._keep(started, [op.tensor for op in ops])  # first, since an operation may raise when others have begun
        self._post_to_nodes([op for op in ops if op.peer not in self._places], started)
        for op in sorted(ops, key=self._turn) if _moves_by_kernels(self.device) else ops:
            place = self._places.get(op.peer)
            if place is None:
                continue
            message = _C.Message(
                peer=place,
                channel=op.channel,
                receives=op.receives,
                data=op.tensor.data_ptr(),
                bytes=op.tensor.numel(),
                dtype=_dtype_and_order(op),
            )
            started.tickets.append(self.messages.post(message))
        return started

    def _post_to_nodes(self, ops: Sequence[Posted], started: Started) -> None:
        """Starts messages with ranks of other nodes. NCCL has no tags: the messages of one call move together. Their
        ends compare nothing, because the host would have to wait for the headers."""
        if self.device.type == "cuda":
            calls = [
                dist.P2POp(dist.irecv if op.receives else dist.isend, op.tensor, group=self._group, group_peer=op.peer)
                for op in ops
            ]
            started.transfers += [Transfer(ops[0], work) for work in dist.batch_isend_irecv(calls)] if ops else []
            return
        for op in ops:
            mine = torch.tensor(self._header(op), device="cpu")
            theirs = torch.empty_like(mine)
            tags = (_OF_RECEIVER, _OF_SENDER) if op.receives else (_OF_SENDER, _OF_RECEIVER)
            # The receive goes first: when the peer gets this rank's header, its own is on its way.
            started.transfers.append(Transfer(op, self._transfer(op, theirs, True, tags[1]), theirs))
            started.transfers.append(Transfer(op, self._transfer(op, mine, False, tags[0])))
            for part, tag in _parts(op.tensor):
                started.transfers.append(Transfer(op, self._transfer(op, part, op.receives, tag)))
        started.transfers.sort(key=lambda one: one.header is None)  # data arrives only if the ends agree

    def _transfer(self, op: Posted, tensor: torch.Tensor, receives: bool, place: tuple[int, int]) -> dist.Work:
        """place: the unit and the count of the tag."""
        lane = self._in_tags * _C.max_message_channels + op.channel
        tag = _TAGS + (lane * _UNITS + place[0]) * _COUNTS + place[1]
        begin, peer = (dist.irecv, "group_src") if receives else (dist.isend, "group_dst")
        work = begin(tensor, group=self._group, tag=tag, **{peer: op.peer})
        assert work is not None
        return work

    def wait(self, started: Started, timeout: datetime.timedelta | None) -> bool:
        """Waits until the operations are over; False if `timeout` has passed. Raises if one has failed. On GPUs the
        caller's stream waits, and the host only with a timeout."""
        if self._is_copy:
            self.check()
        self._waiters.append(threading.get_ident())
        call = self.call_log.begin("send-receive", "wait", started.call.nbytes, started.call)
        try:
            with self.ranged("send-receive", "wait", call.nbytes):
                arrived = self._wait_for_all(started, timeout)
            call.end()
            if not arrived:
                return False
        except BaseException as error:
            self._fail(error, "send-receive")
            raise
        finally:
            self._waiters.remove(threading.get_ident())
            if self._to_close:
                self.close()
        self._kept.pop(id(started), None)
        return True

    def _wait_for_all(self, started: Started, timeout: datetime.timedelta | None) -> bool:
        limit = 0 if not timeout else min(max(1, int(timeout.total_seconds() * 1e9)), _LONGEST_NS)
        until = time.monotonic() + limit / 1e9 if limit else None
        result = self.messages.wait(started.tickets, limit, self.comm.timeout_ns)
        if result == _OVERDUE:
            return False
        if result:
            raise self.error()
        if not started.waiting.acquire(timeout=-1 if until is None else max(0.0, until - time.monotonic())):
            return False
        try:
            while started.transfers:
                if self.closed or self._error is not None:
                    raise self.error()
                self._wait_for(started.transfers[0], until)
                started.transfers.pop(0)
        finally:
            started.waiting.release()
        return True

    def close(self) -> None:
        if threading.get_ident() in self._waiters:  # a signal handler's call: the wait below it uses the memory
            self._to_close = True
            return self.abort("closed by a signal handler during a wait")
        super().close()

    def is_over(self, started: Started) -> bool:
        if self._is_copy:
            self.check()
        return all(self.messages.is_over(ticket) for ticket in started.tickets) and all(
            one.work.is_completed() or self._error is not None for one in started.transfers
        )

    def is_done(self, started: Started) -> bool:
        if self._is_copy:
            self.check()
        return all(self.messages.is_done(ticket) for ticket in started.tickets) and all(
            one.work.is_completed() and one.work.is_success() for one in started.transfers
        )

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

    def _turn(self, op: Posted) -> tuple[int, int, bool, int]:
        """Returns the place of a message in an order that all ranks share.

        A GPU runs the kernels of a limited number of messages at a time. If all ranks start messages in one order, both
        ends of the first unfinished message have started it.
        """
        low, high = sorted((self.rank, op.peer))
        return low, high, op.receives == (self.rank == low), op.channel

    def _header(self, op: Posted) -> list[int]:
        """What both ends of a message compare: each field in its place."""
        return [op.tensor.numel(), _dtype_and_order(op)]

    def _wait_for(self, transfer: Transfer, until: float | None = None) -> None:
        """until: a time.monotonic(); None: the group's timeout."""
        op, work = transfer.op, transfer.work
        seconds = self.timeout_s if until is None else max(1e-3, until - time.monotonic())
        with self.on_rail():  # a failure on another node may be known
            try:
                if self.device.type == "cuda" and until is None:
                    work.wait()  # with a time, the host would wait
                else:
                    work.wait(datetime.timedelta(seconds=seconds))
            except RuntimeError as error:
                raise PeerTimeout(
                    f"{self.name}: rank {self.rank} waited for rank {op.peer} of another node at step send-receive: "
                    f"{error}",
                    op.peer,
                    "send-receive",
                ) from None
        if transfer.header is not None:
            for of, (mine, theirs) in enumerate(zip(self._header(op), transfer.header.tolist(), strict=True)):
                if mine != theirs:
                    raise disagreement(self, "send-receive", op.peer, of, mine, theirs)

    def _keep(self, started: Started, tensors: list[torch.Tensor]) -> None:
        """Keeps the tensors until their messages are over, also if nobody keeps the Work."""
        if len(self._kept) >= self._sweep_at and not self.streams.capturing():
            for key, (one, _) in list(self._kept.items()):
                if self.is_over(one):
                    self._kept.pop(key, None)
            self._sweep_at = max(_KEPT, 2 * len(self._kept))
        self._kept[id(started)] = started, tensors

    def _let_go(self) -> None:
        """Stops keeping tensors. Hands the open messages with CPUs of other nodes to their group, which keeps their
        tensors: if data came for a receive that is gone, gloo would move nothing more between the two ranks."""
        if self.device.type == "cpu":
            open_ones = [started for started, _ in self._kept.values() if started.transfers]
            _open_at_close.setdefault(self._group, []).extend(open_ones)
            if not open_ones and self._error is None:
                _used_in_tags.get(self._group, set()).discard(self._in_tags)
        self._kept.clear()

    def _drained(self) -> Exception | None:
        if self._error is None and self.boards.quiet():
            self.messages.wait_for_sends(self.comm.timeout_ns)
            for started, _ in list(self._kept.values()):
                if not started.waiting.acquire(blocking=False):  # another thread waits for them
                    continue
                try:
                    for one in started.transfers:
                        if not one.op.receives:
                            self._wait_for(one)
                    started.transfers = [one for one in started.transfers if one.op.receives]
                except EpPluginError as error:
                    return error
                finally:
                    started.waiting.release()
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
