"""Events that order a Buffer's calls among streams."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ep_plugin import _C
from ep_plugin.deep_ep.arguments import check_kind
from ep_plugin.runtime.streams import caller_stream, on_stream, record_stream


class EventHandle:
    """An event recorded on the current stream when it is made. Without a GPU in use it is empty."""

    def __init__(self) -> None:
        self.event: torch.cuda.Event | None = None
        if torch.cuda.is_initialized():
            self.event = torch.cuda.Event()
            self.event.record()

    def current_stream_wait(self) -> None:
        """Let the current stream wait for the event."""
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)


@dataclass(eq=False)
class EventOverlap:
    """An event, and tensors that must live until it has passed. As a context manager it is waited for at the end.

    event: None where there is nothing to wait for, as after a call without ``async_finish``.
    hook_after_wait: called once, after the next wait; see `register_hook_after_wait`.
    """

    event: EventHandle | None = None
    extra_tensors: tuple[Any, ...] | None = None
    hook_after_wait: Callable[[], object] | None = None
    _releases: bool = False  # at the end of the next ``with``

    def current_stream_wait(self, release_handle: bool = False) -> None:
        """Let the current stream wait for the event, then call the hook. release_handle: whether to drop the event."""
        if self.event is not None:
            self.event.current_stream_wait()
        hook, self.hook_after_wait = self.hook_after_wait, None
        if hook is not None:
            hook()
        if release_handle:
            self.event = None

    def register_hook_after_wait(self, hook_after_wait: Callable[[], object]) -> None:
        """Call `hook_after_wait` after the next wait. Only one hook may be registered at a time."""
        if self.hook_after_wait is not None:
            raise ValueError("hook_after_wait: expected no hook that has not been called yet, got one")
        self.hook_after_wait = hook_after_wait

    def __call__(self, release_handle: bool = False) -> EventOverlap:
        """Set whether the next ``with`` drops the event when it ends. Returns this object."""
        self._releases = release_handle
        return self

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(self, *error: object) -> None:
        release, self._releases = self._releases, False
        self.current_stream_wait(release)


def ordered(
    operation: Callable[[], tuple[Any, ...]],
    device: torch.device,
    reads: Any,
    previous_event: EventOverlap | None,
    async_finish: bool,
    allocate_on_comm_stream: bool,
) -> Any:
    """Run `operation` after `previous_event` or the current stream. Returns its results and the event after it.

    With `async_finish` on a GPU it runs on the communication stream, and the current stream does not wait for it. The
    allocator keeps the memory of `reads`, tensors nested in tuples, and of the results for both streams.
    """
    if previous_event is not None:
        check_kind(EventOverlap, previous_event=previous_event)
    if allocate_on_comm_stream and not (async_finish and previous_event is not None):
        raise ValueError(
            "allocate_on_comm_stream: expected False without async_finish=True and a previous_event, got True"
        )
    previous = None if previous_event is None else previous_event.event
    if device.type != "cuda" or not async_finish:
        if previous is not None:
            previous.current_stream_wait()
        results = operation()
        return *results, EventOverlap(EventHandle() if async_finish else None)
    caller, comm = caller_stream(device), comm_stream(device)
    with on_stream(comm):
        if previous is None or previous.event is None:
            _C.order_streams(comm.cuda_stream, caller.cuda_stream, device.index)
        else:
            previous.current_stream_wait()
        results = operation()
        done = EventHandle()
    record_stream(comm, reads)
    record_stream(caller, results)
    return *results, EventOverlap(done)


@functools.cache
def comm_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of asynchronous operations on `device`. A process has one."""
    return torch.cuda.Stream(device)
