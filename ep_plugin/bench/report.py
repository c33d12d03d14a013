"""Results as tables. Ratios compare rows of one run: with the floor, with ep_plugin, or with a base case.

Results of earlier versions, whose suites had other names, are read too.
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.table import Table

OURS, FLOOR = "ep_plugin", "floor"
_KEYS = {"suite", "hardware", "versions", "code_hash", "command", "rows"}
_ROW_KEYS = {"case", "impl", "median_us", "p10_us", "p90_us", "bytes_wire", "gb_s", "sms"}
_Row = dict[str, Any]
_Column = tuple[str, Callable[[_Row], str]]


def load(path: Path) -> dict[str, Any]:
    """A result as `ep-bench` wrote it; ValueError when it is something else."""
    try:
        result = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: expected a result that ep-bench wrote, got no JSON: {error}") from error
    missing = _KEYS - result.keys() if isinstance(result, dict) else _KEYS
    if missing:
        raise ValueError(
            f"{path}: expected a result that ep-bench wrote, got JSON without {', '.join(sorted(missing))}"
        )
    for row in result["rows"]:
        if not isinstance(row, dict) or row.keys() != _ROW_KEYS:
            raise ValueError(f"{path}: expected rows of {sorted(_ROW_KEYS)}, got {row!r}")
    return result


def of_cases(results: list[dict[str, Any]], patterns: list[str]) -> list[dict[str, Any]]:
    """The results with only the cases whose names match any shell pattern. Results without such a case are left out.

    The case that others are compared with stays. ValueError when a pattern matches nothing.
    """
    for pattern in patterns:
        cases = dict.fromkeys(row["case"] for result in results for row in result["rows"])
        if not fnmatch.filter(cases, pattern):
            raise ValueError(f"case: expected a pattern for {', '.join(cases)}, got {pattern!r}")
    return [_of_cases(result, patterns) for result in results if _matching(result, patterns)] if patterns else results


def _matching(result: dict[str, Any], patterns: list[str]) -> set[str]:
    return {row["case"] for row in result["rows"] if any(fnmatch.fnmatchcase(row["case"], each) for each in patterns)}


def _of_cases(result: dict[str, Any], patterns: list[str]) -> dict[str, Any]:
    wanted = _matching(result, patterns) | {result.get("base_case")}
    chosen = {**result, "rows": [row for row in result["rows"] if row["case"] in wanted]}
    for name in {"efficiency", "excess_us"} & result.keys():
        chosen[name] = {case: found for case, found in result[name].items() if case in wanted}
    return chosen


def header(result: dict[str, Any]) -> tuple[str, ...]:
    return tuple(name for name, _ in _columns(result))


def lines(result: dict[str, Any]) -> list[tuple[str, ...]]:
    """One line of text cells per row of the result, in the order of `header`."""
    columns = _columns(result)
    return [tuple(cell(row) for _, cell in columns) for row in result["rows"]]


def _columns(result: dict[str, Any]) -> list[_Column]:
    """The columns that have values in these rows."""
    rows = result["rows"]
    columns: list[_Column] = [
        ("case", lambda row: str(row["case"])),
        ("implementation", lambda row: str(row["impl"])),
        ("median µs", lambda row: f"{row['median_us']:,.0f}"),
        ("p10", lambda row: f"{row['p10_us']:,.0f}"),
        ("p90", lambda row: f"{row['p90_us']:,.0f}"),
    ]
    if any(row["bytes_wire"] for row in rows):
        columns.append(("MB on the wire", lambda row: f"{row['bytes_wire'] / 1e6:.1f}"))
        columns.append(("GB/s", lambda row: f"{row['gb_s']:.1f}"))
    if any(row["sms"] is not None for row in rows):
        columns.append(("SMs", lambda row: "" if row["sms"] is None else str(row["sms"])))
    if "efficiency" in result:
        columns.append(("efficiency, relative", lambda row: _share(result["efficiency"].get(row["case"]), row)))
    if "base_case" in result:
        (base,) = (row["median_us"] for row in rows if row["case"] == result["base_case"])
        columns.append((f"time / {result['base_case']}", lambda row: f"{row['median_us'] / base:.3f} ×"))
    if "excess_us" in result:
        columns.append((_excess_name(result), lambda row: _whole(_excess(result, row))))
        columns.append(("excess / ep_plugin's", lambda row: _ratio(_excess(result, row), _excess(result, row, OURS))))
    for impl, name in ((FLOOR, "time / floor"), (OURS, "time / ep_plugin's")):
        medians = {row["case"]: row["median_us"] for row in rows if row["impl"] == impl}
        if medians:
            columns.append((name, lambda row, medians=medians: _ratio(row["median_us"], medians.get(row["case"]))))  # type: ignore[misc]
    return columns


def _share(efficiency: float | None, row: _Row) -> str:
    return f"{efficiency:.2f}" if efficiency is not None and row["impl"] == OURS else ""


def _excess_name(result: dict[str, Any]) -> str:
    return f"µs above {result['base_case']}"


def _excess(result: dict[str, Any], row: _Row, impl: str | None = None) -> float | None:
    """The microseconds that the row's implementation, or `impl`, adds to the base case."""
    found: dict[str, float] = result["excess_us"].get(row["case"], {})
    return found.get(impl or row["impl"])


def _whole(number: float | None) -> str:
    return "" if number is None else f"{number:,.0f}"


def _ratio(mine: float | None, other: float | None) -> str:
    """Empty where either is not known, or the other is not positive."""
    return "" if mine is None or other is None or other <= 0 else f"{mine / other:.2f} ×"


def notes(result: dict[str, Any]) -> list[str]:
    """Sentences below the table; results of earlier versions have few."""
    emulated = [f"emulated: {result['emulation']}"] if "emulation" in result else []
    return [*emulated, *result.get("notes", []), *result.get("left_out", [])]


def title(result: dict[str, Any]) -> str:
    return f"{result['suite']} on {result['hardware']}"


def rich_table(result: dict[str, Any]) -> Table:
    table = Table(title=title(result))
    for index, name in enumerate(header(result)):
        table.add_column(name, justify="left" if index < 2 else "right")
    previous = None
    for line in lines(result):
        if previous not in (None, line[0]) and result["suite"] == "moe_ht":
            table.add_section()
        previous = line[0]
        table.add_row(*line)
    return table


def markdown(result: dict[str, Any]) -> str:
    """Title, table and notes, with command, versions and commit."""
    names = header(result)
    rule = ("---", "---", *["---:"] * (len(names) - 2))
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in [names, rule, *lines(result)])
    parts = [f"### {title(result)}", table]
    parts += [f"- {note}" for note in notes(result)]
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items() if version)
    code = [f"commit {result['commit']}"] if result.get("commit") else []
    parts.append(" · ".join([f"`{result['command']}`", versions, *code, f"code {result['code_hash'][:12]}"]))
    return "\n\n".join(parts) + "\n"
