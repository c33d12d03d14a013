"""`ep-bench plan` also predicts the kernels, the memory and the timeline of operations over nodes. It measures nothing.

Counts are those of one rank in ep_plugin.moe.across_nodes on GPUs. The timeline puts the parts of an operation one
after the other, or side by side, as the streams do. Its times come from the plan's rates and starts.

Shapes: N nodes of G ranks, T tokens per rank, K experts per token, C chunks.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

from ep_plugin import _C
from ep_plugin.bench.plan import (
    CACHED,
    COMBINE,
    DISPATCH,
    LINKS,
    RAIL,
    ROW_PER_RANK,
    TWO_LEVEL,
    Plan,
    Rows,
    bytes_of,
    rows_of,
)
from ep_plugin.bench.plan import expected_rows as mean_rows
from ep_plugin.bench.report import markdown_table
from ep_plugin.config import MAX_RAIL_CHUNKS, MoECommunicatorConfig
from ep_plugin.dtypes import num_scales
from ep_plugin.moe.legs import padded_rows

BOUNDED = "dispatch, capacity="
CALLS = (DISPATCH, BOUNDED, CACHED, COMBINE)
_NOTES = """\
- counts: one call with weights has so many kernels, exchanges over the rail, messages that a rank sends in them, and
  waits of a GPU's host.
- memory: a rank holds the rows that leave and that come, and a pool for the ranks of its node. max_tokens_per_rank is
  T. Without a capacity, also for combine, rows are the mean of evenly drawn experts.
- times: all ranks start together, and the host takes no time. The rest is by --rail-gbps, --link-gbps, --rail-start-us
  and --segment-start-us. overlap: the part of the shorter one of rail and inside that runs beside the longer one."""


class Counts(NamedTuple):
    kernels: int
    exchanges: int
    messages: int
    host_waits: int


def counts_of(plan: Plan, call: str) -> Counts:
    """Returns what a call with weights starts. A combine returns no weights."""
    C, others, is_fp8 = plan.chunks, plan.nodes - 1, plan.dtype == "fp8"
    if call == COMBINE:
        return Counts(kernels=3 + 2 * C, exchanges=C, messages=C * others, host_waits=0)
    if call == CACHED:
        fields = 2 + is_fp8  # rows, weights, scales
        return Counts(kernels=3 + 2 * C + is_fp8, exchanges=C, messages=C * others * fields, host_waits=0)
    fields, bounded = 3 + is_fp8, call == BOUNDED
    return Counts(
        kernels=7 + 5 * C + is_fp8 + bounded,
        exchanges=1 + C,
        messages=others * (1 + C * fields),
        host_waits=int(not bounded),
    )


class Memory(NamedTuple):
    """Bytes of one rank."""

    crossing: float
    pool: float


def padded(plan: Plan, chunks: int) -> int:
    """Returns the rows of each leg of a dispatch with a capacity in so many chunks. max_rows_per_node has its
    default."""
    config = MoECommunicatorConfig(
        num_experts=plan.experts,
        hidden_size=plan.hidden,
        topk=plan.topk,
        max_tokens_per_rank=plan.tokens,
        rail_chunks=chunks,
    )
    return padded_rows(plan.nodes, config, "cuda")


def memory_of(plan: Plan, call: str) -> Memory:
    """Returns the memory of a call with weights. A combine is that of a dispatch without a capacity."""
    T, K, G, C, others = plan.tokens, plan.topk, plan.ranks, plan.chunks, plan.nodes - 1
    mean, room = mean_rows(plan), others * padded(plan, C)  # room: for the tokens of a chunk, from all other nodes
    rows = mean[TWO_LEVEL]
    to_a_rank = mean[ROW_PER_RANK].sent / (plan.size - G) * others / C  # of such a chunk's tokens
    if call == COMBINE:
        row_bytes = plan.row_bytes(COMBINE)
        most = _grown(T * min(G, K), G * to_a_rank)
        return Memory((rows.sent + rows.landed) * row_bytes, most * _C.partial_bytes(row_bytes, 0, K))
    row_bytes, scale_bytes = plan.row_bytes(DISPATCH), 4 * int(num_scales(plan.hidden)) * (plan.dtype == "fp8")
    beside = scale_bytes + 4 * K + 4 * K * (call != CACHED)  # with weights, and with ids
    crossing = 2 * C * room if call == BOUNDED else rows.sent + rows.landed
    slots = max(T, room) if call == BOUNDED else _grown(T, to_a_rank)
    return Memory(crossing * (row_bytes + beside), slots * G * _C.slot_bytes(row_bytes, scale_bytes, 4, K))


def _grown(usual: int, needed: float) -> float:
    """Returns the rows of a pool. It has `usual` rows, or if more are needed, a quarter more than these."""
    return usual if needed <= usual else 1.25 * needed


class Timeline(NamedTuple):
    """The times of one operation, in seconds. rail, inside: how long rows cross, and how long they move inside the
    node. all: from the start to the end."""

    rail: float
    inside: float
    all: float

    @property
    def overlap(self) -> float:
        """The part of the shorter one of `rail` and `inside` that runs beside the longer one, 0 to 1."""
        shorter = min(self.rail, self.inside)
        return max(0.0, min(1.0, (self.rail + self.inside - self.all) / shorter)) if shorter else 0.0


def timeline_of(plan: Plan, call: str, rows: Rows, chunks: int) -> Timeline:
    """Returns the timeline of a call in so many chunks of equal size. rows: the rows of this rank."""
    operation = DISPATCH if call == BOUNDED else call
    weights, rail_start, segment_start = call != COMBINE, plan.rail_start_us * 1e-6, plan.segment_start_us * 1e-6
    number = rows_of(operation, RAIL, rows)
    if call == BOUNDED:
        number = (plan.nodes - 1) * chunks * padded(plan, chunks)
    crossing = bytes_of(plan, TWO_LEVEL, RAIL, operation, number, weights)
    over_rail = (sum(crossing) - crossing.counts) / chunks / (plan.rail_gbps * 1e9) + rail_start
    links = sum(bytes_of(plan, TWO_LEVEL, LINKS, operation, rows.links, weights)) / (plan.link_gbps * 1e9)
    of_others = links * rows.last * plan.chunks / rows.links if rows.links else 0.0
    own, forward = links - of_others + segment_start, of_others / chunks + segment_start
    counts = crossing.counts / (plan.rail_gbps * 1e9) + rail_start if call in (DISPATCH, BOUNDED) else 0.0
    rail_ends = inside_ends = 0.0
    if operation == COMBINE:
        for _ in range(chunks):
            inside_ends += forward
            rail_ends = max(rail_ends, inside_ends) + over_rail
        ends = max(rail_ends, inside_ends + own)
    else:
        rail_ends, inside_ends = counts, counts + own
        for _ in range(chunks):
            rail_ends += over_rail
            inside_ends = max(rail_ends, inside_ends) + forward
        ends = inside_ends
    return Timeline(counts + chunks * over_rail, own + chunks * forward, ends)


def markdown(plan: Plan) -> str:
    """Returns the predictions for rank 0 as two tables: of each call, and of the times by the number of chunks."""
    calls, times, rows = [], [], mean_rows(plan)[TWO_LEVEL]
    for call in CALLS:
        counts, memory = counts_of(plan, call), memory_of(plan, call)
        timeline = timeline_of(plan, call, rows, plan.chunks)
        calls.append(
            {"call": call}
            | {name.replace("_", " "): str(count) for name, count in counts._asdict().items()}
            | {"rows that cross, MB": f"{memory.crossing / 1e6:.1f}", "pool, MB": f"{memory.pool / 1e6:.1f}"}
            | {"rail, ms": f"{timeline.rail * 1e3:.3f}", "inside, ms": f"{timeline.inside * 1e3:.3f}"}
            | {"all, ms": f"{timeline.all * 1e3:.3f}", "overlap": f"{timeline.overlap:.0%}"}
        )
    for call, chunks in itertools.product((DISPATCH, COMBINE), range(1, MAX_RAIL_CHUNKS + 1)):
        timeline = timeline_of(plan, call, rows, chunks)
        line = {"call": call, "chunks": f"{chunks}{' (default)' if chunks == plan.chunks else ''}"}
        times.append(line | {"all, ms": f"{timeline.all * 1e3:.3f}", "overlap": f"{timeline.overlap:.0%}"})
    tables = markdown_table(calls, ("call",)), markdown_table(times, ("call",))
    return "\n\n".join((*tables, _NOTES))
