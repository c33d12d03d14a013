"""The command line of ep-bench around the suites: what it asks of them, and where their results go."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

from ep_plugin.bench import provenance, report
from ep_plugin.bench.cli import SUITES, main
from ep_plugin.bench.suite import Suite, row
from ep_plugin.bench.suites.collectives import AllGatherSuite, ReduceScatterSuite, SendReceiveSuite
from ep_plugin.bench.suites.fsdp2 import Fsdp2Suite
from ep_plugin.bench.suites.host import HostSuite
from ep_plugin.bench.suites.layers import LayersSuite
from ep_plugin.bench.suites.moe import LowLatencySuite, MoeSuite
from ep_plugin.bench.suites.overlap import OverlapSuite
from ep_plugin.bench.suites.stand_in import StandInSuite
from ep_plugin.bench.suites.wire import WireSuite
from ep_plugin.bench.timing import Timing

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
GATHER = ["allgather", "--backend", "cpu", "--ranks", "2"]


def invoke(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "400"}).invoke(main, list(arguments))


def a_result(suite: str = "wire", sms: int | None = None) -> dict[str, Any]:
    """As a suite returns it, of one row."""
    rows = [row("copy_c64", "wire", Timing(median_us=2.0, p10_us=1.0, p90_us=3.0), 64, sms)]
    about = {"hardware": "2 cores", "versions": {}, "code_hash": "0" * 64, "command": f"ep-bench {suite}"}
    return {"suite": suite, **about, "rows": rows, "notes": ["SMs: of kernels"]}


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


SIZES = {"ranks": 2, "tokens": 48, "hidden": 64, "topk": 3, "experts": 8}
# One of each suite, with values that are no defaults.
ASKED: dict[str, tuple[type[Suite], dict[str, Any]]] = {
    "moe": (
        MoeSuite,
        {"backend": "cpu", **SIZES, "dtype": ["bfloat16", "float8"], "layout": ["flat"],
         "case": ["*flat*", "*fp8"], "peer": ["none"]},
    ),
    "moe, sweep": (
        MoeSuite,
        {"backend": "cpu", **SIZES, "dtype": ["bfloat16"], "sweep": ["hidden=128,256", "topk=2"], "case": ["*_h*"]},
    ),
    "low-latency": (
        LowLatencySuite,
        {"backend": "cpu", **SIZES, "tokens": [4, 16], "hidden": 128, "dtype": "bfloat16", "peer": ["none"]},
    ),
    "low-latency-stand-in": (
        StandInSuite,
        {"backend": "cpu", "share": [1, 2], "tokens": [4], "hidden": 128, "topk": 2, "experts": 8, "rate": 50.5,
         "dtype": "bfloat16"},
    ),
    "wire": (WireSuite, {"backend": "cuda", "ranks": 3}),
    "allgather": (AllGatherSuite, {"backend": "cpu", "ranks": 4, "nodes": 2, "size": [64, 128]}),
    "reduce-scatter": (ReduceScatterSuite, {"backend": "cpu", "ranks": 4, "size": [64]}),
    "send-receive": (
        SendReceiveSuite, {"backend": "cpu", "ranks": 4, "size": [64, 128], "pattern": ["ring"]}
    ),
    "host": (HostSuite, {"backend": "cpu", **SIZES, "dtype": "float32", "calls": 3}),
    "overlap": (OverlapSuite, {"backend": "cuda", **SIZES, "size": [64, 128]}),
    "fsdp2": (
        Fsdp2Suite,
        {"backend": "cpu", "ranks": 3, "layers": 5, "tokens": 9, "compared": 2, "compile": True, "unit": 2},
    ),
    "layers": (
        LayersSuite, {"backend": "cuda", **SIZES, "framework": "megatron", "ffn": 24}
    ),
}  # fmt: skip
NEEDS = {"fsdp2": "transformers", "layers": "megatron.core"}


class _Asked(Exception):
    """In place of a run, with the suite that was to be run."""


def test_every_suite_is_asked_for() -> None:
    assert {kind for kind, _ in ASKED.values()} == set(SUITES)


@pytest.mark.parametrize("name", ASKED)
def test_the_command_that_a_result_records_asks_for_the_same_suite(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    kind, given = ASKED[name]
    suite = kind(**given, iterations=7)

    def run(asked: object) -> None:
        raise _Asked(asked)

    monkeypatch.setattr(kind, "run", run)
    program, *arguments = shlex.split(suite.command())
    asked = invoke(*arguments)
    assert program == "ep-bench"
    assert isinstance(asked.exception, _Asked), asked.output
    assert asked.exception.args == (suite,)


def test_committed_results_can_be_reported() -> None:
    """Results of earlier versions, whose suites had other names, as well."""
    paths = [path for path in RESULTS.rglob("*.json") if "suite" in json.loads(path.read_text())]
    assert paths
    for path in paths:
        text = report.markdown(report.load(path))
        assert text.startswith("### ") and text.count("\n| ") > 2, path


@pytest.mark.parametrize(
    ("hidden", "status", "says"),
    [
        ("typer", 2, "ep-bench: expected typer, found none: run pip install '.[bench]' in the repository's root\n"),
        ("rich", 2, "ep-bench: expected rich, found none: run pip install '.[bench]' in the repository's root\n"),
        ("ep_plugin.bench.report", 1, "Traceback"),
        ("antigravity", 0, ""),
    ],
)
def test_what_is_not_installed_is_named(hidden: str, status: int, says: str) -> None:
    start = f"import sys; sys.modules[{hidden!r}] = None; sys.argv = ['ep-bench', '--help']"
    code = f"{start}; from ep_plugin.bench.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == status
    assert done.stderr.startswith(says) and (status or "Usage: ep-bench" in done.stdout)


@pytest.mark.parametrize("case", ["a folder", "a file as a folder", "a file on the way", "a folder by that name"])
def test_a_place_that_cannot_be_written_is_refused_before_anything_runs(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AllGatherSuite, "run", lambda suite: pytest.fail("it has run"))
    (tmp_path / "file").touch()
    (tmp_path / "results" / provenance.hardware_folder("cpu", 2) / "allgather.json").mkdir(parents=True)
    out = {
        "a folder": f"{tmp_path}",
        "a file as a folder": f"{tmp_path}/file/",
        "a file on the way": f"{tmp_path}/file/below/found.json",
        "a folder by that name": f"{tmp_path}/results/",
    }[case]
    run = invoke(*GATHER, "--out", out)
    assert run.exit_code == 2, run.output
    assert "out: expected a f" in run.output and str(tmp_path) in run.output


def test_the_table_is_printed_though_the_file_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "found.json"

    def run_and_block(suite: object) -> dict[str, Any]:
        out.mkdir()
        return a_result()

    monkeypatch.setattr(AllGatherSuite, "run", run_and_block)
    run = invoke(*GATHER, "--out", str(out))
    assert run.exit_code == 1
    assert "copy_c64" in run.output


def test_a_result_is_written_where_folders_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AllGatherSuite, "run", lambda suite: a_result())
    run = invoke(*GATHER, "--out", f"{tmp_path}/new/")
    assert run.exit_code == 0, run.output
    (path,) = tmp_path.rglob("*.json")
    assert path == tmp_path / "new" / provenance.hardware_folder("cpu", 2) / "allgather.json"
    assert json.loads(path.read_text()) == a_result()


def test_a_report_names_what_is_no_result_and_goes_on(tmp_path: Path) -> None:
    result, other, torn = (tmp_path / name for name in ("wire.json", "demo.json", "torn.json"))
    result.write_text(json.dumps(a_result()))
    other.write_text('{"losses": {}, "options": {}}')
    torn.write_text(json.dumps(a_result() | {"rows": [1]}))
    run = invoke("report", str(other), str(result), str(torn))
    assert run.exit_code == 2
    assert "| copy_c64 | wire " in run.output
    assert f"{other}: expected a result that ep-bench wrote, got JSON without code_hash, command," in run.output
    assert f"{torn}: expected rows of" in run.output


def test_a_picture_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (result := tmp_path / "wire.json").write_text(json.dumps(a_result()))
    for place in (result / "below.png", tmp_path):
        run = invoke("report", str(result), "--plot", str(place))
        assert run.exit_code == 2
        assert "plot: expected a f" in run.output
