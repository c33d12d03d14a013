"""Results as pictures: bars of times, lines of rates by SMs, points of a sweep's efficiency."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from ep_plugin.bench.report import OURS, title

LEAST_EFFICIENCY = 0.8  # of the headline's, that a sweep's cases are held to
_CHANGE = re.compile(r"(?P<operation>.+)_(?P<axis>t|skew|sms)(?P<value>[\d.]+)")  # of a sweep, but at equal bytes
_AXES = {  # the size of the headline, if it is one, and what it is
    "t": ("tokens", "tokens per rank"),
    "skew": ("skew", "rows for rank 0's experts, over the mean"),
    "sms": (None, "SMs of all kernels that move rows"),
}
_HEADLINE = "_headline"
_COPY = re.compile(r"(?P<kind>[a-z_]+?)(_c(?P<chunk>\d+))?_sm(?P<sms>\d+)")


def plot(results: list[dict[str, Any]], path: Path) -> None:
    """A PNG with one panel per result."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    results = [panel for result in results for panel in _panels(result)]
    heights = [_height(result) for result in results]
    figure, panels = plt.subplots(
        len(results), figsize=(9, 1 + sum(heights)), layout="constrained", squeeze=False, height_ratios=heights
    )
    for axes, result in zip(panels[:, 0], results, strict=True):
        _DRAWN.get(result["suite"], _draw_bars)(axes, result)
        axes.set_title(title(result))
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[1]:
            axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _panels(result: dict[str, Any]) -> list[dict[str, Any]]:
    """A sweep's efficiencies at equal bytes, and its times over each other axis, apart; any other result as it is."""
    if result["suite"] != "moe_sweep":
        return [result]
    matches = {row["case"]: match for row in result["rows"] if (match := _CHANGE.fullmatch(row["case"]))}
    equal = {case: found for case, found in result["efficiency"].items() if case not in matches}
    panels = [result | {"efficiency": equal}] if equal else []
    for axis in dict.fromkeys(match["axis"] for match in matches.values()):
        size, _ = _AXES[axis]
        points = [
            row | {"operation": match["operation"], "value": float(match["value"])}
            for row in result["rows"]
            if (match := matches.get(row["case"])) and match["axis"] == axis
        ]
        if size is not None:
            points += [
                row | {"operation": row["case"].removesuffix(_HEADLINE), "value": result["headline"][size]}
                for row in result["rows"]
                if row["case"].endswith(_HEADLINE)
            ]
        panels.append(result | {"suite": f"moe_sweep_over_{axis}", "axis": axis, "rows": points})
    return panels


def _height(result: dict[str, Any]) -> float:
    return 5.0 if result["suite"] in _DRAWN else 1 + 0.3 * len(result["rows"])


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
    """The same bars, of what each adds to the base case."""
    (base,) = (row["median_us"] for row in result["rows"] if row["case"] == result["base_case"])
    rows = [
        row | {name: row[name] - base for name in ("median_us", "p10_us", "p90_us")}
        for row in result["rows"]
        if row["case"] != result["base_case"]
    ]
    _draw_bars(axes, result | {"rows": rows})
    axes.set(xlabel=f"µs above {result['base_case']}, median and p10 to p90 (lower is better)")


def _draw_wire(axes: Any, result: dict[str, Any]) -> None:
    """A line per kind of copy and chunk, over SMs; what uses none is a level."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for row in result["rows"]:
        match = _COPY.fullmatch(row["case"])
        if match is None:
            axes.axhline(row["gb_s"], linestyle=":", color="grey")
            axes.annotate(row["case"], (1.0, row["gb_s"]), xycoords=("axes fraction", "data"), fontsize="x-small")
        elif match["kind"] != "tma_local":  # an order of magnitude above the links
            label = match["kind"] + (f", {match['chunk']} bytes" if match["chunk"] else "")
            curves.setdefault(label, []).append((int(match["sms"]), row["gb_s"]))
    for label, points in curves.items():
        axes.plot(*zip(*sorted(points), strict=True), marker="o", markersize=3, label=label)
    axes.set(xlabel="SMs", ylabel="GB/s per GPU and direction", xscale="log" if curves else "linear")


def _draw_sweep(axes: Any, result: dict[str, Any]) -> None:
    """The efficiency of each case relative to the headline's: a line per operation, the cases side by side."""
    points: dict[str, list[tuple[str, float]]] = {}
    for case, efficiency in result["efficiency"].items():
        operation, _, change = case.rpartition("_")
        points.setdefault(operation, []).append((change, efficiency))
    for operation, listed in points.items():
        axes.plot(*zip(*listed, strict=True), marker="o", linestyle="none", label=operation)
    axes.axhline(LEAST_EFFICIENCY, color="grey", linestyle=":")
    axes.tick_params(axis="x", rotation=60)
    axes.set(ylabel="floor / time, relative to the headline's")


def _draw_over(axes: Any, result: dict[str, Any]) -> None:
    """Times over one axis of a sweep: a line per operation, dotted for its floor."""
    curves: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for row in result["rows"]:
        curves.setdefault((row["operation"], row["impl"]), []).append((row["value"], row["median_us"]))
    for (operation, impl), points in curves.items():
        style = {"marker": "o", "markersize": 3} if impl == OURS else {"linestyle": ":", "color": "grey"}
        axes.plot(*zip(*sorted(points), strict=True), label=f"{operation}, {impl}", **style)
    axes.set(xlabel=_AXES[result["axis"]][1], ylabel="µs (lower is better)", xscale="log")
    if result["axis"] == "t":
        axes.set(yscale="log")
    else:
        axes.set(ylim=(0, None))
    values = sorted({row["value"] for row in result["rows"]})
    axes.set_xticks(values, [f"{value:g}" for value in values])
    axes.minorticks_off()


_DRAWN = {
    "wire": _draw_wire,
    "moe_sweep": _draw_sweep,
    "overlap": _draw_excess,
    **{f"moe_sweep_over_{axis}": _draw_over for axis in _AXES},
}
