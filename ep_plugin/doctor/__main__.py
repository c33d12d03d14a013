"""The command line of `ep-doctor`, which is also `python -m ep_plugin.doctor`."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ep_plugin import env
from ep_plugin.doctor import dumps, machine, software
from ep_plugin.doctor.findings import FAILURE, OK, Finding, collect, printable, render, status

_EPILOG = """\
Exit status: 0 if nothing would stop a job (warnings may be there), 1 if there is a failure that would, 2 for a wrong
option. Under a launcher (torchrun, ep_plugin.testing.nodes) start it on every rank: rank 0 prints what all ranks found,
and its exit status counts; the others end with 0."""
_ALONE = """\
only this process was looked at; `torchrun --nproc-per-node N -m ep_plugin.doctor` adds versions on all ranks, the node
map, memory between ranks, the copy rate, and the time of a dispatch"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the checks and prints the findings. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="ep-doctor",
        description="Finds what would stop or slow a job on this machine, and says what to do.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print JSON: status and findings")
    parser.add_argument("--timeout", type=_seconds, default=60.0, help="seconds to wait for other ranks (60)")
    parser.add_argument(
        "--merge", type=_folder, metavar="FOLDER", help="say who was where from the files of failed ranks"
    )
    options = parser.parse_args(arguments)
    if options.merge is not None:
        return _show(dumps.merge(options.merge), options.json)
    with contextlib.redirect_stdout(sys.stderr):  # frameworks print when they are imported
        prints, findings = examine(options.timeout)
    if not prints:
        for finding in findings:
            if finding.level == FAILURE:
                text = f"ep-doctor: {finding.subject}: {finding.what}; to do: {finding.do}"
                print(printable(text), file=sys.stderr)
        return 0  # a launcher would end rank 0 before it has printed
    return _show(findings, options.json)


def _show(findings: Sequence[Finding], as_json: bool) -> int:
    shown = [finding._asdict() for finding in findings]
    text = json.dumps({"status": status(findings), "findings": shown}, indent=2) if as_json else render(findings)
    encoding = sys.stdout.encoding or "utf-8"
    try:
        print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)
    except BrokenPipeError:  # as in `ep-doctor | head`; Python flushes once more when it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return status(findings)


def examine(timeout_s: float) -> tuple[bool, list[Finding]]:
    """Runs the checks on this process and, under a launcher, across the ranks. Collective under a launcher.

    Returns:
        Whether this process prints, and the findings. Rank 0 prints the findings of all ranks. Another rank has none,
        unless rank 0 could not receive them.
    """
    findings = collect((*software.CHECKS, *machine.CHECKS))
    try:
        started = env.launcher()
    except ValueError:
        return True, findings  # check_variables says it
    if started.rank is None or started.world_size is None:
        return True, [*findings, Finding(OK, "ranks", _ALONE)]
    prints = started.rank == 0
    if software.imported_torch() is None:
        return prints, findings
    from ep_plugin.doctor import ranks

    try:
        problem = ranks.connect(timeout_s)
        if problem is not None:
            return prints, [*findings, problem]
        of_all = ranks.examine(findings, timeout_s)
        ranks.leave()
    except Exception as error:
        what = f"the checks across ranks failed: {type(error).__name__}: {error}"
        return prints, [*findings, Finding(FAILURE, "ranks", what, "report this, with the output of ep-doctor --json")]
    return prints, of_all if prints else []


def _folder(text: str) -> Path:
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"expected a folder with the files of EP_PLUGIN_DUMP, got {text}")
    return Path(text)


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"expected seconds above 0, got {text}")
    return value


if __name__ == "__main__":
    sys.exit(main())
