"""Aborts the open communicators of a process that dies of an exception, so that peers need not wait for a deadline.

The hooks cover scripts, threads, multiprocessing children, and cells of IPython. A forked child is not the rank: its
copies of the parent's communicators abort nothing and close nothing.
"""

from __future__ import annotations

import functools
import multiprocessing.process
import multiprocessing.util
import os
import sys
import threading
import traceback
import weakref
from types import TracebackType
from typing import Any, Protocol, TypeGuard

from ep_plugin.errors import type_and_text


class Engine(Protocol):
    """The parts of a communicator that this module uses."""

    closed: bool
    used_by: weakref.WeakSet[threading.Thread]
    """The threads that have called an operation."""

    def abort(self, reason: str) -> None: ...
    def disown(self) -> None:
        """Called in a forked child."""


_live: tuple[weakref.ref[Engine], ...] = ()  # replaced as a whole, under the lock; may be read without it
_live_lock = threading.Lock()


def watch(engine: Engine) -> None:
    """Aborts `engine` from now on when this process, or a thread that has used it, dies of an exception."""
    global _live
    with _live_lock:
        _live = (*(ref for ref in _live if ref() is not None), weakref.ref(engine))
    _hook_interpreter()
    _hook_multiprocessing(os.getpid())
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if shell is not None:
        _hook_shell(shell)


def is_failure(error: BaseException | None) -> TypeGuard[BaseException]:
    """Returns whether peers need to know of `error`.

    The end of a generator and a script's ``sys.exit(0)`` are no failures.
    """
    clean = isinstance(error, GeneratorExit) or (isinstance(error, SystemExit) and error.code in (None, 0))
    return error is not None and not clean


def abort_all(error: BaseException | None, user: threading.Thread | None = None) -> None:
    """Aborts this process's open communicators after a failure: all of them, or those that the thread `user` uses."""
    if not is_failure(error):
        return
    for engine in [engine for ref in _live if (engine := ref()) is not None]:
        if not engine.closed and (user is None or user in engine.used_by):
            engine.abort(type_and_text(error))


@functools.cache
def _hook_interpreter() -> None:
    script, thread = sys.excepthook, threading.excepthook

    def script_hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            abort_all(error)
        finally:
            script(kind, error, trace)

    def thread_hook(args: threading.ExceptHookArgs) -> None:
        try:
            if args.thread is not None:
                abort_all(args.exc_value, args.thread)
        finally:
            thread(args)

    sys.excepthook, threading.excepthook = script_hook, thread_hook


@functools.cache
def _hook_multiprocessing(pid: int) -> None:
    """Aborts when a multiprocessing child ends by an exception, which the child catches itself.

    Up to Python 3.13 the child then runs its finalizers while the exception is in flight. From 3.14 on it only prints
    the exception. It does not print a `SystemExit`, so peers get no abort for that.
    """
    if sys.version_info < (3, 14):
        multiprocessing.util.Finalize(None, lambda: abort_all(sys.exc_info()[1]), exitpriority=100)
    elif multiprocessing.parent_process() is not None:
        _hook_printing()


@functools.cache
def _hook_printing() -> None:
    printed, caller = traceback.print_exc, multiprocessing.process.BaseProcess._bootstrap.__code__  # type: ignore[attr-defined]

    def print_exc(*args: Any, **more: Any) -> None:
        try:
            if sys._getframe(1).f_code is caller:
                abort_all(sys.exc_info()[1])
        finally:
            printed(*args, **more)

    traceback.print_exc = print_exc


@functools.cache
def _hook_shell(shell: Any) -> None:
    """Aborts when a cell of IPython raises. IPython handles the exception and goes on, so a cell counts as a thread."""
    shell.events.register("post_run_cell", lambda cell: abort_all(cell.error_in_exec, threading.current_thread()))


def _disown_all() -> None:
    global _live, _live_lock
    inherited, _live, _live_lock = _live, (), threading.Lock()
    for engine in (ref() for ref in inherited):
        if engine is not None:
            engine.disown()


os.register_at_fork(after_in_child=_disown_all)
