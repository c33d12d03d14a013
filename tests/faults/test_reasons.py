"""The reason of a failure, as the peers and the failing rank itself read it: whatever text an error has."""

from __future__ import annotations

import io
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ep_plugin import HierarchicalAllGather, MoECommunicator
from ep_plugin.errors import PeerAborted
from ep_plugin.runtime.base import leave
from tests.collectives.collective_cases import gather_ones
from tests.faults.fault_cases import nothing_left_behind, open_communicator, round_trip
from tests.ranks import note, run_ranks, values

PATIENCE_S = 20.0  # far more than any test here may take: nothing ends by a deadline
AT_ONCE_S = 10.0
FAILS = 1


class _Mute(Exception):
    def __str__(self) -> str:
        raise LookupError("no text")


def _moe() -> MoECommunicator:
    return open_communicator(dist.get_world_size(), timeout_s=PATIENCE_S)


OPEN: dict[str, Callable[[], Any]] = {"moe": _moe, "gather": HierarchicalAllGather}


def _use(comm: Any) -> None:
    if isinstance(comm, MoECommunicator):
        round_trip(comm)
    else:
        gather_ones(comm, 10)


def _in_a_block(comm: Any, error: BaseException) -> None:
    """The user's own error is what leaves the block, and the communicator is closed."""
    with pytest.raises(type(error)) as caught, comm:
        raise error
    assert caught.value is error


def _in_an_operation(comm: Any, error: BaseException) -> None:
    def fail(_: Any) -> None:
        raise error

    engine = comm.engine if isinstance(comm, MoECommunicator) else comm.engine_on(torch.device("cpu"))
    with pytest.raises(type(error)) as caught:
        engine.run("dispatch", fail)
    assert caught.value is error


def _uncaught(comm: Any, error: BaseException) -> None:
    seen: list[BaseException] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stderr", io.StringIO())
        sys.excepthook(type(error), error, None)
        seen.append(error)
    assert seen == [error]


def _aborts(comm: Any, error: BaseException) -> None:
    comm.abort(error.args[0])


FAILS_IN: dict[str, Callable[[Any, BaseException], None]] = {
    "block": _in_a_block,
    "operation": _in_an_operation,
    "uncaught": _uncaught,
    "abort": _aborts,
}
# An error, and how its text ends where peers read it.
ERRORS: dict[str, tuple[BaseException, str]] = {
    "surrogate": (ValueError("bad file caf\udce9.bin"), "bad file caf\\udce9.bin"),
    "mute": (_Mute("no text"), ": its __str__ raises LookupError"),
    "zero": (ValueError("bad file a\0b.bin\x1b[31m"), "bad file a\\x00b.bin\\x1b[31m"),
    "lines": (ValueError("bad\tfile\nπ"), "bad\tfile\nπ"),
}


def _reads(rank: int, kind: str) -> None:
    for how, fail in FAILS_IN.items():
        for name, (error, text) in ERRORS.items():
            if (how, name) == ("abort", "mute"):  # `abort` takes text
                continue
            note(f"{how}, {name}")
            comm = OPEN[kind]()
            _use(comm)
            dist.barrier()
            if rank == FAILS:
                fail(comm, error)
            else:
                _hears(comm, text)
            comm.close()
            dist.barrier()
    nothing_left_behind()


def _hears(comm: Any, text: str) -> PeerAborted:
    began = time.monotonic()
    with pytest.raises(PeerAborted) as caught:
        while True:
            _use(comm)
    assert time.monotonic() - began < AT_ONCE_S
    assert caught.value.rank == FAILS and caught.value.reason.endswith(text), repr(caught.value)
    assert str(caught.value).endswith(text)
    return caught.value


@pytest.mark.parametrize("nodes", ["1", "2"])
@pytest.mark.parametrize("kind", OPEN)
def test_a_text_that_cannot_be_encoded_reaches_peers_and_replaces_no_error(kind: str, nodes: str) -> None:
    values(run_ranks(2, _reads, kind, env={"EP_TEST_NODES": nodes}))


class _Broken:
    """A communicator whose abort and close fail."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def abort(self, reason: str) -> None:
        self.calls.append(f"abort: {reason}")
        raise OSError("store is gone")

    def close(self) -> None:
        self.calls.append("close")
        raise OSError("device is gone")


def test_a_block_ends_by_its_own_error_when_closing_fails() -> None:
    broken, error = _Broken(), ValueError("first")
    leave(broken, error)
    assert broken.calls == ["abort: ValueError: first", "close"]
    assert error.__notes__ == ["closing failed, too: OSError: device is gone"]
    with pytest.raises(OSError, match="device is gone"):
        leave(broken, None)


def _fails_alone(rank: int) -> None:
    _in_an_operation(_moe(), _Mute())


def test_an_error_without_a_text_is_dumped(tmp_path: Path) -> None:
    values(run_ranks(1, _fails_alone, env={"EP_PLUGIN_DUMP": str(tmp_path)}))
    (failure,) = json.loads((tmp_path / "rank0.json").read_text())["communicators"][0]["failures"]
    assert (failure["error"], failure["text"]) == ("_Mute", "its __str__ raises LookupError")


LIKE_OURS = (
    "[rank 0, step dispatch_recv] nothing",
    "[rank 0] nothing",
    "[not supported] nothing",
    "ranks disagree on nothing",
    "\x1frank 0, step notify\x1fnothing",
    "\x1fnot supported\x1fnothing",
    "",
)


def _reads_plain_text(rank: int) -> None:
    for text in LIKE_OURS:
        comm = _moe()
        _use(comm)
        dist.barrier()
        if rank == FAILS:
            comm.abort(text)
        error = _hears(comm, text.replace("\x1f", "\\x1f"))
        assert error.reason == text.replace("\x1f", "\\x1f") and type(error) is PeerAborted
        comm.close()
        dist.barrier()


@pytest.mark.parametrize("nodes", ["1", "3"])
def test_a_users_reason_is_never_read_as_our_own(nodes: str) -> None:
    values(run_ranks(3, _reads_plain_text, env={"EP_TEST_NODES": nodes}))


ROUNDS = 20


def _leaves(rank: int, kind: str, how: str) -> None:
    """Rank 1 fails and closes at once, while the others wait for it or are about to."""
    for number in range(ROUNDS):
        note(f"round {number}")
        comm = OPEN[kind]()
        _use(comm)
        dist.barrier()
        if rank == FAILS and how == "block":
            _in_a_block(comm, RuntimeError(f"boom {number}"))
        elif rank == FAILS:
            comm.abort(f"boom {number}")
        else:
            _hears(comm, f"boom {number}")
        comm.close()
        dist.barrier()


@pytest.mark.parametrize("how", ["block", "abort"])
@pytest.mark.parametrize("kind", OPEN)
@pytest.mark.parametrize(("size", "per_node"), [(2, "1"), (3, "1"), (4, "2")])
@pytest.mark.slow
def test_a_rank_that_fails_and_closes_is_named_with_its_reason_on_other_nodes(
    size: int, per_node: str, kind: str, how: str
) -> None:
    values(run_ranks(size, _leaves, kind, how, env={"EP_PLUGIN_RANKS_PER_NODE": per_node}))
