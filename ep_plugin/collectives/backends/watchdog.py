"""Ends stream waits that are overdue: a stream that waits for a dead peer's word would wait for ever.

Kernels have deadlines of their own; stream memory operations have none. So streams write to host memory which operation
they have come to, and one thread of the process reads it. The thread acts when an operation has lasted longer than its
communicator's timeout, or when the board shows a fault or an abort. It records which peer is late, has a stream of its
own fill the outputs with NaN bytes, and writes a value into the awaited words that no operation reaches.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ep_plugin import _C
from ep_plugin.collectives.blocks import Node, tensor_at
from ep_plugin.runtime.poller import Poller
from ep_plugin.transport.peer import AddressTable

_LOOK_S = 0.02
_POISON_S = 1.0
RELEASED = 1 << 62
_poller = Poller("ep_plugin watchdog", pause_s=_LOOK_S)


class Pending(NamedTuple):
    """A gather that has been enqueued. addresses: where it writes `nbytes` bytes each on this rank."""

    number: int
    block: int
    addresses: Sequence[int]
    nbytes: int


class StreamWaits:
    """The gathers of one communicator in which streams wait for peers, and the words that they wait for.

    The words are in host memory that every rank and every device of the node maps.

    Attributes:
        addresses: for each rank, the address of its words, as this device maps them.
        words: this rank's words, int64 ``[2 (ready and done), blocks, ranks]``, see StreamWords in collectives.h.
        progress: int64 ``[2]``, the numbers of the gathers that this rank's stream has begun and finished last.
    """

    def __init__(self, node: Node) -> None:
        self.node: Node = weakref.proxy(node)
        self.number = 0  # of the latest gather
        self.pending: deque[Pending] = deque()
        self._seen = 0, 0.0  # the latest operation that was seen to begin, and when
        self._poisoning: _Poisoning | None = None
        self._guard = threading.RLock()  # held for each poll
        self._open = True
        self.progress = torch.zeros(2, dtype=torch.int64, device="cpu", pin_memory=True)
        with contextlib.ExitStack() as made:
            addresses = []
            for address in node.control.stream_words:
                addresses.append(_C.register_host(address, _C.stream_words_bytes, node.device.index))
                made.callback(_unregister, address)
            self.table = AddressTable(addresses)
            own = tensor_at(node.control.stream_words[node.index], _C.stream_words_bytes, torch.device("cpu"))
            self.words: torch.Tensor = own.view(torch.int64).view(_C.stream_words_shape)
            _warm_up(node.device)
            self._resources = made.pop_all()
        _poller.add(self)

    def begin(self, number: int, block: int, addresses: Sequence[int], nbytes: int) -> None:
        """Notes a gather before it is enqueued. The arguments are the fields of a Pending."""
        self.number = number
        finished = int(self.progress[1])
        while self.pending and self.pending[0].number <= finished:
            self.pending.popleft()
        self.pending.append(Pending(number, block, addresses, nbytes))
        _poller.wake()

    def poll(self) -> bool:
        """Whether gathers are pending. Ends the wait of the one that the stream has come to, if it is overdue."""
        with self._guard:
            if not self._open:
                return False
            try:
                begun, finished = self.progress.tolist()
                if begun > finished and self._is_overdue(begun):
                    self._release(begun)
                return self.number > finished
            except ReferenceError:  # the communicator has just been dropped
                return False
            except RuntimeError:  # the device has failed: no stream of it waits any more
                self._open = False
                return False

    def _is_overdue(self, number: int) -> bool:
        if self._seen[0] != number:
            self._seen = number, time.monotonic()
        return _has_failed(self.node) or time.monotonic() - self._seen[1] > self.node.timeout_s

    def _release(self, number: int) -> None:
        """Ends the stream's waits from the host. If all streams of the device share one queue
        (``CUDA_DEVICE_MAX_CONNECTIONS=1``), work that is enqueued now does not run before them."""
        waiting = [gather for gather in list(self.pending) if gather.number >= number]
        ready, done = self.words[:, waiting[0].block if waiting else 0, : self.node.node_size].tolist()
        _record(self.node, number, ready, done)
        poisoning = self._poisoning
        if poisoning is None or not poisoning.is_alive():
            outputs = [(address, gather.nbytes) for gather in waiting for address in gather.addresses]
            poisoning = self._poisoning = _Poisoning(self.node, outputs)
        poisoning.join(_POISON_S)
        self.words.fill_(RELEASED)
        if poisoning.error is not None:
            raise poisoning.error

    def close(self) -> None:
        """From here on nobody reads or writes this communicator's memory."""
        with self._guard:
            self._open = False
        _poller.discard(self)
        if self._poisoning is not None:
            self._poisoning.join()
        self._resources.close()


def _unregister(address: int) -> None:
    with contextlib.suppress(RuntimeError):  # a broken device has forgotten it
        _C.unregister_host(address)


def _has_failed(node: Node) -> bool:
    return node.boards.fault() is not None or node.boards.abort() is not None


def _record(node: Node, number: int, ready: list[int], done: list[int]) -> None:
    """Leaves the first late peer on the board, unless a fault or an abort is there."""
    if _has_failed(node):
        return
    for seen in (ready, done):
        for peer, value in enumerate(seen):
            if peer != node.index and value < number:
                _C.fault_board(node.boards.address, _C.FaultCode.TIMEOUT, _C.Step.ALL_GATHER, peer, number, value)
                return


class _Poisoning(threading.Thread):
    """Calls `_poison` in a thread of its own. A launch may wait for room in a queue, behind the wait that is to end."""

    def __init__(self, node: Node, outputs: list[tuple[int, int]]) -> None:
        super().__init__(name="ep_plugin poison", daemon=True)
        self._node, self._outputs = node, outputs
        self.error: RuntimeError | None = None
        self.start()

    def run(self) -> None:
        try:
            fault = self._node.state[_C.fault_offset : _C.fault_offset + 8]
            _poison(self._node.device, self._outputs, fault)
        except ReferenceError:  # as in `poll`
            pass
        except RuntimeError as error:
            self.error = error


def _poison(device: torch.device, outputs: list[tuple[int, int]], fault: torch.Tensor) -> None:
    """Fills `outputs`, (address, bytes) each, with NaN bytes and sets `fault`, uint8 ``[8]``, on which later kernels
    exit. Returns when both are done, before the stream goes on if the device allows it."""
    with torch.cuda.device(device), torch.cuda.stream(_side_stream(device)):
        for address, nbytes in outputs:
            tensor_at(address, nbytes, device).fill_(0xFF)
        fault.view(torch.int64).fill_(1)
        over = torch.cuda.Event()
        over.record()
    while not over.query():
        time.sleep(_LOOK_S)


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)


def _warm_up(device: torch.device) -> None:
    """Poisons scratch memory. Later it would be too late to make the stream and load the kernels: both would wait for
    the streams that wait."""
    scratch = torch.zeros(16, dtype=torch.uint8, device=device)
    _poison(device, [(scratch.data_ptr(), 8)], scratch[8:])
