"""Makes exceptions of the faults on a board, and finds the rank at fault after a timeout."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from ep_plugin import _C
from ep_plugin._C import FaultCode
from ep_plugin.errors import DisagreementError, EpPluginError, PeerTimeout, error_of_peer
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
    def group_rank(self, index: int) -> int: ...
    def described(self, field: int, value: int) -> tuple[str, str]: ...


def error_of(engine: Communicator) -> EpPluginError | ValueError | None:
    """Returns the exception for the fault or abort on this communicator's board. None: there is none."""
    boards = engine.boards
    fault = abort = None
    try:
        fault = boards.fault()
        if fault is not None and fault[0] != FaultCode.ABORTED:
            return _fault_error(engine, *fault)
        abort = boards.abort()
        if abort is None:
            return None
        if abort[0] < 0:
            raise IndexError(f"expected an index of at least 0, got {abort[0]}")
        return aborted_error(engine, engine.group_rank(abort[0]), abort[1])
    except (LookupError, TypeError, ValueError, OverflowError) as error:
        # A peer, or any writer of shared memory, may have overwritten the board.
        return EpPluginError(
            f"{engine.name}: expected a fault or an abort on the board of rank {engine.rank}, got {abort or fault}: "
            f"{type(error).__name__}: {error}"
        )


def _fault_error(
    engine: Communicator, code: int, step_index: int, index: int, field: int, expected: int, seen: int
) -> EpPluginError | ValueError:
    if code == FaultCode.TIMEOUT and not 0 <= index < engine.boards.size:  # kernels wait for ranks of the node
        raise IndexError(f"expected an index below {engine.boards.size}, got {index}")
    peer, step = engine.group_rank(index), _C.Step(step_index).name.lower()
    if code == FaultCode.TIMEOUT:
        return _timeout(engine, step, index, expected, seen)
    if code == FaultCode.DISAGREE:
        return disagreement(engine, step, peer, field, expected, seen)
    if code == FaultCode.BAD_IDS:
        return ValueError(
            f"topk_ids: expected -1 or an expert id below {expected}, got {seen} at token {field} of rank {peer}"
        )
    if code == FaultCode.TOO_SMALL:
        return EpPluginError(
            f"{engine.name}: step {step}: rows for rank {peer} need {seen} where {expected} are allocated"
        )
    if code == FaultCode.BAD_HANDLE:
        return ValueError(
            f"handle: expected its tensors as dispatch wrote them, got other contents at step {step} (detail {field})"
        )
    if code == FaultCode.BAD_COUNTS:
        return EpPluginError(
            f"{engine.name}: step {step}: tokens of other nodes have {seen} rows or pairs where their ranks counted "
            f"{expected} (detail {field}): a token names an expert twice, or a rank sent other counts than ids"
        )
    if code == FaultCode.MASKED:
        return aborted_error(engine, peer, f"it has masked rank {engine.rank}, for which it had waited in vain")
    if code != FaultCode.BAD_DATA:
        raise ValueError(f"expected a known code, got {code}")
    return EpPluginError(
        f"{engine.name}: step {step}: rank {peer} sent an index outside what was agreed: expected at most {expected}, "
        f"got {seen} (detail {field})"
    )


def disagreement(engine: Communicator, step: str, rank: int, field: int, mine: int, theirs: int) -> DisagreementError:
    """Returns the error for a field on which ranks must agree: it is `mine` here and `theirs` on `rank`."""
    name, described = engine.described(field, mine)
    return DisagreementError(
        f"{DISAGREE_ON} one call of {engine.name} at step {step}: {name} is "
        f"{described} on rank {engine.rank}, {engine.described(field, theirs)[1]} on rank {rank}"
    )


def aborted_error(engine: Communicator, rank: int, reason: str) -> EpPluginError:
    """Returns the error of this rank after `rank` has failed. reason: as `error_of_peer` takes it."""
    return error_of_peer(rank, reason, engine.rank, f"{engine.name}: ")


def _timeout(engine: Communicator, step: str, index: int, expected: int, seen: int) -> PeerTimeout:
    boards = engine.boards
    at_fault = culprit(boards.index, boards.size, index, lambda: _waits(boards))
    if at_fault is None:
        at_fault = index
    peer, rank = engine.group_rank(index), engine.group_rank(at_fault)
    also = "" if at_fault == index else f" {gave_up(peer, rank)}"
    activity, own = (boards.activity_of(one) or "not in any operation yet" for one in (at_fault, boards.index))
    order = ""
    if boards.activity_of(at_fault) and not activity.endswith(f" of {engine.name}"):
        order = (
            " Unless that one is gone: all ranks must call communicators that share a device in the same order, and "
            "these two ranks were last in different ones."
        )
    return PeerTimeout(
        f"{engine.name}: rank {engine.rank} waited {engine.timeout_s:g} s for rank {peer} at step {step} (expected "
        f"epoch {expected}, seen {seen}).{also} Rank {rank} was last {activity}; this rank is {own}.{order}",
        rank,
        step,
    )


def gave_up(peer: int | None, at_fault: int | None) -> str:
    """Returns the sentence for a timeout whose `peer` is not the rank at fault."""
    return f"Rank {peer} has given up waiting, too, and rank {at_fault} has not."


def culprit(
    own: int,
    size: int,
    index: int | None,
    look: Callable[[], Mapping[int, int]],
    known: Callable[[], bool] = lambda: False,
) -> int | None:
    """Returns the rank at fault after rank `own`, of `size` ranks, has waited in vain for rank `index`.

    The rank at fault ends the chain of waits. The chain may be a circle, as among ranks that wait for each other's
    room. Then the rank at fault is the one that has not given up, if there is only one.

    Args:
        index: None: not known.
        look: returns, by rank, the rank that each other rank has waited for in vain. It is called at least once, and
            again for `GRACE_S`, until only one rank has not given up.
        known: whether the answer is not needed any more.

    Returns:
        None: not known.
    """
    until = time.monotonic() + GRACE_S
    while True:
        waits = look()
        silent = [rank for rank in range(size) if rank != own and rank not in waits]
        if index == own or len(silent) <= 1 or known() or time.monotonic() > until:
            break
        time.sleep(0.01)
    chain, found = {own}, index
    while found is not None and found not in chain and 0 <= found < size:  # boards may hold anything
        chain.add(found)
        following = waits.get(found)
        if following is None or following == found:
            return found
        found = following
    return silent[0] if len(silent) == 1 and index != own else index


def _waits(boards: Boards) -> dict[int, int]:
    """Returns, by rank of the node, the rank that each other rank has waited for in vain."""
    faults = {rank: boards.fault_of(rank) for rank in range(boards.size) if rank != boards.index}
    return {rank: fault[2] for rank, fault in faults.items() if fault is not None and fault[0] == FaultCode.TIMEOUT}


def seen_on_boards(engine: Communicator) -> dict[int, dict[str, Any]]:
    """Returns what the boards say of each rank of the node, by rank in the group.

    "last" is the operation that the rank was last in. "waits" is its wait that has been in vain, or None. A board that
    somebody has overwritten adds nothing.
    """
    boards = engine.boards
    found: dict[int, dict[str, Any]] = {}
    for index in range(boards.size):
        seen = found[engine.group_rank(index)] = {"last": "", "waits": None}
        with contextlib.suppress(LookupError, TypeError, ValueError, OverflowError):
            seen["last"] = boards.activity_of(index)
            fault = boards.fault_of(index)
            if fault is not None and fault[0] == FaultCode.TIMEOUT:
                step, peer = _C.Step(fault[1]).name.lower(), engine.group_rank(fault[2])
                seen["waits"] = {"step": step, "rank": peer, "expected": fault[4], "seen": fault[5]}
    return found
