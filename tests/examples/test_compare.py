"""examples/compare as a user starts it: whole runs in processes of their own, short ones, on CPUs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ep_plugin.bench.provenance import hash_sources

pytest.importorskip("transformers", minversion="5.23")
pytest.importorskip("typer")
pytest.importorskip("matplotlib")

import typer

from examples.compare import data
from examples.compare.cli import _environment, _make_folder, resolve
from examples.compare.launch import Comparison, _ended_by_signals
from examples.compare.options import OURS, Options
from examples.compare.parts import IDLE, PARTS, WAITING

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "examples.compare"]
SMALL = ["--layers", "1", "--seq-len", "32", "--batch", "2", "--steps", "4", "--ranks", "2"]
# No GPU: these runs must be the same on every machine.
ENVIRONMENT = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "200", "NO_COLOR": "1"}


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=240)


def resolved(model: str, **given: Any) -> Options:
    return resolve(Options(model=model, **given))


# -- options ---------------------------------------------------------------------------------------------------------


def test_help_names_the_models_and_options() -> None:
    result = run("--help")
    assert result.returncode == 0
    for word in ("qwen3_moe", "megatron", "--preset", "--checkpoint", "--text", "--ranks", "--out"):
        assert word in result.stdout


@pytest.mark.parametrize(
    ("model", "given", "message"),
    [
        ("gpt2", {}, "expected one of qwen3_moe, qwen3, deepseek_v3, megatron, megatron_dense, got 'gpt2'"),
        ("qwen3_moe", {"checkpoint": "/nowhere"}, "folder with a checkpoint, got /nowhere without config.json"),
        ("qwen3_moe", {"text": "/nowhere/text"}, "got /nowhere/text, which does not exist"),
        ("qwen3_moe", {"preset": "large"}, "expected one of tiny, 30b-a3b, got 'large'"),
        ("qwen3_moe", {"dtype": "int8"}, "expected one of float32, bfloat16, float16, got 'int8'"),
        ("qwen3", {"preset": "30b-a3b"}, "expected one of tiny, 4b, got '30b-a3b'"),
        ("qwen3", {"fsdp2": False}, "expected --fsdp2 for qwen3, which has no experts to exchange"),
        ("deepseek_v3", {"preset": "30b-a3b"}, "expected one of tiny, v3, got '30b-a3b'"),
        ("megatron", {"table": True}, "expected a model of transformers, got megatron"),
        ("deepseek_v3", {"layers": 1}, "expected more than 1, since the first 1 have no experts, got 1"),
        ("megatron", {"preset": "tiny", "layers": 1}, "expected more than 1, since the first 1 have no experts, got 1"),
    ],
)
def test_bad_options_are_refused(model: str, given: dict[str, Any], message: str) -> None:
    with pytest.raises(typer.BadParameter) as raised:
        resolved(model, **given)
    assert message in str(raised.value)


@pytest.mark.parametrize("hidden", ["typer", "transformers", "matplotlib"])
def test_a_package_that_is_not_installed_is_named_with_what_to_install(hidden: str) -> None:
    start = f"import runpy, sys; sys.modules[{hidden!r}] = None"
    code = f"{start}; runpy.run_module('examples.compare', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    install = "run pip install '.[bench,transformers]' in the repository's root"
    assert (done.returncode, done.stderr) == (2, f"examples.compare: expected {hidden}, found none: {install}\n")


def test_bad_options_end_the_command_before_anything_starts(tmp_path: Path) -> None:
    for arguments in (["qwen3_moe", "--preset", "large"], ["qwen3_moe", "--lr", "-1"]):
        result = run(*arguments, "--out", tmp_path / "out")
        assert result.returncode == 2
        assert "--lr" in result.stderr or "expected one of tiny, 30b-a3b, got 'large'" in result.stderr
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nodes": 3}, "expected a divisor of 4 ranks, got 3"),
        ({"rate": "1gbit"}, "expected none with one node, which has no link, got 1gbit"),
        ({"nodes": 2, "rate": "fast"}, "rate: expected a number and kbit, mbit or gbit, such as 1gbit, got 'fast'"),
    ],
)
def test_nodes_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(typer.BadParameter) as raised:
        Comparison(model="qwen3", ranks=4, **options)
    assert message in str(raised.value)


def test_megatron_asks_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("megatron.core")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        typer.BadParameter, match="expected NVIDIA GPUs, .* found none: qwen3 and deepseek_v3 run on CPUs"
    ):
        resolved("megatron")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    ours, dense = resolved("megatron"), resolved("megatron_dense")
    assert (ours.preset, ours.layers, ours.micro_batches, ours.fsdp2) == ("v3", 1, 4, False)
    assert (dense.preset, dense.layers, dense.dtype, dense.fsdp2) == ("4b", 24, "bfloat16", False)
    with pytest.raises(typer.BadParameter, match="expected a preset for megatron, got a checkpoint"):
        resolved("megatron", checkpoint=_checkpoint_of("megatron", monkeypatch))


def _checkpoint_of(model_type: str, monkeypatch: pytest.MonkeyPatch) -> str:
    config = {"model_type": model_type, "num_hidden_layers": 2}
    monkeypatch.setattr("examples.compare.cli._read_config", lambda checkpoint, model: config)
    return "checkpoint"


def test_only_megatrons_arms_change_ep_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("EP_PLUGIN", "fsdp2")
    pytest.importorskip("megatron.core")
    ours = resolved("megatron")
    dense = resolved("megatron_dense")
    expected = [(ours, "megatron"), (replace(ours, arm="alltoall"), ""), (resolved("qwen3"), "fsdp2")]
    expected += [(dense, "megatron"), (replace(dense, arm="stock"), "")]
    for options, value in expected:
        with _environment(options):
            assert os.environ["EP_PLUGIN"] == value
        assert os.environ["EP_PLUGIN"] == "fsdp2"


def test_a_learning_rate_of_zero_is_no_default() -> None:
    assert resolved("qwen3").lr > 0
    assert resolved("qwen3", lr=0.0).lr == 0


def test_a_checkpoint_of_another_architecture_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe"}')
    with pytest.raises(typer.BadParameter, match="expected a deepseek_v3, got a qwen3_moe"):
        resolved("deepseek_v3", checkpoint=str(tmp_path))


@pytest.mark.parametrize("where", ["file", "file/below", "folder"], ids=["a-file", "below-a-file", "folder-in-the-way"])
def test_a_folder_that_cannot_be_written_is_refused(where: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder" / "metrics.json").mkdir(parents=True)
    with pytest.raises(typer.BadParameter, match="expected a f") as raised:
        _make_folder(tmp_path / where)
    assert raised.value.param_hint == "--out"


def test_a_vocabulary_of_bytes_gets_bytes_and_a_larger_one_byte_pairs(tmp_path: Path) -> None:
    text = "to be, or not to be, that is the question. " * 50
    (tmp_path / "one.txt").write_text(text)
    (tmp_path / "two.md").write_text(text)
    assert bytes(data.read_text(tmp_path, 256).tolist()).decode() == f"{text}\n{text}"
    pairs = data.read_text(tmp_path, 300)
    assert 256 < int(pairs.max()) < 300
    assert len(pairs) < len(text) and torch.equal(*pairs.chunk(2))  # the same ids for the same lines, in fewer


# -- runs ------------------------------------------------------------------------------------------------------------


def compared(out: Path, *arguments: str | Path, builtin: str) -> dict[str, Any]:
    """The metrics of a small comparison, after the checks that hold for every one."""
    result = run(*arguments, "--out", out)
    assert result.returncode == 0, result.stderr
    metrics = json.loads((out / "metrics.json").read_text())
    assert metrics["code_hash"] == hash_sources()
    assert (metrics["backend"], metrics["world_size"]) == ("cpu", 2)
    assert metrics["loss_last"] < metrics["loss_first"]
    assert metrics["compare"]["reference"] == builtin
    assert set(metrics["losses"]) == set(metrics["tokens_per_s"]) == {OURS, builtin}
    assert {len(losses) for losses in metrics["losses"].values()} == {metrics["steps"]}
    assert all(speed > 0 for speed in metrics["tokens_per_s"].values())
    assert metrics["fsdp2_launches"][OURS]["all_gathers"] > 0
    assert metrics["fsdp2_launches"][OURS]["reduce_scatters"] > 0
    assert metrics["fsdp2_launches"][builtin] is None
    served = metrics["served"]
    assert served[OURS]["fsdp2"]["served"] >= metrics["steps"] and "fsdp2" not in served[builtin]
    assert all(counted["left"] == 0 for counted in served[OURS].values())
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert builtin in result.stdout and "tokens/s" in result.stdout
    for number in range(1, metrics["rounds"] + 1):
        for arm in (OURS, builtin):
            assert f"{arm}, round {number} of {metrics['rounds']}: 100%" in result.stderr
    return metrics


def exchange_is_timed(metrics: dict[str, Any]) -> None:
    assert all(0 < share < 1 for share in metrics["share_dispatch_combine"].values())
    assert all(0 < took["alone"] <= took["with_waiting"] for took in metrics["exchange_ms"].values())


def steps_are_divided(metrics: dict[str, Any], *absent: str) -> None:
    """The parts of both arms add up to the step. absent: the parts that take no time, besides `IDLE`."""
    for found in metrics["profiled"].values():
        step, shares = found["step_ms"], found["parts_ms"]
        assert sum(shares.values()) == pytest.approx(step, rel=0.03)
        assert list(shares) == list(PARTS) and min(shares.values()) >= 0
        assert {name for name, value in shares.items() if not value} - {WAITING} == {*absent, IDLE}  # none may wait
        assert shares["other"] < 0.1 * step


@pytest.mark.slow
def test_qwen3_moe_in_two_rounds(tmp_path: Path) -> None:
    metrics = compared(tmp_path, "qwen3_moe", *SMALL, "--table", builtin="all_to_all")
    assert (metrics["steps"], metrics["rounds"]) == (4, 2)
    assert metrics["model"] == "qwen3_moe tiny, 1 layers"
    assert metrics["compare"]["max_rel_diff"] <= 1e-4
    exchange_is_timed(metrics)
    steps_are_divided(metrics, "dense MLP")


@pytest.mark.slow
def test_qwen3_moe_over_two_nodes(tmp_path: Path) -> None:
    arguments = [*SMALL, "--nodes", "2", "--rounds", "1"]
    metrics = compared(tmp_path, "qwen3_moe", *arguments, builtin="all_to_all")
    assert metrics["emulation"].startswith("2 nodes of 1 ranks on ")
    assert metrics["compare"]["max_rel_diff"] <= 1e-4
    exchange_is_timed(metrics)


@pytest.mark.slow
def test_dense_qwen3(tmp_path: Path) -> None:
    metrics = compared(tmp_path, "qwen3", *SMALL, "--rounds", "1", "--table", builtin="stock")
    steps_are_divided(metrics, "router", "experts", "exchange")
    assert metrics["rounds"] == 1
    assert metrics["compare"]["max_rel_diff"] <= 1e-5
    assert "exchange_ms" not in metrics


@pytest.mark.slow
def test_deepseek_v3_with_overlap(tmp_path: Path) -> None:
    arguments = [*SMALL, "--layers", "2", "--rounds", "1", "--overlap", "--table"]
    metrics = compared(tmp_path, "deepseek_v3", *arguments, builtin="all_to_all")
    steps_are_divided(metrics)
    assert metrics["model"] == "deepseek_v3 tiny, 2 layers"
    assert metrics["compare"]["max_rel_diff"] <= 1e-4
    assert metrics["options"]["overlap"] is True
    assert "exchange_ms" not in metrics, "shared experts would be in it"


@pytest.mark.slow
def test_deepseek_v3_of_a_checkpoint_on_a_text_without_overlap(tmp_path: Path) -> None:
    _save_checkpoint(tmp_path / "model")
    (tmp_path / "text.txt").write_text("to be, or not to be, that is the question. " * 50)
    files = ["--checkpoint", tmp_path / "model", "--text", tmp_path / "text.txt"]
    arguments = [*files, *SMALL[2:], "--rounds", "1", "--no-overlap"]
    metrics = compared(tmp_path / "out", "deepseek_v3", *arguments, builtin="all_to_all")
    assert metrics["model"] == f"deepseek_v3 checkpoint {tmp_path / 'model'}, 2 layers"
    assert metrics["compare"]["max_rel_diff"] <= 1e-4
    assert metrics["options"]["overlap"] is False
    exchange_is_timed(metrics)


@pytest.mark.slow
def test_a_rank_that_raises_ends_the_run(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("short")
    result = run("qwen3_moe", *SMALL, "--text", tmp_path / "text.txt", "--out", tmp_path)
    assert result.returncode == 1
    assert "expected at least seq_len=32 tokens, got 5" in result.stderr
    assert not (tmp_path / "metrics.json").exists()


@pytest.mark.deadline
@pytest.mark.parametrize(
    ("victim", "signum", "status", "nodes"), [("rank", signal.SIGKILL, 1, 2), ("launcher", signal.SIGTERM, 143, 1)]
)
def test_a_run_that_is_cut_short_ends(tmp_path: Path, victim: str, signum: int, status: int, nodes: int) -> None:
    command = [*COMMAND, "qwen3", *SMALL, "--nodes", str(nodes), "--steps", "100000", "--out", str(tmp_path)]
    process = subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    try:
        # The progress bar shows a loss once the first step is done.
        seen = ""
        while "loss=" not in seen:
            character = process.stderr.read(1)
            assert character, f"the run ended before its first step: {seen}"
            seen += character
        # Children of the launcher of nodes, or of the process that they were forked from.
        ranks = [rank for starter in _children(process.pid) for rank in _children(starter)]
        assert len(ranks) == 2
        os.kill(ranks[1] if victim == "rank" else process.pid, signum)
        process.communicate(timeout=60)
        assert process.returncode == status
        assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)
    finally:
        process.terminate()
        process.wait(timeout=60)


def test_a_signal_that_is_ignored_ends_nothing() -> None:
    """nohup starts a command that ignores SIGHUP."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with pytest.raises(typer.Exit) as ended, _ended_by_signals():
            signal.raise_signal(signal.SIGHUP)
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert ended.value.exit_code == 143


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _save_checkpoint(folder: Path) -> None:
    import transformers

    config = transformers.DeepseekV3Config(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        first_k_dense_replace=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=4,
        topk_group=2,
    )
    transformers.DeepseekV3ForCausalLM(config).save_pretrained(folder)
