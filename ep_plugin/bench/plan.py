"""The rows that cross in dispatch and combine over nodes: by formula, and counted in a routing.

Two levels: as ep_plugin.moe.across_nodes sends. Flat: an all-to-all over all ranks, with one row for each rank that a
token needs, or with one for each of its K experts.

Shapes: R ranks, N nodes of G ranks, T tokens per rank, H hidden size, K experts per token, E experts in all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
import typer

from ep_plugin import _C
from ep_plugin.bench.suite import check_least, check_names
from ep_plugin.config import ROW_ALIGNMENT_BYTES
from ep_plugin.moe.across_nodes.legs import chunk_bounds, legs_of, num_chunks

TWO_LEVEL, ROW_PER_RANK, COPIES = WAYS = ("two levels", "flat, a row per rank", "flat, K copies")
DISPATCH, CACHED, COMBINE = "dispatch", "cached dispatch", "combine"
_ELEMENT_BYTES = {"bf16": (2, 2), "fp32": (4, 4), "fp8": (1, 2)}  # of rows in dispatch and in combine


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Predicts bytes and times of dispatch and combine over nodes, from sizes and rates alone. Runs no exchange."""

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

    def __post_init__(self) -> None:
        check_names("dtype", _ELEMENT_BYTES, [self.dtype])
        check_least(dict.fromkeys(("nodes", "ranks", "tokens", "hidden", "topk", "experts"), 1), self)
        for name in ("rail_gbps", "link_gbps"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}: expected a rate above 0, got {getattr(self, name):g}")
        if self.ranks > _C.max_ranks:
            raise ValueError(f"ranks: expected at most {_C.max_ranks} on a node, got {self.ranks}")
        if self.experts % self.size:
            raise ValueError(f"experts: expected a multiple of the {self.size} ranks, got {self.experts}")
        if not 1 <= self.reached <= self.nodes:
            raise ValueError(f"node_limit: expected 1 to the {self.nodes} nodes, got {self.node_limit}")
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
        """The most nodes that hold a token's experts."""
        return self.nodes if self.node_limit is None else self.node_limit

    @property
    def choices(self) -> int:
        """The experts among which a token's K are drawn."""
        return self.reached * self.experts // self.nodes

    @property
    def chunks(self) -> int:
        return num_chunks(self.nodes, None)

    def row_bytes(self, operation: str) -> int:
        return self.hidden * _ELEMENT_BYTES[self.dtype][operation == COMBINE]


class Rows(NamedTuple):
    """The rows of one rank in dispatch. Combine returns them all, so it sends `landed` over the rail.

    sent, landed: to and from other nodes. links: to other ranks of the node. last: those of `links` that come by the
    rail's last leg.
    """

    sent: float
    landed: float
    links: float
    last: float = 0


def expected_rows(plan: Plan) -> dict[str, Rows]:
    """Means over routings that draw `node_limit` nodes evenly, and then K experts of these nodes evenly."""
    N, G, R, T = plan.nodes, plan.ranks, plan.size, plan.tokens
    drawn, total = plan.reached / N, math.comb(plan.choices, plan.topk)

    def needs(experts: int) -> float:
        """p: the probability that a token needs a place with so many experts."""
        return drawn * (1 - math.comb(plan.choices - experts, plan.topk) / total)

    node, rank, pair = T * needs(plan.experts // N), T * needs(plan.experts // R), T * plan.topk / R
    links = (G - 1) * rank
    return {
        TWO_LEVEL: Rows((N - 1) * node, (N - 1) * node, N * links, links / plan.chunks),
        ROW_PER_RANK: Rows((R - G) * rank, (R - G) * rank, links),
        COPIES: Rows((R - G) * pair, (R - G) * pair, (G - 1) * pair),
    }


def random_routing(plan: Plan, generator: torch.Generator) -> torch.Tensor:
    """``[T, K]`` expert ids, drawn as `expected_rows` says."""
    scores = torch.rand(plan.tokens, plan.nodes, plan.experts // plan.nodes, generator=generator)
    nodes = torch.rand(plan.tokens, plan.nodes, generator=generator).topk(plan.reached).indices
    drawn = torch.zeros(plan.tokens, plan.nodes, dtype=torch.bool).scatter_(1, nodes, True)
    return scores.masked_fill_(~drawn.unsqueeze(2), -1).flatten(1).topk(plan.topk).indices


def counted_rows(plan: Plan, routing: Sequence[torch.Tensor], node: int = 0, index: int = 0) -> dict[str, Rows]:
    """The rows of the rank with local rank `index` on `node`. Flat rows that land are taken to be as many as are sent.

    routing: ``[T_n, K]`` expert ids of the rank with that local rank on each node n; -1: dropped.
    """
    N, G = plan.nodes, plan.ranks
    inside = torch.zeros(N, G, dtype=torch.bool)
    inside[node, torch.arange(G) != index] = True
    outside = torch.arange(N) != node
    pairs = _pairs(plan, routing[node])
    needed = pairs > 0
    needs_node = needed.any(2)
    brought = [_pairs(plan, ids)[:, node] > 0 for ids in routing]
    sent = landed = last = 0
    links = int(needed[:, inside].sum())
    for leg in legs_of(node, N, plan.chunks):
        first, end = chunk_bounds(len(needed), plan.chunks)[leg.chunk :][:2]
        sent += int(needs_node[first:end, leg.to].sum())
        first, end = chunk_bounds(len(brought[leg.source]), plan.chunks)[leg.chunk :][:2]
        chunk = brought[leg.source][first:end]
        landed += int(chunk.any(1).sum())
        last = int(chunk[:, inside[node]].sum())
        links += last
    flat = [(int(table[:, outside].sum()), int(table[:, inside].sum())) for table in (needed, pairs)]
    return {
        TWO_LEVEL: Rows(sent, landed, links, last),
        **{way: Rows(far, far, near) for way, (far, near) in zip((ROW_PER_RANK, COPIES), flat, strict=True)},
    }


def _pairs(plan: Plan, ids: torch.Tensor) -> torch.Tensor:
    """``[T, N, G]``, how many of a token's experts each rank holds."""
    ranks = ids.long().div(plan.experts // plan.size, rounding_mode="floor").masked_fill(ids < 0, plan.size)
    pairs = torch.zeros(len(ids), plan.size + 1, dtype=torch.int32)
    pairs.scatter_add_(1, ranks, torch.ones_like(ranks, dtype=torch.int32))
    return pairs[:, :-1].unflatten(1, (plan.nodes, plan.ranks))
