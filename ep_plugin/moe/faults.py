"""What a fault on the board means, as an exception: who waited for whom, at which step, expected and seen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ep_plugin.errors import DisagreementError, EpPluginError, PeerAborted, PeerTimeout
from ep_plugin.moe.validate import DTYPES

if TYPE_CHECKING:
    from ep_plugin.moe.engine import Engine

_TIMEOUT, _ABORTED, _DISAGREE, _BAD_IDS, _BAD_DATA, _TOO_SMALL = 1, 2, 3, 4, 5, 6
STEPS = ("none", "plan", "notify", "send", "expand", "combine", "add")
_FIELDS = ("operation", "row bytes", "scale bytes", "weight bytes", "top-k", "dtype", "layout", "config", "num_tokens")
_DISAGREE_ON = "ranks disagree on"
_OPERATIONS = {1: "dispatch", 2: "cached dispatch", 3: "combine"}


def error_of(engine: Engine) -> EpPluginError | ValueError | None:
    """The exception for what this communicator's board shows, or None when it is well."""
    fault = engine.boards.fault()
    if fault is None or fault[0] == _ABORTED:
        abort = engine.boards.abort()
        if abort is None:
            return None
        return aborted_error(engine, *abort)
    code, step_index, peer, field, expected, seen = fault
    step = STEPS[step_index]
    if code == _TIMEOUT:
        return _timeout(engine, step, peer, expected, seen)
    if code == _DISAGREE:
        return DisagreementError(
            f"{_DISAGREE_ON} one call of {engine.name} at step {step}: {_FIELDS[field]} is "
            f"{_value(field, expected)} on rank {engine.rank}, {_value(field, seen)} on rank {peer}"
        )
    if code == _BAD_IDS:
        return ValueError(
            f"topk_ids: expected -1 or an expert id below {expected}, got {seen} at token {field} of rank {peer}"
        )
    if code == _TOO_SMALL:
        return EpPluginError(
            f"{engine.name}: step {step}: rows for rank {peer} need {seen} where {expected} are allocated"
        )
    assert code == _BAD_DATA, fault
    return EpPluginError(
        f"{engine.name}: step {step}: rank {peer} sent an index outside what was agreed: expected at most {expected}, "
        f"got {seen} (detail {field})"
    )


def aborted_error(engine: Engine, rank: int, reason: str) -> EpPluginError:
    """What ranks raise when `rank` aborts. One that found a disagreement aborts with it: then all raise that alike."""
    if reason.startswith(_DISAGREE_ON):
        return DisagreementError(reason)
    return PeerAborted(f"{engine.name}: rank {rank} aborted: {reason}", rank, reason)


def disagreement_on_pool(engine: Engine, pool: str, nbytes: int, rank: int, theirs: str) -> DisagreementError:
    """Two ranks need differently large pools for one operation."""
    return DisagreementError(
        f"{_DISAGREE_ON} one call of {engine.name}: the {pool} needs {nbytes} bytes on rank {engine.rank}, "
        f"{theirs} on rank {rank}: the shapes or dtypes of their rows differ"
    )


def _timeout(engine: Engine, step: str, peer: int, expected: int, seen: int) -> PeerTimeout:
    return PeerTimeout(
        f"{engine.name}: rank {engine.rank} waited {engine.timeout_s:g} s for rank {peer} at step {step} "
        f"(expected epoch {expected}, seen {seen}). Rank {peer} was last {_activity(engine, peer)}; "
        f"this rank is {_activity(engine, engine.rank)}.{_order_hint(engine, peer)}",
        peer,
        step,
    )


def _activity(engine: Engine, rank: int) -> str:
    return engine.boards.activity_of(rank) or "not in any operation yet"


def _order_hint(engine: Engine, peer: int) -> str:
    theirs = engine.boards.activity_of(peer)
    if not theirs or theirs.endswith(f" of {engine.name}"):
        return ""
    return (
        " All ranks must call communicators that share a device in the same order; these two ranks were last in "
        "different ones."
    )


def _value(field: int, value: int) -> str:
    if _FIELDS[field] == "operation":
        return _OPERATIONS.get(value, str(value))
    return str(DTYPES[value]) if _FIELDS[field] == "dtype" and 0 <= value < len(DTYPES) else str(value)
