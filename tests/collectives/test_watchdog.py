"""The thread that ends overdue stream waits, against a communicator that is closed meanwhile."""

from __future__ import annotations

import threading
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ep_plugin import _C
from ep_plugin.collectives.backends import watchdog

WAIT_S = 30.0


class _Node:
    """A node of two ranks whose stream waits for a peer that has aborted."""

    def __init__(self) -> None:
        boards = SimpleNamespace(fault=lambda: None, abort=lambda: (1, "gone"))
        self.node = SimpleNamespace(
            boards=boards, device=torch.device("cpu"), node_size=2, index=0, timeout_s=WAIT_S, state=torch.empty(0)
        )
        self.words = torch.tensor([1, 0])
        self.number = 1
        self.pending = deque([(1, 0, [0], 8)])
        self.stream_words = SimpleNamespace(own=torch.zeros(_C.stream_words_shape, dtype=torch.int64))

    @property
    def released(self) -> bool:
        return bool((self.stream_words.own == watchdog.RELEASED).all())


def test_a_node_is_removed_only_when_nobody_looks_at_it(monkeypatch: pytest.MonkeyPatch) -> None:
    node: Any = _Node()
    seen: list[bool] = []

    def remove() -> None:
        watchdog.remove(node)
        seen.append(node.released)  # from here on its words may be unmapped

    closing, begun = threading.Thread(target=remove), threading.Event()

    def record(*_: Any) -> None:
        closing.start()
        begun.set()
        closing.join(0.3)

    monkeypatch.setattr(watchdog, "_record", record)
    monkeypatch.setattr(watchdog, "_poison", lambda _node, _outputs: None)
    watchdog.add(node)
    watchdog.wake()
    assert begun.wait(WAIT_S)
    closing.join(WAIT_S)
    assert seen == [True], "the node was removed while its words were still to be written"


def test_a_stream_is_released_also_when_the_device_takes_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    node: Any = _Node()
    room, removed = threading.Event(), threading.Event()
    monkeypatch.setattr(watchdog, "_POISON_S", 0.1)
    monkeypatch.setattr(watchdog, "_poison", lambda _node, _outputs: room.wait(WAIT_S))
    watchdog.add(node)
    watchdog._look_if_there(node)
    assert node.released and not room.is_set()

    def remove() -> None:
        watchdog.remove(node)
        removed.set()

    threading.Thread(target=remove).start()
    assert not removed.wait(0.3), "the node was removed while its outputs were still to be filled"
    room.set()
    assert removed.wait(WAIT_S)


def test_a_node_of_a_broken_device_is_released_and_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    node: Any = _Node()

    def poison(_node: Any, _outputs: Any) -> None:
        raise RuntimeError("the device has failed")

    monkeypatch.setattr(watchdog, "_poison", poison)
    watchdog.add(node)
    assert watchdog._look_if_there(node) is False and node.released
    assert node not in watchdog._nodes
    watchdog.remove(node)


def test_a_removed_node_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    node: Any = _Node()
    monkeypatch.setattr(watchdog, "_poison", lambda _node, _outputs: None)
    watchdog.add(node)
    watchdog.remove(node)
    assert watchdog._look_if_there(node) is False and not node.released
