"""Results as a picture: bars with their values, and with words for cases and implementations.

Training results of one machine share a panel of tokens per second. Any other result has a panel of times.
"""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from ep_plugin.bench import training
from ep_plugin.bench.report import base_us, picture
from ep_plugin.bench.suite import FLOOR, OURS

OURS_IN_WORDS, STOCK_IN_WORDS = "with ep_plugin", "without ep_plugin"
_FLOOR_IN_WORDS = "least time on the links"
_IMPLS = {
    OURS: OURS_IN_WORDS,
    "nccl": "NCCL",
    "gloo": "gloo",
    "nccl_all_to_all": "NCCL's all-to-all, sort and sums",
    "gloo_all_to_all": "gloo's all-to-all, sort and sums",
    "nccl_all_to_all, routing known": "NCCL's all-to-all, counts known",
    "nccl_row_per_rank": "NCCL's all-to-all, a row per rank",
    "gloo_row_per_rank": "gloo's all-to-all, a row per rank",
    "nccl_rail": "NCCL between nodes alone, ep_plugin's bytes",
    "gloo_rail": "gloo between nodes alone, ep_plugin's bytes",
    "deep_ep": "DeepEP",
    "ep_plugin copy_engine": "ep_plugin, always copy engines",
    "ep_plugin sm": "ep_plugin, always SMs",
    "ep_plugin, foreign output": "ep_plugin, into memory that peers have not mapped",
}
_SUITES = {
    "moe_ht": "Dispatch and combine",
    "low_latency": "Dispatch and combine in low latency",
    "allgather": "All-gather",
    "reduce_scatter": "Reduce-scatter",
    "send_receive": "Messages",
}
_PARTS: dict[str, str | Callable[[re.Match[str]], str]] = {  # of a case's name, in the order in which they are tried
    r"roundtrip": "dispatch and combine",
    r"dispatch|combine|ring": r"\g<0>",
    r"one_way": "one way",
    r"both_ways": "both ways",
    r"send|receive": r"\g<0> half",
    r"cached": "known routing",
    r"flat": "rows grouped by expert",
    r"token_major": "a row per token",
    r"to_fp8": "sent as FP8",
    r"bf16|fp\d+": lambda found: found[0].upper(),
    r"graph": "as a CUDA graph",
    r"host_wait": "the host waits for the totals",
    r"t(\d+)": r"\1 tokens per rank",
    r"skew([\d.]+)": r"one rank gets \1 × the mean",
    r"(\d+)sm": r"sent by \1 SMs",
    r"(\d+)total": r"on \1 SMs in all",
    r"\d+": lambda found: size_in_words(int(found[0])),
}


class Bar(NamedTuple):
    """One bar. spread: from p10 to p90, if known. ratio: how many times as good as the only other one; or None."""

    case: str
    impl: str
    value: float
    spread: tuple[float, float] | None = None
    ratio: float | None = None

    @property
    def text(self) -> str:
        """The value, and the ratio if there is one."""
        shown = f"{self.value:,.0f}" if self.value >= 10 else f"{self.value:.1f}"
        return shown if self.ratio is None else f"{shown}  ({self.ratio:.{2 if self.ratio < 2 else 1}f} × as fast)"


class Panel(NamedTuple):
    """A panel's bars, those of a case next to each other. floors: by case, the least possible time."""

    title: str
    axis: str
    bars: list[Bar]
    floors: dict[str, float]


def size_in_words(nbytes: int) -> str:
    """A number of bytes in the largest unit of which it has at least one."""
    power = min(max(nbytes.bit_length() - 1, 0) // 10, 3)
    return f"{nbytes / 1024**power:.4g} {('bytes', 'KiB', 'MiB', 'GiB')[power]}"


def case_in_words(case: str) -> str:
    """The name of a case in words, on a line or two. A name with a part that has no words stays as it is."""
    words, rest = [], case
    while rest:
        for pattern, word in _PARTS.items():
            if found := re.match(rf"(?:{pattern})(?=_|$)", rest):
                words.append(found.expand(word) if isinstance(word, str) else word(found))
                rest = rest[found.end() + 1 :]
                break
        else:
            return case
    return "\n".join(filter(None, (words[0], ", ".join(words[1:]))))


def panels(results: list[dict[str, Any]]) -> list[Panel]:
    """What `plot` draws."""
    trained: dict[str, list[Bar]] = {}
    timed = []
    for result in results:
        if "tokens_per_s" in result:
            of_steps = "rows" in result
            machine = result["hardware"] if of_steps else training.hardware(result)
            trained.setdefault(machine, []).extend(_step_bars(result) if of_steps else _training_bars(result))
        else:
            timed.append(_times(result))
    axis = "tokens per second, of all ranks (more is better)"
    return [Panel(f"Training on {machine}", axis, bars, {}) for machine, bars in trained.items()] + timed


def _training_bars(result: dict[str, Any]) -> list[Bar]:
    speeds = result["tokens_per_s"]
    case, stock = training.name(result), speeds[result["compare"]["reference"]]
    return [Bar(case, STOCK_IN_WORDS, stock), Bar(case, OURS_IN_WORDS, speeds[OURS], ratio=speeds[OURS] / stock)]


def _step_bars(result: dict[str, Any]) -> list[Bar]:
    """Bars of the suite fsdp2, which are named by the model alone: what else its case says is left out."""
    speeds, names = result["tokens_per_s"], {OURS: OURS_IN_WORDS, "stock": STOCK_IN_WORDS}
    bars = []
    for row in result["rows"]:
        case = ", ".join(row["case"].split(", ")[:3]) + "\nFSDP2"
        bars.append(Bar(case, names.get(row["impl"], row["impl"]), speeds[row["impl"]]))
    return _with_ratios(bars, more_is_better=True)


def _times(result: dict[str, Any]) -> Panel:
    base, base_case = base_us(result), result.get("base_case")
    bars, floors = [], {}
    for row in result["rows"]:
        if row["case"] == base_case:
            continue
        case, value = case_in_words(row["case"]), row["median_us"] - base
        if row["impl"] == FLOOR:
            floors[case] = value
        else:
            spread = row["p10_us"] - base, row["p90_us"] - base
            bars.append(Bar(case, _IMPLS.get(row["impl"], row["impl"]), value, spread))
    above = f" above {base_case}" if base else ""
    title = f"{_SUITES.get(result['suite'], result['suite'])} on {result['hardware']}"
    axis = f"µs{above}, median and p10 to p90 (less is better){_sizes(result)}"
    return Panel(title, axis, _with_ratios(bars, more_is_better=False), floors)


def _with_ratios(bars: list[Bar], more_is_better: bool) -> list[Bar]:
    """The bars of each case, others' first; ours has a ratio if there is one other that it can be compared with."""
    found = []
    for _, same in itertools.groupby(bars, key=lambda bar: bar.case):
        ours, others = list[Bar](), list[Bar]()
        for bar in same:
            (ours if bar.impl == OURS_IN_WORDS else others).append(bar)
        if len(others) == 1 and len(ours) == 1 and min(others[0].value, ours[0].value) > 0:
            quotient = ours[0].value / others[0].value
            ours = [ours[0]._replace(ratio=quotient if more_is_better else 1 / quotient)]
        found += others + ours
    return found


def _sizes(result: dict[str, Any]) -> str:
    """The sizes of an exchange, from the command that measured it, as one more line."""
    words = shlex.split(result["command"])
    options = dict(itertools.pairwise(words))
    if words.count("--tokens") != 1 or not {"--hidden", "--topk", "--experts"} <= options.keys():
        return ""
    tokens, hidden = int(options["--tokens"]), int(options["--hidden"])
    chosen = f"top {options['--topk']} of {options['--experts']} experts"
    return (
        f"\n{tokens:,} tokens of {hidden:,} elements per rank ({size_in_words(2 * tokens * hidden)} in BF16), {chosen}"
    )


def plot(results: list[dict[str, Any]], path: Path) -> None:
    """Draws the panels of all results into a PNG. Raises ValueError if there are no bars."""
    made = [panel for panel in panels(results) if panel.bars]
    if not made:
        raise ValueError(f"plot: expected rows that have bars, got none but rows of {FLOOR}")
    heights = [1.3 + 0.3 * len(panel.bars) + 0.2 * len({bar.case for bar in panel.bars}) for panel in made]
    with picture(path, len(made), figsize=(9, sum(heights)), height_ratios=heights) as (_, axes):
        for each, panel in zip(axes, made, strict=True):
            _draw(each, panel)


def _draw(axes: Any, panel: Panel) -> None:
    """Draws one panel. Positions grow downwards by one for each bar, and by a gap for each case."""
    impls = list(dict.fromkeys(bar.impl for bar in panel.bars))
    colors = {impl: f"C{index + 1}" for index, impl in enumerate(impls)} | {OURS_IN_WORDS: "C0"}
    if len(impls) == 2:
        colors |= {impl: "0.7" for impl in impls if impl != OURS_IN_WORDS}
    ticks, position = {}, 0.0
    for case, same in itertools.groupby(panel.bars, key=lambda bar: bar.case):
        bars = list(same)
        ticks[case] = position + (len(bars) - 1) / 2
        for offset, bar in enumerate(bars):
            _draw_bar(axes, bar, position + offset, colors[bar.impl])
        if case in panel.floors:
            ends = position - 0.45, position + len(bars) - 0.55
            axes.vlines(panel.floors[case], *ends, color="black", linestyle=":", label=_FLOOR_IN_WORDS)
        position += len(bars) + 0.6
    axes.set_yticks(list(ticks.values()), list(ticks))
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.margins(x=0.3)
    axes.set_xlim(left=min(0.0, *(bar.value for bar in panel.bars)))
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.locator_params(axis="x", nbins=6)
    axes.set_xlabel(panel.axis)
    axes.set_title(panel.title, loc="left", pad=26)
    shown = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    handles = {label: shown[label] for label in (*impls, _FLOOR_IN_WORDS) if label in shown}
    place = {"loc": "lower left", "bbox_to_anchor": (0, 1), "ncols": 3, "frameon": False, "borderaxespad": 0.2}
    axes.legend(handles.values(), handles.keys(), fontsize="small", **place)


def _draw_bar(axes: Any, bar: Bar, position: float, color: str) -> None:
    whiskers: dict[str, Any] = {}
    if bar.spread is not None:
        low, high = bar.spread
        whiskers = {"xerr": [[max(0.0, bar.value - low)], [max(0.0, high - bar.value)]], "error_kw": {"linewidth": 1}}
    axes.barh(position, bar.value, height=0.9, color=color, label=bar.impl, **whiskers)
    end = max(0.0, bar.value, *(bar.spread or ()))
    where = {"xytext": (5, 0), "textcoords": "offset points", "va": "center", "fontsize": "small"}
    axes.annotate(bar.text, (end, position), **where)
