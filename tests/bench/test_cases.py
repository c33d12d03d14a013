"""ep-bench: which cases there are, how they are selected, what they route, and what their floors are."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from ep_plugin.bench.cli import main
from ep_plugin.bench.exchange.cases import EpPlugin, floor_row, sms_of
from ep_plugin.bench.exchange.workload import (
    FLAT,
    HOT_RANK,
    ROUNDTRIP,
    TOKEN_MAJOR,
    Spec,
    Workload,
    batches,
    rows_by_rank,
    rows_on_the_wire,
    specs_of,
)
from ep_plugin.bench.report import markdown
from ep_plugin.bench.suite import matching
from ep_plugin.bench.suites.moe import MoeSuite
from ep_plugin.moe.high_throughput.sms import for_combine, for_dispatch
from tests.bench.test_bench import cells
from tests.ranks import run_ranks, values

HEADLINE = Workload(ranks=4, tokens=4096, hidden=7168, topk=8, experts=256)
SMALL = Workload(ranks=4, tokens=301, hidden=4, topk=8, experts=64)
WIDE = Workload(ranks=2, tokens=8, hidden=128, topk=2, experts=4)
ON_GPUS = [
    "dispatch_flat_bf16",
    "dispatch_cached_bf16",
    "combine_flat_bf16",
    "roundtrip_flat_bf16",
    "dispatch_flat_bf16_12sm",
    "dispatch_flat_bf16_12total",
    "combine_flat_bf16_12sm",
    "combine_flat_bf16_12total",
    "dispatch_token_major_bf16",
    "dispatch_cached_token_major_bf16",
    "combine_token_major_bf16",
    "dispatch_token_major_bf16_12sm",
    "dispatch_flat_fp8",
    "dispatch_cached_fp8",
    "dispatch_flat_fp8_12sm",
    "dispatch_flat_fp8_12total",
    "dispatch_token_major_fp8",
    "dispatch_cached_token_major_fp8",
    "dispatch_token_major_fp8_12sm",
    "dispatch_flat_bf16_to_fp8",
    "dispatch_flat_bf16_skew2",
    "roundtrip_t512",
    "roundtrip_t512_graph",
    "roundtrip_t512_host_wait",
    "roundtrip_t128",
    "roundtrip_t128_graph",
    "roundtrip_t128_host_wait",
]


def gpu_specs() -> list[Spec]:
    return specs_of(HEADLINE, ("bfloat16", "float8"), (FLAT, TOKEN_MAJOR), on_gpus=True)


def test_the_cases_of_a_default_run_on_gpus() -> None:
    assert [spec.name for spec in gpu_specs()] == ON_GPUS


def test_bounded_cases_keep_their_bounds() -> None:
    named = {spec.name: spec for spec in gpu_specs()}
    split = {"dispatch_send_sms": 12, "dispatch_recv_sms": 48, "combine_send_sms": 12, "combine_recv_sms": 36}
    assert named["dispatch_flat_bf16_12sm"].sms == split
    in_all = {"dispatch_send_sms": 12, "dispatch_recv_sms": 0}
    in_all |= {"combine_send_sms": 12, "combine_recv_sms": 0}
    assert named["dispatch_flat_bf16_12total"].sms == named["dispatch_token_major_bf16_12sm"].sms == in_all
    assert not any(spec.peers for spec in gpu_specs() if spec.name.endswith(("12sm", "12total")) or spec.graph)


def test_patterns_select_cases() -> None:
    expected = [name for name in ON_GPUS if name.startswith("combine") or name.endswith("12total")]
    assert matching(ON_GPUS, ["combine_*", "*_12total"]) == expected
    assert matching(ON_GPUS, []) == ON_GPUS


@pytest.mark.parametrize("skew", [1.5, 2.0, 3.0])
def test_the_hottest_rank_receives_exactly_its_multiple_of_the_mean(skew: float) -> None:
    everyone = batches(replace(SMALL, skew=skew), torch.float32, torch.device("cpu"))
    ids = [batch.ids for batch in everyone]
    rows = rows_by_rank(SMALL, ids, dedup=False).sum(0).tolist()
    mean = SMALL.tokens * SMALL.topk
    assert sum(rows) == SMALL.ranks * mean
    assert rows[HOT_RANK] == max(rows) == SMALL.ranks * round(skew * mean / SMALL.ranks)
    assert max(rows[1:]) < 1.2 * min(rows[1:])
    for batch in everyone:
        assert all(len(set(chosen)) == SMALL.topk for chosen in batch.ids.tolist())
        assert bool((batch.weights >= 0.1).all()) and float(batch.weights.sum(1).std()) > 0.5


def test_a_skewed_floor_is_the_hottest_ranks_own() -> None:
    everyone = batches(replace(SMALL, skew=2.0), torch.float32, torch.device("cpu"))
    ids = [batch.ids for batch in everyone]
    local = SMALL.local_experts
    arriving = sum(int((chosen // local == HOT_RANK).any(1).sum()) for rank, chosen in enumerate(ids) if rank)
    assert rows_on_the_wire(SMALL, ids, dedup=True) == arriving


def test_a_floor_is_bytes_over_rate() -> None:
    row = floor_row("dispatch_flat_bf16", 159_000_000, 354.0)
    assert (row["impl"], row["median_us"], row["bytes_wire"]) == ("floor", 449.2, 159_000_000)
    assert row["median_us"] == row["p10_us"] == row["p90_us"] and row["gb_s"] == pytest.approx(354, abs=0.1)


def _row(case: str, impl: str, median: float, bytes_wire: int, sms: int | None = None) -> dict[str, object]:
    times = {"median_us": median, "p10_us": median, "p90_us": median}
    return {"case": case, "impl": impl, **times, "bytes_wire": bytes_wire, "gb_s": 1.0, "sms": sms}


TINY = ["--ranks", "2", "--tokens", "40", "--hidden", "128", "--topk", "2", "--experts", "8", "--iterations", "2"]


def test_selected_cases_without_peers(tmp_path: Path) -> None:
    out = tmp_path / "tuned.json"
    chosen = ["--case", "roundtrip_t128*", "--case", "combine*", "--peer", "none"]
    run = CliRunner().invoke(main, ["moe", "--backend", "cpu", *TINY, *chosen, "--out", str(out)])
    assert run.exit_code == 0, run.output
    rows = [(row["case"], row["impl"]) for row in json.loads(out.read_text())["rows"]]
    combines = ("combine_flat_fp32", "combine_token_major_fp32")
    assert rows == [(name, "ep_plugin") for name in (*combines, "roundtrip_t128", "roundtrip_t128_host_wait")]


def test_tables_compare_with_the_floor_and_with_peers() -> None:
    result = {
        "suite": "moe_ht", "hardware": "4 x GPU", "versions": {"torch": "2"}, "code_hash": "0" * 64, "command": "c",
        "rows": [
            _row("dispatch", "ep_plugin", 500, 10, 64),
            _row("dispatch", "nccl_all_to_all", 1500, 20),
            _row("dispatch", "floor", 400, 10),
            _row("combine_12sm", "ep_plugin", 600, 10, 12),
            _row("combine_12sm", "floor", 400, 10),
        ],
        "commit": "f" * 40, "notes": ["floor: 354.2 GB/s"],
    }  # fmt: skip
    assert "MiB held" not in markdown(result)  # as of earlier versions
    result["rows"][0]["peer_bytes"] = 3 << 19
    text = cells(markdown(result))
    assert "| dispatch | ep_plugin | 500 | 500 | 500 | 0.0 | 1.0 | 64 | 1.5 | 1.25 × | 1.00 × |" in text
    assert "| dispatch | nccl_all_to_all | 1,500 | 1,500 | 1,500 | 0.0 | 1.0 | | | 3.75 × | 3.00 × |" in text
    assert "- floor: 354.2 GB/s\n" in text and text.endswith(f"`c` · torch 2 · commit {'f' * 40} · code {'0' * 12}\n")


def _round_trip_sms(_: int) -> int:
    spec = Spec(name="", what=ROUNDTRIP, dtype="bfloat16", workload=WIDE)
    with contextlib.closing(EpPlugin(spec, torch.device("cpu"))) as ours:
        return sms_of(ours.comm, ROUNDTRIP, WIDE, 2 * WIDE.hidden)


def test_a_round_trip_has_the_sms_of_its_larger_half() -> None:
    larger = max(sum(for_dispatch(2, True, 256, 2, False)), sum(for_combine(2, True, 256, 2)))
    assert values(run_ranks(2, _round_trip_sms)) == [larger, larger]


def test_every_suite_has_a_table_and_a_picture(tmp_path: Path) -> None:
    about = {"hardware": "4 x GPU", "versions": {}, "code_hash": "0" * 64, "command": "c"}
    results = [
        {**about, "suite": "wire", "rows": [
            _row("tma_store_c14336_sm4", "wire", 900, 10, 4), _row("tma_store_c14336_sm16", "wire", 500, 10, 16),
            _row("store_sm132", "wire", 400, 10, 132), _row("ce_push", "wire", 300, 10)]},
        {**about, "suite": "moe_sweep", "efficiency": {"dispatch_flat_bf16_headline": 1.0, "combine_flat_bf16_k1": 0.9},
         "rows": [
            _row("dispatch_flat_bf16_headline", "ep_plugin", 5, 10), _row("combine_flat_bf16_k1", "floor", 4, 10)]},
        {**about, "suite": "moe_sweep", "headline": {"tokens": 4096, "skew": 1.0},
         "efficiency": {"dispatch_flat_bf16_headline": 1.0, "dispatch_flat_bf16_t512": 0.5},
         "rows": [
            _row(f"dispatch_flat_bf16_{change}", impl, 400, 10, 12 if impl == "ep_plugin" else None)
            for change in ("headline", "t512", "skew1.5", "sms4", "sms12") for impl in ("ep_plugin", "floor")]},
        {**about, "suite": "beside", "base_case": "matmul_alone", "rows": [
            _row("matmul_alone", "matmul", 1400, 0), _row("matmul_beside_hold_12sm", "matmul", 1540, 0, 12)]},
    ]  # fmt: skip
    picture = tmp_path / "all.png"
    files = []
    for result in results:
        files.append(tmp_path / f"{len(files)}.json")
        files[-1].write_text(json.dumps(result))
    run = CliRunner().invoke(main, ["report", *map(str, files), "--plot", str(picture)])
    assert run.exit_code == 0, run.output
    text = cells(run.output)
    assert "| matmul_beside_hold_12sm | matmul | 1,540 | 1,540 | 1,540 | 12 | 140 |" in text
    assert "| dispatch_flat_bf16_headline | ep_plugin | 5 | 5 | 5 | 0.0 | 1.0 | | 1.00 × |" in text
    assert "| dispatch_flat_bf16_t512 | ep_plugin | 400 | 400 | 400 | 0.0 | 1.0 | 12 | 1.00 × | 1.00 × |" in text
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_report_of_some_cases(tmp_path: Path) -> None:
    about = {"hardware": "4 x GPU", "versions": {}, "code_hash": "0" * 64, "command": "c"}
    moe = {
        **about,
        "suite": "moe_ht",
        "notes": ["SMs: of some kernels"],
        "rows": [
            _row("dispatch_flat_bf16", "ep_plugin", 500, 10, 76),
            _row("combine_flat_bf16", "ep_plugin", 600, 10, 52),
        ],
    }
    beside = {**about, "suite": "beside", "base_case": "matmul_alone", "rows": [
        _row("matmul_alone", "matmul", 1400, 0), _row("matmul_beside_hold_12sm", "matmul", 1540, 0, 12)]}  # fmt: skip
    files = []
    for result in (moe, beside):
        files.append(str(tmp_path / f"{result['suite']}.json"))
        Path(files[-1]).write_text(json.dumps(result))
    picture = tmp_path / "some.png"
    run = CliRunner().invoke(main, ["report", *files, "--case", "dispatch*", "--plot", str(picture)])
    assert run.exit_code == 0, run.output
    assert "| dispatch_flat_bf16 | ep_plugin | 500 |" in cells(run.output) and "| SMs |" in run.output
    assert "combine" not in run.output and "matmul" not in run.output and "- SMs: of some kernels" in run.output
    assert picture.read_bytes().startswith(b"\x89PNG")
    run = CliRunner().invoke(main, ["report", *files, "--case", "*hold*"])
    assert "| matmul_beside_hold_12sm | matmul | 1,540 | 1,540 | 1,540 | 12 | 140 |" in cells(run.output)
    run = CliRunner(env={"COLUMNS": "400"}).invoke(main, ["report", *files, "--case", "dispatch*", "--case", "gather"])
    assert run.exit_code == 2
    assert "case: expected a pattern for dispatch_flat_bf16, combine_flat_bf16, matmul_alone, " in run.output


def test_a_command_says_all_that_was_asked_for() -> None:
    suite = MoeSuite(
        backend="cuda", ranks=4, tokens=301, hidden=8, topk=8, experts=64, dtype=["float32"], layout=["flat"],
        iterations=3, case=["dispatch*"], peer=["none"],
    )  # fmt: skip
    assert suite.command() == (
        "ep-bench moe --backend cuda --ranks 4 --iterations 3 --tokens 301 --hidden 8 --topk 8 --experts 64 "
        "--nodes 1 --dtype float32 --layout flat --case 'dispatch*' --peer none"
    )
