"""Calls that may never return, in threads that stay for the next call."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

# What threads are to call: (where the answer goes, function, arguments). One queue for each thread that has no call.
_idle: list[SimpleQueue[Any]] = []
os.register_at_fork(after_in_child=_idle.clear)  # their threads are not in the child


def call_in_thread(function: Callable[..., Any], *args: Any) -> SimpleQueue[tuple[Any, BaseException | None]]:
    """Where the result of function(*args), or its error, will be. A thread makes one call after the other."""
    try:
        calls = _idle.pop()
    except IndexError:
        calls = SimpleQueue()
        threading.Thread(target=_serve, args=(calls,), name="ep_plugin calls", daemon=True).start()
    answers: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
    calls.put((answers, function, args))
    return answers


def _serve(calls: SimpleQueue[Any]) -> None:
    while True:
        _answer(calls, *calls.get())  # keeps nothing of a call while it waits for the next one


def _answer(calls: SimpleQueue[Any], answers: SimpleQueue[Any], function: Callable[..., Any], args: Any) -> None:
    answer, error = None, None
    try:
        answer = function(*args)
    except BaseException as caught:
        error = caught
    _idle.append(calls)  # before the caller goes on, and asks again
    answers.put((answer, error))
    del error  # its traceback holds this frame
