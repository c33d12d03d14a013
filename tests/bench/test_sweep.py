"""ep-bench sweep: what it changes, what it leaves out and says so, and what its result holds."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from ep_plugin.bench import plots, suite_sweep
from ep_plugin.bench.cli import main
from ep_plugin.bench.specs import Sms
from ep_plugin.bench.suite_sweep import SweepSuite, relative_efficiency
from ep_plugin.bench.workload import crossing_per_token
from tests.bench.test_cases import HEADLINE, TINY, _row


def sweep_suite(backend: str = "cuda", **more: Any) -> SweepSuite:
    return SweepSuite(backend=backend, workload=HEADLINE, dtype="bfloat16", iterations=1, **more)


def test_a_sweep_changes_h_k_and_e_at_equal_bytes() -> None:
    found = sweep_suite().workloads()
    assert list(found)[:3] == ["headline", "h2048", "h2880"]
    found = {change: sizes for change, sizes in found.items() if change[0] in "hke"}
    assert len(found) == 1 + 5 + 6 + 5
    target = HEADLINE.tokens * crossing_per_token(HEADLINE) * HEADLINE.hidden
    for change, sizes in found.items():
        assert sizes.tokens * crossing_per_token(sizes) * sizes.hidden == pytest.approx(target, rel=1e-3), change


def test_a_sweep_changes_tokens_and_skew_by_themselves() -> None:
    found = sweep_suite().workloads()
    for tokens in (128, 512, 1024, 2048, 8192):
        assert found[f"t{tokens}"] == replace(HEADLINE, tokens=tokens)
    for skew in (1.25, 1.5, 2, 3, 4):
        assert found[f"skew{skew:g}"] == replace(HEADLINE, skew=skew)
    small = replace(sweep_suite(), workload=replace(HEADLINE, ranks=2, tokens=1024)).workloads()
    assert [change for change in small if change[0] in "ts"] == [
        "t128",
        "t512",
        "t2048",
        "skew1.25",
        "skew1.5",
        "skew2",
    ]


def test_a_sweep_over_sms_bounds_all_kernels_that_move_rows() -> None:
    specs = [spec for spec in sweep_suite().specs() if "_sms" in spec.name]
    assert [spec.name.rpartition("_")[2] for spec in specs[::2]] == [f"sms{sms}" for sms in (4, 8, 12, 16, 24, 48, 96)]
    assert specs[0].sms == Sms(dispatch=4, expand=0, combine=4, add=0)
    assert all(spec.workload == HEADLINE for spec in specs)


def test_a_sweep_selects_by_pattern_and_keeps_the_headline() -> None:
    head = ["dispatch_flat_bf16_headline", "combine_flat_bf16_headline"]
    for pattern, change in (("*_k16", "k16"), ("*_t512", "t512"), ("*_skew2", "skew2"), ("*_sms12", "sms12")):
        names = [spec.name for spec in sweep_suite(cases=(pattern,)).specs()]
        assert names == [*head, f"dispatch_flat_bf16_{change}", f"combine_flat_bf16_{change}"]


@pytest.mark.parametrize(
    ("suite", "reason"),
    [
        (sweep_suite("cpu"), "kernels on CPUs run on no SMs"),
        (sweep_suite(sms=Sms(dispatch=16)), "all cases run on dispatch=16"),
    ],
    ids=["cpu", "given SMs"],
)
def test_a_sweep_without_sms_says_why(suite: SweepSuite, reason: str) -> None:
    assert not any("_sms" in spec.name for spec in suite.specs())
    for cases, left_out in (((), True), (("dispatch*",), True), (("*_k1",), False)):
        said = replace(suite, cases=cases).left_out()
        assert said == ([f"over SMs: left out, since {reason}"] if left_out else []), cases
    with pytest.raises(ValueError, match=f"case: expected none over SMs, since {reason}, got '[*]_sms12'"):
        replace(suite, cases=("*_sms12",))


def test_more_sms_than_a_device_has_are_left_out_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite_sweep, "usable_sms", lambda device: 50)
    suite = sweep_suite(cases=("combine*_sms48", "combine*_sms96"))
    specs, left_out = suite_sweep._that_fit(suite, torch.device("cuda"))
    assert [spec.name for spec in specs][2:] == ["combine_flat_bf16_sms48"]
    assert left_out == ["combine_flat_bf16_sms96: left out, since kernels may hold at most 50 of this device's SMs"]


def test_a_sweep_on_cpus(tmp_path: Path) -> None:
    out = tmp_path / "sweep.json"
    chosen = [word for pattern in ("*_k1", "dispatch_*_e64", "dispatch*_skew2") for word in ("--case", pattern)]
    run = CliRunner().invoke(main, ["sweep", "--backend", "cpu", *TINY, *chosen, "--out", str(out)])
    assert run.exit_code == 0, run.output
    result = json.loads(out.read_text())
    cases = [f"{what}_flat_fp32_{change}" for change in ("headline", "k1") for what in ("dispatch", "combine")]
    assert [row["case"] for row in result["rows"]] == [*cases, "dispatch_flat_fp32_e64", "dispatch_flat_fp32_skew2"]
    assert result["headline"]["tokens"] == 40
    assert result["left_out"] == []
    assert list(result["efficiency"]) == [row["case"] for row in result["rows"]]
    for row in result["rows"]:
        (base,) = (other for other in result["rows"] if other["case"] == f"{row['case'].rpartition('_')[0]}_headline")
        efficiency = row["bytes_wire"] / row["median_us"] / (base["bytes_wire"] / base["median_us"])
        assert result["efficiency"][row["case"]] == pytest.approx(efficiency, abs=1e-3)


def test_a_sweep_of_one_rank_is_refused() -> None:
    with pytest.raises(ValueError, match="ranks: expected at least 2, whose rows cross between them, got 1"):
        SweepSuite(backend="cpu", workload=replace(HEADLINE, ranks=1), dtype="bfloat16", iterations=1)


def test_efficiency_is_relative_to_the_headline_of_the_same_operation() -> None:
    rows = [
        _row("dispatch_flat_bf16_headline", "ep_plugin", 500, 1000),
        _row("combine_flat_bf16_headline", "ep_plugin", 800, 1000),
        _row("dispatch_flat_bf16_k1", "ep_plugin", 1000, 1000),
        _row("dispatch_flat_bf16_k1", "floor", 400, 1000),
        _row("combine_flat_bf16_k1", "ep_plugin", 800, 500),
    ]
    assert relative_efficiency(rows) == {
        "dispatch_flat_bf16_headline": 1.0,
        "combine_flat_bf16_headline": 1.0,
        "dispatch_flat_bf16_k1": 0.5,
        "combine_flat_bf16_k1": 0.5,
    }


def test_a_sweep_is_drawn_axis_by_axis() -> None:
    cases = ["headline", "k1", "t512", "t128", "skew1.5", "sms4"]
    rows = [_row(f"dispatch_flat_bf16_{case}", "ep_plugin", 400, 10) for case in cases]
    efficiency = {row["case"]: 1.0 for row in rows}
    result = {"suite": "moe_sweep", "rows": rows, "efficiency": efficiency, "headline": {"tokens": 4096, "skew": 1.0}}
    equal, *over = plots._panels(result)
    assert list(equal["efficiency"]) == ["dispatch_flat_bf16_headline", "dispatch_flat_bf16_k1"]
    points = {panel["axis"]: [(row["operation"], row["value"]) for row in panel["rows"]] for panel in over}
    assert {name for listed in points.values() for name, _ in listed} == {"dispatch_flat_bf16"}
    values = {axis: [value for _, value in listed] for axis, listed in points.items()}
    assert values == {"t": [512, 128, 4096], "skew": [1.5, 1], "sms": [4]}
