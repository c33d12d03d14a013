"""ep-bench fsdp2: a small run, and what it refuses to time."""

from __future__ import annotations

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


@pytest.mark.slow
def test_a_step_through_each_arm() -> None:
    found = Fsdp2Suite(backend="cpu", ranks=2, layers=3, tokens=8, compared=2, iterations=1, unit=2).run()
    assert [row["impl"] for row in found["rows"]] == [STOCK, GATHER, BOTH, NONE]
    assert all(row["median_us"] > 0 for row in found["rows"])
    assert [row["impl"] for row in found["rows"] if row["peer_bytes"]] == [GATHER, BOTH]
    assert all("3 layers, 2 in a unit" in row["case"] for row in found["rows"])
    losses, medians = found["losses"], {row["impl"]: row["median_us"] for row in found["rows"]}
    assert losses[GATHER] == losses[STOCK] and len(losses[BOTH]) == 2
    assert losses[BOTH] == pytest.approx(losses[STOCK], rel=1e-5)
    assert found["notes"] == notes_of(medians, 16, losses, dict.fromkeys(losses, 0)) and len(found["notes"]) == 3


def test_the_notes_say_what_is_compared() -> None:
    medians = {STOCK: 1000.0, GATHER: 1000 / 1.05, BOTH: 1000 / 1.08, NONE: 1000 / 1.2}
    losses = {STOCK: [2.0] * 50, GATHER: [2.0] * 50, BOTH: [2.000186] * 50}
    peaks = {STOCK: 117_400_000_000, GATHER: 117_814_000_000, BOTH: 117_843_000_000}
    assert notes_of(medians, 1, losses, peaks) == [
        "tokens/s: stock 1,000 (1.000 × stock); ep_plugin, gathers only 1,050 (1.050 × stock); ep_plugin 1,080 "
        "(1.080 × stock); no communication 1,200 (1.200 × stock)",
        "communication: 16.7% of stock's step is exposed",
        "losses of 50 steps, largest relative difference from stock's: ep_plugin, gathers only 0.0e+00, ep_plugin "
        "9.3e-05",
        "peak memory beyond stock's 117.4 GB: ep_plugin, gathers only 414 MB, ep_plugin 443 MB",
    ]


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
