"""Results as pictures: bars of times."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ep_plugin.bench.report import OURS, title


def plot(results: list[dict[str, Any]], path: Path) -> None:
    """A PNG with one panel per result."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    heights = [1 + 0.3 * len(result["rows"]) for result in results]
    figure, panels = plt.subplots(
        len(results), figsize=(9, 1 + sum(heights)), layout="constrained", squeeze=False, height_ratios=heights
    )
    for axes, result in zip(panels[:, 0], results, strict=True):
        draw = _draw_excess if "excess_us" in result else _draw_bars
        draw(axes, result)
        axes.set_title(title(result))
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[1]:
            axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _draw_bars(axes: Any, result: dict[str, Any]) -> None:
    """A bar per implementation and case, whiskers from p10 to p90."""
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
    axes.set(xlabel="µs, median and p10 to p90 (lower is better)")


def _draw_excess(axes: Any, result: dict[str, Any]) -> None:
    """Bars of the time that each implementation adds to the base case."""
    (base,) = (row["median_us"] for row in result["rows"] if row["case"] == result["base_case"])
    rows = [
        row | {name: row[name] - base for name in ("median_us", "p10_us", "p90_us")}
        for row in result["rows"]
        if row["case"] != result["base_case"]
    ]
    _draw_bars(axes, result | {"rows": rows})
    axes.set(xlabel=f"µs above {result['base_case']}, median and p10 to p90 (lower is better)")
