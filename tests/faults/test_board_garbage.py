"""Boards that hold what no kernel writes: an error of ours, whatever lies there."""

from __future__ import annotations

from typing import Any

import pytest

from ep_plugin._C import FaultCode
from ep_plugin.errors import EpPluginError
from ep_plugin.runtime.faults import error_of

TIMEOUT, ABORTED = int(FaultCode.TIMEOUT), int(FaultCode.ABORTED)


class _Boards:
    size, index = 2, 0

    def __init__(self, fault: Any, abort: Any) -> None:
        self._found = fault, abort

    def fault(self) -> Any:
        return self._found[0]

    def abort(self) -> Any:
        return self._found[1]

    def fault_of(self, rank: int) -> Any:
        return self._found[0]

    def activity_of(self, rank: int) -> str:
        return ""


class _Communicator:
    name, rank, timeout_s = "communicator 0.1", 0, 1.0

    def __init__(self, boards: _Boards) -> None:
        self.boards = boards

    def group_rank(self, index: int) -> int:
        return (0, 1)[index]

    def described(self, field: int, value: int) -> tuple[str, str]:
        return ("tokens", "experts")[field], str(value)


@pytest.mark.parametrize(
    ("fault", "abort"),
    [
        ((TIMEOUT, 1, 7, 0, 1, 0), None),
        ((TIMEOUT, 1, -1, 0, 1, 0), None),
        ((TIMEOUT, 9999, 1, 0, 1, 0), None),
        ((9999, 1, 1, 0, 1, 0), None),
        ((int(FaultCode.DISAGREE), 1, 1, 99, 1, 0), None),
        ((ABORTED, 1, 1, 0, 1, 0), (7, "reason")),
        (None, (-1, "reason")),
    ],
    ids=["peer", "negative peer", "step", "code", "field", "aborting rank", "negative aborting rank"],
)
def test_garbage_is_an_error_of_this_package(fault, abort):
    error = error_of(_Communicator(_Boards(fault, abort)))
    assert type(error) is EpPluginError
    assert "communicator 0.1: expected a fault or an abort on the board of rank 0" in str(error)
