"""The receipt of the GPU tests: runs from several copies of one tree become one receipt, and nothing else does."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.gpu import conftest, receipt, sanitize


def _run(hardware: str, passed: int) -> dict[str, Any]:
    counts = {"passed": passed, "skipped": 0, "failed": 0}
    return {"hardware": hardware, "versions": {}, "counts": counts, "seconds": 1.0}


def _write(path: Path, runs: dict[str, Any], also: tuple[str, ...] = (), code_hash: str | None = None) -> Path:
    also_passed = {part: _run("1 x NVIDIA H200", 1) for part in also}
    content = {"code_hash": code_hash or receipt.code_hash(), "runs": runs, "also_passed": also_passed}
    path.write_text(json.dumps(content, indent=2))
    return path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the tree's own receipt: one run of this code."""
    code = receipt.code_hash()
    monkeypatch.setattr(receipt, "ROOT", tmp_path)
    monkeypatch.setattr(receipt, "RECEIPT", tmp_path / "receipt.json")
    monkeypatch.setattr(receipt, "code_hash", lambda: code)
    _write(tmp_path / "receipt.json", {"1 GPU(s)": _run("1 x NVIDIA H200", 30)}, ("memcheck",))
    return tmp_path


def _merge(monkeypatch: pytest.MonkeyPatch, *files: Path) -> int:
    monkeypatch.setattr(sys, "argv", ["receipt.py", "--merge", *map(str, files)])
    return receipt.main()


def test_runs_are_merged_by_setting(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two = _write(folder / "two.json", {"2 GPU(s)": _run("2 x NVIDIA H100", 32)}, ("memcheck", "racecheck"))
    blocking = {"1 GPU(s) CUDA_LAUNCH_BLOCKING=1": _run("1 x NVIDIA H200", 31), "2 GPU(s)": _run("2 x NVIDIA H200", 33)}
    three = _write(folder / "three.json", blocking)
    assert _merge(monkeypatch, two, three) == 0
    merged = json.loads((folder / "receipt.json").read_text())
    passed = {setting: run["counts"]["passed"] for setting, run in merged["runs"].items()}
    assert passed == {"1 GPU(s)": 30, "1 GPU(s) CUDA_LAUNCH_BLOCKING=1": 31, "2 GPU(s)": 33}
    assert list(merged["also_passed"]) == ["memcheck", "racecheck"]


def test_a_receipt_of_other_code_begins_afresh(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(folder / "receipt.json", {"1 GPU(s)": _run("1 x NVIDIA A100", 1)}, ("old",), code_hash="0" * 64)
    two = _write(folder / "two.json", {"2 GPU(s)": _run("2 x NVIDIA H200", 32)})
    assert _merge(monkeypatch, two) == 0
    merged = json.loads((folder / "receipt.json").read_text())
    assert list(merged["runs"]) == ["2 GPU(s)"] and merged["also_passed"] == {}


def test_a_receipt_of_other_code_is_refused_by_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = _write(folder / "odd.json", {"2 GPU(s)": _run("2 x NVIDIA H200", 32)}, code_hash="0" * 64)
    before = (folder / "receipt.json").read_text()
    with pytest.raises(ValueError, match="odd.json: expected code_hash .*, got 0000"):
        receipt.merge([odd])
    with pytest.raises(SystemExit) as ended:
        _merge(monkeypatch, odd)
    assert ended.value.code == 2 and "odd.json: expected" in capsys.readouterr().err
    assert (folder / "receipt.json").read_text() == before


SOURCES = {
    "ep_plugin/csrc/cuda/send.cu": 'const char* url = "http://x";  // a comment\n/* and\none more */ int rows = 1;\n',
    "integrations/hook.py": '"""A module."""\n\ndef hook():\n    """Says a thing."""\n    return 1  # one\n',
}
CHANGES = {
    "a comment in C++": ("ep_plugin/csrc/cuda/send.cu", "a comment", "another", False),
    "layout in C++": ("ep_plugin/csrc/cuda/send.cu", " int rows", "\n  int  rows", False),
    "a string in C++": ("ep_plugin/csrc/cuda/send.cu", "//x", "//y", True),
    "a number in C++": ("ep_plugin/csrc/cuda/send.cu", "rows = 1", "rows = 2", True),
    "a comment in Python": ("integrations/hook.py", "# one", "# 1", False),
    "a docstring": ("integrations/hook.py", "Says a thing", "Says another", False),
    "a module's docstring": ("integrations/hook.py", "A module", "The module", False),
    "a number in Python": ("integrations/hook.py", "return 1", "return 2", True),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_hash_is_of_what_runs(change: str, tmp_path: Path) -> None:
    for name, text in SOURCES.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
    before = receipt.code_hash(tmp_path)
    name, old, new, counts = CHANGES[change]
    assert SOURCES[name].count(old) == 1
    (tmp_path / name).write_text(SOURCES[name].replace(old, new))
    assert (receipt.code_hash(tmp_path) != before) == counts


def test_the_hash_leaves_out_what_no_gpu_runs(tmp_path: Path) -> None:
    before = receipt.code_hash(tmp_path)
    for name in ("ep_plugin/bench/cli.py", "ep_plugin/csrc/cpu/send.cpp", "ep_plugin/notes.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1")
    assert receipt.code_hash(tmp_path) == before
    (tmp_path / "ep_plugin/config.py").write_text("x = 1")
    assert receipt.code_hash(tmp_path) != before


def _end(monkeypatch: pytest.MonkeyPatch, *args: str, status: int = 0, **options: Any) -> list[tuple[str, dict]]:
    """Ends a run of pytest with these arguments and options. Returns the part and the counts that it has noted."""
    noted = []
    monkeypatch.setattr(receipt, "record", lambda seconds, counts, part: noted.append((part, counts)))
    chosen = SimpleNamespace(**{"keyword": "", "markexpr": "gpu"} | options)
    ran, of_the_cpu = SimpleNamespace(keywords={"gpu": 1}), SimpleNamespace(keywords={})
    file = pytest.CollectReport("tests/gpu/test_torchtitan.py", "skipped", None, [])
    reporter = SimpleNamespace(stats={"passed": [ran, of_the_cpu], "skipped": [ran, file]})
    conftest.pytest_terminal_summary(reporter, status, SimpleNamespace(args=list(args), option=chosen))
    return noted


# A whole file that is skipped has a report, too.
COUNTS = {"passed": 1, "skipped": 2, "failed": 0}


def test_the_whole_suite_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _end(monkeypatch, "tests/gpu") == [("", COUNTS)]
    assert _end(monkeypatch, "tests/gpu", status=1) == []


PARTS: dict[str, tuple[tuple[str, ...], dict[str, str], str]] = {
    "a file": (("tests/gpu/test_moe.py",), {}, "tests/gpu/test_moe.py"),
    "two files": (("tests/gpu/a.py", "tests/gpu/b.py"), {}, "tests/gpu/a.py tests/gpu/b.py"),
    "a keyword": (("tests/gpu",), {"keyword": "not nodes"}, "tests/gpu -k 'not nodes'"),
    "a marker": (("tests/gpu",), {"markexpr": "gpu and not slow"}, "tests/gpu -m 'gpu and not slow'"),
}


@pytest.mark.parametrize("case", PARTS)
def test_a_part_of_the_suite_is_noted_where_that_is_asked_for(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    args, options, part = PARTS[case]
    assert _end(monkeypatch, *args, **options) == []
    assert _end(monkeypatch, *args, **options, also_passed=True) == [(part, COUNTS)]
    assert _end(monkeypatch, *args, **options, also_passed=True, status=1) == []


@pytest.fixture
def gpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One GPU, and no setting. Returns the receipt's file."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "NVIDIA H200")
    for name in (*receipt.SETTINGS, "EP_TEST_DEEPEP"):
        monkeypatch.delenv(name, raising=False)
    return folder / "receipt.json"


def test_runs_of_a_part_with_several_versions_and_settings_stand_side_by_side(
    gpu: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = {"megatron-core": "0.16.1", "torchtitan": "0.3.0"}
    monkeypatch.setattr("importlib.metadata.version", lambda name: versions.get(name) or _missing(name))
    receipt.record(1.0, COUNTS, "tests/gpu/test_megatron.py")
    versions["megatron-core"] = "0.19.2"
    receipt.record(1.0, COUNTS, "tests/gpu/test_megatron.py")
    monkeypatch.setenv("EP_PLUGIN_PLAIN_KERNELS", "1")
    receipt.record(1.0, COUNTS, "tests/gpu/test_moe.py")
    (tmp_path / "setup.py").write_text("setuptools.setup(name='deep_ep', version='1.2.1' + revision)")
    monkeypatch.setenv("EP_TEST_DEEPEP", str(tmp_path))
    receipt.record(1.0, COUNTS, "tests/gpu/test_deep_ep_scripts.py")
    written = json.loads(gpu.read_text())
    assert list(written["runs"]) == ["1 GPU(s)"]
    assert list(written["also_passed"]) == [
        "memcheck",
        "1 GPU(s): tests/gpu/test_megatron.py, megatron-core 0.16.1",
        "1 GPU(s): tests/gpu/test_megatron.py, megatron-core 0.19.2",
        "1 GPU(s) EP_PLUGIN_PLAIN_KERNELS=1: tests/gpu/test_moe.py",
        "1 GPU(s) EP_PLUGIN_PLAIN_KERNELS=1: tests/gpu/test_deep_ep_scripts.py, DeepEP 1.2.1",
    ]
    latest = list(written["also_passed"].values())[-1]
    assert latest["hardware"] == "1 x NVIDIA H200" and latest["counts"] == COUNTS
    assert latest["versions"].items() >= {"DeepEP": "1.2.1", "torchtitan": "0.3.0"}.items()


def _missing(name: str) -> str:
    raise importlib.metadata.PackageNotFoundError(name)


def _sanitizer(folder: Path, monkeypatch: pytest.MonkeyPatch, last_line: str) -> Path:
    """A stand-in for compute-sanitizer, which only writes down how it was called. Returns the file."""
    calls, program = folder / "calls", folder / "bin" / "compute-sanitizer"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$@" >> {calls}\n{last_line}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    return calls


def test_sanitizers_watch_ranks_of_one_and_of_two_nodes(gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = _sanitizer(gpu.parent, monkeypatch, "exit 0")
    sanitize.main()
    ranks = [call.split("small_case.py ")[1].split() for call in calls.read_text().splitlines()]
    for size, nodes in ((1, 1), (2, 1), (4, 2)):
        chosen = [(store, rank) for rank, of, store, on in ranks if (of, on) == (str(size), str(nodes))]
        assert len({store for store, _ in chosen}) == 2  # one of each tool
        assert sorted(rank for _, rank in chosen) == sorted(2 * [str(rank) for rank in range(size)])
    shapes = ("1 rank(s) on 1 node(s)", "2 rank(s) on 1 node(s)", "4 rank(s) on 2 node(s)")
    assert list(json.loads(gpu.read_text())["also_passed"]) == [
        "memcheck",
        *(f"1 GPU(s): compute-sanitizer --tool memcheck of small_case.py, {shape}" for shape in shapes),
        *(f"1 GPU(s): compute-sanitizer --tool racecheck of small_case.py, {shape}" for shape in shapes),
    ]


@pytest.mark.slow
def test_what_a_sanitizer_finds_ends_the_run(gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = _sanitizer(gpu.parent, monkeypatch, 'case "$*" in *" 1 2 "*) exit 9;; esac')
    with pytest.raises(subprocess.CalledProcessError, match="exit status 9"):
        sanitize.main()
    assert len(calls.read_text().splitlines()) == 3
    passed = ["memcheck", "1 GPU(s): compute-sanitizer --tool memcheck of small_case.py, 1 rank(s) on 1 node(s)"]
    assert list(json.loads(gpu.read_text())["also_passed"]) == passed


def test_the_committed_receipt_has_what_a_run_writes() -> None:
    written = json.loads(Path(receipt.__file__).with_name("receipt.json").read_text())
    assert written.keys() == {"code_hash", "runs", "also_passed"}
    for run in [*written["runs"].values(), *written["also_passed"].values()]:
        assert run.keys() >= {"hardware", "versions", "counts", "seconds"} and run["counts"]["failed"] == 0


def test_a_file_that_is_missing_is_named(folder: Path) -> None:
    with pytest.raises(FileNotFoundError, match="absent.json"):
        receipt.merge([folder / "absent.json"])
