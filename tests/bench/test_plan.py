"""ep-bench plan: its formulas against counts, published figures and a real exchange, and what it refuses."""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from ep_plugin import MoECommunicator, MoECommunicatorConfig
from ep_plugin.bench import cli
from ep_plugin.bench.plan import (
    CACHED,
    COMBINE,
    COPIES,
    DISPATCH,
    LINKS,
    RAIL,
    ROW_PER_RANK,
    TWO_LEVEL,
    WAYS,
    Plan,
    bytes_of,
    counted_rows,
    expected_rows,
    least_seconds,
    points_of,
    random_routing,
    rows_of,
)
from tests.moe.moe_cases import Case, make_inputs
from tests.ranks import run_ranks, values

SIZES = {"tokens": 4096, "hidden": 7168, "topk": 8, "experts": 256}


def a_plan(nodes: int, ranks: int, **other: Any) -> Plan:
    return Plan(nodes=nodes, ranks=ranks, **SIZES | other)


@pytest.mark.parametrize(("nodes", "rows", "copies"), [(2, 0.997, 4.0), (4, 2.711, 2.2), (8, 4.633, 1.5)])
def test_rows_on_the_rail_are_the_published_ones(nodes: int, rows: float, copies: float) -> None:
    found = expected_rows(a_plan(nodes, 8))
    assert found[TWO_LEVEL].sent / SIZES["tokens"] == pytest.approx(rows, abs=5e-4)
    assert found[COPIES].sent / found[TWO_LEVEL].sent == pytest.approx(copies, abs=0.05)


@pytest.mark.parametrize(("nodes", "ranks", "times"), [(2, 2, 1.81), (2, 8, 3.27), (4, 8, 2.0), (8, 8, 1.45)])
def test_one_row_per_node_is_less_than_one_per_rank(nodes: int, ranks: int, times: float) -> None:
    found = expected_rows(a_plan(nodes, ranks))
    assert found[ROW_PER_RANK].sent / found[TWO_LEVEL].sent == pytest.approx(times, abs=0.015)


@pytest.mark.parametrize(("nodes", "two_level_ms", "copies_ms"), [(2, 1.69, 5.22), (4, 4.0, 7.8), (8, 6.6, 9.1)])
def test_times_are_near_the_model(nodes: int, two_level_ms: float, copies_ms: float) -> None:
    """That model adds to the least time what starting costs, so two levels take less here."""
    plan = a_plan(nodes, 8)
    rows = expected_rows(plan)
    assert 1e3 * least_seconds(plan, COPIES, COMBINE, rows[COPIES], False) == pytest.approx(copies_ms, rel=0.01)
    rail = sum(bytes_of(plan, TWO_LEVEL, RAIL, COMBINE, rows[TWO_LEVEL].landed, False)) / 45e6
    assert rail < 1e3 * least_seconds(plan, TWO_LEVEL, COMBINE, rows[TWO_LEVEL], False) < two_level_ms


def test_slow_links_decide_the_time() -> None:
    plan = a_plan(2, 8, link_gbps=10)
    rows = expected_rows(plan)[TWO_LEVEL]
    links = sum(bytes_of(plan, TWO_LEVEL, LINKS, DISPATCH, rows.links, True))
    assert least_seconds(plan, TWO_LEVEL, DISPATCH, rows, True) == links / 10e9


@pytest.mark.parametrize(
    ("nodes", "ranks", "limit"), [(2, 2, None), (3, 2, None), (4, 8, None), (2, 8, 1), (8, 4, 4), (8, 8, 8)]
)
def test_the_formula_is_the_mean_of_counts(nodes: int, ranks: int, limit: int | None) -> None:
    """Within 4 standard deviations. Whether a token needs one node makes no other likelier; pairs of one node, and
    ranks of one, may come together, up to K and G."""
    plan = a_plan(nodes, ranks, node_limit=limit, tokens=2048, experts=nodes * ranks * 8)
    generator = torch.Generator().manual_seed(1)
    found = counted_rows(plan, [random_routing(plan, generator) for _ in range(nodes)])
    together = {TWO_LEVEL: 1, ROW_PER_RANK: ranks, COPIES: plan.topk}
    for way, expected in expected_rows(plan).items():
        for name, mean in expected._asdict().items():
            most = max(ranks, together[way]) if name in ("links", "last") else together[way]
            assert abs(getattr(found[way], name) - mean) <= 4 * (most * mean) ** 0.5, (way, name)


def test_random_routing_keeps_to_the_limit_and_repeats_no_expert() -> None:
    plan = a_plan(8, 4, node_limit=2, tokens=300, topk=40)
    ids = random_routing(plan, torch.Generator().manual_seed(0))
    assert all(len(set(row)) == 40 and len({expert // 32 for expert in row}) <= 2 for row in ids.tolist())


@pytest.mark.parametrize(("node", "index"), [(0, 0), (1, 1), (2, 0)])
def test_counts_are_those_of_a_loop_over_tokens(node: int, index: int) -> None:
    plan = Plan(nodes=3, ranks=2, tokens=1, hidden=8, topk=3, experts=12)
    generator = torch.Generator().manual_seed(2)
    routing = [torch.rand(tokens, 12, generator=generator).topk(3).indices - 1 for tokens in (31, 0, 54)]
    routing = [ids.where(ids >= 0, -1) for ids in routing]
    ranks = [[{expert // 2 for expert in row if expert >= 0} for row in ids.tolist()] for ids in routing]
    own, neighbour = ranks[node], 2 * node + 1 - index
    others = [rows for at, rows in enumerate(ranks) if at != node]
    found = counted_rows(plan, routing, node, index)
    two = found[TWO_LEVEL]
    assert two.sent == sum(len({rank // 2 for rank in row} - {node}) for row in own)
    assert two.landed == sum(bool(row & {2 * node, 2 * node + 1}) for rows in others for row in rows)
    assert two.links == sum(neighbour in row for rows in ranks for row in rows)
    outside = {rank for rank in range(6) if rank // 2 != node}
    assert found[ROW_PER_RANK].sent == sum(len(row & outside) for row in own)
    assert found[ROW_PER_RANK].links == sum(neighbour in row for row in own)
    pairs = [expert // 2 for row in routing[node].tolist() for expert in row if expert >= 0]
    assert found[COPIES].sent == sum(rank in outside for rank in pairs)
    assert found[COPIES].links == pairs.count(neighbour)


CASE = Case(tokens=(37, 5, 64, 0), num_experts=8, hidden=160, topk=3, id_dtype=torch.int32)


def _sent(rank: int, quantize: str | None) -> dict[str, int]:
    """The bytes that this rank has sent over the rail, by operation."""
    inputs, found = make_inputs(CASE), {}
    x, ids, given = inputs.x[rank], inputs.ids[rank], inputs.weights[rank]
    config = MoECommunicatorConfig(num_experts=8, hidden_size=160, topk=3)
    with MoECommunicator(None, config) as comm:

        @contextlib.contextmanager
        def counted(name: str) -> Any:
            before = comm.engine.rails.bytes_sent
            yield
            found[name] = comm.engine.rails.bytes_sent - before

        with counted("dispatch"):
            out, handle = comm.dispatch(x, ids, quantize=quantize)
        with counted("dispatch, weights"):
            weights = given.clone().requires_grad_()
            out, handle = comm.dispatch(x.clone().requires_grad_(quantize is None), ids, weights, quantize=quantize)
        with counted("cached dispatch"):
            comm.dispatch(x, ids, previous_handle=handle, quantize=quantize)
        with counted("cached dispatch, weights"):
            comm.dispatch(x, ids, given, previous_handle=handle, quantize=quantize)
        y = out.tokens.detach().float()
        with counted("combine"):
            comm.combine(y, handle)
        with counted("combine, weights applied"):
            comm.combine(y, handle, weights=out.weights.detach())
        if quantize is None:
            with counted("combine, weights"):  # returns the gradients of weights beside those of rows
                (out.tokens.sum() + out.weights.sum()).backward()
    return found


@pytest.mark.parametrize("quantize", [None, "e4m3"])
def test_counted_bytes_are_those_that_ranks_send(quantize: str | None) -> None:
    inputs = make_inputs(CASE)
    outcomes = run_ranks(4, _sent, quantize, env={"EP_PLUGIN_RANKS_PER_NODE": "2"})
    plan = Plan(nodes=2, ranks=2, tokens=1, hidden=160, topk=3, experts=8, dtype="fp8" if quantize else "fp32")
    summed = Plan(nodes=2, ranks=2, tokens=1, hidden=160, topk=3, experts=8, dtype="fp32")  # the type of rows there
    for rank, sent in enumerate(values(outcomes)):
        node, index = divmod(rank, 2)
        rows = counted_rows(plan, [inputs.ids[index], inputs.ids[2 + index]], node, index)[TWO_LEVEL]
        assert sent
        for name, size in sent.items():
            operation, _, beside = name.partition(", ")
            of = summed if operation == COMBINE else plan
            number = rows_of(operation, RAIL, rows)
            parts = bytes_of(of, TWO_LEVEL, RAIL, operation, number, beside == "weights")
            assert size == sum(parts), (rank, name, parts)
            assert parts.counts > 0
    assert {name.partition(",")[0] for name in sent} == {DISPATCH, CACHED, COMBINE}


def ask(nodes: int = 2, ranks: int = 2, topk: int = 3, experts: int = 16, **other: Any) -> Any:
    options = {"nodes": nodes, "ranks": ranks, "tokens": 50, "hidden": 64, "topk": topk, "experts": experts, **other}
    words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    return CliRunner(env={"COLUMNS": "400"}).invoke(cli.main, ["plan", *words])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"experts": 18}, "experts: expected a multiple of the 4 ranks, got 18"),
        ({"node_limit": 3}, "node_limit: expected 1 to the 2 nodes, got 3"),
        ({"node_limit": 0}, "node_limit: expected 1 to the 2 nodes, got 0"),
        ({"topk": 17}, "topk: expected at most the 16 experts of 2 nodes, got 17"),
        ({"topk": 129, "experts": 512}, "topk: expected at most 128, got 129"),
        ({"topk": 9, "node_limit": 1}, "topk: expected at most the 8 experts of 1 nodes, got 9"),
        ({"nodes": 0}, "nodes: expected at least 1, got 0"),
        ({"nodes": 1, "plot": "bytes.png"}, "nodes: expected at least 2 for --plot, got 1"),
        ({"tokens": 0}, "tokens: expected at least 1, got 0"),
        ({"hidden": 7}, "hidden: expected rows of a multiple of 16 bytes, got 7"),
        ({"dtype": "int4"}, "dtype: expected one of bf16, fp32, fp8, got 'int4'"),
        ({"rail_gbps": 0}, "rail_gbps: expected a rate above 0, got 0"),
        ({"link_gbps": "nan"}, "link_gbps: expected a rate above 0, got nan"),
        ({"ranks": 128, "experts": 256}, "ranks: expected at most 72 on a node, got 128"),
        ({"plot": "/dev/null/picture.png"}, "plot: expected a folder that can be made for /dev/null/picture.png, got"),
        ({"nodes": 1_000_000, "experts": 2_000_000}, "tokens: expected at most 68719 / experts for 1000000 nodes"),
        ({"nodes": 1, "tokens": 10**12}, "tokens: expected at most 536870912 / experts for 1 nodes"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], says: str) -> None:
    run = ask(**options)
    assert run.exit_code == 2
    assert says in run.output


def test_the_table_has_a_line_for_each_exchange_path_and_source() -> None:
    run = ask(dtype="fp8", node_limit=1)
    assert run.exit_code == 0, run.output
    table = run.output.partition("\n\n")[0]
    head, _, *cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    assert len(cells) == 2 * 3 * 2 * 2 == len({tuple(line[:4]) for line in cells})
    found = {tuple(line[:4]): dict(zip(head, line, strict=True)) for line in cells}
    rail = found[DISPATCH, TWO_LEVEL, RAIL, "formula"]
    assert rail["rows per token"] == "0.500"
    assert float(rail["all, MB"]) == pytest.approx(25 * (64 + 4 + 2 * 12) / 1e6 + 8 * 13 / 1e6, abs=1e-3)
    assert "p(n) = 1 - C(e - n, K) / C(e, K)" in run.output


def test_the_picture_is_of_all_numbers_of_nodes_that_divide_the_plans(tmp_path: Path) -> None:
    picture = tmp_path / "bytes.png"
    run = ask(nodes=6, ranks=1, experts=24, node_limit=2, plot=picture)
    assert run.exit_code == 0, run.output
    assert picture.read_bytes().startswith(b"\x89PNG")
    plan = Plan(nodes=6, ranks=2, tokens=400, hidden=64, topk=4, experts=48, node_limit=3)
    points = points_of(plan)
    assert list(points) == [2, 3, 6]
    for nodes, point in points.items():
        assert point.keys() == set(itertools.product(("formula", "counted"), (RAIL, LINKS), WAYS))
        for where in itertools.product((RAIL, LINKS), WAYS):
            assert point["counted", *where] == pytest.approx(point["formula", *where], rel=0.2), (nodes, where)
    rows = expected_rows(plan)[COPIES]
    parts = (
        bytes_of(plan, COPIES, RAIL, DISPATCH, rows.sent, True),
        bytes_of(plan, COPIES, RAIL, COMBINE, rows.sent, False),
    )
    assert points[6]["formula", RAIL, COPIES] == pytest.approx(sum(map(sum, parts)))
