"""Results as tables. Ratios compare rows of one run: with the floor, with ep_plugin, or with a base case."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.table import Table

from ep_plugin.bench.fsdp2_notes import fsdp2_notes

OURS, FLOOR = "ep_plugin", "floor"
BARE = "_single"  # after a peer's name: its exchange alone
WELL_WRITTEN = 1.45  # times the bare exchange, at most, is what a peer takes that is written as well as it can be
CONSTRUCTION_S = 1  # that a communicator is to be made in, its pools too
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


def of_cases(results: list[dict[str, Any]], patterns: tuple[str, ...]) -> list[dict[str, Any]]:
    """The results with only those cases whose names match any pattern of a shell, and without those that have none.

    What the others are compared with stays. ValueError when a pattern matches nothing.
    """
    for pattern in patterns:
        cases = dict.fromkeys(row["case"] for result in results for row in result["rows"])
        if not fnmatch.filter(cases, pattern):
            raise ValueError(f"case: expected a pattern for {', '.join(cases)}, got {pattern!r}")
    return [_of_cases(result, patterns) for result in results if _matching(result, patterns)] if patterns else results


def _matching(result: dict[str, Any], patterns: tuple[str, ...]) -> set[str]:
    return {row["case"] for row in result["rows"] if any(fnmatch.fnmatchcase(row["case"], each) for each in patterns)}


def _of_cases(result: dict[str, Any], patterns: tuple[str, ...]) -> dict[str, Any]:
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
    """What is known of these rows: bytes where some crossed, ratios where there is something to compare with."""
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
        columns.append((_sms_name(result), lambda row: "" if row["sms"] is None else str(row["sms"])))
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


def _sms_name(result: dict[str, Any]) -> str:
    return "SMs that move rows" if "sms_are" in result else "SMs"


def _share(efficiency: float | None, row: _Row) -> str:
    return f"{efficiency:.2f}" if efficiency is not None and row["impl"] == OURS else ""


def _excess_name(result: dict[str, Any]) -> str:
    return f"µs above {result['base_case']}"


def _excess(result: dict[str, Any], row: _Row, impl: str | None = None) -> float | None:
    """What the row's implementation, or `impl`, adds to the base case."""
    found: dict[str, float] = result["excess_us"].get(row["case"], {})
    return found.get(impl or row["impl"])


def _whole(number: float | None) -> str:
    return "" if number is None else f"{number:,.0f}"


def _ratio(mine: float | None, other: float | None) -> str:
    """Nothing where either is not known, or nothing was left to compare with."""
    return "" if mine is None or other is None or other <= 0 else f"{mine / other:.2f} ×"


def by_case(result: dict[str, Any]) -> list[tuple[str, ...]]:
    """A line per case, header first: ep_plugin's median, those of others, and what part of these it is.

    Of the excess where the result has one. Empty when nothing was compared with ep_plugin.
    """
    rows = {(row["case"], row["impl"]): row for row in result["rows"]}
    with_excess = "excess_us" in result
    unit = _excess_name(result) if with_excess else "µs"

    def of(row: _Row) -> float | None:
        return _excess(result, row) if with_excess else row["median_us"]

    cases = list(dict.fromkeys(case for case, impl in rows if impl == OURS))
    others = list(dict.fromkeys(impl for case, impl in rows if impl != OURS and case != result.get("base_case")))
    if not cases or not others:
        return []
    found = [
        (
            "case",
            _sms_name(result),
            f"ep_plugin {unit}",
            *(f"{impl} {unit}" for impl in others),
            *(f"/ {impl}" for impl in others),
        )
    ]
    for case in cases:
        ours = rows[case, OURS]
        theirs = [rows.get((case, impl)) for impl in others]
        medians = ["" if row is None else _whole(of(row)) for row in theirs]
        ratios = ["" if row is None else _ratio(of(ours), of(row)) for row in theirs]
        sms = "" if ours["sms"] is None else str(ours["sms"])
        found.append((case, sms, _whole(of(ours)), *medians, *ratios))
    return found


def notes(result: dict[str, Any]) -> list[str]:
    """Sentences on what the run found beside its rows."""
    found = [f"emulated: {result['emulation']}"] if "emulation" in result else []
    if "best_sm_copy" in result:
        best = result["best_sm_copy"]
        found.append(f"floor: {best['gb_s']:.1f} GB/s, the best rate of SM stores in this run ({best['case']})")
    found += _over_bare(result)
    if "sms_are" in result and any(row["sms"] is not None for row in result["rows"]):
        found.append(f"SMs: {result['sms_are']}")
    if "memory" in result:
        memory = {name: f"{value / 2**20:,.1f} MiB" for name, value in result["memory"].items()}
        found.append(
            f"memory beyond tensors: {memory['beyond_tensors_bytes']} (pools {memory['pool_bytes']}, control "
            f"{memory['control_bytes']}), limit {memory['limit_bytes']}"
            + (f"; on the device {memory['device_bytes']}" if "device_bytes" in memory else "")
        )
    if "construction_s" in result:
        found.append(_construction(result))
    if "above_experts_us" in result:
        above = ", ".join(f"{impl} {took:,.0f} µs" for impl, took in result["above_experts_us"].items())
        found.append(f"experts: {result['experts']}")
        ratio = "" if result["above_ratio"] is None else f"; ratio {result['above_ratio']:.2f}"
        found.append(f"above the experts' own compute: {above}{ratio}")
    if result.get("suite") == "fsdp2":
        found += fsdp2_notes(result)
    return [*found, *result.get("left_out", [])]


def _construction(result: dict[str, Any]) -> str:
    alone, first = result["construction_s"], result.get("first_operations_s")
    if first is None:
        return f"construction of a communicator, before its pools: {alone:.3f} s"
    whole = alone + first
    verdict = f"expected under {CONSTRUCTION_S} s" + ("" if whole < CONSTRUCTION_S else ", which it is not")
    return (
        f"construction of a communicator: {alone:.3f} s, its first operations, which make its pools: {first:.3f} s; "
        f"together {whole:.3f} s, {verdict}"
    )


def _over_bare(result: dict[str, Any]) -> list[str]:
    """A sentence for each peer whose exchange was timed alone too: how much longer all of it takes."""
    medians = {(row["case"], row["impl"]): row["median_us"] for row in result["rows"]}
    ratios: dict[str, list[str]] = {}
    for (case, impl), bare in medians.items():
        whole = medians.get((case, impl.removesuffix(BARE))) if impl.endswith(BARE) else None
        if whole is not None:
            ratios.setdefault(impl, []).append(f"{whole / bare:.2f} × in {case}")
    return [
        f"{impl.removesuffix(BARE)} over {impl}: {', '.join(listed)}; at most {WELL_WRITTEN} × is well written"
        for impl, listed in ratios.items()
    ]


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
    """Title, tables, notes, and what they belong to."""
    parts = [f"### {title(result)}", _table([header(result), *lines(result)], 2)]
    compact = by_case(result)
    if compact:
        parts += ["By case:", _table(compact, 1)]
    parts += [f"- {note}" for note in notes(result)]
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items() if version)
    parts.append(f"`{result['command']}` · {versions} · code {result['code_hash'][:12]}")
    return "\n\n".join(parts) + "\n"


def _table(rows: list[tuple[str, ...]], left: int) -> str:
    """The first row is the header; the first `left` columns are text."""
    rule = (*["---"] * left, *["---:"] * (len(rows[0]) - left))
    return "\n".join(f"| {' | '.join(row)} |" for row in [rows[0], rule, *rows[1:]])
