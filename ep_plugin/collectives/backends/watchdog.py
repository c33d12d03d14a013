"""Ends stream waits that are overdue: a stream that waits for a dead peer's word would wait for ever.

Kernels have deadlines of their own; stream memory operations have none. One thread of the process looks at the words in
host memory by which streams say which operation they have come to. When an operation has lasted longer than its
communicator's timeout, or a fault or an abort stands on its board, the thread records who was waited for, has the
outputs filled with NaN bytes by a stream of its own, and writes a value into the awaited words that no operation
reaches.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import torch

from ep_plugin import _C
from ep_plugin.collectives.blocks import OperatingNode, tensor_at

_LOOK_S = 0.02
_POISON_S = 1.0
RELEASED = 1 << 62


class Words(Protocol):
    own: torch.Tensor


class Watched(Protocol):
    """The gathers of one communicator. words: int64 ``[2]``, the operations that its stream has begun and finished.
    number: of the latest that was enqueued. pending: of each, number, block, addresses of what it fills here, and bytes
    of each. stream_words: the awaited words, see StreamWords."""

    words: torch.Tensor
    number: int
    pending: deque[tuple[int, int, Sequence[int], int]]

    @property
    def stream_words(self) -> Words: ...
    @property
    def node(self) -> OperatingNode: ...


_nodes: weakref.WeakSet[Watched] = weakref.WeakSet()
_lock = threading.RLock()  # held for each look: whoever closes a watched waits for the end of one that is under way
_work = threading.Event()
_thread: threading.Thread | None = None
_since: weakref.WeakKeyDictionary[Watched, tuple[int, float]] = weakref.WeakKeyDictionary()


def add(watched: Watched) -> None:
    """Watches `watched` until it is gone or removed."""
    global _thread
    if watched.node.device.type == "cuda":  # tests put CPU tensors in place of a device
        _warm_up(watched.node.device)
    with _lock:
        _nodes.add(watched)
        if _thread is None:
            _thread = threading.Thread(target=_watch, name="ep_plugin watchdog", daemon=True)
            _thread.start()


def remove(watched: Watched) -> None:
    """From here on nobody looks at `watched`, nor fills what it has: its memory may be given back."""
    with _lock:
        _nodes.discard(watched)
        poisoning = _poisonings.pop(watched, None)
    if poisoning is not None:
        poisoning.join()


def wake() -> None:
    """There is something to watch."""
    if not _work.is_set():
        _work.set()


def _watch() -> None:
    while True:
        _work.wait()
        time.sleep(_LOOK_S)
        _work.clear()
        with _lock:
            nodes = list(_nodes)
        if any([_look_if_there(watched) for watched in nodes]):
            _work.set()


def _look_if_there(watched: Watched) -> bool:
    with _lock:
        if watched not in _nodes:
            return False
        try:
            return _look(watched)
        except ReferenceError:  # its communicator has just been dropped
            return False
        except RuntimeError:  # the device has failed: no stream of it waits any more
            _nodes.discard(watched)
            return False


def _look(watched: Watched) -> bool:
    """Whether operations of `watched` are under way. Releases the one that its stream has come to, if it is overdue."""
    begun, finished = watched.words.tolist()
    if begun > finished:
        number, since = _since.get(watched, (0, 0.0))
        if number != begun:
            since = time.monotonic()
            _since[watched] = (begun, since)
        boards = watched.node.boards
        failed = boards.fault() is not None or boards.abort() is not None
        if failed or time.monotonic() - since > watched.node.timeout_s:
            _release(watched, begun)
    return watched.number > finished


def _release(watched: Watched, number: int) -> None:
    """Ends the waits that a stream stands at, from the host: where all streams of the device share one queue
    (``CUDA_DEVICE_MAX_CONNECTIONS=1``) nothing that is enqueued now would run before them.
    """
    waiting = [entry for entry in list(watched.pending) if entry[0] >= number]
    words = watched.stream_words.own
    ready, done = words[:, waiting[0][1] if waiting else 0, : watched.node.node_size].tolist()
    _record(watched, number, ready, done)
    poisoning = _poisonings.get(watched)
    if poisoning is None or not poisoning.is_alive():
        outputs = [(address, nbytes) for _, _, addresses, nbytes in waiting for address in addresses]
        poisoning = _poisonings[watched] = _Poisoning(watched, outputs)
        poisoning.start()
    poisoning.join(_POISON_S)
    words.fill_(RELEASED)
    if poisoning.error is not None:
        raise poisoning.error


class _Poisoning(threading.Thread):
    """`_poison`, in a thread of its own: a launch may wait for room in a queue that is full of what stands behind the
    wait, and so for the release."""

    def __init__(self, watched: Watched, outputs: list[tuple[int, int]]) -> None:
        super().__init__(name="ep_plugin poison", daemon=True)
        self._node, self._outputs = watched, outputs
        self.error: RuntimeError | None = None

    def run(self) -> None:
        try:
            _poison(self._node, self._outputs)
        except ReferenceError:  # as _look_if_there
            return
        except RuntimeError as error:
            self.error = error
        finally:
            del self._node, self._outputs


_poisonings: weakref.WeakKeyDictionary[Watched, _Poisoning] = weakref.WeakKeyDictionary()


def _poison(watched: Watched, outputs: list[tuple[int, int]]) -> None:
    """Outputs become NaN bytes, and later kernels leave at once: before the stream goes on, if the device lets them."""
    node = watched.node
    with torch.cuda.device(node.device), torch.cuda.stream(_side_stream(node.device)):
        for address, nbytes in outputs:  # those of the operations behind it run too, once it is released
            tensor_at(address, nbytes, node.device).fill_(0xFF)
        state = node.state[_C.fault_offset : _C.fault_offset + 8].view(torch.int64)
        state.fill_(1)
        over = torch.cuda.Event()
        over.record()
    while not over.query():
        time.sleep(_LOOK_S)


def _record(watched: Watched, number: int, ready: list[int], done: list[int]) -> None:
    node = watched.node
    if node.boards.fault() is not None or node.boards.abort() is not None:
        return
    for seen in (ready, done):
        for peer, value in enumerate(seen):
            if peer != node.index and value < number:
                address = node.boards.address
                _C.fault_board(address, _C.FaultCode.TIMEOUT, _C.Step.ALL_GATHER, peer, number, value)
                return


_streams: dict[torch.device, torch.cuda.Stream] = {}


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device, priority=-1)
    return _streams[device]


def _warm_up(device: torch.device) -> None:
    """What `_poison` does, once: making a stream and loading a kernel wait for streams that wait for a dead peer."""
    with torch.cuda.device(device), torch.cuda.stream(_side_stream(device)):
        words = torch.zeros(2, dtype=torch.int64, device=device)
        words.view(torch.uint8).fill_(0xFF)
        words.fill_(1)
        torch.cuda.Event().record()
        torch.cuda.current_stream().synchronize()
