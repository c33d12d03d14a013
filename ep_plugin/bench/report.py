"""Results as tables and plots. Ratios compare each row with ep_plugin's of the same case and run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.table import Table

HEADER = ("case", "implementation", "median µs", "p10", "p90", "MB on the wire", "GB/s", "time / ep_plugin's")
OURS = "ep_plugin"
_ROW_KEYS = {"case", "impl", "median_us", "p10_us", "p90_us", "bytes_wire", "gb_s", "sms"}


def load(path: Path) -> dict[str, Any]:
    """A result as `ep-bench` wrote it; ValueError when it is something else."""
    try:
        result = json.loads(path.read_text())
        for row in result["rows"]:
            if row.keys() != _ROW_KEYS:
                raise ValueError(f"{path}: expected rows of {sorted(_ROW_KEYS)}, got {sorted(row)}")
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: expected a result that ep-bench wrote, got {error!r}") from error
    return result


def lines(result: dict[str, Any]) -> list[tuple[str, ...]]:
    """One line of text cells per row of the result, in HEADER's order."""
    ours = {row["case"]: row["median_us"] for row in result["rows"] if row["impl"] == OURS}
    return [
        (
            row["case"],
            row["impl"],
            f"{row['median_us']:,.0f}",
            f"{row['p10_us']:,.0f}",
            f"{row['p90_us']:,.0f}",
            f"{row['bytes_wire'] / 1e6:.1f}",
            f"{row['gb_s']:.1f}",
            f"{row['median_us'] / ours[row['case']]:.2f} ×" if row["case"] in ours else "",
        )
        for row in result["rows"]
    ]


def title(result: dict[str, Any]) -> str:
    return f"{result['suite']} on {result['hardware']}"


def rich_table(result: dict[str, Any]) -> Table:
    table = Table(title=title(result))
    for index, name in enumerate(HEADER):
        table.add_column(name, justify="left" if index < 2 else "right")
    previous = None
    for line in lines(result):
        if previous not in (None, line[0]):
            table.add_section()
        previous = line[0]
        table.add_row(*line)
    return table


def markdown(result: dict[str, Any]) -> str:
    """Title, table and what it belongs to."""
    rows = [HEADER, ("---", "---", *["---:"] * (len(HEADER) - 2)), *lines(result)]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items() if version)
    footer = f"`{result['command']}` · {versions} · code {result['code_hash'][:12]}"
    return f"### {title(result)}\n\n{table}\n\n{footer}\n"


def plot(results: list[dict[str, Any]], path: Path) -> None:
    """A PNG with one panel per result: a bar per implementation and case, whiskers from p10 to p90."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    size = (9, 1 + sum(1 + 0.3 * len(result["rows"]) for result in results))
    figure, panels = plt.subplots(len(results), figsize=size, layout="constrained", squeeze=False)
    for axes, result in zip(panels[:, 0], results, strict=True):
        _draw(axes, result)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _draw(axes: Any, result: dict[str, Any]) -> None:
    rows = result["rows"]
    impls = sorted({row["impl"] for row in rows}, key=lambda impl: (impl != OURS, impl))
    for index, impl in enumerate(impls):
        places = [place for place, row in enumerate(rows) if row["impl"] == impl]
        medians = [rows[place]["median_us"] for place in places]
        whiskers = [
            [rows[place]["median_us"] - rows[place]["p10_us"] for place in places],
            [rows[place]["p90_us"] - rows[place]["median_us"] for place in places],
        ]
        axes.barh(places, medians, xerr=whiskers, label=impl, color=f"C{index}", error_kw={"linewidth": 1})
    cases = [row["case"] for row in rows]
    axes.set_yticks(range(len(rows)), [case if cases.index(case) == i else "" for i, case in enumerate(cases)])
    axes.invert_yaxis()
    axes.set(xlabel="µs, median and p10 to p90 (lower is better)", title=title(result))
    axes.grid(axis="x", alpha=0.3)
    axes.legend()
