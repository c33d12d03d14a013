"""The latest calls of this process's communicators, and the file that a failure writes of them.

The calls are always kept, a fixed number of them. EP_PLUGIN_DUMP names a folder. Each communicator that fails then
writes all calls to the file ``rank<rank in the job>.json`` there. `ep-doctor --merge` reads the files of all ranks.

A replay of a CUDA graph is no call. On GPUs a call ends when its kernels are enqueued.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty
from typing import Any

import torch.distributed as dist

from ep_plugin import _C, env
from ep_plugin.errors import PeerAborted, PeerTimeout, text_of, type_and_text
from ep_plugin.log import logger
from ep_plugin.transport.peer import undo_on_error
from ep_plugin.transport.threads import call_in_thread

FORMAT = 1
_WRITE_S = 5.0  # the longest that a failing rank waits for its folder, whose server may be gone


@dataclass(eq=False)
class Calls:
    """What a dump says of one communicator, beside its calls, which `_C.CallLog` keeps.

    Attributes:
        ranks: the ranks of the group, as ranks of the job.
        rank: the index of this rank among them.
        in_order: whether all ranks call the same operations in the same order.
        name, ident: the name and ident of the communicator's Exchange, once the ranks have agreed.
        epochs: the number of operations of each kind.
    """

    ranks: tuple[int, ...]
    rank: int
    in_order: bool
    name: str
    ident: str = ""
    epochs: dict[str, int] = field(default_factory=dict)


_CALL_FIELDS = "kind", "part", "number", "epoch", "nbytes", "began", "ended"  # of _C.kept_calls()
_failures: list[tuple[Calls, dict[str, Any]]] = []
_writing = threading.RLock()  # a signal's handler, or garbage that is collected, may fail another communicator
_unwritable: set[str] = set()  # folders of which a warning was logged; nothing more is written there


def failed(calls: Calls, error: BaseException, boards: Callable[[], dict[int, Any]]) -> None:
    """Writes this process's calls after a communicator's first error, where EP_PLUGIN_DUMP asks for it. Never raises.

    boards: returns what the boards say of the ranks of this node, by rank in the group.
    """
    folder = ""
    try:
        folder = env.settings().dump or ""
        if folder and folder not in _unwritable:
            with _writing:
                _failures.append((calls, _failure(error, boards)))
                rank = calls.ranks[calls.rank]
                answers = call_in_thread(_write, Path(folder), rank, json.dumps(_content(rank)))
                _, problem = answers.get(timeout=_WRITE_S)
            if problem is not None:
                raise problem
    except Exception as second:  # the first error is raised, whatever happens here
        _unwritable.add(folder)
        why = f"no answer in {_WRITE_S:g} s" if isinstance(second, Empty) else type_and_text(second)
        logger.warning("EP_PLUGIN_DUMP: %s: nothing was written: %s", folder, why)


def _failure(error: BaseException, boards: Callable[[], dict[int, Any]]) -> dict[str, Any]:
    blamed = isinstance(error, (PeerTimeout, PeerAborted))
    return {
        "time": time.time(),
        "error": type(error).__name__,
        "text": text_of(error),
        "rank": getattr(error, "rank", None) if blamed else None,
        "step": error.step if isinstance(error, PeerTimeout) else "",
        "boards": boards(),
    }


def _content(rank: int) -> dict[str, Any]:
    """Returns the content of the file. rank: the rank of this process in the job."""
    recent = _C.kept_calls()
    known = {id(one): one for one in [*(calls for calls, *_ in recent), *(calls for calls, _ in _failures)]}
    places = {key: place for place, key in enumerate(known)}
    return {
        "format": FORMAT,
        "rank": rank,
        "world_size": dist.get_world_size() if dist.is_initialized() else None,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "written": time.time(),
        "communicators": [
            {
                "name": one.name,
                "ident": one.ident,
                "ranks": one.ranks,
                "in_order": one.in_order,
                "epochs": one.epochs,
                "failures": [failure for calls, failure in _failures if calls is one],
            }
            for one in known.values()
        ],
        "calls": [
            {"communicator": places[id(calls)], **dict(zip(_CALL_FIELDS, values, strict=True))}
            for calls, *values in recent
        ],
    }


def _write(folder: Path, rank: int, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    # In a folder that others can write to, a file or link may have any name that can be known before.
    unfinished = folder / f"rank{rank}.json.{secrets.token_hex(8)}.unfinished"
    with undo_on_error() as made:
        with open(unfinished, "x") as file:
            made.callback(unfinished.unlink)
            file.write(text)
        unfinished.replace(folder / f"rank{rank}.json")


def _forget() -> None:
    global _writing
    _writing = threading.RLock()  # a thread of the parent may hold it
    _C.forget_calls()
    _failures.clear()


os.register_at_fork(after_in_child=_forget)
