"""In which stream a Buffer's operation runs, and what orders it before and after."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ep_plugin.deep_ep.utils import EventHandle, EventOverlap

T = TypeVar("T")


def ordered(
    operation: Callable[[], T],
    device: torch.device,
    reads: Any,
    previous_event: EventOverlap | None,
    async_finish: bool,
    allocate_on_comm_stream: bool,
) -> tuple[T, EventOverlap]:
    """Runs `operation` after `previous_event`, or after the current stream where there is none.

    With `async_finish` on a GPU it runs on a stream of its own, after which the current stream does not wait: the
    event does. reads: the tensors that it reads, in tuples; their memory and its results' is kept for both streams.
    """
    if allocate_on_comm_stream and not (async_finish and previous_event is not None):
        raise ValueError(
            "allocate_on_comm_stream: expected False without async_finish=True and a previous_event, got True"
        )
    previous = None if previous_event is None else previous_event.event
    if device.type != "cuda" or not async_finish:
        if previous is not None:
            previous.current_stream_wait()
        result = operation()
        return result, EventOverlap(EventHandle() if async_finish else None)
    caller, comm = torch.cuda.current_stream(device), comm_stream(device)
    with torch.cuda.stream(comm):
        if previous is None or previous.event is None:
            comm.wait_stream(caller)
        else:
            previous.current_stream_wait()
        result = operation()
        done = EventHandle()
    _keep_for(comm, reads)
    _keep_for(caller, result)
    return result, EventOverlap(done)


@functools.cache
def comm_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of asynchronous operations on `device`, one per process."""
    return torch.cuda.Stream(device)


def _keep_for(stream: torch.cuda.Stream, values: Any) -> None:
    if isinstance(values, torch.Tensor):
        if values.is_cuda:
            values.record_stream(stream)
    elif isinstance(values, (tuple, list)):
        for value in values:
            _keep_for(stream, value)
