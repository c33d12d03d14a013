"""What a fault on the board means, as an exception: who waited for whom, at which step, expected and seen."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

from ep_plugin import _C
from ep_plugin._C import FaultCode
from ep_plugin.errors import DisagreementError, EpPluginError, PeerAborted, PeerTimeout

if TYPE_CHECKING:
    from ep_plugin.runtime.board import Boards

GRACE_S = 0.5  # ranks that began to wait together come to their deadlines within this time
DISAGREE_ON = "ranks disagree on"


class Communicator(Protocol):
    """The parts of a communicator that its errors mention."""

    boards: Boards
    rank: int
    timeout_s: float

    @property
    def name(self) -> str: ...

    def group_rank(self, index: int) -> int:
        """The rank within the group whose board has this index."""

    def described(self, field: int, value: int) -> tuple[str, str]:
        """The name of a word on which ranks must agree, and `value` in the reader's terms."""


def error_of(engine: Communicator) -> EpPluginError | ValueError | None:
    """The exception for what this communicator's board shows, or None when it is well."""
    fault = abort = None
    try:
        fault = engine.boards.fault()
        if fault is None or fault[0] == FaultCode.ABORTED:
            abort = engine.boards.abort()
            if abort is None:
                return None
            if abort[0] < 0:
                raise IndexError(f"expected an index of at least 0, got {abort[0]}")
            return aborted_error(engine, engine.group_rank(abort[0]), abort[1])
        return _fault_error(engine, fault)
    except (LookupError, TypeError, ValueError, OverflowError) as error:
        # A peer, or any writer of shared memory, may have overwritten the board.
        return EpPluginError(
            f"{engine.name}: expected a fault or an abort on the board of rank {engine.rank}, got {abort or fault}: "
            f"{type(error).__name__}: {error}"
        )


def _rank_of(engine: Communicator, index: int) -> int:
    if not 0 <= index < engine.boards.size:
        raise IndexError(f"expected an index below {engine.boards.size}, got {index}")
    return engine.group_rank(index)


def _fault_error(engine: Communicator, fault: tuple[int, int, int, int, int, int]) -> EpPluginError | ValueError:
    code, step_index, index, field, expected, seen = fault
    peer = _rank_of(engine, index)
    step = _C.Step(step_index).name.lower()
    if code == FaultCode.TIMEOUT:
        return _timeout(engine, step, index, expected, seen)
    if code == FaultCode.DISAGREE:
        return disagreement(engine, step, index, field, expected, seen)
    if code == FaultCode.BAD_IDS:
        return ValueError(
            f"topk_ids: expected -1 or an expert id below {expected}, got {seen} at token {field} of rank {peer}"
        )
    if code == FaultCode.TOO_SMALL:
        return EpPluginError(
            f"{engine.name}: step {step}: rows for rank {peer} need {seen} where {expected} are allocated"
        )
    if code != FaultCode.BAD_DATA:
        raise ValueError(f"expected a known code, got {code}")
    return EpPluginError(
        f"{engine.name}: step {step}: rank {peer} sent an index outside what was agreed: expected at most {expected}, "
        f"got {seen} (detail {field})"
    )


def disagreement(engine: Communicator, step: str, index: int, field: int, mine: int, theirs: int) -> DisagreementError:
    """This rank and the one of board `index` say `mine` and `theirs` for a word that they must say alike."""
    name, described = engine.described(field, mine)
    return DisagreementError(
        f"{DISAGREE_ON} one call of {engine.name} at step {step}: {name} is "
        f"{described} on rank {engine.rank}, {engine.described(field, theirs)[1]} on rank {engine.group_rank(index)}"
    )


def aborted_error(engine: Communicator, rank: int, reason: str) -> EpPluginError:
    """What ranks raise when `rank` aborts. One that found a disagreement aborts with it: then all raise that alike."""
    if reason.startswith(DISAGREE_ON):
        return DisagreementError(reason)
    return PeerAborted(f"{engine.name}: rank {rank} aborted: {reason}", rank, reason)


def _timeout(engine: Communicator, step: str, index: int, expected: int, seen: int) -> PeerTimeout:
    peer, blamed = engine.group_rank(index), culprit(engine.boards, index)
    also = ""
    if blamed != index:
        also = f" Rank {peer} has given up waiting, too, and rank {engine.group_rank(blamed)} has not."
    return PeerTimeout(
        f"{engine.name}: rank {engine.rank} waited {engine.timeout_s:g} s for rank {peer} at step {step} "
        f"(expected epoch {expected}, seen {seen}).{also} Rank {engine.group_rank(blamed)} was last "
        f"{_activity(engine, blamed)}; this rank is {_activity(engine, engine.boards.index)}."
        f"{_order_hint(engine, blamed)}",
        engine.group_rank(blamed),
        step,
    )


def culprit(boards: Boards, index: int) -> int:
    """Who keeps this node waiting, where this rank has waited for the one of board `index` in vain.

    That one, unless it tells, a moment later at most, that it has waited in vain itself. Then whom it waited for, and
    so on; where that leads in a circle, as among ranks that wait for each other's room, the one that has not given up,
    if there is one alone.
    """
    if index == boards.index:
        return index
    until = time.monotonic() + GRACE_S
    peers = [peer for peer in range(boards.size) if peer != boards.index]
    while True:
        waited_for = {peer: _waited_for(boards, peer) for peer in peers}
        silent = [peer for peer in peers if waited_for[peer] is None]
        if len(silent) <= 1 or time.monotonic() > until:
            break
        time.sleep(0.01)
    found, seen = index, {boards.index}
    while found in waited_for and found not in seen:  # whatever lies on a peer's board
        seen.add(found)
        next_found = waited_for[found]
        if next_found is None or next_found == found:
            return found
        found = next_found
    return silent[0] if len(silent) == 1 else index


def _waited_for(boards: Boards, rank: int) -> int | None:
    """Whom `rank` has waited for in vain; None where it has not."""
    fault = boards.fault_of(rank)
    return None if fault is None or fault[0] != FaultCode.TIMEOUT else fault[2]


def _activity(engine: Communicator, index: int) -> str:
    return engine.boards.activity_of(index) or "not in any operation yet"


def _order_hint(engine: Communicator, index: int) -> str:
    theirs = engine.boards.activity_of(index)
    if not theirs or theirs.endswith(f" of {engine.name}"):
        return ""
    return (
        " Unless that one is gone: all ranks must call communicators that share a device in the same order, and these "
        "two ranks were last in different ones."
    )
