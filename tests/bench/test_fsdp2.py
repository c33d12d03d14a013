"""ep-bench fsdp2: a small run, and what it refuses to time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", minversion="5.23")
pytest.importorskip("typer")

from typer.testing import CliRunner

from ep_plugin.bench import report as reports
from ep_plugin.bench import suite_fsdp2
from ep_plugin.bench.cli import main
from ep_plugin.bench.step_collectives import Call, Noted, again
from ep_plugin.bench.suite_fsdp2 import BOTH, GATHER, NONE, STOCK, STOCK_AGAIN, Fsdp2Suite
from tests.ranks import run_ranks, values


def test_a_step_through_each_arm() -> None:
    suite = Fsdp2Suite(backend="cpu", ranks=2, layers=3, tokens=8, judged=2, iterations=1, unit=2)
    found = suite_fsdp2.run(suite)
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
    alone = found["collectives_us"]
    assert alone.keys() == {STOCK, BOTH} and min(alone.values()) > 0
    assert found["collectives_share"] == pytest.approx(alone[STOCK] / medians[STOCK], abs=1e-3)
    assert found["share_when_exposed"] == pytest.approx(alone[STOCK] / (alone[STOCK] + medians[NONE]), abs=1e-3)
    assert found["peak_bytes"] is None
    assert len(reports.notes(found)) == 3


def _called_again(rank: int) -> list[tuple[Any, ...]]:
    """Collectives that note who was called, with how much, and how far its input lies from its output."""
    said: list[tuple[Any, ...]] = []

    class Comm:
        def __init__(self, name: str) -> None:
            self.name = name

        def allocate(self, size: Sequence[int], **where: Any) -> torch.Tensor:
            said.append((self.name, "allocate", *size))
            return torch.empty(size, **where)

        def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, **how: Any) -> str:
            between = input_tensor.data_ptr() - output_tensor.data_ptr()
            said.append((self.name, len(output_tensor), len(input_tensor), between, *how))
            return "work"

    calls: list[Call] = []
    group = torch.distributed.group.WORLD
    gather, scatter = (Noted(Comm("stock"), place, calls) for place in (0, 1))
    out, source = torch.empty(4), torch.empty(2)
    for _ in range(2):
        assert gather(output_tensor=out, input_tensor=source, group=group, async_op=True) == "work"
    scatter(output_tensor=source, input_tensor=out, group=group, op="sum")
    assert [call.bytes_wire for call in calls] == [8, 8, 8]
    assert said[0][4:] == ("async_op", "group")
    said.clear()
    run = again(calls, [Comm("gather"), Comm("scatter")])
    run()
    return said


def test_the_collectives_of_a_step_are_called_again_in_memory_of_their_own() -> None:
    for rank, said in enumerate(values(run_ranks(2, _called_again))):
        assert said[:3] == [("gather", "allocate", 4), ("scatter", "allocate", 4), ("scatter", "allocate", 2)]
        assert said[3:5] == [("gather", 4, 2, 8 * rank, "group")] * 2
        assert said[5][:3] == ("scatter", 2, 4) and said[5][4:] == ("group", "op")


RESULT: dict[str, Any] = {
    "suite": "fsdp2", "hardware": "4 x GPU", "versions": {}, "code_hash": "0" * 64, "command": "c", "rows": [],
    "tokens_per_s": {STOCK: 1000, GATHER: 1050, BOTH: 1080, NONE: 1200},
    "exposed_in_stock": 0.167,
    "losses": {STOCK: [2.0] * 50},
    "max_rel_diff": {GATHER: 0.0, BOTH: 9.3e-5},
    "peak_bytes": {STOCK: 117.4e9, STOCK_AGAIN: 117.4e9, GATHER: 117.814e9, BOTH: 117.843e9},
}  # fmt: skip
NEWER = {
    "collectives_us": {STOCK: 80_000.0, BOTH: 66_000.0},
    "collectives_share": 0.288,
    "share_when_exposed": 0.235,
    "unit_bytes": 404_000_000,
}


def test_a_report_says_what_is_judged(tmp_path: Path) -> None:
    (path := tmp_path / "fsdp2.json").write_text(json.dumps(RESULT | NEWER))
    done = CliRunner().invoke(main, ["report", str(path)])
    assert done.exit_code == 0, done.output
    for sentence in (
        "- tokens/s: stock 1,000; ep_plugin, gathers only 1,050 (1.050 × stock); ep_plugin 1,080 (1.080 × stock); no "
        "communication 1,200 (1.200 × stock)",
        "- communication: 16.7% of stock's step is exposed; a step's collectives by themselves, undisturbed: stock "
        "80.0 ms, ep_plugin 66.0 ms; stock's are at least 28.8% of its step, and 23.5% of one that hid none of them",
        "- losses of 50 steps, largest relative difference from stock's: ep_plugin, gathers only 0.0e+00, ep_plugin "
        "9.3e-05",
        "- peak memory beyond stock's 117.4 GB: ep_plugin, gathers only 414 MB, ep_plugin 443 MB; parameters of a "
        "unit: 404 MB",
    ):
        assert f"{sentence}\n" in done.output


def test_an_older_result_is_reported_without_what_it_lacks() -> None:
    _, communication, _, memory = reports.notes(RESULT)
    assert communication == "communication: 16.7% of stock's step is exposed"
    assert memory.endswith("ep_plugin 443 MB")


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
