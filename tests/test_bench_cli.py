"""The command line of ep-bench around the suites: where results go, before and after anything is measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

from ep_plugin.bench import provenance, suite_wire
from ep_plugin.bench.cli import main
from ep_plugin.bench.results import row
from ep_plugin.bench.timing import Timing

WIRE = ["wire", "--backend", "cpu", "--ranks", "2"]


def invoke(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "400"}).invoke(main, list(arguments))


def a_result(suite: str = "wire", sms: int | None = None) -> dict[str, Any]:
    """As a suite returns it, of one row."""
    rows = [row("copy_c64", "wire", Timing(median_us=2.0, p10_us=1.0, p90_us=3.0), 64, sms)]
    about = {"hardware": "2 cores", "versions": {}, "code_hash": "0" * 64, "command": f"ep-bench {suite}"}
    return {"suite": suite, **about, "rows": rows, "sms_are": "of kernels"}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("fsdp2 --backend cpu --layers 0", "layers: expected at least 2, got 0"),
        ("fsdp2 --backend cpu --tokens 0", "tokens: expected at least 2, got 0"),
        ("wire --backend cuda --ranks 0", "ranks: expected at least 2, got 0"),
        ("moe --backend cuda --ranks 0", "ranks: expected at least 1, got 0"),
    ],
)
def test_zero_is_no_default(arguments: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    run = invoke(*arguments.split())
    assert run.exit_code == 2
    assert says in run.output


@pytest.mark.parametrize("case", ["a folder", "a file as a folder", "a file on the way", "a folder by that name"])
def test_a_place_that_cannot_be_written_is_refused_before_anything_runs(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suite_wire, "run", lambda suite: pytest.fail("it has run"))
    (tmp_path / "file").touch()
    (tmp_path / "results" / provenance.hardware_folder("cpu", 2) / "wire.json").mkdir(parents=True)
    out = {
        "a folder": f"{tmp_path}",
        "a file as a folder": f"{tmp_path}/file/",
        "a file on the way": f"{tmp_path}/file/below/found.json",
        "a folder by that name": f"{tmp_path}/results/",
    }[case]
    run = invoke(*WIRE, "--out", out)
    assert run.exit_code == 2, run.output
    assert "out: expected a f" in run.output and str(tmp_path) in run.output


def test_the_table_is_printed_though_the_file_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "found.json"

    def run_and_block(suite: object) -> dict[str, Any]:
        out.mkdir()
        return a_result()

    monkeypatch.setattr(suite_wire, "run", run_and_block)
    run = invoke(*WIRE, "--out", str(out))
    assert run.exit_code == 1
    assert "copy_c64" in run.output


def test_a_result_is_written_where_folders_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite_wire, "run", lambda suite: a_result())
    run = invoke(*WIRE, "--out", f"{tmp_path}/new/")
    assert run.exit_code == 0, run.output
    (path,) = tmp_path.rglob("*.json")
    assert path == tmp_path / "new" / provenance.hardware_folder("cpu", 2) / "wire.json"
    assert json.loads(path.read_text()) == a_result()
