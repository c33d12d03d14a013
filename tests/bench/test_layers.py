"""ep-bench layers: small runs of the frameworks' own layers, and what it refuses to time."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("typer")

from typer.testing import CliRunner

from ep_plugin.bench.cli import main
from ep_plugin.bench.suite import measured
from ep_plugin.bench.suites import layers
from ep_plugin.bench.suites.layers import EXPERTS, FRAMEWORKS, LIMIT, OURS, ROUTER, STOCK, LayersSuite
from tests.integrations.on_cpus import make_megatron_run_here
from tests.ranks import run_ranks, values


@pytest.mark.slow
@pytest.mark.parametrize(
    ("framework", "ranks", "parts", "experts"),
    [
        ("megatron", 2, [EXPERTS, ROUTER], "GroupedMLP, products of torch.nn.functional.grouped_mm"),
        ("torchtitan", 3, [EXPERTS], "GroupedExperts, in BF16"),
    ],
    ids=["megatron", "torchtitan"],
)
def test_both_dispatchers_and_the_experts_alone(framework: str, ranks: int, parts: list[str], experts: str) -> None:
    pytest.importorskip(FRAMEWORKS[framework])
    suite = LayersSuite(
        backend="cpu" if framework == "torchtitan" else "cuda", framework=framework, ranks=ranks, tokens=9, hidden=32,
        topk=3, experts=4 * ranks, ffn=16, iterations=1,
    )  # fmt: skip
    found = suite.run() if suite.backend == "cpu" else values(run_ranks(ranks, _megatron_on_cpus, suite))[0]
    assert suite.name == f"layers_{framework}"
    rows = {row["impl"]: row for row in found["rows"]}
    assert list(rows) == [STOCK, OURS, *parts]
    assert all(row["median_us"] > 0 for row in rows.values())
    assert {row["sms"] for row in rows.values()} == {None}
    assert [impl for impl, row in rows.items() if row["peer_bytes"]] == [OURS]
    medians = {impl: row["median_us"] for impl, row in rows.items()}
    assert found["notes"] == layers.notes_of(experts, medians)
    assert 0 < found["max_rel_diff"] <= LIMIT
    # A row of ours crosses once for all experts of a rank.
    assert 0 < rows[OURS]["bytes_wire"] < rows[STOCK]["bytes_wire"]
    assert rows[OURS]["bytes_wire"] % (4 * 32 * 2) == 0
    assert rows[EXPERTS]["bytes_wire"] == 0
    assert f"--framework {framework}" in suite.command()


def _megatron_on_cpus(_: int, suite: LayersSuite) -> dict[str, Any]:
    make_megatron_run_here()
    return measured(torch.device("cpu"), suite)


def _differences(**changes: torch.Tensor) -> dict[str, float]:
    theirs = {"y": torch.ones(4, 2), "x.grad": torch.ones(4, 2)}
    return layers.differences(theirs | changes, theirs)


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({}, None),
        ({"y": torch.ones(4, 2) * (1 + LIMIT / 2)}, None),
        ({"y": torch.tensor([[1.0, 1.0]] * 3 + [[1.0, 1.1]])}, "y"),
        ({"x.grad": torch.full((4, 2), float("nan"))}, "x.grad"),
        ({"x.grad": torch.ones(4, 1)}, "x.grad"),
        ({"experts.weight1.grad": torch.ones(1)}, "experts.weight1.grad"),
    ],
    ids=["same", "rounding", "one-element", "nan", "shape", "not-in-theirs"],
)
def test_what_differs_is_not_timed(changes: dict[str, torch.Tensor], wrong: str | None) -> None:
    sentences = layers.too_different(_differences(**changes))
    assert [sentence.split(":")[0] for sentence in sentences] == ([wrong] if wrong else [])


def test_the_report_says_what_is_above_the_experts() -> None:
    medians = {STOCK: 3000.0, OURS: 1500.0, EXPERTS: 1000.0}
    assert layers.notes_of("made of wood", medians) == [
        "experts: made of wood",
        "above the experts' own compute: alltoall 2,000 µs, ep_plugin 500 µs; ratio 0.25",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "1"], "ranks: expected at least 2, got 1"),
        (["--hidden", "36"], "hidden: expected a multiple of 8"),
        (["--experts", "9"], "experts: expected a multiple of the 2 ranks, got 9"),
        (["--ffn", "0"], "ffn: expected at least 1, got 0"),
        (["--framework", "jax"], "framework: expected one of megatron, torchtitan, got 'jax'"),
        (["--framework", "megatron"], "backend: expected cuda for megatron,"),
    ],
)
def test_sizes_are_checked_before_anything_starts(arguments: list[str], message: str) -> None:
    done = CliRunner().invoke(main, ["layers", "--framework", "torchtitan", "--backend", "cpu", *arguments])
    assert done.exit_code == 2
    assert message in " ".join(done.output.split())
