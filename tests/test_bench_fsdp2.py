"""ep-bench fsdp2: a small run, and what it refuses to time."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers", minversion="5.23")
pytest.importorskip("typer")

from typer.testing import CliRunner

from ep_plugin.bench import suite_fsdp2
from ep_plugin.bench.cli import main
from ep_plugin.bench.suite_fsdp2 import BOTH, GATHER, NONE, STOCK, STOCK_AGAIN, Fsdp2Suite


def test_a_step_through_each_arm() -> None:
    suite = Fsdp2Suite(backend="cpu", ranks=2, layers=3, tokens=8, judged=2, iterations=1, unit=2)
    found = suite_fsdp2.run(suite)
    assert [row["impl"] for row in found["rows"]] == [STOCK, GATHER, BOTH, NONE]
    assert all(row["median_us"] > 0 for row in found["rows"])
    assert all("3 layers, 2 in a unit" in row["case"] for row in found["rows"])
    assert found["losses"][GATHER] == found["losses"][STOCK]
    assert len(found["losses"][BOTH]) == 2
    assert found["max_rel_diff"][GATHER] == 0 and found["max_rel_diff"][BOTH] <= 1e-5
    assert {row["bytes_wire"] for row in found["rows"] if row["impl"] != NONE} == {3 * found["parameters"] * 4 // 2}


STOCK_TWICE = {STOCK: [2.0], STOCK_AGAIN: [2.0]}


@pytest.mark.parametrize(
    ("losses", "message"),
    [
        (
            {STOCK: [2.0], STOCK_AGAIN: [2.1], GATHER: [2.0], BOTH: [2.0]},
            "losses of stock: expected the same from run to",
        ),
        ({**STOCK_TWICE, GATHER: [2.0000001], BOTH: [2.0]}, "with our gathers alone: expected stock's, bit for bit"),
        ({**STOCK_TWICE, GATHER: [2.0], BOTH: [2.01]}, "with our reductions: expected stock's within 0.001"),
        ({**STOCK_TWICE, GATHER: [2.0], BOTH: [float("nan")]}, "with our reductions: expected stock's within 0.001"),
    ],
    ids=["stock", "gathers", "reductions", "nan"],
)
def test_losses_that_differ_are_not_timed(losses: dict[str, list[float]], message: str) -> None:
    (sentence,) = suite_fsdp2._judge(losses)
    assert message in sentence


def test_sizes_are_checked_before_anything_starts() -> None:
    done = CliRunner().invoke(main, ["fsdp2", "--backend", "cpu", "--ranks", "1"])
    assert done.exit_code == 2
    assert "ranks: expected at least 2, got 1" in " ".join(done.output.split())
