"""`ep-bench plan` predicts the rows, bytes and least times of dispatch and combine over nodes.

It compares three exchanges. In the one with two levels ep_plugin.moe.across_nodes sends. The two flat ones are an
all-to-all over all ranks: one sends a row to each rank that a token needs, the other a row for each of its K experts.
Rows are predicted by a formula, and counted in a random routing.

Shapes: R ranks, N nodes of G ranks, T tokens per rank, H hidden size, K experts per token, E experts in all.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer

from ep_plugin import _C
from ep_plugin.bench.report import markdown_table, picture
from ep_plugin.bench.suite import check_least, check_names
from ep_plugin.config import MAX_TOPK, ROW_ALIGNMENT_BYTES
from ep_plugin.dtypes import num_scales
from ep_plugin.moe.legs import chunk_bounds, default_chunks, legs_of

TWO_LEVEL, ROW_PER_RANK, COPIES = WAYS = ("two levels", "flat, a row per rank", "flat, K copies")
DISPATCH, CACHED, COMBINE = "dispatch", "cached dispatch", "combine"
_ELEMENT_BYTES = {"bf16": (2, 2), "fp32": (4, 4), "fp8": (1, 2)}  # of rows in dispatch and in combine
RAIL, LINKS = "rail", "links"
_COUNTED = 256  # tokens per rank in the routing of the picture
_MOST_DRAWN, _MOST_DRAWN_BY_NODES = 2**29, 2**36  # random numbers: of a rank, 2 GiB, and of its rail, some minutes
_NOTES = """\
- formula: each token draws M of the N nodes evenly (M: the node limit, else N), then K of their e = E M / N experts.
  It needs a place with n experts with probability q(n) = M / N p(n), p(n) = 1 - C(e - n, K) / C(e, K). Rows per token:
  two levels: (N - 1) q(E / N) on the rail, N (G - 1) q(E / R) on the links;
  flat, a row per rank: (R - G) q(E / R) and (G - 1) q(E / R); flat, K copies: K (R - G) / R and K (G - 1) / R.
- counted: the rows of rank 0 in one random routing of that kind, in the legs that ep_plugin sends.
- links: what dispatch sends to the other ranks of the node, and combine receives from them.
- time: the least that the rates allow; rail and links work at once, but for forwarding the rail's last chunk."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Predicts bytes and times of dispatch and combine over nodes, from sizes and rates alone. Exchanges nothing."""

    nodes: Annotated[int, typer.Option(help="Nodes, N.")]
    ranks: Annotated[int, typer.Option(help="Ranks on each node, G.")]
    tokens: Annotated[int, typer.Option(help="Tokens per rank, T.")]
    hidden: Annotated[int, typer.Option(help="Elements of a row, H.")]
    topk: Annotated[int, typer.Option(help="Experts per token, K.")]
    experts: Annotated[int, typer.Option(help="Experts in all, E.")]
    dtype: Annotated[str, typer.Option(help="bf16, fp32, or fp8: BF16 rows that dispatch quantises.")] = "bf16"
    node_limit: Annotated[int | None, typer.Option(help="A token's experts are on at most so many nodes.")] = None
    rail_gbps: Annotated[float, typer.Option(help="GB/s per rank and direction between nodes.")] = 45
    link_gbps: Annotated[float, typer.Option(help="GB/s per rank and direction inside a node.")] = 354
    rail_start_us: Annotated[float, typer.Option(help="Microseconds before an exchange's first byte arrives.")] = 20
    segment_start_us: Annotated[float, typer.Option(help="Microseconds of a segment's kernels without rows.")] = 40

    def __post_init__(self) -> None:
        check_names("dtype", _ELEMENT_BYTES, [self.dtype])
        check_least(dict.fromkeys(("nodes", "ranks", "tokens", "hidden", "topk", "experts"), 1), self)
        for name in ("rail_gbps", "link_gbps"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}: expected a rate above 0, got {getattr(self, name):g}")
        for name in ("rail_start_us", "segment_start_us"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}: expected 0 or more microseconds, got {getattr(self, name):g}")
        if self.ranks > _C.max_ranks:
            raise ValueError(f"ranks: expected at most {_C.max_ranks} on a node, got {self.ranks}")
        if self.experts % self.size:
            raise ValueError(f"experts: expected a multiple of the {self.size} ranks, got {self.experts}")
        if not 1 <= self.reached <= self.nodes:
            raise ValueError(f"node_limit: expected 1 to the {self.nodes} nodes, got {self.node_limit}")
        if self.topk > MAX_TOPK:
            raise ValueError(f"topk: expected at most {MAX_TOPK}, got {self.topk}")
        if self.topk > self.choices:
            most = f"the {self.choices} experts of {self.reached} nodes"
            raise ValueError(f"topk: expected at most {most}, got {self.topk}")
        if self.row_bytes(DISPATCH) % ROW_ALIGNMENT_BYTES:
            raise ValueError(f"hidden: expected rows of a multiple of {ROW_ALIGNMENT_BYTES} bytes, got {self.hidden}")

    @property
    def size(self) -> int:
        return self.nodes * self.ranks

    @property
    def reached(self) -> int:
        """The largest number of nodes that may hold a token's experts."""
        return self.nodes if self.node_limit is None else self.node_limit

    @property
    def choices(self) -> int:
        """The experts among which a token's K are drawn."""
        return self.reached * self.experts // self.nodes

    @property
    def chunks(self) -> int:
        return 0 if self.nodes == 1 else default_chunks(self.nodes, self.tokens, self.hidden, self.topk, "cuda")

    def row_bytes(self, operation: str) -> int:
        return self.hidden * _ELEMENT_BYTES[self.dtype][operation == COMBINE]


class Rows(NamedTuple):
    """The rows of one rank in dispatch. Combine returns all of them, so it sends `landed` over the rail.

    Attributes:
        sent: rows to other nodes.
        landed: rows from other nodes.
        links: rows to other ranks of the node.
        last: the part of `links` that comes by the rail's last chunk.
    """

    sent: float
    landed: float
    links: float
    last: float = 0


def expected_rows(plan: Plan) -> dict[str, Rows]:
    """Returns the mean rows over routings that draw `node_limit` nodes evenly, then K of their experts evenly."""
    N, G, R, T = plan.nodes, plan.ranks, plan.size, plan.tokens
    drawn, total = plan.reached / N, math.comb(plan.choices, plan.topk)

    def needs(experts: int) -> float:
        """Returns the probability q(n) that a token needs a place with n = `experts` experts."""
        return drawn * (1 - math.comb(plan.choices - experts, plan.topk) / total)

    node, rank, pair = T * needs(plan.experts // N), T * needs(plan.experts // R), T * plan.topk / R
    links = (G - 1) * rank
    return {
        TWO_LEVEL: Rows((N - 1) * node, (N - 1) * node, N * links, (N - 1) * links / max(1, plan.chunks)),
        ROW_PER_RANK: Rows((R - G) * rank, (R - G) * rank, links),
        COPIES: Rows((R - G) * pair, (R - G) * pair, (G - 1) * pair),
    }


def random_routing(plan: Plan, generator: torch.Generator) -> torch.Tensor:
    """Returns ``[T, K]`` expert ids, drawn as `expected_rows` says."""
    scores = torch.rand(plan.tokens, plan.nodes, plan.experts // plan.nodes, generator=generator)
    nodes = torch.rand(plan.tokens, plan.nodes, generator=generator).topk(plan.reached).indices
    drawn = torch.zeros(plan.tokens, plan.nodes, dtype=torch.bool).scatter_(1, nodes, True)
    return scores.masked_fill_(~drawn.unsqueeze(2), -1).flatten(1).topk(plan.topk).indices


def counted_rows(plan: Plan, routing: Sequence[torch.Tensor], node: int = 0, index: int = 0) -> dict[str, Rows]:
    """Counts the rows of the rank with local rank `index` on `node`.

    In the flat exchanges as many rows are assumed to land as are sent.

    Args:
        routing: for each node n ``[T_n, K]`` expert ids, of the rank there with the same local rank. -1 drops one.
    """
    N, G = plan.nodes, plan.ranks
    inside = torch.zeros(N, G, dtype=torch.bool)
    inside[node, torch.arange(G) != index] = True
    pairs = _pairs(plan, routing[node])
    needed = pairs > 0
    needs_node = needed.any(2)
    brought = [_pairs(plan, ids)[:, node] > 0 for ids in routing]
    sent = landed = 0
    links, in_chunks = int(needed[:, inside].sum()), [0] * max(1, plan.chunks)
    for leg in legs_of(node, N, plan.chunks):
        first, end = chunk_bounds(len(needed), plan.chunks)[leg.chunk :][:2]
        sent += int(needs_node[first:end, leg.to].sum())
        first, end = chunk_bounds(len(brought[leg.source]), plan.chunks)[leg.chunk :][:2]
        chunk = brought[leg.source][first:end]
        landed += int(chunk.any(1).sum())
        in_chunks[leg.chunk] += int(chunk[:, inside[node]].sum())

    def flat(rows: torch.Tensor) -> Rows:
        far = int(rows[:, torch.arange(N) != node].sum())
        return Rows(far, far, int(rows[:, inside].sum()))

    return {
        TWO_LEVEL: Rows(sent, landed, links + sum(in_chunks), in_chunks[-1]),
        ROW_PER_RANK: flat(needed),
        COPIES: flat(pairs),
    }


def _pairs(plan: Plan, ids: torch.Tensor) -> torch.Tensor:
    """Returns ``[T, N, G]``, how many of a token's experts each rank holds."""
    ranks = ids.long().div(plan.experts // plan.size, rounding_mode="floor").masked_fill(ids < 0, plan.size)
    pairs = torch.zeros(len(ids), plan.size + 1, dtype=torch.int32)
    pairs.scatter_add_(1, ranks, torch.ones_like(ranks, dtype=torch.int32))
    return pairs[:, :-1].unflatten(1, (plan.nodes, plan.ranks))


class Bytes(NamedTuple):
    rows: float
    ids: float
    weights: float
    scales: float
    counts: float


def bytes_of(plan: Plan, way: str, path: str, operation: str, rows: float, weights: bool) -> Bytes:
    """Returns the bytes of `rows` rows and of their counts.

    Signals inside the node are left out. They are a few words for each pair of ranks.

    Args:
        weights: whether dispatch sends float32 weights, or combine returns their gradients.
    """
    K, local = plan.topk, plan.experts // plan.size
    with_each = 1 if way == COPIES else K
    fresh = operation == DISPATCH
    ids, weight = 4 * with_each * fresh, 4 * with_each * weights
    row, scale = plan.row_bytes(operation), 4 * int(num_scales(plan.hidden))
    scale *= plan.dtype == "fp8" and operation != COMBINE
    peers = plan.ranks - 1 if path == LINKS else plan.size - plan.ranks
    counts = 8 * local * peers
    if way == TWO_LEVEL and path == RAIL:
        of_node = plan.ranks * (1 + local)  # of its ranks and experts
        message = _C.message_head_words + plan.chunks * (1 + of_node)
        counts = 8 * message * (plan.nodes - 1)
    elif way == TWO_LEVEL:  # csrc/common/layout.h: slots, whose parts are aligned, and count rows
        words = 2 * len(_C.header_fields) + plan.ranks + local
        of_origins = _C.rail_overflow_words + (plan.nodes - 1) * (1 + local)
        counts = 8 * (words + plan.chunks * (words + of_origins)) * peers  # the node's own tokens, then each chunk
        ids = 0 if operation == COMBINE else 2 * _aligned(4 * K)
        weight, scale = _aligned(weight), _aligned(scale)
    has_counts = fresh or (way == TWO_LEVEL and path == RAIL)  # over the rail, ranks compare every operation
    return Bytes(rows * row, rows * ids, rows * weight, rows * scale, counts * has_counts)


def least_seconds(plan: Plan, way: str, operation: str, rows: Rows, weights: bool) -> float:
    """Returns the least time that the rates allow.

    Rail and links work at the same time, with one exception. In dispatch the links forward the rail's last chunk when
    it has arrived. Combine runs backwards, so its first chunk waits for the sums of the node's ranks.
    """
    rail, links = (
        sum(bytes_of(plan, way, path, operation, rows_of(operation, path, rows), weights)) / (rate * 1e9)
        for path, rate in ((RAIL, plan.rail_gbps), (LINKS, plan.link_gbps))
    )
    tail = links * rows.last / rows.links if rows.last else 0
    return max(rail + tail, links)


def rows_of(operation: str, path: str, rows: Rows) -> float:
    """Returns the rows that an operation sends over the rail. Over links: that dispatch sends or combine receives."""
    return rows.links if path == LINKS else rows.landed if operation == COMBINE else rows.sent


def rows_by_source(plan: Plan, most: int | None = None) -> dict[str, dict[str, Rows]]:
    """Returns the rows of rank 0, by formula and counted. At most `most` tokens are counted, and then scaled up."""
    few = replace(plan, tokens=min(plan.tokens, most or plan.tokens))
    _check_countable(few)
    generator, scale = torch.Generator().manual_seed(0), plan.tokens / few.tokens
    counted = counted_rows(few, [random_routing(few, generator) for _ in range(plan.nodes)])
    scaled = {way: Rows(*(number * scale for number in rows)) for way, rows in counted.items()}
    return {"formula": expected_rows(plan), "counted": scaled}


def _check_countable(plan: Plan) -> None:
    """Raises ValueError for a routing that needs too much memory or time to be drawn and counted."""
    drawn = plan.tokens * plan.experts
    if drawn > _MOST_DRAWN or drawn * plan.nodes > _MOST_DRAWN_BY_NODES:
        most = min(_MOST_DRAWN, _MOST_DRAWN_BY_NODES // plan.nodes)
        raise ValueError(
            f"tokens: expected at most {most} / experts for {plan.nodes} nodes, whose routing is counted, got "
            f"{plan.tokens} tokens and {plan.experts} experts"
        )


def markdown(plan: Plan) -> str:
    """Returns the predictions for rank 0 as a table."""
    found, lines = rows_by_source(plan), []
    for operation, way, path, source in itertools.product((DISPATCH, COMBINE), WAYS, (RAIL, LINKS), found):
        rows, weights = found[source][way], operation == DISPATCH
        number = rows_of(operation, path, rows)
        parts = bytes_of(plan, way, path, operation, number, weights)
        line = {"operation": operation, "exchange": way, "path": path, "rows by": source}
        line["rows per token"] = f"{number / plan.tokens:.3f}"
        line |= {f"{name}, MB": f"{size / 1e6:.3f}" for name, size in parts._asdict().items()}
        line["all, MB"] = f"{sum(parts) / 1e6:.3f}"
        time = least_seconds(plan, way, operation, rows, weights) if path == RAIL else 0
        line["time, ms"] = f"{time * 1e3:.3f}" if time else ""
        lines.append(line)
    return f"{markdown_table(lines, ('operation', 'exchange', 'path', 'rows by'))}\n\n{_NOTES}"


def points_of(plan: Plan) -> dict[int, dict[tuple[str, str, str], float]]:
    """Returns the bytes of a dispatch with weights and its combine, by number of nodes and (source, path, way).

    The numbers of nodes are the divisors of the plan's number, from 2 on. Each node has as many ranks as in the plan.
    """
    points = {}
    for nodes in (number for number in range(2, plan.nodes + 1) if plan.nodes % number == 0):
        part = replace(plan, nodes=nodes, node_limit=plan.node_limit and min(plan.node_limit, nodes))
        points[nodes] = {
            (source, path, way): sum(
                sum(bytes_of(part, way, path, operation, rows_of(operation, path, rows), operation == DISPATCH))
                for operation in (DISPATCH, COMBINE)
            )
            for source, by_way in rows_by_source(part, _COUNTED).items()
            for path in (RAIL, LINKS)
            for way, rows in by_way.items()
        }
    return points


def plot(plan: Plan, path: Path) -> None:
    """Draws a PNG of the bytes per rank over the number of nodes.

    Lines show the formula. Marks show counts in a random routing of at most 256 tokens per rank, scaled up. If the plan
    has a node limit, dashed lines show routing with the limit, and solid lines show routing without it.
    """
    shape = f"T {plan.tokens}, H {plan.hidden}, K {plan.topk} of {plan.experts}, {plan.dtype}"
    with picture(path, 1, 2, figsize=(11, 4.5)) as (figure, panels):
        for limit in dict.fromkeys((None, plan.node_limit)):
            points = points_of(replace(plan, node_limit=limit))
            limited = "" if limit is None else f", at most {limit} nodes per token"
            for (axes, where), (index, way) in itertools.product(
                zip(panels, (RAIL, LINKS), strict=True), enumerate(WAYS)
            ):
                formula, counted = (
                    [point[source, where, way] / 1e6 for point in points.values()] for source in ("formula", "counted")
                )
                style: dict[str, Any] = {"color": f"C{index}", "linestyle": "-" if limit is None else "--"}
                axes.plot(list(points), formula, label=way + limited, **style)
                axes.plot(list(points), counted, "x", color=style["color"])
        for axes, title in zip(panels, ("between nodes (rail)", "inside a node (links)"), strict=True):
            axes.set(xlabel="nodes", ylabel="MB per rank, dispatch and combine", title=title)
            axes.set(xscale="log", ylim=(0, None))
            axes.set_xticks(list(points))
            axes.minorticks_off()
            axes.xaxis.set_major_formatter("{x:g}")
            axes.grid(alpha=0.3)
        panels[0].legend(fontsize="small")
        figure.suptitle(f"{plan.ranks} ranks per node, {shape}")


def _aligned(size: int) -> int:
    return -(-size // ROW_ALIGNMENT_BYTES) * ROW_ALIGNMENT_BYTES
