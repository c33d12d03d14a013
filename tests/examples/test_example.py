"""The example as a user starts it: whole runs in processes of their own, short ones."""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ep_plugin.bench.provenance import hash_sources

pytest.importorskip("transformers", minversion="5.23")
pytest.importorskip("typer")
pytest.importorskip("matplotlib")

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPT = str(EXAMPLES / "train_qwen3_moe.py")
DENSE = str(EXAMPLES / "train_fsdp2.py")
DEEPSEEK = str(EXAMPLES / "train_deepseek_hf.py")
ACCELERATE = str(EXAMPLES / "train_accelerate.py")
SMALL = ["--layers", "1", "--seq-len", "32", "--batch", "2", "--steps", "4"]


def _run(
    *arguments: str, launcher: tuple[str, ...] = (), script: str = SCRIPT, **environment: str
) -> subprocess.CompletedProcess:
    # No GPU: these runs are about the example, and must be the same on every machine.
    variables = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "200", "NO_COLOR": "1", **environment}
    command = [sys.executable, *launcher, script, *arguments]
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=240)


def test_help_names_the_options() -> None:
    result = _run("--help")
    assert result.returncode == 0
    for option in ("--preset", "--model", "--text", "--compare", "--launch", "--out"):
        assert option in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "/nowhere/model"), "/nowhere/model without config.json"),
        (("--text", "/nowhere/text"), "/nowhere/text, which is not there"),
        (("--preset", "large"), "expected one of tiny, 30b-a3b, got 'large'"),
        (("--compare", "smoke"), "expected ep_plugin or all_to_all, got 'smoke'"),
        (("--compare", "ep_plugin"), "expected another exchange than ep_plugin"),
        (("--dtype", "int8"), "expected float32, bfloat16 or float16, got 'int8'"),
        (("--fsdp2", "nccl"), "expected ep_plugin or stock, got 'nccl'"),
    ],
    ids=["model", "text", "preset", "compare-unknown", "compare-itself", "dtype", "fsdp2"],
)
def test_bad_options_are_refused_before_anything_starts(arguments: tuple[str, str], message: str) -> None:
    result = _run(*arguments)
    assert result.returncode == 2
    assert message in " ".join(result.stderr.split())


def test_a_learning_rate_of_zero_is_no_default(monkeypatch: pytest.MonkeyPatch) -> None:
    import typer

    monkeypatch.syspath_prepend(str(EXAMPLES))
    resolve = importlib.import_module("_launch").resolve
    given = {"architecture": "qwen3", "preset": "tiny", "seed": 0, "fsdp2": "stock"}
    given |= dict.fromkeys(("model", "layers", "text", "steps", "seq_len", "batch", "dtype", "ep_implementation"))
    assert resolve(**given, lr=None).lr > 0
    assert resolve(**given, lr=0.0).lr == 0
    with pytest.raises(typer.BadParameter, match="expected at least 0, got -1"):
        resolve(**given, lr=-1.0)


@pytest.mark.parametrize("where", ["file", "file/below", "folder"], ids=["a-file", "below-a-file", "folder-in-the-way"])
def test_a_folder_that_cannot_be_written_is_refused_before_anything_starts(where: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder" / "metrics.json").mkdir(parents=True)
    result = _run(*SMALL, "--launch", "1", "--out", str(tmp_path / where))
    assert result.returncode == 2
    said = " ".join(result.stderr.split())
    assert "--out" in said and "expected a f" in said and "step" not in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--preset", "30b-a3b"), "expected one of tiny, 4b, got '30b-a3b'"),
        (("--compare", "ep_plugin"), "expected other collectives than ep_plugin"),
        (("--collectives", "nccl"), "expected ep_plugin or stock, got 'nccl'"),
    ],
    ids=["preset", "compare-itself", "collectives"],
)
def test_bad_options_of_the_dense_example(arguments: tuple[str, str], message: str) -> None:
    result = _run(*arguments, script=DENSE)
    assert result.returncode == 2
    assert message in " ".join(result.stderr.split())


def test_dense_comparison_with_stock_fsdp2(tmp_path: Path) -> None:
    result = _run(*SMALL, "--launch", "2", "--compare", "stock", "--rounds", "1", "--out", str(tmp_path), script=DENSE)
    assert result.returncode == 0, result.stderr
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["loss_last"] < metrics["loss_first"]
    assert metrics["compare"]["reference"] == "stock" and metrics["rounds"] == 1
    assert metrics["compare"]["max_rel_diff"] <= 1e-5
    assert set(metrics["tokens_per_s"]) == {"ep_plugin", "stock"}
    assert metrics["fsdp2_launches"]["stock"] is None
    assert metrics["fsdp2_launches"]["ep_plugin"]["all_gathers"] > 0
    assert metrics["fsdp2_launches"]["ep_plugin"]["reduce_scatters"] > 0
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "stock" in result.stdout and "tokens/s" in result.stdout


def test_a_plain_accelerate_loop_gathers_and_reduces_through_us() -> None:
    pytest.importorskip("accelerate")
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    printed = {}
    for arm in ((), ("--stock",)):
        result = _run("--steps", "6", *arm, launcher=launcher, script=ACCELERATE)
        assert result.returncode == 0, result.stderr
        *losses, printed[arm] = result.stdout.splitlines()
        printed[arm] = [*(float(line.split()[-1]) for line in losses), printed[arm]]
    *ours, launches = printed[()]
    *stock, said = printed["--stock",]
    assert said == "stock collectives"
    assert len(ours) == 2 and ours[-1] < ours[0]
    assert ours == pytest.approx(stock, rel=1e-5)
    counts = {name: int(count) for name, count in re.findall(r"(\w+)=(\d+)", launches)}
    assert counts["all_gathers"] >= 6 * counts["parameter_groups"] > 6
    assert counts["reduce_scatters"] == 6 * counts["parameter_groups"]


def test_a_plain_accelerate_loop_asks_for_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("accelerate")
    monkeypatch.delenv("RANK", raising=False)
    result = _run("--steps", "1", script=ACCELERATE)
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].startswith("expected a launcher, such as torchrun ")
    assert "Traceback" not in result.stderr and not result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--preset", "30b-a3b"), "expected one of tiny, v3, got '30b-a3b'"),
        (("--layers", "1"), "expected more than 1, the first 1 being dense, got 1"),
        (("--compare", "ep_plugin"), "expected another exchange than ep_plugin"),
    ],
    ids=["preset", "only-dense-layers", "compare-itself"],
)
def test_bad_options_of_the_deepseek_example(arguments: tuple[str, str], message: str) -> None:
    result = _run(*arguments, script=DEEPSEEK)
    assert result.returncode == 2
    assert message in " ".join(result.stderr.split())


def test_deepseek_example_refuses_another_architecture(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe"}')
    result = _run("--model", str(tmp_path), script=DEEPSEEK)
    assert result.returncode == 2
    assert "expected a deepseek_v3, got a qwen3_moe" in " ".join(result.stderr.split())


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no-overlap"])
def test_deepseek_comparison_with_the_built_in_exchange(tmp_path: Path, overlap: bool) -> None:
    comparison = ["--compare", "all_to_all", "--rounds", "1", *([] if overlap else ["--no-overlap"])]
    arguments = [*SMALL, "--layers", "2", "--launch", "2", *comparison, "--out", str(tmp_path)]
    result = _run(*arguments, script=DEEPSEEK)
    assert result.returncode == 0, result.stderr
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["model"] == "DeepSeek-V3 tiny, 2 layers"
    assert metrics["loss_last"] < metrics["loss_first"]
    assert metrics["compare"]["reference"] == "all_to_all"
    assert metrics["compare"]["max_rel_diff"] <= 1e-4
    assert len(metrics["losses"]["ep_plugin"]) == len(metrics["losses"]["all_to_all"]) == 4
    assert metrics["overlap"] == {"ep_plugin": overlap, "all_to_all": False}
    if overlap:
        assert "exchange_ms" not in metrics, "shared experts would be in it"
    else:
        assert all(0 < share < 1 for share in metrics["share_dispatch_combine"].values())
        assert all(0 < took["alone"] <= took["with_waiting"] for took in metrics["exchange_ms"].values())
    assert all(speed > 0 for speed in metrics["tokens_per_s"].values())
    assert metrics["fsdp2_launches"]["ep_plugin"]["all_gathers"] > 0
    assert metrics["fsdp2_launches"]["all_to_all"] is None
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "all_to_all" in result.stdout and "tokens/s" in result.stdout


def test_compare_is_refused_under_torchrun() -> None:
    result = _run("--compare", "all_to_all", WORLD_SIZE="1", RANK="0")
    assert result.returncode == 2
    assert "torchrun" in result.stderr


def test_comparison_writes_metrics_and_picture(tmp_path: Path) -> None:
    hooks = ["--fsdp2", "ep_plugin", "--compare", "all_to_all"]
    result = _run(*SMALL, "--launch", "2", *hooks, "--out", str(tmp_path))
    assert result.returncode == 0, result.stderr
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["code_hash"] == hash_sources()
    assert metrics["backend"] == "cpu"
    assert metrics["world_size"] == 2
    assert metrics["steps"] == 4 and metrics["rounds"] == 2
    assert metrics["model"] == "tiny, 1 layers"
    assert metrics["loss_last"] < metrics["loss_first"]
    assert metrics["compare"]["reference"] == "all_to_all"
    assert metrics["compare"]["max_rel_diff"] <= 1e-4
    assert set(metrics["tokens_per_s"]) == {"ep_plugin", "all_to_all"}
    assert metrics["fsdp2_launches"]["ep_plugin"]["all_gathers"] > 0
    assert metrics["fsdp2_launches"]["all_to_all"] is None
    assert all(0 < share < 1 for share in metrics["share_dispatch_combine"].values())
    assert all(0 < took["alone"] <= took["with_waiting"] for took in metrics["exchange_ms"].values())
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "all_to_all" in result.stdout and "tokens/s" in result.stdout


def test_trains_a_checkpoint_on_a_text_under_torchrun(tmp_path: Path) -> None:
    _save_checkpoint(tmp_path / "model")
    (tmp_path / "text.txt").write_text("to be, or not to be, that is the question. " * 50)
    model, text, out = (str(tmp_path / name) for name in ("model", "text.txt", "out"))
    result = _run(
        "--model", model, "--text", text, "--out", out, "--seq-len", "32", "--batch", "2", "--steps", "2",
        launcher=("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert metrics["code_hash"] == hash_sources()
    assert metrics["model"] == model
    assert metrics["world_size"] == 2
    assert metrics["compare"] is None
    assert list(metrics["tokens_per_s"]) == ["ep_plugin"]


def test_a_vocabulary_of_bytes_gets_bytes_and_a_larger_one_byte_pairs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    data = importlib.import_module("_data")
    text = "to be, or not to be, that is the question. " * 50
    (tmp_path / "one.txt").write_text(text)
    (tmp_path / "two.md").write_text(text)
    assert bytes(data.read_text(tmp_path, 256).tolist()).decode() == f"{text}\n{text}"
    pairs = data.read_text(tmp_path, 300)
    assert 256 < int(pairs.max()) < 300
    assert len(pairs) < len(text) and torch.equal(*pairs.chunk(2))  # the same ids for the same lines, in fewer


def test_a_rank_that_raises_ends_the_run(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("short")
    result = _run(*SMALL, "--launch", "2", "--text", str(tmp_path / "text.txt"), "--out", str(tmp_path))
    assert result.returncode == 1
    assert "expected at least seq_len=32 tokens, got 5" in result.stderr
    assert not (tmp_path / "metrics.json").exists()


@pytest.mark.parametrize(
    ("victim", "signum", "status"), [("rank", signal.SIGKILL, 1), ("launcher", signal.SIGTERM, 143)]
)
def test_a_run_that_is_cut_short_ends(tmp_path: Path, victim: str, signum: int, status: int) -> None:
    arguments = [
        "--layers",
        "1",
        "--seq-len",
        "32",
        "--steps",
        "100000",
        "--launch",
        "2",
        "--out",
        str(tmp_path),
    ]
    variables = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.Popen([sys.executable, SCRIPT, *arguments], env=variables, stderr=subprocess.PIPE, text=True)
    try:
        # The progress bar shows a loss once the first step is done.
        seen = ""
        while "loss=" not in seen:
            character = run.stderr.read(1)
            assert character, f"the run ended before its first step: {seen}"
            seen += character
        ranks = [int(pid) for pid in Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()]
        assert len(ranks) == 2
        os.kill(ranks[1] if victim == "rank" else run.pid, signum)
        run.communicate(timeout=60)
        assert run.returncode == status
        assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)
    finally:
        run.terminate()
        run.wait(timeout=60)


def _save_checkpoint(folder: Path) -> None:
    import transformers

    config = transformers.Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
    )
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(folder)
