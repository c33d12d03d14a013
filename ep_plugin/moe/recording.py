"""Load statistics of a whole process: switches them on, reads all communicators, and writes files for `ep-bench load`.

A file holds JSON: {"format": "ep_plugin load", "version": 1, "communicators": {name: fields of LoadStats}}. Tensors are
lists. Each rank writes one.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from ep_plugin.moe.registry import open_communicators
from ep_plugin.moe.statistics import LoadStats, Sums

_HEAD = {"format": "ep_plugin load", "version": 1}
_TENSORS = ("tokens", "waited_ns")  # the values of `layers` are tensors, too


def record_stats(on: bool = True) -> None:
    """Starts to record the load of every communicator of this process, from zero; or stops.

    While statistics are recorded, each operation enqueues a small addition and waits for nothing. Ranks may differ.
    Operations in CUDA graphs that were captured earlier do not count.

    Args:
        on: True starts, False stops.
    """
    if on and not Sums.recording:
        for comm in open_communicators():
            with comm.engine.lock:
                comm.engine.load.reset()
    Sums.recording = on


def stats(reset: bool = False) -> dict[str, LoadStats]:
    """Returns `MoECommunicator.stats()` of every open communicator of this process, by its name in error messages.

    Layers of a model share the communicator of their group and shape. The names are the same on all ranks of a group.

    Args:
        reset: start every communicator at zero again.

    Raises:
        ValueError: this process does not record.
    """
    return {comm.engine.name: comm.stats(reset) for comm in open_communicators()}


def write_stats(path: str | os.PathLike[str], reset: bool = False) -> None:
    """Writes `stats(reset)` to the file `path`, for `ep-bench load`. Each rank must write a file of its own."""
    records = {name: _to_json(record) for name, record in stats(reset).items()}
    Path(path).write_text(json.dumps({**_HEAD, "communicators": records}) + "\n")


def read_stats(path: str | os.PathLike[str]) -> dict[str, LoadStats]:
    """Reads a file that `write_stats` has written. Returns the load of each communicator, by name.

    Raises:
        ValueError: `write_stats` has not written this file.
    """
    expected = f"{path}: expected a file that ep_plugin.write_stats wrote"
    try:
        found = json.loads(Path(path).read_text())
    except ValueError as error:
        raise ValueError(f"{expected}, got no JSON: {error}") from None
    head = {key: found.get(key) for key in _HEAD} if isinstance(found, dict) else {}
    if head != _HEAD:
        raise ValueError(f"{expected}, with {_HEAD}, got {head}")
    try:
        return {name: _from_json(fields) for name, fields in found["communicators"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{expected}, got other fields: {error}") from None


def _to_json(record: LoadStats) -> dict[str, Any]:
    fields = record._asdict()
    layers = {name: tokens.tolist() for name, tokens in record.layers.items()}
    return fields | {name: fields[name].tolist() for name in _TENSORS} | {"layers": layers}


def _from_json(fields: dict[str, Any]) -> LoadStats:
    given = {name: torch.tensor(fields[name], dtype=torch.int64) for name in _TENSORS}
    layers = {name: torch.tensor(tokens, dtype=torch.int64) for name, tokens in fields["layers"].items()}
    return LoadStats(**{**fields, **given, "layers": layers})
