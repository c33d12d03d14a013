"""``deep_ep.utils``: events, with which a caller says what an operation waits for and what waits for it."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch


class EventHandle:
    """What is enqueued on the current stream when it is made; without a GPU in use, nothing."""

    def __init__(self) -> None:
        self.event: torch.cuda.Event | None = None
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            self.event = torch.cuda.Event()
            self.event.record()

    def current_stream_wait(self) -> None:
        """The current stream goes on after the event."""
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)


class EventOverlap:
    """An event and the tensors that must live until it has come; as a context manager it is waited for at the end.

    event: None where there is nothing to wait for, as after a call without ``async_finish``.
    """

    def __init__(self, event: EventHandle | None = None, extra_tensors: tuple[Any, ...] | None = None) -> None:
        self.event = event
        self.extra_tensors = extra_tensors

    def current_stream_wait(self) -> None:
        """The current stream goes on after the event."""
        if self.event is not None:
            self.event.current_stream_wait()

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.current_stream_wait()
