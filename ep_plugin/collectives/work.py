"""What an operation with ``async_op=True`` returns: a Work of torch.distributed."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.distributed_c10d import Work


class CollectiveWork(Work):
    """An operation that has been enqueued, on CPUs one that is over.

    ``wait()`` orders the caller's stream after it, and raises what went wrong with it as far as that is known by then,
    also after the communicator's close; ``result`` are its outputs, which it keeps alive.
    """

    def __init__(self, outputs: list[torch.Tensor], check: Callable[[], None], event: Any = None) -> None:
        super().__init__()
        self._outputs = outputs
        self._check = check
        self._event = event

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        if self._event is not None:
            self._check()
            torch.cuda.current_stream(self._outputs[0].device).wait_event(self._event)
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._event is None or bool(self._event.query())

    def is_success(self) -> bool:
        return self.is_completed()

    def exception(self) -> None:
        return None

    def result(self) -> list[torch.Tensor]:
        return self._outputs

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        self.wait()  # what it is made on goes on after the operation
        devices: list[int | str | torch.device] = [self._outputs[0].device] if self._event is not None else []
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future(devices=devices)
        future.set_result(self._outputs)
        return future
