"""ep-bench moe --sweep: the cases, those that are left out, and the result."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ep_plugin.bench.cli import main
from ep_plugin.bench.exchange.workload import Workload, sweep_specs
from ep_plugin.bench.suites.moe import MoeSuite
from tests.bench.test_cases import HEADLINE, TINY

SMS = ["sms=4,8,12,16,24,48,96"]


def changed(*sweep: str) -> dict[str, Workload]:
    """The workloads by the names of their changes."""
    return {spec.name.rpartition("_")[2]: spec.workload for spec in sweep_specs(HEADLINE, "bfloat16", list(sweep))}


def sweep_suite(**more: Any) -> MoeSuite:
    sizes = {"ranks": 4, "tokens": 4096, "hidden": 7168, "topk": 8, "experts": 256}
    return MoeSuite(backend="cuda", **(sizes | more))


def test_a_sweep_changes_one_size_at_a_time() -> None:
    found = changed("hidden=2048,2880", "topk=1,16", "experts=8,512", "tokens=128,8192", "skew=1.25,2")
    assert found == {
        "headline": HEADLINE,
        **{f"h{hidden}": replace(HEADLINE, hidden=hidden) for hidden in (2048, 2880)},
        **{f"k{topk}": replace(HEADLINE, topk=topk) for topk in (1, 16)},
        **{f"e{experts}": replace(HEADLINE, experts=experts) for experts in (8, 512)},
        **{f"t{tokens}": replace(HEADLINE, tokens=tokens) for tokens in (128, 8192)},
        **{f"skew{skew:g}": replace(HEADLINE, skew=skew) for skew in (1.25, 2)},
    }
    with pytest.raises(ValueError, match="skew: expected at most 2 with these ranks and experts, got 3"):
        sweep_specs(replace(HEADLINE, ranks=2), "bfloat16", ["skew=3"])


def test_a_sweep_over_sms_bounds_all_kernels_that_move_rows() -> None:
    specs = sweep_specs(HEADLINE, "bfloat16", SMS)[2:]
    assert [spec.name.rpartition("_")[2] for spec in specs[::2]] == [f"sms{sms}" for sms in (4, 8, 12, 16, 24, 48, 96)]
    sms = {"dispatch_send_sms": 4, "dispatch_recv_sms": 0, "combine_send_sms": 4, "combine_recv_sms": 0}
    assert specs[0].sms == sms
    assert all(spec.workload == HEADLINE for spec in specs)


def test_a_sweep_selects_by_pattern_and_keeps_the_headline() -> None:
    head = ["dispatch_flat_bf16_headline", "combine_flat_bf16_headline"]
    for pattern, change in (("*_k16", "k16"), ("*_t512", "t512"), ("*_skew2", "skew2"), ("*_sms12", "sms12")):
        suite = sweep_suite(case=[pattern], sweep=["topk=1,16", "tokens=512,128", "skew=2", *SMS])
        names = [spec.name for spec in suite.specs()]
        assert names == [*head, f"dispatch_flat_bf16_{change}", f"combine_flat_bf16_{change}"]
        assert suite.name == "moe_sweep"


def test_a_sweep_on_cpus(tmp_path: Path) -> None:
    out = tmp_path / "sweep.json"
    chosen = [word for pattern in ("*_k1", "dispatch_*_e64", "dispatch*_skew2") for word in ("--case", pattern)]
    sweep = [word for text in ("topk=1,4", "experts=64", "skew=2") for word in ("--sweep", text)]
    run = CliRunner().invoke(main, ["moe", "--backend", "cpu", *TINY, *sweep, *chosen, "--out", str(out)])
    assert run.exit_code == 0, run.output
    result = json.loads(out.read_text())
    cases = [f"{what}_flat_fp32_{change}" for change in ("headline", "k1") for what in ("dispatch", "combine")]
    assert [row["case"] for row in result["rows"]] == [*cases, "dispatch_flat_fp32_e64", "dispatch_flat_fp32_skew2"]
    assert " --tokens 40 " in result["command"]
    assert result["suite"] == "moe_sweep" and result["notes"] == []
    assert all(row["bytes_wire"] > 0 for row in result["rows"])


def test_a_sweep_of_one_rank_is_refused() -> None:
    with pytest.raises(ValueError, match="ranks: expected at least 2, whose rows cross between them, got 1"):
        sweep_suite(ranks=1, sweep=["tokens=512"])
