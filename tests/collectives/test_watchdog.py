"""The thread that ends overdue stream waits, against a communicator that is closed meanwhile."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ep_plugin import _C
from ep_plugin.collectives.backends import watchdog
from ep_plugin.collectives.backends.watchdog import Pending, StreamWaits

WAIT_S = 30.0


class _Waits(StreamWaits):
    """The waits of a node of two ranks whose stream waits for a peer that has aborted."""

    def __init__(self) -> None:
        boards = SimpleNamespace(fault=lambda: None, abort=lambda: (1, "gone"))
        self.node: Any = SimpleNamespace(
            boards=boards, device=torch.device("cpu"), node_size=2, index=0, timeout_s=WAIT_S, state=torch.empty(0)
        )
        self.progress = torch.tensor([1, 0])
        self.number = 1
        self.pending = deque([Pending(1, 0, [0], 8)])
        self.words = torch.zeros(_C.stream_words_shape, dtype=torch.int64)
        self._seen, self._poisoning = (0, 0.0), None
        self._guard, self._open = threading.RLock(), True
        self._resources = contextlib.ExitStack()

    @property
    def released(self) -> bool:
        return bool((self.words == watchdog.RELEASED).all())


def test_a_node_is_closed_only_when_nobody_looks_at_it(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = _Waits()
    seen: list[bool] = []

    def close() -> None:
        waits.close()
        seen.append(waits.released)  # from here on its words may be unmapped

    closing, begun = threading.Thread(target=close), threading.Event()

    def record(*_: Any) -> None:
        closing.start()
        begun.set()
        closing.join(0.3)

    monkeypatch.setattr(watchdog, "_record", record)
    monkeypatch.setattr(watchdog, "_poison", lambda *_: None)
    watchdog._poller.add(waits)
    watchdog._poller.wake()
    assert begun.wait(WAIT_S)
    closing.join(WAIT_S)
    assert seen == [True], "the node was closed while its words were still to be written"


def test_a_stream_is_released_also_when_the_device_takes_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = _Waits()
    room, closed = threading.Event(), threading.Event()
    monkeypatch.setattr(watchdog, "_POISON_S", 0.1)
    monkeypatch.setattr(watchdog, "_poison", lambda *_: room.wait(WAIT_S))
    waits.poll()
    assert waits.released and not room.is_set()

    def close() -> None:
        waits.close()
        closed.set()

    threading.Thread(target=close).start()
    assert not closed.wait(0.3), "the node was closed while its outputs were still to be filled"
    room.set()
    assert closed.wait(WAIT_S)


def test_a_node_of_a_broken_device_is_released_and_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = _Waits()
    calls: list[Any] = []

    def poison(*given: Any) -> None:
        calls.append(given)
        raise RuntimeError("the device has failed")

    monkeypatch.setattr(watchdog, "_poison", poison)
    assert waits.poll() is False and waits.released
    assert waits.poll() is False and len(calls) == 1
    waits.close()


def test_a_closed_node_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = _Waits()
    monkeypatch.setattr(watchdog, "_poison", lambda *_: None)
    waits.close()
    assert waits.poll() is False and not waits.released
