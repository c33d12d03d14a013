"""The pictures of `ep-bench report`: words for cases, values and ratios on bars, training beside exchanges."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")
pytest.importorskip("matplotlib")

from typer.testing import CliRunner

from ep_plugin.bench import bars, report
from ep_plugin.bench.cli import main
from ep_plugin.bench.exchange import workload
from ep_plugin.bench.exchange.workload import CUDA_SIZES, Workload, specs_of
from ep_plugin.config import DispatchLayout

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
ABOUT = {"hardware": "4 x GPU", "versions": {}, "code_hash": "0" * 64, "command": "c"}


def _row(case: str, impl: str, median: float) -> dict[str, Any]:
    times = {"median_us": median, "p10_us": median - 1, "p90_us": median + 1}
    return {"case": case, "impl": impl, **times, "bytes_wire": 0, "gb_s": 0.0, "sms": None}


def _trained(ours: float, theirs: float) -> dict[str, Any]:
    both = {"ep_plugin": ours, "all_to_all": theirs}
    return {
        "model": "qwen3_moe 30b-a3b, 4 layers", "device": "GPU", "world_size": 4, "steps": 2,
        "compare": {"reference": "all_to_all", "max_rel_diff": 1e-4}, "tokens_per_s": both, "step_ms": both,
        "losses": {"ep_plugin": [12.0, 3.0], "all_to_all": [12.0, 3.0003]}, "versions": {"torch": "2.11"},
        "options": {"model": "qwen3_moe", "preset": "30b-a3b", "checkpoint": None, "layers": 4, "fsdp2": True},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("dispatch_flat_bf16", "dispatch\nrows grouped by expert, BF16"),
        ("dispatch_token_major_fp8_12sm", "dispatch\na row per token, FP8, sent by 12 SMs"),
        ("dispatch_flat_bf16_to_fp8", "dispatch\nrows grouped by expert, BF16, sent as FP8"),
        ("dispatch_send_fp8_t128", "dispatch\nsend half, FP8, 128 tokens per rank"),
        ("roundtrip_t512_host_wait", "dispatch and combine\n512 tokens per rank, the host waits for the totals"),
        ("65536", "64 KiB"),
        ("80000000", "76.29 MiB"),
        ("both_ways_1073741824", "both ways\n1 GiB"),
        ("tma_store_c14336_sm132", "tma_store_c14336_sm132"),
        ("MoE layer, T 4096", "MoE layer, T 4096"),
    ],
)
def test_cases_are_named_in_words(case: str, words: str) -> None:
    assert bars.case_in_words(case) == words


def test_every_case_of_the_suites_on_gpus_has_words() -> None:
    sizes = Workload(ranks=4, **{name: CUDA_SIZES[name] for name in ("tokens", "hidden", "topk", "experts")})
    layouts = DispatchLayout.FLAT, DispatchLayout.TOKEN_MAJOR
    names = [spec.name for spec in specs_of(sizes, tuple(workload.DTYPES), layouts, on_gpus=True)]
    assert len(names) > 20
    assert [name for name in names if bars.case_in_words(name) == name] == []


def test_training_stands_beside_the_exchange() -> None:
    exchange = {
        **ABOUT, "suite": "moe_ht", "command": "ep-bench moe --tokens 4096 --hidden 7168 --topk 8 --experts 256",
        "rows": [_row("combine_flat_bf16", impl, us) for impl, us in
                 (("ep_plugin", 500.0), ("nccl_all_to_all", 2000.0), ("floor", 450.0))],
    }  # fmt: skip
    step = {
        **ABOUT, "suite": "fsdp2", "tokens_per_s": {"stock": 50, "ep_plugin": 60},
        "rows": [_row("dense Qwen3, 36 layers, compiled, 2 in a unit", impl, 1.0) for impl in ("stock", "ep_plugin")],
    }  # fmt: skip
    training, times = bars.panels([_trained(110, 100), exchange, step])
    assert training.title == "Training on 4 x GPU" and "more is better" in training.axis and not training.floors
    assert [(bar.case, bar.impl, bar.text) for bar in training.bars] == [
        ("Qwen3-30B-A3B's widths, 4 layers\ntransformers, FSDP2", "without ep_plugin", "100"),
        ("Qwen3-30B-A3B's widths, 4 layers\ntransformers, FSDP2", "with ep_plugin", "110  (1.10 × as fast)"),
        ("dense Qwen3, 36 layers, compiled\nFSDP2", "without ep_plugin", "50"),
        ("dense Qwen3, 36 layers, compiled\nFSDP2", "with ep_plugin", "60  (1.20 × as fast)"),
    ]
    assert times.title == "Dispatch and combine on 4 x GPU" and "less is better" in times.axis
    assert "4,096 tokens of 7,168 elements per rank (56 MiB in BF16), top 8 of 256 experts" in times.axis
    assert [(bar.impl, bar.text) for bar in times.bars] == [
        ("NCCL's all-to-all, sort and sums", "2,000"),
        ("with ep_plugin", "500  (4.0 × as fast)"),
    ]
    assert times.floors == {times.bars[0].case: 450.0}


def test_no_ratio_where_there_are_several_others() -> None:
    impls = {"ep_plugin": 5.0, "ep_plugin sm": 6.0, "nccl": 7.25}
    result = {**ABOUT, "suite": "allgather", "rows": [_row("1048576", impl, us) for impl, us in impls.items()]}
    (panel,) = bars.panels([result])
    assert [(bar.impl, bar.text) for bar in panel.bars] == [
        ("ep_plugin, always SMs", "6.0"), ("NCCL", "7.2"), ("with ep_plugin", "5.0"),
    ]  # fmt: skip


def test_a_report_of_training_and_some_implementations(tmp_path: Path) -> None:
    impls = ("ep_plugin", "ep_plugin sm", "nccl")
    gather = {**ABOUT, "suite": "allgather", "rows": [_row("1048576", impl, 10.0) for impl in impls]}
    files = []
    for name, result in (("train", _trained(110, 100)), ("gather", gather)):
        files.append(str(tmp_path / f"{name}.json"))
        Path(files[-1]).write_text(json.dumps(result))
    picture = tmp_path / "both.png"
    few = ["--impl", "ep_plugin", "--impl", "nccl"]
    run = CliRunner().invoke(main, ["report", *files, *few, "--plot", str(picture)])
    assert run.exit_code == 0, run.output
    assert "### training of qwen3_moe 30b-a3b, 4 layers on 4 x GPU, 2 steps" in run.output
    assert "| ep_plugin | 12.0000, 3.0000 | 110 | 110.0 | 1.10 × |" in run.output
    assert "losses differ by at most 1.0e-04" in run.output
    assert "nccl" in run.output and "ep_plugin sm" not in run.output
    assert picture.read_bytes().startswith(b"\x89PNG")
    run = CliRunner().invoke(main, ["report", *files, "--case", "*4 layers"])
    assert "training of" in run.output and "allgather" not in run.output
    run = CliRunner(env={"COLUMNS": "400"}).invoke(main, ["report", *files, "--impl", "mpi"])
    assert run.exit_code == 2 and "impl: expected a pattern for ep_plugin, ep_plugin sm, nccl, got 'mpi'" in run.output


def test_parts_of_a_step_are_shown_from_the_largest(tmp_path: Path) -> None:
    parts = {"router": 1.0, "exchange": 20.0, "idle": 0.0}
    profiled = {
        arm: {"step_ms": 21.0 + more, "parts_ms": parts | {"exchange": 20.0 + more}}
        for arm, more in (("ep_plugin", 0.0), ("all_to_all", 5.0))
    }
    result = {**_trained(110, 100), "profiled": profiled}
    (tmp_path / "train.json").write_text(json.dumps(result))
    run = CliRunner().invoke(main, ["report", str(tmp_path / "train.json")])
    shown = ["| step | 21.0 | 26.0 |", "| exchange | 20.0 | 25.0 |", "| router | 1.0 | 1.0 |"]
    table = ["| ms of a profiled step | ep_plugin | all_to_all |", "|---|--:|--:|", *shown]
    assert "\n\n" + "\n".join(table) + "\n\n" in run.output


def test_a_picture_without_bars_is_refused(tmp_path: Path) -> None:
    result = {**ABOUT, "suite": "moe_ht", "rows": [_row("combine_flat_bf16", impl, 10.0) for impl in ("nccl", "floor")]}
    (tmp_path / "result.json").write_text(json.dumps(result))
    words = ["report", str(tmp_path / "result.json"), "--impl", "floor", "--plot", str(tmp_path / "picture.png")]
    run = CliRunner(env={"COLUMNS": "400"}).invoke(main, words)
    assert run.exit_code == 2 and "plot: expected rows that have bars, got none but rows of floor" in run.output


@pytest.mark.parametrize("path", sorted(RESULTS.rglob("*.json")), ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_result_in_the_repository_has_a_panel(path: Path) -> None:
    (panel,) = bars.panels([report.load(path)])
    assert panel.bars and all(bar.value for bar in panel.bars)
