"""Applies the mutations of mutations.toml one at a time to a copy of the tree: the tests must fail for each.

A mutation names the tests that should notice it; when they do not, the whole CPU suite is asked. The table of who
caught what is written beside this file, a row for each verdict as it comes. Exit status 1 when a mutation survives.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
RESULTS = HERE / "RESULTS.md"
SURVIVED = "**survived**"
NO_PROGRAM = r"\b(NameError|UnboundLocalError|SyntaxError|IndentationError): "
# Whole training runs and builds of the package say nothing that the rest does not, and take minutes.
NOT_ASKED = ("tests/gpu", "tests/mutation", "tests/project/test_packaging.py", "tests/examples/test_example.py")
TEST_LIMIT_S = 150
RUN_LIMIT_S = 900


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """One edit: `old`, found exactly once in `file`, becomes `new`. `breaks` says what is lost by it."""

    name: str
    file: str
    old: str
    new: str
    breaks: str
    tests: tuple[str, ...]

    def apply(self, tree: Path) -> None:
        """Edits the file in `tree`; ValueError when `old` is not there exactly once."""
        path = tree / self.file
        text = path.read_text()
        if text.count(self.old) != 1 or self.new == self.old:
            raise ValueError(
                f"{self.name}: expected its text once in {self.file}, found it {text.count(self.old)} times"
            )
        path.write_text(text.replace(self.old, self.new))


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """`caught_by` is the first test that failed, empty when the mutation survived, `said` its error in a line."""

    mutation: Mutation
    caught_by: str
    said: str
    seconds: float


def load() -> list[Mutation]:
    """All mutations, in the order of the file."""
    with (HERE / "mutations.toml").open("rb") as file:
        entries = tomllib.load(file)["mutation"]
    return [Mutation(**(entry | {"tests": tuple(entry["tests"])})) for entry in entries]


def copy_tree(to: Path) -> None:
    """The files that git knows or would add, and the integrations under the name by which they are imported."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)
    (to / "ep_plugin" / "integrations").symlink_to("../integrations")


def environment(tree: Path) -> dict[str, str]:
    """Imports come from `tree`; the extension is built for CPUs only, and quickly."""
    return os.environ | {
        "PYTHONPATH": str(tree),
        "PYTHONDONTWRITEBYTECODE": "1",
        "EP_PLUGIN_BUILD_CUDA": "0",
        "CXXFLAGS": "-O1 -w",
        "COLUMNS": "250",  # pytest cuts its summary to it
    }


def build(tree: Path) -> None:
    """Compiles what is older than its source. RuntimeError with the compiler's words when a mutation is not C++."""
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    done = subprocess.run(
        command, cwd=tree, env=environment(tree), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode != 0:
        raise RuntimeError(f"expected a build, got:\n{done.stdout}")


def run_tests(tree: Path, tests: tuple[str, ...], *flags: str) -> tuple[int, str]:
    """Exit status and output of pytest in `tree`; a run without an end counts as failed and says so."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=short"]
    command += ["-o", f"timeout={TEST_LIMIT_S}", *flags, *tests]
    with subprocess.Popen(
        command,
        cwd=tree,
        env=environment(tree),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=RUN_LIMIT_S)
        except subprocess.TimeoutExpired:
            _end(process)
            return 1, f"FAILED {tests[0]} - no end within {RUN_LIMIT_S} s"
        except BaseException:
            _end(process)
            raise
    return process.returncode, output


def _end(process: subprocess.Popen[str]) -> None:
    """Ends pytest and the ranks that it has started."""
    os.killpg(process.pid, signal.SIGKILL)


def whole_suite() -> tuple[str, ...]:
    return ("-m", "not slow", "tests", *(f"--ignore={path}" for path in NOT_ASKED))


def first_failure(output: str) -> tuple[str, str]:
    """The name of the test that failed first, and what it said."""
    _, _, summary = output.rpartition("short test summary info")
    found = re.search(r"^(?:FAILED|ERROR) (?:tests/)?(.+?)(?: - (.*))?$", summary, re.MULTILINE)
    return (found[1], found[2] or "") if found else ("", "")


def judge(mutation: Mutation, base: Path, work: Path) -> Verdict:
    """Applies one mutation to a fresh copy of `base` and asks the tests."""
    began = time.monotonic()
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(base, work, symlinks=True)
    mutation.apply(work)
    if "/csrc/" in mutation.file:
        build(work)
    caught_by = said = ""
    for tests in (mutation.tests, whole_suite()):
        status, output = run_tests(work, tests)
        if status not in (0, 1):
            raise RuntimeError(f"{mutation.name}: expected pytest to pass or fail, it ended with {status}:\n{output}")
        if status == 1:
            caught_by, said = first_failure(output)
            if not caught_by:
                raise RuntimeError(f"{mutation.name}: expected the name of a failed test in\n{output}")
            if re.search(NO_PROGRAM, output):
                raise RuntimeError(f"{mutation.name}: expected a program that does wrong, got none:\n{output}")
            break
    seconds = time.monotonic() - began
    return Verdict(mutation=mutation, caught_by=caught_by, said=said, seconds=seconds)


def check_base(base: Path, mutations: list[Mutation]) -> None:
    """The tests must pass, and be about the copy, before their failures mean anything."""
    where = "import ep_plugin, ep_plugin._C as c; print(ep_plugin.__file__, c.__file__)"
    found = subprocess.run(
        [sys.executable, "-c", where], cwd=base, env=environment(base), capture_output=True, text=True, check=True
    ).stdout.split()
    if not all(Path(path).is_relative_to(base) for path in found):
        raise RuntimeError(f"expected ep_plugin from {base}, imported {found}")
    asked = tuple(dict.fromkeys(test for mutation in mutations for test in mutation.tests))
    whole_files = {test for test in asked if "::" not in test}
    asked = tuple(test for test in asked if test.split("::")[0] not in whole_files or test in whole_files)
    status, output = run_tests(base, asked)
    if status != 0:
        name, said = first_failure(output)
        raise RuntimeError(f"expected the tests to pass without a mutation, {name} failed: {said}\n{output}")


def found_of(verdict: Verdict) -> tuple[str, str]:
    """Of a verdict, what the table keeps: who caught it, and the seconds."""
    return f"`{verdict.caught_by}`" if verdict.caught_by else SURVIVED, f"{verdict.seconds:.0f}"


def known() -> dict[str, tuple[str, str]]:
    """What the table has, by the mutation's name; not of another file, nor what was caught by a test that is gone."""
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    rows = [[cell.strip() for cell in line.split("|")] for line in lines if line.startswith("| ") and "`" in line]
    files = {mutation.name: f"`{mutation.file}`" for mutation in load()}
    return {row[1]: (row[-3], row[-2]) for row in rows if files.get(row[1]) == row[2] and _is_there(row[-3])}


def _is_there(caught_by: str) -> bool:
    file, _, test = caught_by.strip("`").partition("::")
    path = ROOT / "tests" / file
    return caught_by == SURVIVED or (path.is_file() and f"def {test.split('[')[0]}(" in path.read_text())


def table(every: list[Mutation], verdicts: dict[str, tuple[str, str]]) -> str:
    """Markdown, a row for each mutation that has a verdict, in their order."""
    found = [
        f"| {mutation.name} | `{mutation.file}` | {mutation.breaks} | {caught} | {seconds} |"
        for mutation in every
        for caught, seconds in filter(None, [verdicts.get(mutation.name)])
    ]
    survivors = sum(SURVIVED in row for row in found)
    head = f"{len(every)} mutations, {len(found) - survivors} caught, {survivors} survived"
    head += f", {len(every) - len(found)} not run (`make mutate`)." if len(found) < len(every) else " (`make mutate`)."
    columns = ["| mutation | where | what it breaks | caught by | s |", "|---|---|---|---|---|"]
    return "\n".join(["# Mutations and the tests that catch them", "", head, "", *columns, *found, ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="only mutations whose name contains one of these")
    parser.add_argument("--missing", action="store_true", help="only mutations that the table does not have")
    parser.add_argument("--no-base", action="store_true", help="do not run the tests without a mutation first")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # leaves by the way that cleans up
    every, verdicts = load(), known()
    chosen = [m for m in every if not options.names or any(part in m.name for part in options.names)]
    if options.missing:
        chosen = [m for m in chosen if m.name not in verdicts]
    survived = False
    with tempfile.TemporaryDirectory(prefix="ep_plugin-mutate-") as scratch:
        base, work = Path(scratch, "base"), Path(scratch, "work")
        copy_tree(base)
        build(base)
        if not options.no_base:
            check_base(base, chosen)
        for number, mutation in enumerate(chosen, 1):
            verdict = judge(mutation, base, work)
            survived |= not verdict.caught_by
            verdicts[mutation.name] = found_of(verdict)
            RESULTS.write_text(table(every, verdicts))
            told = f"caught by {verdict.caught_by}: {verdict.said}" if verdict.caught_by else "SURVIVED"
            print(f"[{number}/{len(chosen)}] {mutation.name} ({verdict.seconds:.0f} s): {told}", flush=True)
    return int(survived)


if __name__ == "__main__":
    sys.exit(main())
