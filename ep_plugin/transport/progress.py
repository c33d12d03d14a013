"""Shows the host which operation of a rail a device has come to.

The operations of an NCCL communicator run one after the other, in one stream, and wait for peers there without a
deadline. When an operation's turn comes, the rail's stream writes the operation's number to pinned host memory, and 0
when the operation is over. If NCCL runs the operation in a stream of its own, the rail's stream waits for the same. The
host reads that memory and calls nothing of CUDA, so it disturbs no capture of a graph. In a graph the writes are
captured, too; a counter then tells its replays apart.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from typing import Any

import torch

_words: list[torch.Tensor] = []  # never freed: a device may still write to them when their rail is gone
_NUMBERS = 4096  # of operations on their way, and of captured ones


class Progress:
    """Follows the operations of one rail on one GPU.

    is_written: whether the operations outside of captures write their numbers themselves, in the rail's stream.
    """

    is_written = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._numbers = torch.arange(_NUMBERS, dtype=torch.int64, device=device)
        self._counter = torch.zeros(1, dtype=torch.int64, device=device)
        self._words = torch.zeros(2, dtype=torch.int64, device="cpu", pin_memory=True)
        _words.append(self._words)
        self._next = 0
        self._captured: set[int] = set()
        self._what: dict[int, tuple[Any, str]] = {}
        self._seen: tuple[list[int], float] = [0, 0], 0.0
        torch.cuda.current_stream(device).synchronize()  # the numbers are there

    def begin(self, owner: Any, what: str) -> int:
        """Numbers an operation that is about to begin after the current stream. Returns the number that the operation
        has to write itself; 0: none.

        Args:
            owner: the communicator that `running` names.
            what: the description that `running` returns.
        """
        number, captured = self._number(), torch.cuda.is_current_stream_capturing()
        if captured:
            self._captured.add(number)
        self._what[number] = owner, what
        if self.is_written and not captured:
            return number
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._words[:1].copy_(self._numbers[number : number + 1], non_blocking=True)
            if captured:
                self._counter.add_(1)
                self._words[1:].copy_(self._counter, non_blocking=True)
        return 0

    def follow(self, work: Any) -> torch.cuda.Event | None:
        """Follows an operation that has begun and writes no number. In a capture, returns the event after which the
        graph has all of it."""
        with torch.cuda.stream(self._stream):
            work.wait()
            self._words[:1].copy_(self._numbers[:1], non_blocking=True)
            if not torch.cuda.is_current_stream_capturing():
                return None
            over = torch.cuda.Event()
            over.record(self._stream)
            return over

    @property
    def stream(self) -> int:
        """The rail's stream."""
        stream: int = self._stream.cuda_stream
        return stream

    @property
    def word(self) -> int:
        """The address of the number of the operation whose turn it is."""
        return self._words.data_ptr()

    def settle(self) -> None:
        """Orders the current stream after all operations that have begun."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def record(self, tensors: Iterable[torch.Tensor | None]) -> None:
        """Keeps the freed memory of CUDA tensors unused until all operations that have begun are over."""
        for tensor in tensors:
            if tensor is not None and tensor.is_cuda:
                tensor.record_stream(self._stream)

    def running(self) -> tuple[Any, str, float] | None:
        """Returns the owner and the description of the operation whose turn it is, and since how many seconds.

        None if no operation runs.
        """
        words, now = self._words.tolist(), time.monotonic()
        if words != self._seen[0]:
            self._seen = words, now
        if words[0] == 0:
            return None
        owner, what = self._what.get(words[0], (None, ""))
        return owner, what, now - self._seen[1]

    def _number(self) -> int:
        """Returns the next number. It is never 0, which stands for no operation, nor a number in a graph."""
        with contextlib.suppress(StopIteration):
            self._next = next(
                number
                for step in range(1, _NUMBERS)
                if (number := (self._next + step) % _NUMBERS) and number not in self._captured
            )
        return self._next
