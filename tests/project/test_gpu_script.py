"""scripts/gpu.sh without a GPU: which steps it knows, and what it asks programs for, with stand-ins for these."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ep_plugin.bench.cli import main
from ep_plugin.bench.suite import Suite
from ep_plugin.bench.suites.collectives import CollectiveSuite
from ep_plugin.bench.suites.fsdp2 import Fsdp2Suite

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu.sh"
# Writes down how it was called, and an example's metrics where it was asked for them.
PYTHON = """#!/bin/sh
echo "$@" >> "$CALLS"
while [ $# -gt 0 ]; do
  case $1 in --out) case $2 in runs/*) mkdir -p "$2"; echo "{}" > "$2/metrics.json";; esac;; esac
  shift
done
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The script alone, and two GPUs that nvidia-smi lists."""
    (tmp_path / "bin").mkdir()
    for name, content in (("python", PYTHON), ("nvidia-smi", "#!/bin/sh\necho GPU 0; echo GPU 1\n")):
        (tmp_path / "bin" / name).write_text(content)
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "scripts").mkdir()
    shutil.copy(SCRIPT, tmp_path / "scripts")
    return tmp_path


def run(tree: Path, *steps: str, **variables: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """What it said, and the calls of Python."""
    calls = tree / "calls"
    inherited = {name: value for name, value in os.environ.items() if name not in ("LAYERS", "STEPS", "OUT")}
    places = {"PATH": f"{tree}/bin:{os.environ['PATH']}", "PYTHON": f"{tree}/bin/python", "CALLS": str(calls)}
    command = ["bash", str(tree / "scripts" / "gpu.sh"), *steps]
    done = subprocess.run(command, env=inherited | places | variables, capture_output=True, text=True, timeout=60)
    return done, calls.read_text().splitlines() if calls.exists() else []


def test_usage_names_every_step(tree: Path) -> None:
    done, calls = run(tree, "--help", PATH="/usr/bin:/bin")
    assert done.returncode == 0 and not calls
    (known,) = re.findall(r"^    (build .*)\) ;;$", SCRIPT.read_text(), re.MULTILINE)
    assert re.findall(r"^([a-z]+)  ", done.stdout, re.MULTILINE) == known.split(" | ")


@pytest.mark.parametrize("steps", [("usage",), ("bench", "rm"), ("bench rm",), ("*",)])
def test_other_words_are_refused_before_any_step(tree: Path, steps: tuple[str, ...]) -> None:
    done, calls = run(tree, *steps)
    assert done.returncode == 2 and not calls
    assert "gpu.sh: expected a step, got '" in done.stderr


@pytest.mark.parametrize(
    ("step", "variables", "wanted"),
    [
        ("more", {}, "fsdp2 --compile --unit 2 --compared 50 --backend cuda"),
        ("more", {"LAYERS": "8"}, "fsdp2 --compile --unit 2 --compared 50 --layers 8 --backend cuda"),
        ("train", {}, "examples.compare qwen3_moe --preset 30b-a3b --layers 4 --no-fsdp2 "),
        ("deepseek", {}, "examples.compare deepseek_v3 --preset v3 --ranks 2 --out runs/"),
        ("deepseek", {"LAYERS": "2", "STEPS": "8"}, "examples.compare megatron --layers 2 --ranks 2"),
        ("deepseek", {"LAYERS": "2"}, "examples.compare megatron_dense --preset 4b --ranks 2"),
    ],
)
def test_layers_are_those_of_what_trains(tree: Path, step: str, variables: dict[str, str], wanted: str) -> None:
    done, calls = run(tree, step, **variables)
    assert done.returncode == 0, done.stderr
    assert len([call for call in calls if wanted in call]) == 1


def test_every_suite_of_links_and_more_can_be_asked_for(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call's options are those of a suite. The suites are made, and not run."""
    asked = []
    monkeypatch.setattr(Suite, "run", lambda suite: asked.append(suite) or sys.exit(0))
    monkeypatch.setattr(CollectiveSuite, "run", Suite.run)
    monkeypatch.setattr(Fsdp2Suite, "run", Suite.run)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    _, calls = run(tree, "links", "more", "deepseek")
    benched = [call.removeprefix("-m ep_plugin.bench ") for call in calls if call.startswith("-m ep_plugin.bench ")]
    for call in benched:
        words = call.split(" --out ")[0].split()
        done = CliRunner().invoke(main, words)
        assert done.exit_code == 0, done.output
    links = "low_latency send_receive overlap allgather reduce_scatter reduce_scatter_fp32"
    more = "wire moe_sweep low_latency_stand_in fsdp2 layers_megatron layers_torchtitan"
    assert [suite.name for suite in asked] == [*links.split(), *more.split()]


TESTS_OVER_NODES = "-m pytest -m gpu tests/gpu/test_across_nodes.py -q"


def test_two_emulated_nodes_have_half_the_gpus_each(tree: Path) -> None:
    done, (tests, *calls) = run(tree, "nodes")
    assert done.returncode == 0, done.stderr
    assert tests == TESTS_OVER_NODES
    for call, suite in zip(calls, ("allgather --size 67108864", "moe --dtype bfloat16"), strict=True):
        launcher, bench = call.split(f" -- {tree}/bin/python ")
        assert launcher == "-m ep_plugin.testing.nodes --device cuda --nodes 2 --ranks 1"
        assert bench == (f"-m ep_plugin.bench {suite} --backend cuda --ranks 2 --nodes 2 --out benchmarks/results/")


def test_one_gpu_has_the_tests_over_nodes(tree: Path) -> None:
    (tree / "bin" / "nvidia-smi").write_text("#!/bin/sh\necho GPU 0\n")
    done, calls = run(tree, "nodes")
    assert done.returncode == 0 and calls == [TESTS_OVER_NODES], done.stderr


def test_a_part_of_the_suite_is_noted_in_the_receipt(tree: Path) -> None:
    files = "tests/gpu/test_megatron.py tests/gpu/test_megatron_optimizer.py"
    done, (call,) = run(tree, "part", TESTS=files)
    assert done.returncode == 0, done.stderr
    assert f" -m gpu {files} " in call and call.endswith(" --also-passed")


@pytest.mark.parametrize(
    ("step", "variables", "names"),
    [
        (
            "deepseek",
            {"LAYERS": "2", "STEPS": "8"},
            "deepseek_v3_hf_2_layers deepseek_v3_megatron_2_layers megatron_dense",
        ),
        ("deepseek", {}, "deepseek_v3_hf deepseek_v3_megatron megatron_dense"),
        ("train", {}, "qwen3_30b_a3b_4_layers"),
    ],
)
def test_a_result_is_named_after_its_layers(tree: Path, step: str, variables: dict[str, str], names: str) -> None:
    done, calls = run(tree, step, **variables)
    assert done.returncode == 0, done.stderr
    results = sorted(path.stem for path in (tree / "benchmarks/results/h200x2").glob("*.json"))
    assert results == [f"train_{name}" for name in names.split()]
    trained = [call for call in calls if call.startswith("-m examples.compare")]
    assert all(("--steps 8" in call) is ("STEPS" in variables) for call in trained)


def test_out_gets_what_this_run_wrote(tree: Path) -> None:
    results, out = tree / "benchmarks/results/h200x2", tree / "out"
    results.mkdir(parents=True)
    out.mkdir()
    (results / "old.json").write_text("{}")
    os.utime(results / "old.json", (0, 0))
    done, _ = run(tree, "train", OUT=str(out))
    assert done.returncode == 0, done.stderr
    assert [path.name for path in out.iterdir()] == ["train_qwen3_30b_a3b_4_layers.json"]


GROUPED = """
import os, pathlib, pytest

@pytest.mark.xdist_group("one")
@pytest.mark.parametrize("number", range(6))
def test_of_a_group(number):
    (pathlib.Path(__file__).parent / f"{number}").write_text(os.environ["PYTEST_XDIST_WORKER"])
"""


@pytest.mark.slow
def test_tests_of_a_group_run_in_one_worker(tmp_path: Path) -> None:
    """As gpu.sh asks: those that share ranks, or want the device for themselves."""
    (tmp_path / "test_grouped.py").write_text(GROUPED)
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadgroup", "-p", "no:cacheprovider", "."]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout
    assert len({(tmp_path / f"{number}").read_text() for number in range(6)}) == 1
