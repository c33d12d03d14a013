"""In what ranks can disagree when they dispatch and combine, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ep_plugin import _C
from ep_plugin.dtypes import DTYPES
from ep_plugin.errors import DisagreementError
from ep_plugin.runtime.faults import DISAGREE_ON

if TYPE_CHECKING:
    from ep_plugin.moe.high_throughput.engine import Engine

_FIELDS = {"op": "operation", "topk": "top-k", "config_hash": "config", "num_tokens": "number of tokens"}


def disagreement_on_pool(engine: Engine, pool: str, nbytes: int, rank: int, theirs: str) -> DisagreementError:
    """Two ranks need differently large pools for one operation."""
    return DisagreementError(
        f"{DISAGREE_ON} one call of {engine.name}: the {pool} needs {nbytes} bytes on rank {engine.rank}, "
        f"{theirs} on rank {rank}: the shapes or dtypes of their rows differ"
    )


def described(field: int, value: int) -> tuple[str, str]:
    """The name of a header's word, and its `value` as a reader knows it."""
    return _words(_C.header_fields[field]), _value(field, value)


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
