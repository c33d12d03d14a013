"""ep-bench fsdp2: a small run, and what it refuses to time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", minversion="5.23")
pytest.importorskip("typer")

from typer.testing import CliRunner

from ep_plugin.bench.cli import main
from ep_plugin.bench.suites.fsdp2 import (
    BOTH,
    GATHER,
    NONE,
    STOCK,
    STOCK_AGAIN,
    Fsdp2Suite,
    notes_of,
    wrong_losses,
)


def test_a_step_through_each_arm() -> None:
    found = Fsdp2Suite(backend="cpu", ranks=2, layers=3, tokens=8, compared=2, iterations=1, unit=2).run()
    assert [row["impl"] for row in found["rows"]] == [STOCK, GATHER, BOTH, NONE]
    assert all(row["median_us"] > 0 for row in found["rows"])
    assert all("3 layers, 2 in a unit" in row["case"] for row in found["rows"])
    assert found["losses"][GATHER] == found["losses"][STOCK]
    assert len(found["losses"][BOTH]) == 2
    assert found["max_rel_diff"][GATHER] == 0 and found["max_rel_diff"][BOTH] <= 1e-5
    # Two gathers of the layers, which are a unit and a half, one of the rest, and a reduction of all.
    wire = (2 * found["parameters"] * 4 + found["unit_bytes"] * 3 // 2) // 2
    assert {row["bytes_wire"] for row in found["rows"] if row["impl"] != NONE} == {wire}
    medians = {row["impl"]: row["median_us"] for row in found["rows"]}
    assert found["exposed_in_stock"] == pytest.approx(1 - medians[NONE] / medians[STOCK], abs=1e-3)
    assert found["peak_bytes"] is None
    assert found["notes"] == notes_of(found) and len(found["notes"]) == 3


ABOUT = {"suite": "fsdp2", "hardware": "4 x GPU", "versions": {}, "code_hash": "0" * 64, "command": "c", "rows": []}
FOUND: dict[str, Any] = {
    "tokens_per_s": {STOCK: 1000, GATHER: 1050, BOTH: 1080, NONE: 1200},
    "exposed_in_stock": 0.167,
    "losses": {STOCK: [2.0] * 50},
    "max_rel_diff": {GATHER: 0.0, BOTH: 9.3e-5},
    "peak_bytes": {STOCK: 117.4e9, STOCK_AGAIN: 117.4e9, GATHER: 117.814e9, BOTH: 117.843e9},
    "unit_bytes": 404_000_000,
}  # fmt: skip


def test_a_report_says_what_is_compared(tmp_path: Path) -> None:
    (path := tmp_path / "fsdp2.json").write_text(json.dumps(ABOUT | FOUND | {"notes": notes_of(FOUND)}))
    done = CliRunner().invoke(main, ["report", str(path)])
    assert done.exit_code == 0, done.output
    for sentence in (
        "- tokens/s: stock 1,000; ep_plugin, gathers only 1,050 (1.050 × stock); ep_plugin 1,080 (1.080 × stock); no "
        "communication 1,200 (1.200 × stock)",
        "- communication: 16.7% of stock's step is exposed",
        "- losses of 50 steps, largest relative difference from stock's: ep_plugin, gathers only 0.0e+00, ep_plugin "
        "9.3e-05",
        "- peak memory beyond stock's 117.4 GB: ep_plugin, gathers only 414 MB, ep_plugin 443 MB; parameters of a "
        "unit: 404 MB",
    ):
        assert f"{sentence}\n" in done.output


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
    (sentence,) = wrong_losses(losses)
    assert message in sentence


def test_sizes_are_checked_before_anything_starts() -> None:
    done = CliRunner().invoke(main, ["fsdp2", "--backend", "cpu", "--ranks", "1"])
    assert done.exit_code == 2
    assert "ranks: expected at least 2, got 1" in " ".join(done.output.split())
