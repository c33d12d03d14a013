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
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty
from typing import Any

import torch.distributed as dist

from ep_plugin import env
from ep_plugin.errors import PeerAborted, PeerTimeout, text_of, type_and_text
from ep_plugin.log import logger
from ep_plugin.transport.peer import undo_on_error
from ep_plugin.transport.threads import call_in_thread

FORMAT = 1
_KEPT = 1000
_WRITE_S = 5.0  # the longest that a failing rank waits for its folder, whose server may be gone


@dataclass(slots=True)
class Call:
    """One call of an operation, or of a part of it.

    Attributes:
        number: the count of the operation in its communicator, 1 for the first.
        epoch: its count among the operations of its kind.
        nbytes: the bytes that this rank passes in.
        began, ended: seconds since 1970. ended is None while the call runs, and after it has failed.
    """

    calls: Calls
    kind: str
    part: str
    number: int
    epoch: int
    nbytes: int
    began: float
    ended: float | None = None


@dataclass(eq=False)
class Calls:
    """The calls of one communicator.

    Attributes:
        ranks: the ranks of the group, as ranks of the job.
        rank: the index of this rank among them.
        in_order: whether all ranks call the same operations in the same order.
        name, ident: the name and ident of the communicator's Exchange, once the ranks have agreed.
    """

    ranks: tuple[int, ...]
    rank: int
    in_order: bool
    name: str
    ident: str = ""
    number: int = 0
    epochs: Counter[str] = field(default_factory=Counter)

    def begin(self, kind: str, part: str, nbytes: int, continues: Call | None) -> Call:
        """Counts, keeps and returns a call. continues: the call that has begun the same operation."""
        if continues is None:
            self.number += 1
            self.epochs[kind] += 1
            call = Call(self, kind, part, self.number, self.epochs[kind], nbytes, time.time())
        else:
            call = Call(self, kind, part, continues.number, continues.epoch, nbytes, time.time())
        _recent.append(call)
        return call


_recent: deque[Call] = deque(maxlen=_KEPT)
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
    recent = list(_recent)
    known = {id(one): one for one in [*(call.calls for call in recent), *(calls for calls, _ in _failures)]}
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
            {
                "communicator": places[id(call.calls)],
                **{name: getattr(call, name) for name in Call.__slots__ if name != "calls"},
            }
            for call in recent
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
    _recent.clear()
    _failures.clear()


os.register_at_fork(after_in_child=_forget)
