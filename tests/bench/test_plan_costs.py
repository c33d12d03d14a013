"""The costs that ep-bench plan predicts, against operations over 2 to 16 nodes, and their timeline."""

from __future__ import annotations

import unittest.mock
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from ep_plugin import MoECommunicator, MoECommunicatorConfig
from ep_plugin.bench import cli
from ep_plugin.bench.plan import CACHED, COMBINE, DISPATCH, TWO_LEVEL, Plan, expected_rows
from ep_plugin.bench.plan_costs import BOUNDED, CALLS, Counts, counts_of, memory_of, timeline_of
from ep_plugin.moe.high_throughput.engine import COMBINE_POOL, DISPATCH_POOL
from tests.moe.test_across_nodes import CountedKernels, on_nodes

HIDDEN, TOKENS = 64, 96


def a_plan(nodes: int, per_node: int) -> Plan:
    experts = 4 * nodes * per_node
    return Plan(nodes=nodes, ranks=per_node, tokens=TOKENS, hidden=HIDDEN, topk=4, experts=experts, dtype="fp32")


def _counted(rank: int, size: int, per_node: int) -> dict[str, tuple[Counts, tuple[int, int]]]:
    """What each call starts, and the bytes of its buffers and of its pool."""
    generator = torch.Generator().manual_seed(rank)
    x, weights = torch.randn(TOKENS, HIDDEN, generator=generator), torch.rand(TOKENS, 4, generator=generator)
    ids = torch.rand(TOKENS, 4 * size, generator=generator).topk(4).indices
    config = MoECommunicatorConfig(num_experts=4 * size, hidden_size=HIDDEN, topk=4, max_tokens_per_rank=TOKENS)
    found = {}
    with MoECommunicator(None, config) as comm:
        engine, rails, starts = comm.engine, comm.engine.rails, []
        engine.kernels = kernels = CountedKernels(engine.kernels)
        begin = rails.start

        def start(sends: Any, receives: Any, what: str) -> Any:
            starts.append((what, len(sends)))
            return begin(sends, receives, what)

        def run(call: str, operation: Any, pool: int) -> Any:
            kernels.count = Counter()
            starts.clear()
            with unittest.mock.patch.object(engine, "wait_totals", wraps=engine.wait_totals) as waits:
                made = comm.in_flight.run(operation)
            compared = call in (CACHED, COMBINE)  # CPUs compare known calls in one more exchange
            exchanges = [sent for what, sent in starts if not (compared and what == "counts")]
            counts = Counts(sum(kernels.count.values()), len(exchanges), sum(exchanges), waits.call_count)
            if call == COMBINE:
                crossing = [operation._landed, *operation._sums[1:]]
            else:
                crossing = [*operation._packed, *operation._landed]
            held = sum(part.nbytes for part in crossing if part is not None)
            found[call] = counts, (held, engine.pool_bytes(pool))
            return made

        with unittest.mock.patch.object(rails, "start", start):
            made = run(DISPATCH, comm.new_dispatch(x, ids, weights, None, None, None, [], comm.number), DISPATCH_POOL)
            known = list(made[8:])
            run(CACHED, comm.new_dispatch(x, ids, weights, None, None, None, known, comm.number), DISPATCH_POOL)
            run(COMBINE, comm.new_combine(made[0], None, None, None, False, known, comm.number), COMBINE_POOL)
            rows = TOKENS * 4 * size
            run(BOUNDED, comm.new_dispatch(x, ids, weights, None, rows, None, [], comm.number), DISPATCH_POOL)
    return found


@pytest.mark.parametrize(("nodes", "per_node"), [(2, 2), (4, 1), (8, 1), pytest.param(16, 1, marks=pytest.mark.slow)])
def test_counts_and_memory_are_those_of_operations(nodes: int, per_node: int) -> None:
    plan = a_plan(nodes, per_node)
    for found in on_nodes(nodes, per_node, _counted, per_node):
        assert set(found) == set(CALLS)
        for call, (counts, (crossing, pool)) in found.items():
            expected, memory = counts_of(plan, call), memory_of(plan, call)
            if call == BOUNDED:  # on GPUs layout is two kernels then
                expected = expected._replace(kernels=expected.kernels - 1)
            assert counts == expected, call
            # Random rows are near their mean. The dispatch before the one with a capacity may have made a larger pool.
            exact = 1e-9 if call == BOUNDED else 0.15
            assert crossing == pytest.approx(memory.crossing, rel=exact), call
            largest = max(memory.pool, memory_of(plan, DISPATCH).pool) if call == BOUNDED else memory.pool
            assert pool == pytest.approx(largest, rel=0.15), call


def test_a_timeline_is_between_its_longest_part_and_their_sum() -> None:
    plan = Plan(nodes=8, ranks=8, tokens=4096, hidden=7168, topk=8, experts=256)
    for asked in (plan, replace(plan, node_limit=2), replace(plan, dtype="fp8"), replace(plan, rail_gbps=1000)):
        rows = expected_rows(asked)[TWO_LEVEL]
        for call in CALLS:
            timelines = [timeline_of(asked, call, rows, chunks) for chunks in range(1, 7)]
            for timeline in timelines:
                assert (
                    max(timeline.rail, timeline.inside) <= timeline.all + 1e-9 < timeline.rail + timeline.inside + 1e-6
                )
                assert 0 <= timeline.overlap <= 1
            at_once = replace(asked, rail_start_us=0, segment_start_us=0)
            ends = [timeline_of(at_once, call, rows, chunks).all for chunks in range(1, 7)]
            if call != BOUNDED:  # whose rooms are larger, the shorter its chunks are
                assert all(later <= end + 1e-9 for end, later in pairwise(ends)), "chunks that cost nothing only help"


def test_dear_starts_ask_for_fewer_chunks() -> None:
    plan = Plan(nodes=4, ranks=8, tokens=256, hidden=7168, topk=8, experts=256, rail_start_us=500)
    rows = expected_rows(plan)[TWO_LEVEL]
    ends = [timeline_of(plan, DISPATCH, rows, chunks).all for chunks in range(1, 7)]
    assert ends == sorted(ends) and plan.chunks == 1


@pytest.mark.parametrize("limit", [None, 4])
def test_a_thousand_ranks_are_planned(limit: int | None) -> None:
    options = {"nodes": 128, "ranks": 8, "tokens": 512, "hidden": 7168, "topk": 8, "experts": 1024}
    options |= {} if limit is None else {"node_limit": limit}
    words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    said = CliRunner(env={"COLUMNS": "400"}).invoke(cli.main, ["plan", *words])
    assert said.exit_code == 0
    for call in CALLS:
        assert f"| {call} " in said.output
    assert "(default)" in said.output and "overlap" in said.output


def test_one_node_has_no_costs_of_several() -> None:
    words = [
        "plan",
        "--nodes",
        "1",
        "--ranks",
        "8",
        "--tokens",
        "64",
        "--hidden",
        "64",
        "--topk",
        "2",
        "--experts",
        "8",
    ]
    said = CliRunner(env={"COLUMNS": "400"}).invoke(cli.main, words)
    assert said.exit_code == 0 and "host waits" not in said.output


@pytest.mark.parametrize("name", ["rail-start-us", "segment-start-us"])
def test_starts_below_0_are_refused(name: str) -> None:
    words = f"plan --nodes 2 --ranks 1 --tokens 4 --hidden 64 --topk 2 --experts 8 --{name} -1".split()
    said = CliRunner(env={"COLUMNS": "400"}).invoke(cli.main, words)
    assert said.exit_code == 2 and f"{name.replace('-', '_')}: expected 0 or more microseconds, got -1" in said.output
