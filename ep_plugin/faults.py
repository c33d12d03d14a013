"""What a fault on the board means, as an exception: who waited for whom, at which step, expected and seen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ep_plugin import _C
from ep_plugin._C import FaultCode
from ep_plugin.errors import DisagreementError, EpPluginError, PeerAborted, PeerTimeout

if TYPE_CHECKING:
    from ep_plugin.engine import BaseEngine

DISAGREE_ON = "ranks disagree on"


def error_of(engine: BaseEngine) -> EpPluginError | ValueError | None:
    """The exception for what this communicator's board shows, or None when it is well."""
    fault = engine.boards.fault()
    if fault is None or fault[0] == FaultCode.ABORTED:
        abort = engine.boards.abort()
        if abort is None:
            return None
        return aborted_error(engine, engine.group_rank(abort[0]), abort[1])
    code, step_index, index, field, expected, seen = fault
    peer = engine.group_rank(index)
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
    assert code == FaultCode.BAD_DATA, fault
    return EpPluginError(
        f"{engine.name}: step {step}: rank {peer} sent an index outside what was agreed: expected at most {expected}, "
        f"got {seen} (detail {field})"
    )


def disagreement(engine: BaseEngine, step: str, index: int, field: int, mine: int, theirs: int) -> DisagreementError:
    """This rank and the one of board `index` say `mine` and `theirs` for a word that they must say alike."""
    name, described = engine.described(field, mine)
    return DisagreementError(
        f"{DISAGREE_ON} one call of {engine.name} at step {step}: {name} is "
        f"{described} on rank {engine.rank}, {engine.described(field, theirs)[1]} on rank {engine.group_rank(index)}"
    )


def aborted_error(engine: BaseEngine, rank: int, reason: str) -> EpPluginError:
    """What ranks raise when `rank` aborts. One that found a disagreement aborts with it: then all raise that alike."""
    if reason.startswith(DISAGREE_ON):
        return DisagreementError(reason)
    return PeerAborted(f"{engine.name}: rank {rank} aborted: {reason}", rank, reason)


def _timeout(engine: BaseEngine, step: str, index: int, expected: int, seen: int) -> PeerTimeout:
    peer = engine.group_rank(index)
    return PeerTimeout(
        f"{engine.name}: rank {engine.rank} waited {engine.timeout_s:g} s for rank {peer} at step {step} "
        f"(expected epoch {expected}, seen {seen}). Rank {peer} was last {_activity(engine, index)}; "
        f"this rank is {_activity(engine, engine.boards.index)}.{_order_hint(engine, index)}",
        peer,
        step,
    )


def _activity(engine: BaseEngine, index: int) -> str:
    return engine.boards.activity_of(index) or "not in any operation yet"


def _order_hint(engine: BaseEngine, index: int) -> str:
    theirs = engine.boards.activity_of(index)
    if not theirs or theirs.endswith(f" of {engine.name}"):
        return ""
    return (
        " All ranks must call communicators that share a device in the same order; these two ranks were last in "
        "different ones."
    )
