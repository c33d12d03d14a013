"""What an asynchronous operation returns: its result comes with `wait()`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeAlias, TypeVar

import torch

from ep_plugin.moe.high_throughput.combine import PendingCombine
from ep_plugin.moe.high_throughput.dispatch_args import PendingDispatch
from ep_plugin.moe.layout import DispatchHandle, DispatchOutput
from ep_plugin.moe.untraced import untraced

T = TypeVar("T")


class Work(Generic[T]):
    """An operation under way. `wait()` returns what the plain call would have."""

    def __init__(self, begun: PendingDispatch | PendingCombine, complete: Callable[[], T]) -> None:
        self._begun: PendingDispatch | PendingCombine | None = begun
        self._complete: Callable[[], T] | None = complete
        self._result: T | None = None
        self._waiting = threading.RLock()

    @property
    def done(self) -> bool:
        """Whether this work's `wait()` or a later call has completed the operation."""
        begun = self._begun
        return begun is None or begun.result is not None

    @untraced
    def wait(self) -> T:
        """Completes the operation and orders the caller's stream after it. May be called again, and by more threads."""
        with self._waiting:
            if self._result is None:
                assert self._complete is not None
                self._result = self._complete()
                self._complete = self._begun = None  # they hold the arguments
            return self._result


DispatchWork: TypeAlias = Work[tuple[DispatchOutput, DispatchHandle]]
CombineWork: TypeAlias = Work[torch.Tensor]
