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
from typing import TYPE_CHECKING

import torch

from ep_plugin import _C
from ep_plugin.collectives.blocks import tensor_at

if TYPE_CHECKING:
    from ep_plugin.collectives.backends.cuda_gather import CudaGatherNode

_LOOK_S = 0.02
_POISON_S = 1.0
RELEASED = 1 << 62

_nodes: weakref.WeakSet[CudaGatherNode] = weakref.WeakSet()
_lock = threading.RLock()  # held for each look: whoever closes a node waits for the end of one that is under way
_work = threading.Event()
_thread: threading.Thread | None = None
_since: weakref.WeakKeyDictionary[CudaGatherNode, tuple[int, float]] = weakref.WeakKeyDictionary()


def add(node: CudaGatherNode) -> None:
    """Watches `node` until it is gone or removed."""
    global _thread
    if node.engine.device.type == "cuda":  # tests put CPU tensors in place of a device
        _warm_up(node.engine.device)
    with _lock:
        _nodes.add(node)
        if _thread is None:
            _thread = threading.Thread(target=_watch, name="ep_plugin watchdog", daemon=True)
            _thread.start()


def remove(node: CudaGatherNode) -> None:
    """From here on nobody looks at `node`, nor fills what it has: its memory may be given back."""
    with _lock:
        _nodes.discard(node)
        poisoning = _poisonings.pop(node, None)
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
        if any([_look_if_there(node) for node in nodes]):
            _work.set()


def _look_if_there(node: CudaGatherNode) -> bool:
    with _lock:
        if node not in _nodes:
            return False
        try:
            return _look(node)
        except ReferenceError:  # its engine has just been dropped
            return False
        except RuntimeError:  # the device has failed: no stream of it waits any more
            _nodes.discard(node)
            return False


def _look(node: CudaGatherNode) -> bool:
    """Whether operations of `node` are under way. Releases the one that its stream has come to, if it is overdue."""
    begun, finished = node.words.tolist()
    if begun > finished:
        number, since = _since.get(node, (0, 0.0))
        if number != begun:
            since = time.monotonic()
            _since[node] = (begun, since)
        boards = node.engine.boards
        failed = boards.fault() is not None or boards.abort() is not None
        if failed or time.monotonic() - since > node.engine.timeout_s:
            _release(node, begun)
    return node.number > finished


def _release(node: CudaGatherNode, number: int) -> None:
    """Ends the waits that a stream stands at, from the host: where all streams of the device share one queue
    (``CUDA_DEVICE_MAX_CONNECTIONS=1``) nothing that is enqueued now would run before them.
    """
    waiting = [entry for entry in list(node.pending) if entry[0] >= number]
    words = node.stream_words.own
    ready, done = words[:, waiting[0][1] if waiting else 0, : node.engine.node_size].tolist()
    _record(node, number, ready, done)
    poisoning = _poisonings.get(node)
    if poisoning is None or not poisoning.is_alive():
        outputs = [(address, nbytes) for _, _, addresses, nbytes in waiting for address in addresses]
        poisoning = _poisonings[node] = _Poisoning(node, outputs)
        poisoning.start()
    poisoning.join(_POISON_S)
    words.fill_(RELEASED)
    if poisoning.error is not None:
        raise poisoning.error


class _Poisoning(threading.Thread):
    """`_poison`, in a thread of its own: a launch may wait for room in a queue that is full of what stands behind the
    wait, and so for the release."""

    def __init__(self, node: CudaGatherNode, outputs: list[tuple[int, int]]) -> None:
        super().__init__(name="ep_plugin poison", daemon=True)
        self._node, self._outputs = node, outputs
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


_poisonings: weakref.WeakKeyDictionary[CudaGatherNode, _Poisoning] = weakref.WeakKeyDictionary()


def _poison(node: CudaGatherNode, outputs: list[tuple[int, int]]) -> None:
    """Outputs become NaN bytes, and later kernels leave at once: before the stream goes on, if the device lets them."""
    engine = node.engine
    with torch.cuda.device(engine.device), torch.cuda.stream(_side_stream(engine.device)):
        for address, nbytes in outputs:  # those of the operations behind it run too, once it is released
            tensor_at(address, nbytes, engine.device).fill_(0xFF)
        state = engine.state[_C.fault_offset : _C.fault_offset + 8].view(torch.int64)
        state.fill_(1)
        over = torch.cuda.Event()
        over.record()
    while not over.query():
        time.sleep(_LOOK_S)


def _record(node: CudaGatherNode, number: int, ready: list[int], done: list[int]) -> None:
    engine = node.engine
    if engine.boards.fault() is not None or engine.boards.abort() is not None:
        return
    for seen in (ready, done):
        for peer, value in enumerate(seen):
            if peer != engine.index and value < number:
                address = engine.boards.address
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
