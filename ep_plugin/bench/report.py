"""Shows results as tables. Ratios compare rows of one run with the floor, with ep_plugin or with a base case.

It also reads the results of earlier versions, whose suites had other names.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from ep_plugin.bench import training
from ep_plugin.bench.suite import FLOOR, OURS, Row, matching

_KEYS = {"suite", "hardware", "versions", "code_hash", "command", "rows"}
_ROW_KEYS = {"case", "impl", "median_us", "p10_us", "p90_us", "bytes_wire", "gb_s", "sms"}
_NEWER_KEYS = {"host_us", "peer_bytes"}  # which earlier versions did not write


def load(path: Path) -> dict[str, Any]:
    """Reads a result of `ep-bench` or `examples.compare`. Raises ValueError for any other file."""
    try:
        result = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: expected a result that ep-bench wrote, got no JSON: {error}") from error
    if training.is_training(result):
        return dict(result)
    missing = ", ".join(sorted(_KEYS - result.keys() if isinstance(result, dict) else _KEYS))
    if missing:
        raise ValueError(f"{path}: expected a result that ep-bench wrote, got JSON without {missing}")
    for row in result["rows"]:
        if not isinstance(row, dict) or row.keys() - _NEWER_KEYS != _ROW_KEYS:
            raise ValueError(f"{path}: expected rows of {sorted(_ROW_KEYS)}, got {row!r}")
    return result


def of_cases(results: list[dict[str, Any]], patterns: list[str], impls: list[str]) -> list[dict[str, Any]]:
    """Returns the matching cases of each result, and its base case.

    patterns, impls: of the cases and of the implementations to keep; [] keeps all. A training result is one case, its
    model, and keeps both arms. ValueError when a pattern matches none.
    """
    wanted = set(matching([case for result in results for case in _cases(result)], patterns))
    all_rows = [row for result in results for row in result.get("rows", [])]
    kept = set(matching([row["impl"] for row in all_rows], impls, "impl"))
    found = []
    for result in results:
        if "rows" not in result:
            found += [result] if result["model"] in wanted else []
            continue
        rows = [row for row in result["rows"] if row["case"] in wanted and row["impl"] in kept]
        base = [row for row in result["rows"] if row["case"] == result.get("base_case") and row not in rows]
        found += [{**result, "rows": base + rows}] if rows else []
    return found


def _cases(result: dict[str, Any]) -> list[str]:
    return [row["case"] for row in result["rows"]] if "rows" in result else [result["model"]]


def markdown(result: dict[str, Any]) -> str:
    """Returns the title, the table and the notes of a result, with its command, versions and commit."""
    if "rows" not in result:
        return training.markdown(result)
    emulated = [f"emulated: {result['emulation']}"] if "emulation" in result else []
    notes = [f"- {note}" for note in (*emulated, *result.get("notes", []), *result.get("left_out", []))]
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items() if version)
    code = [f"commit {result['commit']}"] if result.get("commit") else []
    about = " · ".join([f"`{result['command']}`", versions, *code, f"code {result['code_hash'][:12]}"])
    return "\n\n".join([f"### {result['suite']} on {result['hardware']}", _table(result), *notes, about]) + "\n"


def _table(result: dict[str, Any]) -> str:
    """Returns the rows as a markdown table of the columns that are not empty."""
    lines = [{name: cell(row) for name, cell in _columns(result).items()} for row in result["rows"]]
    filled = {name for line in lines for name, cell in line.items() if cell}
    lines = [{name: cell for name, cell in line.items() if name in filled} for line in lines]
    return markdown_table(lines, ("case", "implementation"))


def markdown_table(lines: list[dict[str, str]], left: Collection[str]) -> str:
    """Returns a markdown table of lines, whose cells are by column. The columns in `left` are left-aligned."""
    table = Table(box=box.MARKDOWN)
    for name in lines[0]:
        table.add_column(name, justify="left" if name in left else "right")
    for line in lines:
        table.add_row(*line.values())
    console = Console(width=1000, color_system=None, markup=False)
    with console.capture() as captured:
        console.print(table)
    return "\n".join(line for line in captured.get().splitlines() if line.strip())


def _columns(result: dict[str, Any]) -> dict[str, Callable[[Row], str]]:
    base = base_us(result)
    medians = {(row["case"], row["impl"]): row["median_us"] for row in result["rows"]}

    def ratio(row: Row, impl: str, start: float = 0.0) -> str:
        """Returns the median over that of `impl`, both beyond `start`; empty if `impl` takes no longer than `start`."""
        other = medians.get((row["case"], impl), start) - start
        return f"{(row['median_us'] - start) / other:.2f} ×" if other > 0 else ""

    def above_base(row: Row) -> str:
        return "" if row["case"] == result["base_case"] else f"{row['median_us'] - base:,.0f}"

    columns: dict[str, Callable[[Row], str]] = {
        "case": lambda row: row["case"],
        "implementation": lambda row: row["impl"],
        "median µs": lambda row: f"{row['median_us']:,.0f}",
        "p10": lambda row: f"{row['p10_us']:,.0f}",
        "p90": lambda row: f"{row['p90_us']:,.0f}",
        "host µs": lambda row: "" if row.get("host_us") is None else f"{row['host_us']:,.0f}",
        "MB on the wire": lambda row: f"{row['bytes_wire'] / 1e6:.1f}" if row["bytes_wire"] else "",
        "GB/s": lambda row: f"{row['gb_s']:.1f}" if row["bytes_wire"] else "",
        "SMs": lambda row: "" if row["sms"] is None else str(row["sms"]),
        "MiB held": lambda row: f"{row['peer_bytes'] / 2**20:,.1f}" if row.get("peer_bytes") else "",
    }
    if base:
        columns[f"µs above {result['base_case']}"] = above_base
        columns["the same / ep_plugin's"] = lambda row: ratio(row, OURS, base)
    columns["time / floor"] = lambda row: ratio(row, FLOOR)
    columns["time / ep_plugin's"] = lambda row: ratio(row, OURS)
    return columns


def base_us(result: dict[str, Any]) -> float:
    """Returns the median of the base case; 0 if the result has none."""
    return next((row["median_us"] for row in result["rows"] if row["case"] == result.get("base_case")), 0.0)


@contextlib.contextmanager
def picture(path: Path, rows: int, columns: int = 1, **options: Any) -> Iterator[tuple[Any, list[Any]]]:
    """Yields a figure and its panels, and writes the PNG at the end. `options` are for matplotlib's subplots."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(rows, columns, layout="constrained", squeeze=False, **options)
    yield figure, list(panels.flat)
    figure.savefig(path, dpi=120)
    plt.close(figure)
