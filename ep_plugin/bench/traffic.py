"""The bytes and the least time of the rows of a Plan, their table, and their picture.

Shapes: R ranks, N nodes of G ranks, K experts per token, E_l local experts.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ep_plugin import _C
from ep_plugin.bench.plan import (
    COMBINE,
    COPIES,
    DISPATCH,
    TWO_LEVEL,
    WAYS,
    Plan,
    Rows,
    counted_rows,
    expected_rows,
    random_routing,
)
from ep_plugin.bench.report import markdown_table, picture
from ep_plugin.config import ROW_ALIGNMENT_BYTES
from ep_plugin.dtypes import num_scales

RAIL, LINKS = "rail", "links"
_COUNTED = 256  # tokens per rank in the routing of the picture
_NOTES = """\
- formula: each token draws M of the N nodes evenly (M: the node limit, else N), then K of their e = E M / N experts.
  It needs a place with n experts with probability q(n) = M / N p(n), p(n) = 1 - C(e - n, K) / C(e, K). Rows per token:
  two levels: (N - 1) q(E / N) on the rail, N (G - 1) q(E / R) on the links;
  flat, a row per rank: (R - G) q(E / R) and (G - 1) q(E / R); flat, K copies: K (R - G) / R and K (G - 1) / R.
- counted: the rows of rank 0 in one random routing of that kind, in the legs that ep_plugin sends.
- links: what dispatch sends to the other ranks of the node, and combine receives from them.
- time: the least that the rates allow; rail and links work at once, but for forwarding the rail's last leg."""


class Bytes(NamedTuple):
    rows: float
    ids: float
    weights: float
    scales: float
    counts: float


def bytes_of(plan: Plan, way: str, path: str, operation: str, rows: float, weights: bool) -> Bytes:
    """The bytes of so many rows and of their counts. weights: dispatch sends float32 weights, or combine returns their
    gradients. Signals inside the node, a few words for each pair of ranks, are left out."""
    K, local = plan.topk, plan.experts // plan.size
    with_each = 1 if way == COPIES else K
    fresh = operation == DISPATCH
    ids, weight = 4 * with_each * fresh, 4 * with_each * weights
    row, scale = plan.row_bytes(operation), 4 * int(num_scales(plan.hidden))
    scale *= plan.dtype == "fp8" and operation != COMBINE
    peers = plan.ranks - 1 if path == LINKS else plan.size - plan.ranks
    counts = 8 * local * peers
    if way == TWO_LEVEL and path == RAIL:
        counts = 8 * (len(_C.header_fields) + plan.chunks) * (plan.nodes - 1)
    elif way == TWO_LEVEL:  # csrc/common/layout.h: slots, whose parts are aligned, and count rows
        segments = 1 + plan.chunks * (plan.nodes - 1)
        counts = 8 * (2 * len(_C.header_fields) + plan.ranks + local) * segments * peers
        ids = 0 if operation == COMBINE else 2 * _aligned(4 * K)
        weight, scale = _aligned(weight), _aligned(scale)
    has_counts = fresh or (way == TWO_LEVEL and path == RAIL)  # over the rail, ranks compare every operation
    return Bytes(rows * row, rows * ids, rows * weight, rows * scale, counts * has_counts)


def least_seconds(plan: Plan, way: str, operation: str, rows: Rows, weights: bool) -> float:
    """The time that the rates allow where rail and links work at once, but for the forwarding of the rail's last leg.

    Combine runs backwards: its first leg waits for the sums of the node's ranks.
    """
    rail, links = (
        sum(bytes_of(plan, way, path, operation, rows_of(operation, path, rows), weights)) / (rate * 1e9)
        for path, rate in ((RAIL, plan.rail_gbps), (LINKS, plan.link_gbps))
    )
    tail = links * rows.last / rows.links if rows.last else 0
    return max(rail + tail, links)


def rows_of(operation: str, path: str, rows: Rows) -> float:
    """The rows that an operation sends over the rail. Over the links: that dispatch sends, and combine receives."""
    return rows.links if path == LINKS else rows.landed if operation == COMBINE else rows.sent


def markdown(plan: Plan) -> str:
    """The predictions for rank 0 as a table."""
    generator = torch.Generator().manual_seed(0)
    routing = [random_routing(plan, generator) for _ in range(plan.nodes)]
    found = {"formula": expected_rows(plan), "counted": counted_rows(plan, routing)}
    lines = []
    for operation, way, path in itertools.product((DISPATCH, COMBINE), WAYS, (RAIL, LINKS)):
        for source, by_way in found.items():
            rows, weights = by_way[way], operation == DISPATCH
            number = rows_of(operation, path, rows)
            parts = bytes_of(plan, way, path, operation, number, weights)
            line = {"operation": operation, "exchange": way, "path": path, "rows by": source}
            line["rows per token"] = f"{number / plan.tokens:.3f}"
            line |= {f"{name}, MB": f"{size / 1e6:.3f}" for name, size in parts._asdict().items()}
            line["all, MB"] = f"{sum(parts) / 1e6:.3f}"
            time = least_seconds(plan, way, operation, rows, weights) if path == RAIL else 0
            line["time, ms"] = f"{time * 1e3:.3f}" if time else ""
            lines.append(line)
    columns = {name: [line[name] for line in lines] for name in lines[0]}
    return f"{markdown_table(columns, ('operation', 'exchange', 'path', 'rows by'))}\n\n{_NOTES}"


class Point(NamedTuple):
    """Bytes of a dispatch and its combine on a number of nodes, by (path, way): by formula, and counted."""

    nodes: int
    formula: dict[tuple[str, str], float]
    counted: dict[tuple[str, str], float]


def points_of(plan: Plan) -> list[Point]:
    """Of every number of nodes from 2 on that divides the plan's, with as many ranks for each node."""
    points = []
    for nodes in _numbers_of_nodes(plan):
        limit = None if plan.node_limit is None else min(plan.node_limit, nodes)
        part = replace(plan, nodes=nodes, node_limit=limit)
        few = replace(part, tokens=min(part.tokens, _COUNTED))
        generator = torch.Generator().manual_seed(0)
        counted = counted_rows(few, [random_routing(few, generator) for _ in range(nodes)])
        scaled = {way: Rows(*(n * part.tokens / few.tokens for n in rows)) for way, rows in counted.items()}
        found = [
            {(path, way): _both(part, way, path, rows[way]) for path in (RAIL, LINKS) for way in WAYS}
            for rows in (expected_rows(part), scaled)
        ]
        points.append(Point(nodes, *found))
    return points


def _numbers_of_nodes(plan: Plan) -> list[int]:
    return [nodes for nodes in range(2, plan.nodes + 1) if plan.nodes % nodes == 0]


def _both(plan: Plan, way: str, path: str, rows: Rows) -> float:
    """The bytes of a dispatch with weights and of its combine."""
    return sum(
        sum(bytes_of(plan, way, path, operation, rows_of(operation, path, rows), operation == DISPATCH))
        for operation in (DISPATCH, COMBINE)
    )


def plot(plan: Plan, path: Path) -> None:
    """A PNG of the bytes per rank over the number of nodes: lines by formula, marks counted in a random routing.

    The routing has at most 256 tokens per rank, and its rows are scaled. With a node limit, dashed lines are of routing
    that has it, and the others of routing that has none.
    """
    shape = f"T {plan.tokens}, H {plan.hidden}, K {plan.topk} of {plan.experts}, {plan.dtype}"
    with picture(path, 1, 2, figsize=(11, 4.5)) as (figure, panels):
        for limit in dict.fromkeys((None, plan.node_limit)):
            points = points_of(replace(plan, node_limit=limit))
            for axes, where in zip(panels, _TITLES, strict=True):
                _draw(axes, points, where, limit)
        for axes, title in zip(panels, _TITLES.values(), strict=True):
            axes.set(xlabel="nodes", ylabel="MB per rank, dispatch and combine", title=title)
            axes.set(xscale="log", ylim=(0, None))
            axes.set_xticks(_numbers_of_nodes(plan))
            axes.minorticks_off()
            axes.xaxis.set_major_formatter("{x:g}")
            axes.grid(alpha=0.3)
        panels[0].legend(fontsize="small")
        figure.suptitle(f"{plan.ranks} ranks per node, {shape}")


_TITLES = {RAIL: "between nodes (rail)", LINKS: "inside a node (links)"}


def _draw(axes: Any, points: list[Point], path: str, limit: int | None) -> None:
    nodes = [point.nodes for point in points]
    limited = "" if limit is None else f", at most {limit} nodes per token"
    for index, way in enumerate(WAYS):
        style: dict[str, Any] = {"color": f"C{index}", "linestyle": "-" if limit is None else "--"}
        axes.plot(nodes, [point.formula[path, way] / 1e6 for point in points], label=way + limited, **style)
        axes.plot(nodes, [point.counted[path, way] / 1e6 for point in points], "x", color=style["color"])


def _aligned(size: int) -> int:
    return -(-size // ROW_ALIGNMENT_BYTES) * ROW_ALIGNMENT_BYTES
