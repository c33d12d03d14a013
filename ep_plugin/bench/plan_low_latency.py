"""`ep-bench plan` also predicts low latency over nodes: what crosses, the memory, and times. It measures nothing.

Bytes and memory are those of csrc/common/low_latency_legs.h. The times are a model, with the parts of `_PARTS_US`.

Shapes: N nodes of G ranks, T tokens per rank, K experts per token.
"""

from __future__ import annotations

from typing import NamedTuple

from ep_plugin import _C
from ep_plugin.bench.plan import COMBINE, DISPATCH, ROW_PER_RANK, TWO_LEVEL, Plan, expected_rows
from ep_plugin.bench.report import markdown_table
from ep_plugin.config import MAX_LL_TOKENS, MoECommunicatorConfig
from ep_plugin.dtypes import num_scales
from ep_plugin.moe.low_latency.engine import slots_of

_CHUNKS = 4
_ROWS, _WEIGHTS, _SUMS = range(3)  # LlLeg
_PARTS_US = {"start": 5.0, "one way": 8.4, "signal": 2.5, "forward": 4.0}
"""Microseconds of a send half before its first byte, of a message between GPUs on two nodes, of the signal that it has
come, and of the forwarder's work before its first row. They are assumptions."""
_NOTES = f"""\
- low latency: legs have the rows that there are, as over gloo. Padded legs have T rows, as over a backend that needs
  one size on both ends. memory: of a communicator, on each rank; max_tokens_per_rank is T.
- Times are predicted. c10d: padded legs, in one message after --rail-start-us. A combine also exchanges weights before.
  GPUs' rail, which does not exist yet: legs in {_CHUNKS} chunks, {_PARTS_US["one way"]} us one way.
  Both: {_PARTS_US["start"]:g} us before the first byte, {_PARTS_US["signal"]:g} us for a signal,
  {_PARTS_US["forward"]:g} us before forwarding, --rail-gbps and --link-gbps."""


class LegBytes(NamedTuple):
    """The bytes of one rank's legs: those of the mean rows, and those of T rows."""

    mean: float
    padded: float


def _shape(plan: Plan) -> _C.LlShape:
    config = MoECommunicatorConfig(
        num_experts=plan.experts,
        hidden_size=plan.hidden,
        topk=plan.topk,
        max_tokens_per_rank=plan.tokens,
        max_row_bytes=plan.row_bytes(COMBINE),
        mode="ll",
    )
    return slots_of(config, plan.nodes)[1]


def bytes_of(plan: Plan, operation: str) -> LegBytes:
    """Returns the bytes that one rank sends in legs. In a combine: weights, and the sums for others."""
    scales = 4 * int(num_scales(plan.hidden)) * (plan.dtype == "fp8" and operation == DISPATCH)
    header = _C.LlHeader(row_bytes=plan.row_bytes(operation), scale_bytes=scales, topk=plan.topk, weight_bytes=4)
    kinds, shape = (_ROWS,) if operation == DISPATCH else (_WEIGHTS, _SUMS), _shape(plan)
    fixed, padded = (sum(_C.ll_leg_bytes(kind, header, shape, rows) for kind in kinds) for rows in (0, plan.tokens))
    others, mean = plan.nodes - 1, expected_rows(plan)[TWO_LEVEL].sent / plan.tokens
    return LegBytes(others * fixed + mean * (padded - fixed), others * padded)


def memory_of(plan: Plan) -> int:
    """Returns the bytes of a communicator's block on each rank."""
    return _C.ll_block_bytes(plan.ranks, _shape(plan))


def microseconds(plan: Plan, operation: str, over_c10d: bool) -> float:
    """Returns the predicted time of one operation."""
    legs, rows = bytes_of(plan, operation), expected_rows(plan)
    row_bytes = legs.mean / rows[TWO_LEVEL].sent  # with its share of the headers
    links = rows[ROW_PER_RANK].sent * row_bytes / (plan.link_gbps * 1e3)
    rail = (legs.padded if over_c10d else legs.mean) / (plan.rail_gbps * 1e3)
    fixed = _PARTS_US["start"] + _PARTS_US["signal"] + _PARTS_US["forward"]
    if not over_c10d:
        return fixed + _PARTS_US["one way"] + rail + links / _CHUNKS
    return fixed + (1 + (operation == COMBINE)) * plan.rail_start_us + rail + links


def markdown(plan: Plan) -> str:
    """Returns the predictions for one rank as a table; nothing for more tokens than low latency takes."""
    if plan.tokens > MAX_LL_TOKENS or plan.nodes == 1:
        return ""
    lines, memory = [], memory_of(plan)
    for operation in (DISPATCH, COMBINE):
        legs = bytes_of(plan, operation)
        line = {"low latency": operation, "rows per token": f"{expected_rows(plan)[TWO_LEVEL].sent / plan.tokens:.3f}"}
        line |= {"legs, MB": f"{legs.mean / 1e6:.3f}", "padded legs, MB": f"{legs.padded / 1e6:.3f}"}
        line |= {"memory, MiB": f"{memory / 2**20:.0f}"}
        for name, over_c10d in (("c10d", True), ("GPUs' rail", False)):
            line[f"predicted over {name}, us"] = f"{microseconds(plan, operation, over_c10d):.0f}"
        lines.append(line)
    return f"{markdown_table(lines, ('low latency',))}\n\n{_NOTES}"
