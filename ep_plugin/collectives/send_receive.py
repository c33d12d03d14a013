"""SendReceive: messages between two ranks of a group.

Inside a node a message goes through a lane in the receiver's memory, one lane for each source and channel. To ranks of
other nodes it goes through the group's own backend.
"""

from __future__ import annotations

import datetime
import itertools
import operator
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch.distributed.distributed_c10d import Work

from ep_plugin import _C
from ep_plugin.collectives.base import check_timeout
from ep_plugin.collectives.messages import MessageEngine, Posted, leave_to_python
from ep_plugin.collectives.shards import as_bytes_in_order
from ep_plugin.counts import held_bytes
from ep_plugin.errors import CommunicatorClosed, PeerTimeout
from ep_plugin.runtime.base import leave
from ep_plugin.runtime.streams import resolve_device
from ep_plugin.transport.groups import Group, checked_group
from ep_plugin.transport.peer import PeerBuffer


@dataclass(frozen=True, eq=False)
class Send:
    """Sends `tensor`, of any dtype, to the rank `dst` of the group. SendReceive says which strides it may have."""

    tensor: torch.Tensor
    dst: int
    channel: int = 0


@dataclass(frozen=True, eq=False)
class Receive:
    """Receives into `tensor` the message of the rank `src` of the group, which has as many bytes and the same dtype."""

    tensor: torch.Tensor
    src: int
    channel: int = 0


class SendReceive:
    """Send and receive over one process group. Ranks are ranks of the group.

    Operations return at once, and messages move on while the rank computes. A tensor that is sent must not change, and
    one that is received must not be read, before the operation's `Work` has been waited for. Messages of one source,
    destination and channel arrive in the order of their sends.

    Tensors are contiguous, or have no gaps and the same order of dimensions in memory at both ends, such as
    channels_last. Between GPUs of different nodes they must be contiguous.

    On GPUs an operation starts after what the caller's stream has then. A CUDA graph may capture operations of ranks of
    one node together with their `wait()`. Wait for all eager operations before a replay.

    Raises:
        ValueError: wrong arguments, before anything is sent.
        NotSupported: the GPUs of a node cannot reach each other.
        DisagreementError: the two ends of a message have different sizes, dtypes or orders of dimensions. Between GPUs
            of different nodes NCCL does not compare dtypes, and decides what different sizes do.
        PeerTimeout, PeerAborted: a peer is late or has failed. Every later call raises the same error, and only `close`
            works.
    """

    def __init__(
        self,
        group: Group = None,
        *,
        device: torch.device | str | None = None,
        num_channels: int = 2,
    ) -> None:
        """Collective: all ranks of the group make the object together.

        Args:
            group: as for HierarchicalAllGather. Its timeout is the deadline of every wait.
            device: of all tensors; None: the CUDA device for a group with a backend for GPUs, else the CPU.
            num_channels: the number of channels, at least 1. A lane takes 1 MiB of a CPU's memory once it is used, and
                8 MiB of a GPU's at once. Between GPUs of different nodes a channel does not keep messages apart: all
                messages of two ranks match in the order of the calls.
        """
        if isinstance(num_channels, bool) or not isinstance(num_channels, int):
            raise ValueError(f"num_channels: expected an integer, got {num_channels!r}")
        if not 1 <= num_channels <= _C.max_message_channels:
            raise ValueError(f"num_channels: expected 1 to {_C.max_message_channels}, got {num_channels}")
        self.group = checked_group(group)
        self.num_channels = num_channels
        self.device = resolve_device(self.group, device)
        self._closed = False
        self._engine = MessageEngine(self.group, self.device, num_channels) if self.group.size() > 1 else None
        self._start = leave_to_python if self._engine is None else self._engine.start

    @property
    def num_nodes(self) -> int:
        """The number of nodes that the group spans."""
        return 1 if self._engine is None else self._engine.node_map.num_nodes

    @property
    def peer_bytes(self) -> int:
        """Bytes of memory that this rank holds for the object, and that peers map: lanes, and control memory, which the
        collectives of a group share."""
        return held_bytes([self])

    def peer_buffers(self) -> list[PeerBuffer]:
        """The open blocks of that memory."""
        return [] if self._engine is None else self._engine.peer_buffers()

    def send(self, tensor: torch.Tensor, dst: int, channel: int = 0) -> MessageWork:
        """Sends `tensor` to rank `dst`. The `Work` is done when the tensor may change."""
        started = self._start(False, tensor, dst, channel)
        return self._batch([Send(tensor, dst, channel)]) if started is None else MessageWork([], self._engine, started)

    def receive(self, tensor: torch.Tensor, src: int, channel: int = 0) -> MessageWork:
        """Receives into `tensor` the next message of rank `src`."""
        started = self._start(True, tensor, src, channel)
        if started is None:
            return self._batch([Receive(tensor, src, channel)])
        return MessageWork([tensor], self._engine, started)

    def exchange(self, send: torch.Tensor, receive: torch.Tensor, dst: int, src: int, channel: int = 0) -> MessageWork:
        """Sends to rank `dst` and receives from rank `src`, both at once."""
        started = self._start(False, send, dst, channel, True, receive, src, channel)
        if started is None:
            return self._batch([Send(send, dst, channel), Receive(receive, src, channel)])
        return MessageWork([receive], self._engine, started)

    def batch(self, ops: Sequence[Send | Receive]) -> MessageWork:
        """Starts all operations; one `Work` for all of them. A message to this rank needs its receive in the batch."""
        if not isinstance(ops, Sequence):
            raise ValueError(f"ops: expected a sequence of Send and Receive, got {type(ops).__name__}")
        given: list[Any] = []
        for index, op in enumerate(ops):
            if isinstance(op, Receive):
                given += (True, op.tensor, op.src, op.channel)
            elif isinstance(op, Send):
                given += (False, op.tensor, op.dst, op.channel)
            else:
                raise ValueError(f"ops[{index}]: expected Send or Receive, got {type(op).__name__}")
        started = self._start(*given)
        if started is None:
            return self._batch(ops)
        return MessageWork([op.tensor for op in ops if isinstance(op, Receive)], self._engine, started)

    def _batch(self, ops: Sequence[Send | Receive]) -> MessageWork:
        """Does what `batch` does, for calls that C has left."""
        posted = [self._checked(f"ops[{index}]", op) for index, op in enumerate(ops)]
        own = [one for one in posted if one.peer == self.group.rank()]
        pairs = self._pairs(own)
        self.check()
        for source, destination in pairs:
            destination.tensor.copy_(source.tensor)
        others = [one for one in posted if one.peer != self.group.rank()]
        outputs = [op.tensor for op in ops if isinstance(op, Receive)]
        if self._engine is None or not others:
            return MessageWork(outputs)
        nbytes = sum(one.tensor.numel() for one in others)
        started = self._engine.run("send-receive", MessageEngine.post, others, nbytes=nbytes)
        return MessageWork(outputs, self._engine, started)

    def check(self) -> None:
        """Raises the first error of this object, if there is one."""
        if self._engine is not None:
            self._engine.check()
        elif self._closed:
            raise CommunicatorClosed("expected an open communicator, got a closed one")

    def abort(self, reason: str) -> None:
        """Ends the waits of the ranks of this node, which raise PeerAborted(rank, reason), and refuses later calls."""
        if self._engine is not None:
            self._engine.abort(reason)

    def close(self) -> None:
        """Waits until what this rank has sent is under way, and releases the memory. Receives that are open fail.

        Sends that make no progress for the group's timeout fail, too: a warning is logged, and their `Work` raises.
        """
        self._closed = True
        if self._engine is not None:
            self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        leave(self, error)

    def _checked(self, name: str, op: Send | Receive) -> Posted:
        """Returns the operation in the form that the engine takes. Raises ValueError if an argument is wrong."""
        if isinstance(op, Receive):
            end, rank, receives = "src", op.src, True
        else:
            end, rank, receives = "dst", op.dst, False
        if not isinstance(op.tensor, torch.Tensor):
            raise ValueError(f"{name}.tensor: expected a tensor, got {type(op.tensor).__name__}")
        if op.tensor.device != self.device:
            raise ValueError(f"{name}.tensor: expected device {self.device}, got {op.tensor.device}")
        peer = _index(f"{name}.{end}", rank, self.group.size())
        channel = _index(f"{name}.channel", op.channel, self.num_channels)
        tensor, order = as_bytes_in_order(f"{name}.tensor", op.tensor)
        if order and self.device.type == "cuda" and self._engine and not self._engine.is_on_this_node(peer):
            raise ValueError(
                f"{name}.tensor: expected a contiguous tensor in a message with rank {peer} of another node's GPU, got "
                f"strides {tuple(op.tensor.stride())}"
            )
        return Posted(tensor, op.tensor.dtype, order, peer, channel, receives)

    def _pairs(self, own: Sequence[Posted]) -> list[tuple[Posted, Posted]]:
        """Returns this rank's messages to itself, each with its receive. Raises ValueError unless all match."""
        sides: dict[int, tuple[list[Posted], list[Posted]]] = defaultdict(lambda: ([], []))
        for one in own:
            sides[one.channel][one.receives].append(one)
        pairs: list[tuple[Posted, Posted]] = []
        for channel, (sends, receives) in sides.items():
            if len(sends) != len(receives):
                raise ValueError(
                    f"ops: expected a receive in the batch for each send of rank {self.group.rank()} to itself, got "
                    f"{len(sends)} sends and {len(receives)} receives in channel {channel}"
                )
            pairs += zip(sends, receives, strict=True)
        for source, destination in pairs:
            if (len(source.tensor), source.dtype) != (len(destination.tensor), destination.dtype):
                raise ValueError(
                    f"ops: expected {len(source.tensor)} bytes of {source.dtype} in the receive of a message to this "
                    f"rank itself, got {len(destination.tensor)} of {destination.dtype}"
                )
            if source.order != destination.order:
                raise ValueError(
                    f"ops: expected the order of dimensions {source.order} in the receive of a message to this rank "
                    f"itself, got {destination.order}; () is contiguous"
                )
        for (source, _), (_, destination) in itertools.product(pairs, pairs):
            if shared := _shared_bytes(source.tensor, destination.tensor):
                raise ValueError(
                    "ops: expected a receive of a message to this rank itself in other memory than what is sent, got "
                    f"{shared} bytes in both"
                )
        return pairs


class MessageWork(Work):
    """The `torch.distributed.Work` of one call. It keeps the tensors alive until their messages are over."""

    def __init__(
        self,
        outputs: list[torch.Tensor],
        engine: MessageEngine | None = None,
        started: _C.StartedMessages | None = None,
    ) -> None:
        super().__init__()
        self._outputs, self._engine, self._started = outputs, engine, started

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Waits until the messages are over: at most `timeout`, else the group's timeout from their last progress. On
        GPUs the caller's stream waits, and the host only with a `timeout`: later calls raise what fails after that.

        Returns True. Raises PeerTimeout after either, and the communicator's error if the messages have failed. With
        ranks of other nodes the backend ends all its messages at `timeout`, so the communicator has failed then.
        """
        engine, started = self._engine, self._started
        if engine is None or started is None:
            check_timeout(timeout)
            return True
        arrived = started.wait(0) if timeout is None and engine.is_direct else None
        if arrived is None:
            check_timeout(timeout)
            arrived = engine.wait(started, timeout)
        if not arrived:
            raise PeerTimeout(f"wait: expected the messages to end within {timeout}, they have not", None, "wait")
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        """Whether the messages are over, with or without an error. Over gloo, to other nodes, they are after `wait`."""
        return self._engine is None or self._started is None or self._engine.is_over(self._started)

    def is_success(self) -> bool:
        """Whether the messages are over and have arrived."""
        return self._engine is None or self._started is None or self._engine.is_done(self._started)

    def exception(self) -> Exception | None:
        """The error that the messages ended with; None if they have none so far."""
        if self.is_success() or self._engine is None or not self.is_completed():
            return None
        return self._engine.error()

    def result(self) -> list[torch.Tensor]:
        """The tensors that receive, in the order of the operations."""
        return self._outputs

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A future of `result()`, completed. Waits, and raises like `wait`."""
        self.wait()
        devices: list[int | str | torch.device] = list({one.device for one in self._outputs if one.is_cuda})
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future(devices=devices)
        future.set_result(self._outputs)
        return future


def _shared_bytes(one: torch.Tensor, other: torch.Tensor) -> int:
    """Returns how many bytes of memory two uint8 ``[bytes]`` tensors share."""
    first, last = max(one.data_ptr(), other.data_ptr()), min(one.data_ptr() + len(one), other.data_ptr() + len(other))
    return max(0, last - first)


def _index(name: str, value: Any, count: int) -> int:
    """Returns `value` as an integer. Raises ValueError unless it is an integer from 0 to `count` - 1."""
    try:
        index = operator.index(value)
    except TypeError:
        index = -1
    if isinstance(value, bool) or not 0 <= index < count:
        raise ValueError(f"{name}: expected 0 to {count - 1}, got {value!r}")
    return index
