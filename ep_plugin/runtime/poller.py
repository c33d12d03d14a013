"""A thread that polls, for waits that nothing else ends: neither a device nor another node does."""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from typing import Protocol

_STOP_S = 2.0  # a poll may be waiting for a store that is gone


class Polled(Protocol):
    def poll(self) -> bool:
        """Returns whether to poll again soon. Calls may come after `Poller.discard`, until the object is gone."""


class Poller:
    """Calls `poll` of the objects added to it, in a thread that starts with the first of them."""

    def __init__(self, name: str, *, pause_s: float, idle_s: float | None = None) -> None:
        """pause_s: the pause before each round. idle_s: the longest time without a round; None waits for `wake`."""
        self._name, self._pause_s, self._idle_s = name, pause_s, idle_s
        self._polled: weakref.WeakSet[Polled] = weakref.WeakSet()
        self._lock = threading.RLock()  # garbage that is collected while it is held may discard others
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._stopped = False
        atexit.register(self._stop)

    def _stop(self) -> None:
        """Ends the thread before the interpreter does: a thread that it stops inside C++ would abort the process."""
        self._stopped = True
        self._wake.set()
        thread = self._thread
        if thread is not None and thread.is_alive():
            thread.join(_STOP_S)

    def add(self, polled: Polled) -> None:
        with self._lock:
            self._polled.add(polled)
            if self._thread is None or not self._thread.is_alive():  # a forked child has none
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()

    def discard(self, polled: Polled) -> None:
        with self._lock:
            self._polled.discard(polled)

    def is_current(self) -> bool:
        """Returns whether the caller is this poller's thread."""
        return threading.current_thread() is self._thread

    def wake(self) -> None:
        """Makes a round of polls begin after `pause_s`."""
        if not self._wake.is_set():
            self._wake.set()

    def _run(self) -> None:
        while not self._stopped:
            self._wake.wait(self._idle_s)
            time.sleep(self._pause_s)
            self._wake.clear()
            if self._poll_all():
                self._wake.set()

    def _poll_all(self) -> bool:
        with self._lock:
            polled = list(self._polled)
        return any([each.poll() for each in polled])
