"""Inside a node on GPUs: sums, and what gathers (cuda_gather.py) share with them.

Everything is enqueued on the caller's stream; the host waits for nothing. Operations of one communicator on several
streams follow each other in the order in which they are called. Gathers of SM_BELOW_BYTES and more go by copy engines,
which leave all SMs to the model; smaller ones, and sums, take a kernel of few CTAs, which is done sooner. Up to
SMALL_BYTES, of all ranks together, each word carries a flag.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from ep_plugin import _C
from ep_plugin.collectives.blocks import OperatingNode
from ep_plugin.collectives.shards import addresses_of
from ep_plugin.errors import CaptureRefused
from ep_plugin.runtime.base import stream_of
from ep_plugin.runtime.faults import disagreement
from ep_plugin.transport.peer import PeerBuffer

CONTROL_BYTES = _C.device_control_bytes
SM_BELOW_BYTES = 32 << 20  # gathered
SMALL_BYTES = _C.small_bytes  # gathered, or of the input that is scattered
_BYTES_PER_CTA = 16 << 10  # of a shard
# More of them store no faster, since links are full, and unevenly where they are no power of two.
_MOST_PUSH_CTAS = 64
_SMALL_BYTES_PER_CTA = 4 << 10  # to or from one peer
_SMALL_BYTES_IN_A_ROUND = 12 << 10  # two words for each thread of a CTA
MOST_KEPT = 256  # launches that a node remembers


def is_small(path: str, nbytes: int, node_size: int) -> bool:
    """Whether words with flags carry shards of `nbytes` bytes."""
    return path == "auto" and nbytes * node_size <= SMALL_BYTES


def small_ctas(nbytes: int, node_size: int) -> int:
    """CTAs of the kernel that exchanges shards of `nbytes` bytes as words with flags: as many for each peer, and no
    more than send the largest in one round."""
    most = -(-SMALL_BYTES // node_size // _SMALL_BYTES_IN_A_ROUND)
    return (node_size - 1) * max(1, min(most, nbytes // _SMALL_BYTES_PER_CTA))


def push_ctas(path: str, nbytes: int, node_size: int) -> int:
    """CTAs of the kernel that pushes shards of `nbytes` bytes; 0: copy engines do it."""
    if path == "copy_engine" or (path == "auto" and nbytes * node_size >= SM_BELOW_BYTES):
        return 0
    return max(1, min(_MOST_PUSH_CTAS, nbytes // _BYTES_PER_CTA))


def sum_sms_of(device: torch.device, asked: int) -> int:
    """SMs that sums may take of those `asked` for: a CTA of theirs has an SM to itself, and all of them run at once."""
    return min(asked, torch.cuda.get_device_properties(device).multi_processor_count)


def sum_ctas(nbytes: int, sum_sms: int) -> int:
    """CTAs of the kernel that sums shards of `nbytes` bytes, of which there may be `sum_sms`."""
    return max(1, min(sum_sms, nbytes // _BYTES_PER_CTA))


def gather_sms(path: str, nbytes: int, node_size: int) -> int:
    """SMs that a gather of shards of `nbytes` bytes takes, at most."""
    if is_small(path, nbytes, node_size):
        return small_ctas(nbytes, node_size)
    return push_ctas(path, nbytes, node_size)


def scatter_sms(path: str, nbytes: int, node_size: int, sum_sms: int) -> int:
    """The same of a sum, whose kernels for larger shards take no more than `sum_sms`."""
    return small_ctas(nbytes, node_size) if is_small(path, nbytes, node_size) else sum_ctas(nbytes, sum_sms)


class StreamLanes:
    """The caller's streams, one operation after the other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last: int | None = None

    def join(self) -> None: ...

    def drain(self) -> None:
        torch.cuda.synchronize(self._device)

    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def follow(self, earlier: int | None) -> int:
        """The caller's stream, which goes on after `earlier`. A stream that records a graph waits for none outside.

        Streams are their handles: to make PyTorch's object of one costs the host more than all else here.
        """
        current = stream_of(self._device)
        if earlier is None or earlier == current:
            return current
        if not self.capturing() or _C.stream_capture(earlier, self._device.index):
            torch.cuda.current_stream(self._device).wait_stream(self._stream(earlier))
        return current

    def _stream(self, handle: int) -> torch.cuda.Stream:
        if handle == 0:
            return torch.cuda.default_stream(self._device)
        return torch.cuda.ExternalStream(handle, self._device)

    def enter(self) -> int:
        """The caller's stream as kernels take it, after this communicator's earlier operations."""
        self._last = self.follow(self._last)
        return self._last


class Calls:
    """Ranks of a node compare, on their hosts, what they enqueue on their devices.

    Each rank posts its call, under a number that counts them, in host memory that all ranks map, and then looks for the
    peers' posts of that number. The rank that calls second compares, so no rank waits. It raises before it enqueues
    anything, and its abort ends what the others have enqueued. Making it is collective over the node.
    """

    def __init__(self, node: OperatingNode) -> None:
        self._node: Any = weakref.proxy(node)
        self._rings = (ctypes.c_int64 * node.node_size)(*node.posts.allocate(_C.call_ring_bytes, "calls").ptrs)
        self._who = (ctypes.addressof(self._rings), node.node_size, node.index)
        self._number = 0

    def compare(self, step: _C.Step, nbytes: int, element: int, place: int) -> None:
        """nbytes: of a shard. element: of a sum, 0 without. place: in peer memory, see place_word.

        Raises DisagreementError, naming this rank and the first whose call of this number says otherwise.
        """
        self._number += 1
        found = _C.post_call(*self._who, self._number, nbytes, element, place)
        if found is not None:
            raise disagreement(self._node, step.name.lower(), *found)


class CudaNode:
    """What the operations of one communicator inside a node have in common. Shards and outputs are uint8 ``[bytes]``,
    one for each rank of the node.

    What ranks pass is compared by the hosts as they call, and in graphs by the kernels; copy engines compare nothing.
    """

    def __init__(self, node: OperatingNode, lanes: StreamLanes) -> None:
        self._node: OperatingNode = weakref.proxy(node)
        self._lanes = lanes
        self._path = node.path
        self._calls = Calls(node)
        self._workspaces: dict[str, PeerBuffer] = {}

    @property
    def node(self) -> OperatingNode:
        return self._node

    def close(self) -> None: ...

    def _workspace(self, name: str, nbytes: int) -> tuple[int, ...]:
        """Where each rank's `name` lies, peer memory of `nbytes` that is made when the first operation needs it, which
        is collective then."""
        made = self._workspaces.get(name)
        if made is None:
            self._refuse_first_in_graph(name)
            made = self._workspaces[name] = self._node.memory.allocate(nbytes, name)
        return made.ptrs

    def _refuse_first_in_graph(self, name: str) -> None:
        """CaptureRefused where a CUDA graph's capture would have to make `name`; asked before anything is done."""
        if name not in self._workspaces and self._lanes.capturing():
            raise CaptureRefused(
                f"{self._node.name}: expected one operation of this kind, size and memory before a CUDA graph is "
                f"captured, got the first, which makes {name}"
            )

    def _is_small(self, nbytes: int) -> bool:
        return is_small(self._path, nbytes, self._node.node_size)

    def _exchange_words(
        self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], element: int, scale: float
    ) -> None:
        """inputs: this rank's shard for each rank. outputs: where theirs go, or this rank's sum. element -1: gather."""
        node, nbytes = self._node, inputs[0].numel()
        words = self._workspace("words", _C.small_words_bytes(node.node_size))
        args = _C.SmallArgs(
            comm=node.comm,
            bytes=nbytes,
            scale=scale,
            element=element,
            num_ctas=small_ctas(nbytes, node.node_size),
            stream=self._lanes.enter(),
        )
        args.set_words(list(words))
        args.set_inputs(addresses_of(inputs))
        args.set_outputs(addresses_of(outputs))
        node.kernels.small(args)


class CudaSumNode(CudaNode):
    """Reduce-scatter: one kernel of few CTAs, which reads inputs where they are and maps none of them. Shards travel
    through slots that every rank has for each other."""

    def __init__(self, node: OperatingNode, lanes: StreamLanes) -> None:
        super().__init__(node, lanes)
        self._kept: dict[tuple[int, int, float], Any] = {}

    def scatter(self, out: torch.Tensor, shards: Sequence[torch.Tensor], element: int, scale: float) -> None:
        """out = scale * the sum over the ranks of their shards for this one."""
        nbytes = out.numel()
        if not self._lanes.capturing():  # a graph's calls are no host's
            self._calls.compare(_C.Step.REDUCE_SCATTER, nbytes, element, 0)
        if nbytes == 0:
            return
        if self._is_small(nbytes):
            return self._exchange_words(shards, [out] * self._node.node_size, element, scale)
        args = self._args_of(nbytes, element, scale)
        args.set_inputs(addresses_of(shards))
        args.output = out.data_ptr()
        args.stream = self._lanes.enter()
        self._node.kernels.reduce_scatter(args)

    def _args_of(self, nbytes: int, element: int, scale: float) -> Any:
        """A kernel's arguments but for what changes from call to call."""
        key = nbytes, element, scale
        args = self._kept.get(key)
        if args is None:
            slots = self._workspace("slots", _C.lane_slots_bytes(self._node.node_size, self._node.sum_sms))
            if len(self._kept) == MOST_KEPT:
                self._kept.clear()
            args = self._kept[key] = _C.ReduceScatterArgs(
                comm=self._node.comm,
                bytes=nbytes,
                scale=scale,
                element=element,
                num_ctas=sum_ctas(nbytes, self._node.sum_sms),
            )
            args.set_slots(list(slots))
        return args
