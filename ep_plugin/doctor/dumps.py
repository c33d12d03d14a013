"""`ep-doctor --merge FOLDER` reads the files of failed ranks, and says in which operation each rank was.

Ranks write the files where EP_PLUGIN_DUMP asks for them (runtime/calls.py). If the folder also has files of load
statistics, named load* (moe/recording.py), the command says which rank was late. Nothing here needs torch. A file may
have been cut off, and in a shared folder anybody may have written it, so every field is checked.
"""

from __future__ import annotations

import json
import math
import os
import stat
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ep_plugin.doctor.findings import FAILURE, OK, WARNING, Finding, ranks_said
from ep_plugin.errors import type_and_text

_FORMAT = 1
_STATS = {"format": "ep_plugin load", "version": 1}
_MOST_NS = 2**63
_MOST_RANKS = 2**20
_MOST_BYTES = 64 * 2**20  # of a file; one of 1000 calls has some 300 kB
_BLAME_OTHERS = ("PeerTimeout", "PeerAborted")
_UNUSABLE = (OSError, ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError, MemoryError)


class DumpedCall(NamedTuple):
    """One call of a rank, with the fields of `runtime.calls.Call`. `ended` is None if the call had not returned."""

    kind: str
    part: str
    number: int
    epoch: int
    began: float
    ended: float | None

    def __str__(self) -> str:
        return f"{'in' if self.ended is None else 'after'} {self.kind} {self.epoch}{self.part and f' ({self.part})'}"


class Failure(NamedTuple):
    """The first error of a communicator on one rank.

    Attributes:
        rank: the rank of the job that is at fault; None if it is not known.
        boards: the operation that each rank of the node was last in, by rank of the job.
    """

    time: float
    error: str
    text: str
    rank: int | None
    step: str
    boards: dict[int, str]


class Communicator(NamedTuple):
    """One rank's side of a communicator. `ranks` are ranks of the job."""

    name: str
    ident: str
    ranks: tuple[int, ...]
    in_order: bool
    failure: Failure | None
    calls: list[DumpedCall]


class Dump(NamedTuple):
    """The content of one rank's file."""

    rank: int
    world_size: int
    written: float
    communicators: list[Communicator]

    @property
    def failure(self) -> tuple[Communicator, Failure] | None:
        """The communicator that failed first on the rank, and its failure; None if no communicator failed."""
        failed = [(one, one.failure) for one in self.communicators if one.failure is not None]
        return min(failed, key=lambda pair: pair[1].time, default=None)


def merge(folder: Path) -> list[Finding]:
    """Reads the files in `folder`, and returns what they say together."""
    findings: list[Finding] = []
    dumps: dict[int, Dump] = {}
    for path in sorted(folder.glob("rank*")):
        try:
            dump = _dump_of(json.loads(_read(path)))
        except _UNUSABLE as error:
            what = f"{path.name} cannot be used: {type_and_text(error)}"
            findings.append(Finding(WARNING, "files", what, "its rank may have died while it wrote; the rest is used"))
            continue
        if dump.rank in dumps:
            what = f"{path.name} is of rank {dump.rank}, as another file is"
            findings.append(Finding(WARNING, "files", what, "let each job write into an empty folder of its own"))
            continue
        dumps[dump.rank] = dump
    waits = list(_waits(folder))
    if not dumps and waits:
        return [*findings, *waits]
    if not dumps:
        do = "set EP_PLUGIN_DUMP to a folder that all ranks can write to, and run the job again"
        return [*findings, Finding(FAILURE, "files", f"{folder} has no file of any rank", do)]
    return [*findings, *_strangers(dumps), *_failures(dumps), *_missing(dumps), *_places(dumps), *waits]


def _waits(folder: Path) -> Iterator[Finding]:
    """Says for each communicator which rank was late, by the files of `ep_plugin.write_stats`.

    A rank that waits for others makes its own peers wait. So the late rank is the one for which others waited longest,
    less the time that it waited itself.
    """
    waited: dict[str, dict[int, list[int]]] = defaultdict(dict)
    for path in sorted(folder.glob("load*")):
        try:
            found = _waited_of(json.loads(_read(path)))
        except _UNUSABLE as error:
            what = f"{path.name} cannot be used: {type_and_text(error)}"
            yield Finding(WARNING, "files", what, "let every rank write one with ep_plugin.write_stats")
            continue
        for name, (rank, times) in found.items():
            if rank in waited[name] or any(len(others) != len(times) for others in waited[name].values()):
                what = f"{path.name} has rank {rank} of {len(times)} of {name}, and does not fit the files before it"
                yield Finding(WARNING, "files", what, "let each job write into an empty folder of its own")
            else:
                waited[name][rank] = times
    for name, by_rank in waited.items():
        yield Finding(OK, name, _late_rank(by_rank))


def _waited_of(content: Any) -> dict[str, tuple[int, list[int]]]:
    """Returns a rank of each communicator, and how many nanoseconds it waited for each rank of the group."""
    head = {key: content[key] for key in _STATS}
    if head != _STATS:
        raise ValueError(f"expected {_STATS}, got {head}")
    found = {}
    for name, fields in content["communicators"].items():
        rank, times = int(fields["rank"]), [int(ns) for ns in fields["waited_ns"]]
        if not 0 <= rank < len(times) <= _MOST_RANKS:
            raise ValueError(f"expected a rank below the number of waits, got rank {rank} and {len(times)} waits")
        if not all(0 <= ns < _MOST_NS for ns in times):
            raise ValueError(f"expected waits of 0 to {_MOST_NS - 1} ns, got {min(times)} to {max(times)}")
        found[name] = rank, times
    return found


def _late_rank(by_rank: dict[int, list[int]]) -> str:
    ranks = range(len(next(iter(by_rank.values()))))
    for_it = [sum(times[rank] for other, times in by_rank.items() if other != rank) for rank in ranks]
    own = [sum(by_rank.get(rank, ())) for rank in ranks]
    late = max(ranks, key=lambda rank: for_it[rank] - own[rank])
    if for_it[late] <= own[late]:
        return "no rank was late"
    return f"others waited {for_it[late] / 1e9:.3f} s for its rank {late}, which waited {own[late] / 1e9:.3f} s itself"


def _read(path: Path) -> bytes:
    """Reads a file. Raises ValueError for a pipe or a device, which may never end, and for a file that is too large."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK | os.O_NOCTTY)) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_size > _MOST_BYTES:
            raise ValueError(
                f"expected a regular file of at most {_MOST_BYTES} bytes, got mode {found.st_mode:o}, "
                f"{found.st_size} bytes"
            )
        return file.read(_MOST_BYTES)


def _dump_of(content: Any) -> Dump:
    if content["format"] != _FORMAT:
        raise ValueError(f"expected format {_FORMAT}, got {content['format']!r}")
    calls = defaultdict(list)
    for call in content["calls"]:
        number, epoch, began = int(call["number"]), int(call["epoch"]), float(call["began"])
        ended = None if call["ended"] is None else float(call["ended"])
        calls[int(call["communicator"])].append(
            DumpedCall(str(call["kind"]), str(call["part"]), number, epoch, began, ended)
        )
    communicators = []
    for place, one in enumerate(content["communicators"]):
        ranks = tuple(map(int, one["ranks"]))
        failure = _failure_of(one["failures"][0], ranks) if one["failures"] else None
        in_order = bool(one["in_order"])
        communicators.append(Communicator(str(one["name"]), str(one["ident"]), ranks, in_order, failure, calls[place]))
    rank = int(content["rank"])
    known = [rank, *(rank for one in communicators for rank in one.ranks)]
    world_size = int(content["world_size"] or 1 + max(known))
    if not 0 <= min(known) <= max(known) < world_size <= _MOST_RANKS:
        raise ValueError(
            f"expected ranks from 0 to {min(world_size, _MOST_RANKS) - 1}, got {min(known)} to {max(known)}"
        )
    return Dump(rank, world_size, float(content["written"]), communicators)


def _failure_of(found: Any, ranks: Sequence[int]) -> Failure:
    in_job = dict(enumerate(ranks))
    at_fault = None if found["rank"] is None else in_job[int(found["rank"])]
    boards = {in_job[int(rank)]: str(seen["last"]) for rank, seen in found["boards"].items()}
    when = float(found["time"])
    time.localtime(when)  # raises if it is no time
    return Failure(when, str(found["error"]), str(found["text"]), at_fault, str(found["step"]), boards)


def _strangers(dumps: dict[int, Dump]) -> Iterator[Finding]:
    """Removes from `dumps` the files that an earlier job has left in the folder, and names them.

    A file is of an earlier job if a later file has another communicator of the same name and ranks, or if the latest
    file has another number of ranks.
    """
    latest = max(dumps.values(), key=lambda dump: dump.written)
    idents: dict[tuple[str, tuple[int, ...]], str] = {}
    for dump in sorted(dumps.values(), key=lambda dump: dump.written):
        idents |= {(one.name, one.ranks): one.ident for one in dump.communicators if one.ident}
    for rank, dump in sorted(dumps.items()):
        is_old = any(one.ident and one.ident != idents[one.name, one.ranks] for one in dump.communicators)
        if is_old or dump.world_size != latest.world_size:
            del dumps[rank]
            what = f"the file of rank {rank} is of an earlier job, and left out"
            yield Finding(WARNING, "files", what, "let each job write into an empty folder of its own")


def _failures(dumps: dict[int, Dump]) -> Iterator[Finding]:
    """Yields the first failure of each rank, ordered by time.

    Ranks that failed by themselves come before all others, as failures. Time alone would not do: a peer may record its
    error before the rank at fault has recorded its own.
    """
    failed = [(rank, *dump.failure) for rank, dump in dumps.items() if dump.failure is not None]
    failed.sort(key=lambda entry: (not _is_own(entry[0], entry[2]), entry[2].time))
    for rank, communicator, failure in failed:
        when = time.strftime("%H:%M:%S", time.localtime(failure.time))
        what = f"at {when} {failure.error}: {failure.text}"
        if communicator.name not in failure.text:
            what = f"in {communicator.name} {what}"
        if not _is_own(rank, failure):
            yield Finding(OK, f"rank {rank}", what)
        else:
            do = f"begin with this error: rank {rank} failed by itself, and the other ranks stopped because of it"
            yield Finding(FAILURE, f"rank {rank}", what, do)


def _is_own(rank: int, failure: Failure) -> bool:
    """Returns whether `rank` failed by itself, not because of another rank."""
    return failure.error not in _BLAME_OTHERS or failure.rank == rank


def _missing(dumps: dict[int, Dump]) -> Iterator[Finding]:
    """Names the ranks that left no file, and says where other ranks saw them last."""
    missing = set(range(max(dump.world_size for dump in dumps.values()))) - dumps.keys()
    seen: dict[int, list[tuple[float, str]]] = defaultdict(list)
    waiting: dict[int, list[int]] = defaultdict(list)
    for other, failure in ((other, dump.failure[1]) for other, dump in dumps.items() if dump.failure is not None):
        for rank, last in failure.boards.items():
            seen[rank].append((failure.time, f"rank {other} saw it last {last or 'in no operation'}"))
        if failure.rank is not None:
            waiting[failure.rank].append(other)
    for rank in sorted(missing & (seen.keys() | waiting.keys())):
        what = f"left no file; {max(seen[rank])[1] if seen[rank] else _NOT_SEEN}"
        if waiting[rank]:
            what = f"{what}; {ranks_said(waiting[rank])} waited for it in vain"
        yield Finding(FAILURE if waiting[rank] else WARNING, f"rank {rank}", what, _LOOK.format(f"rank {rank}"))
    others = missing - seen.keys() - waiting.keys()
    if others:  # one finding for all: they may be a million
        them = "it" if len(others) == 1 else "them"
        what = f"{ranks_said(others)} left no file, and no other file mentions {them}"
        yield Finding(WARNING, "ranks", what, _LOOK.format("such a rank"))


_NOT_SEEN = "no rank of its node has left one that mentions it"
_LOOK = (
    "look at the end of {}'s output and at its exit code: it was killed, or it hangs outside of ep_plugin "
    "(`py-spy dump --pid PID` on its host shows where), or it could not write its file"
)


def _places(dumps: dict[int, Dump]) -> Iterator[Finding]:
    """Says for each communicator where each rank was when the first of them failed, and which ranks were behind."""
    sides: dict[str, dict[int, Communicator]] = defaultdict(dict)
    for rank, dump in sorted(dumps.items()):
        for one in dump.communicators:
            sides[one.ident or one.name][rank] = one
    for by_rank in sides.values():
        first = next(iter(by_rank.values()))
        failed_at = min((one.failure.time for one in by_rank.values() if one.failure is not None), default=math.inf)
        calls = {rank: seen for rank, one in by_rank.items() if (seen := _until(failed_at, one.calls))}
        if not calls:
            continue
        last = {rank: max(seen, key=lambda call: (call.number, call.began)) for rank, seen in calls.items()}
        yield Finding(OK, first.name, "; ".join(_grouped({rank: str(call) for rank, call in last.items()})))
        # A rank that failed by itself explains why others are ahead of it.
        if (
            first.in_order
            and failed_at < math.inf
            and not any(one.failure is not None and _is_own(rank, one.failure) for rank, one in by_rank.items())
        ):
            blamed = {one.failure.rank for one in by_rank.values() if one.failure is not None}
            waiting = {rank for rank, one in by_rank.items() if one.failure is not None and rank not in blamed}
            yield from _out_of_step(first, calls, last, waiting)


def _until(end: float, calls: Iterable[DumpedCall]) -> list[DumpedCall]:
    """Returns the calls that had begun by the time `end`, as they were then. A late rank calls more after that."""
    begun = (call for call in calls if call.began <= end)
    return [call._replace(ended=None) if call.ended is not None and call.ended > end else call for call in begun]


def _out_of_step(
    one: Communicator, calls: dict[int, list[DumpedCall]], last: dict[int, DumpedCall], waiting: set[int]
) -> Iterator[Finding]:
    """Names the ranks of a communicator that called other operations than the rest, or fewer.

    Args:
        one: the communicator on any rank.
        calls: its calls, by rank.
        last: its last call, by rank.
        waiting: the ranks that waited for another rank while no rank waited for them. They are not named: the rank at
            fault may have sent its rows to some ranks only, which then are one operation ahead.
    """
    kinds: dict[int, dict[int, str]] = defaultdict(dict)  # by number, by rank
    for rank, seen in calls.items():
        for call in seen:
            kinds[call.number][rank] = f"{call.kind} {call.epoch}"
    differing = min((number for number, by in kinds.items() if len(set(by.values())) > 1), default=None)
    furthest = max(call.number for call in last.values())
    apart = {rank for rank, call in last.items() if call.number < furthest}
    behind = {rank: str(last[rank]) for rank in apart - waiting}
    if differing is not None:
        what = f"ranks differ in operation {differing}: {'; '.join(_grouped(kinds[differing]))}"
        do = "all ranks must call the same operations in the same order: look for a condition that differs among them"
        yield Finding(FAILURE, one.name, what, do)
    elif behind:
        what = f"behind: {'; '.join(_grouped(behind))}, while {ranks_said(set(last) - apart)} came further"
        do = f"look at what {ranks_said(behind)} did then: its output, and its calls of other communicators"
        yield Finding(FAILURE, one.name, what, do)
    elif len(last) == len(one.ranks) and not apart:
        do = "look at the rank and the step in the first error above; a larger timeout helps if that rank is only slow"
        yield Finding(WARNING, one.name, "all ranks had come to the same operation", do)


def _grouped(texts: dict[int, str]) -> list[str]:
    """Joins the ranks that have the same text: "ranks 0, 2 in dispatch 4". The order is that of the ranks."""
    ranks = defaultdict(list)
    for rank, text in sorted(texts.items()):
        ranks[text].append(rank)
    return [f"{ranks_said(those)} {text}" for text, those in ranks.items()]
