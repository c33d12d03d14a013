"""ep-bench torchtitan: a small run of torchtitan's own routed experts, and what it refuses."""

from __future__ import annotations

import pytest

pytest.importorskip("torchtitan", reason="needs torchtitan")
pytest.importorskip("typer")

from typer.testing import CliRunner

from ep_plugin.bench import suite_torchtitan
from ep_plugin.bench.cli import main
from ep_plugin.bench.layers import EXPERTS, LIMIT, OURS, STOCK
from ep_plugin.bench.suite_torchtitan import TorchtitanSuite
from ep_plugin.bench.workload import Workload

SMALL = Workload(ranks=3, tokens=9, hidden=32, topk=3, experts=9)


def test_both_dispatchers_and_the_experts_alone() -> None:
    found = suite_torchtitan.run(TorchtitanSuite(backend="cpu", workload=SMALL, ffn=16, iterations=1))
    rows = {row["impl"]: row for row in found["rows"]}
    assert list(rows) == [STOCK, OURS, EXPERTS]
    assert all(row["median_us"] > 0 for row in rows.values())
    assert 0 < found["max_rel_diff"] <= LIMIT
    for impl in (STOCK, OURS):
        above = rows[impl]["median_us"] - rows[EXPERTS]["median_us"]
        assert found["above_experts_us"][impl] == pytest.approx(above, abs=0.1)
    assert 0 < rows[OURS]["bytes_wire"] < rows[STOCK]["bytes_wire"]
    assert rows[EXPERTS]["bytes_wire"] == 0
    assert found["command"].startswith("ep-bench torchtitan --backend cpu --ranks 3 --tokens 9")
    assert {row["sms"] for row in rows.values()} == {None}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "1"], "ranks: expected at least 2, got 1"),
        (["--hidden", "36"], "hidden: expected a multiple of 8"),
        (["--experts", "9"], "experts: expected a multiple of the 2 ranks, got 9"),
        (["--ffn", "0"], "ffn: expected at least 1, got 0"),
    ],
)
def test_sizes_are_checked_before_anything_starts(arguments: list[str], message: str) -> None:
    done = CliRunner().invoke(main, ["torchtitan", "--backend", "cpu", *arguments])
    assert done.exit_code == 2
    assert message in " ".join(done.output.split())
