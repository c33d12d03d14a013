"""The receipt of the GPU tests: runs from several copies of one tree become one receipt, and nothing else does."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.gpu import conftest, receipt


def _run(hardware: str, passed: int) -> dict[str, Any]:
    counts = {"passed": passed, "skipped": 0, "failed": 0}
    return {"hardware": hardware, "versions": {}, "counts": counts, "seconds": 1.0}


def _write(path: Path, runs: dict[str, Any], also: list[str], code_hash: str | None = None) -> Path:
    path.write_text(
        json.dumps({"code_hash": code_hash or receipt.code_hash(), "runs": runs, "also_passed": also}, indent=2)
    )
    return path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the tree's own receipt: one run of this code."""
    code = receipt.code_hash()
    monkeypatch.setattr(receipt, "ROOT", tmp_path)
    monkeypatch.setattr(receipt, "RECEIPT", tmp_path / "receipt.json")
    monkeypatch.setattr(receipt, "code_hash", lambda: code)
    _write(tmp_path / "receipt.json", {"1 GPU(s)": _run("1 x NVIDIA H200", 30)}, ["memcheck"])
    return tmp_path


def _merge(monkeypatch: pytest.MonkeyPatch, *files: Path) -> int:
    monkeypatch.setattr(sys, "argv", ["receipt.py", "--merge", *map(str, files)])
    return receipt.main()


def test_runs_are_merged_by_setting(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two = _write(folder / "two.json", {"2 GPU(s)": _run("2 x NVIDIA H100", 32)}, ["memcheck", "racecheck"])
    blocking = {"1 GPU(s) CUDA_LAUNCH_BLOCKING=1": _run("1 x NVIDIA H200", 31), "2 GPU(s)": _run("2 x NVIDIA H200", 33)}
    three = _write(folder / "three.json", blocking, [])
    assert _merge(monkeypatch, two, three) == 0
    merged = json.loads((folder / "receipt.json").read_text())
    passed = {setting: run["counts"]["passed"] for setting, run in merged["runs"].items()}
    assert passed == {"1 GPU(s)": 30, "1 GPU(s) CUDA_LAUNCH_BLOCKING=1": 31, "2 GPU(s)": 33}
    assert merged["also_passed"] == ["memcheck", "racecheck"]


def test_a_receipt_of_other_code_begins_afresh(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(folder / "receipt.json", {"1 GPU(s)": _run("1 x NVIDIA A100", 1)}, ["old"], code_hash="0" * 64)
    two = _write(folder / "two.json", {"2 GPU(s)": _run("2 x NVIDIA H200", 32)}, [])
    assert _merge(monkeypatch, two) == 0
    merged = json.loads((folder / "receipt.json").read_text())
    assert list(merged["runs"]) == ["2 GPU(s)"] and merged["also_passed"] == []


def test_a_receipt_of_other_code_is_refused_by_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = _write(folder / "odd.json", {"2 GPU(s)": _run("2 x NVIDIA H200", 32)}, [], "0" * 64)
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


def test_a_whole_file_that_is_skipped_does_not_cost_the_receipt(monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[dict[str, int]] = []
    monkeypatch.setattr(receipt, "record", lambda counts, seconds: noted.append(counts))
    config = SimpleNamespace(args=["tests/gpu"], option=SimpleNamespace(keyword=""))
    ran, of_the_cpu = SimpleNamespace(keywords={"gpu": 1}), SimpleNamespace(keywords={})
    file = pytest.CollectReport("tests/gpu/test_torchtitan.py", "skipped", None, [])
    reporter = SimpleNamespace(stats={"passed": [ran, of_the_cpu], "skipped": [ran, file]})
    conftest.pytest_terminal_summary(reporter, 0, config)
    assert noted == [{"passed": 1, "skipped": 2, "failed": 0}]


def test_a_file_that_is_missing_is_named(folder: Path) -> None:
    with pytest.raises(FileNotFoundError, match="absent.json"):
        receipt.merge([folder / "absent.json"])
