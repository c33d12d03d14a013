"""Applies the mutations of mutations.toml one at a time to a copy of the tree: the tests must fail for each.

A mutation names the tests that should notice it. If these pass, the whole CPU suite runs. The verdicts go to
build/mutations.json as they come. Exit status 1 when a mutation survives.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
VERDICTS = ROOT / "build" / "mutations.json"
NO_PROGRAM = r"\b(NameError|UnboundLocalError|SyntaxError|IndentationError): "
# Whole training runs and builds of the package take minutes and find nothing that the other tests do not.
NOT_ASKED = ("tests/gpu", "tests/mutation", "tests/project/test_packaging.py", "tests/examples")
TEST_LIMIT_S = 150
RUN_LIMIT_S = 900
TOKEN = re.compile(r"\w+|\S")


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """One edit: `old`, found exactly once in `function` of `file`, becomes `new`. `breaks` says what is lost by it.

    `old` matches whatever white space lies between its words and signs. Functions of one name are searched together;
    an empty `function` is the whole file.
    """

    name: str
    file: str
    old: str
    new: str
    breaks: str
    tests: tuple[str, ...]
    function: str = ""

    def apply(self, tree: Path) -> None:
        """Edits the file in `tree`; ValueError unless `old` is there exactly once."""
        path = tree / self.file
        text = path.read_text()
        begin, end = self.place(text)
        path.write_text(text[:begin] + self.new + text[end:])

    def place(self, text: str) -> tuple[int, int]:
        """Where in `text`, the file's, `old` begins and ends. ValueError unless it is there exactly once."""
        words = re.compile(r"\s*".join(re.escape(token) for token in TOKEN.findall(self.old)))
        where = functions(self.file, text, self.function) if self.function else [(0, len(text))]
        found = {match.span() for begin, end in where for match in words.finditer(text, begin, end)}
        if len(found) != 1 or self.new == self.old:
            raise ValueError(
                f"{self.name}: expected its text once in {self.function or 'all'} of {self.file}, found it "
                f"{len(found)} times"
            )
        return found.pop()


def functions(file: str, text: str, name: str) -> list[tuple[int, int]]:
    """Begin and end of each function called `name` in `text`."""
    if file.endswith(".py"):
        starts = [0]
        for line in text.splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        nodes = [node for node in ast.walk(ast.parse(text)) if getattr(node, "name", None) == name]
        return [(starts[node.lineno - 1], starts[node.end_lineno]) for node in nodes]  # type: ignore[attr-defined]
    return list(_cpp_functions(text, name))


def _cpp_functions(text: str, name: str) -> Iterator[tuple[int, int]]:
    for found in re.finditer(rf"\b{re.escape(name)}\s*\(", text):
        after_arguments = _after_bracket(text, found.end() - 1)
        body = re.compile(r"[^;{}]*\{").match(text, after_arguments)
        if body:
            yield found.start(), _after_bracket(text, body.end() - 1)


def _after_bracket(text: str, opening: int) -> int:
    """Behind the bracket that closes the one at `opening`."""
    closing, depth = {"(": ")", "{": "}"}[text[opening]], 0
    for place in range(opening, len(text)):
        depth += (text[place] == text[opening]) - (text[place] == closing)
        if depth == 0:
            return place + 1
    return len(text)


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
    return [mutation for entry in entries for mutation in mutations_of(entry)]


def mutations_of(entry: dict[str, Any]) -> list[Mutation]:
    """The mutations of an entry of the file: one, or one for each of its `places`.

    A place has fields of its own, which replace those of the entry, and `at`, which ends the mutation's name.
    """
    shared = {name: value for name, value in entry.items() if name != "places"}
    fields = [shared | place for place in entry.get("places", [{}])]
    for one in fields:
        one["name"] = ": ".join([one["name"], *([one.pop("at")] if "places" in entry else [])])
    return [Mutation(**(one | {"tests": tuple(one["tests"])})) for one in fields]


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


def run_mutation(mutation: Mutation, base: Path, work: Path) -> Verdict:
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


def known() -> dict[str, dict[str, str | float]]:
    """The verdicts of earlier runs in this checkout, by the mutation's name."""
    return json.loads(VERDICTS.read_text()) if VERDICTS.exists() else {}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="only mutations whose name contains one of these")
    parser.add_argument(
        "--missing", action="store_true", help="only mutations without a verdict in build/mutations.json"
    )
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
            verdict = run_mutation(mutation, base, work)
            survived |= not verdict.caught_by
            found = {"caught_by": verdict.caught_by, "said": verdict.said, "seconds": round(verdict.seconds)}
            verdicts[mutation.name] = found
            VERDICTS.parent.mkdir(exist_ok=True)
            VERDICTS.write_text(json.dumps(verdicts, indent=2) + "\n")
            outcome = f"caught by {verdict.caught_by}: {verdict.said}" if verdict.caught_by else "SURVIVED"
            print(f"[{number}/{len(chosen)}] {mutation.name} ({verdict.seconds:.0f} s): {outcome}", flush=True)
    return int(survived)


if __name__ == "__main__":
    sys.exit(main())
