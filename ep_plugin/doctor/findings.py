"""Defines the finding of a check, collects findings, and prints them as a table."""

from __future__ import annotations

import itertools
import shutil
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

OK, WARNING, FAILURE = LEVELS = ("ok", "warning", "failure")
_WIDEST_SUBJECT = 40  # characters: every line of the table begins behind that many


class Finding(NamedTuple):
    """What a check found.

    Attributes:
        level: "ok", "warning", or "failure" for a fault that would stop a job.
        subject: the thing that was checked, in a word or two.
        what: a sentence that says what was found.
        do: what the user can do about it. It is empty if, and only if, the level is "ok".
    """

    level: str
    subject: str
    what: str
    do: str = ""


def collect(checks: Iterable[Callable[[], Iterator[Finding]]]) -> list[Finding]:
    """Returns the findings of all checks. A check that raises counts as a failure, and the others still run."""
    found: list[Finding] = []
    for check in checks:
        try:
            found.extend(check())
        except Exception as error:
            subject = check.__name__.removeprefix("check_").replace("_", " ")
            what = f"this check itself failed: {type(error).__name__}: {error}"
            found.append(Finding(FAILURE, subject, what, "report this, with the output of ep-doctor --json"))
    return found


def ranks_said(ranks: Iterable[int]) -> str:
    """Names ranks in ascending order: "rank 3", "ranks 1, 3" or "ranks 0 to 3, 7"; "" for none."""
    known = sorted(set(ranks))
    runs = [[rank for _, rank in run] for _, run in itertools.groupby(enumerate(known), lambda one: one[1] - one[0])]
    said = (f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)
    return f"rank{'s'[: len(known) != 1]} {', '.join(said)}" if known else ""


def printable(text: str) -> str:
    """Replaces control characters and lone surrogates in `text` by escapes such as ``\\x1b``."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else ascii(letter)[1:-1] for letter in text)


def status(findings: Sequence[Finding]) -> int:
    """Returns the exit status: 1 if there is a failure, else 0."""
    return int(any(finding.level == FAILURE for finding in findings))


def render(findings: Sequence[Finding]) -> str:
    """Returns a table of levels, subjects and sentences, with advice below each problem. The last line counts."""
    width = max(80, min(shutil.get_terminal_size((120, 24)).columns, 120))
    lengths = (len(printable(finding.subject)) for finding in findings)
    subjects = min(max(lengths, default=0), _WIDEST_SUBJECT)
    margin = " " * (len(FAILURE) + subjects + 4)
    lines = []
    for level, subject, what, do in ([printable(text) for text in finding] for finding in findings):
        start = f"{level:<{len(FAILURE)}}  {subject:<{subjects}}  "
        lines += textwrap.wrap(what, width, initial_indent=start, subsequent_indent=margin, break_long_words=False)
        if do:
            start, rest = f"{margin}to do: ", f"{margin}       "
            lines += textwrap.wrap(do, width, initial_indent=start, subsequent_indent=rest, break_long_words=False)
    failures, warnings = (sum(finding.level == level for finding in findings) for level in (FAILURE, WARNING))
    return "\n".join(
        [*lines, "", f"{failures} failure{'s'[: failures != 1]}, {warnings} warning{'s'[: warnings != 1]}"]
    )
