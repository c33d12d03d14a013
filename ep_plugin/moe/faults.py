"""What a fault on the board means, as an exception: who waited for whom, at which step, expected and seen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ep_plugin import _C
from ep_plugin._C import FaultCode
from ep_plugin.errors import DisagreementError, EpPluginError, PeerAborted, PeerTimeout
from ep_plugin.moe.validate import DTYPES

if TYPE_CHECKING:
    from ep_plugin.moe.engine import Engine

_FIELDS = {"op": "operation", "topk": "top-k", "config_hash": "config", "num_tokens": "number of tokens"}
_DISAGREE_ON = "ranks disagree on"


def error_of(engine: Engine) -> EpPluginError | ValueError | None:
    """The exception for what this communicator's board shows, or None when it is well."""
    fault = engine.boards.fault()
    if fault is None or fault[0] == FaultCode.ABORTED:
        abort = engine.boards.abort()
        if abort is None:
            return None
        return aborted_error(engine, *abort)
    code, step_index, peer, field, expected, seen = fault
    step = _C.Step(step_index).name.lower()
    if code == FaultCode.TIMEOUT:
        return _timeout(engine, step, peer, expected, seen)
    if code == FaultCode.DISAGREE:
        return DisagreementError(
            f"{_DISAGREE_ON} one call of {engine.name} at step {step}: {_words(_C.header_fields[field])} is "
            f"{_value(field, expected)} on rank {engine.rank}, {_value(field, seen)} on rank {peer}"
        )
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


def _words(name: str) -> str:
    return _FIELDS.get(name, name.replace("_", " ")).lower()


def _value(field: int, value: int) -> str:
    """A header's word as a reader knows it; one that a peer has garbled as the number it is."""
    name = _C.header_fields[field]
    if name == "dtype" and 0 <= value < len(DTYPES):
        return str(DTYPES[value])
    if name == "op" and value in list(_C.Op):
        return _words(_C.Op(value).name)
    return str(value)
