"""ep-bench: what it writes, that it refuses to time wrong results, and what it says about sources and samples."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import subprocess
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from ep_plugin.bench import provenance
from ep_plugin.bench.cli import main
from ep_plugin.bench.exchange.cases import time_cases
from ep_plugin.bench.exchange.workload import Workload, rows_on_the_wire, rows_over_rails
from ep_plugin.bench.provenance import hash_sources
from ep_plugin.bench.timing import summarise
from tests.bench.test_compare import suite
from tests.ranks import run_ranks, values

RANKS = 2
SIZES = {"ranks": RANKS, "tokens": 40, "hidden": 128, "topk": 2, "experts": 6}
ROW_KEYS = ["case", "impl", "median_us", "p10_us", "p90_us", "host_us", "bytes_wire", "gb_s", "sms", "peer_bytes"]
GLOO = "gloo_all_to_all"
# Which implementations each case has, on CPUs.
EXPECTED = {
    "dispatch_flat_fp32": ["ep_plugin", GLOO],
    "dispatch_cached_fp32": ["ep_plugin", GLOO],
    "combine_flat_fp32": ["ep_plugin", GLOO],
    "roundtrip_flat_fp32": ["ep_plugin", GLOO],
    "dispatch_token_major_fp32": ["ep_plugin"],
    "dispatch_cached_token_major_fp32": ["ep_plugin"],
    "combine_token_major_fp32": ["ep_plugin"],
    "dispatch_flat_fp32_skew2": ["ep_plugin", GLOO],
    "roundtrip_t512": ["ep_plugin", GLOO],
    "roundtrip_t512_host_wait": ["ep_plugin", GLOO],
    "roundtrip_t128": ["ep_plugin", GLOO],
    "roundtrip_t128_host_wait": ["ep_plugin", GLOO],
    "dispatch_flat_fp8": ["ep_plugin", GLOO],
    "dispatch_cached_fp8": ["ep_plugin", GLOO],
    "dispatch_token_major_fp8": ["ep_plugin"],
    "dispatch_cached_token_major_fp8": ["ep_plugin"],
}


def moe_arguments(out: Path | str, *more: str) -> list[str]:
    sizes = [word for name, value in SIZES.items() for word in (f"--{name}", str(value))]
    return ["moe", "--backend", "cpu", *sizes, "--iterations", "3", "--out", str(out), *more]


def cells(text: str) -> str:
    """Tables without the spaces that align their columns."""
    return re.sub(" +", " ", text)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The result of a small run of the whole suite on CPUs."""
    folder = tmp_path_factory.mktemp("results")
    run = CliRunner().invoke(main, moe_arguments(f"{folder}/", "--dtype", "float32", "--dtype", "float8"))
    assert run.exit_code == 0, run.output
    (path,) = folder.rglob("*.json")
    return path


@pytest.mark.slow
def test_a_result_names_what_it_belongs_to(written: Path) -> None:
    result = json.loads(written.read_text())
    about = ["suite", "hardware", "versions", "code_hash", "commit", "command"]
    assert list(result) == [*about, "rows", "notes"]
    memory = r"a communicator takes ([\d,]+\.\d) MiB of peer memory"
    took = r"(\d+\.\d{3}) s until its first dispatch and combine have finished"
    found = re.fullmatch(f"{memory}, and {took}", result["notes"][-1])
    assert found, result["notes"]
    assert float(found[1]) > 0 and 0 < float(found[2]) < 30
    assert result["suite"] == "moe_ht" and written.name == "moe_ht.json"
    assert "cores of" in result["hardware"] and written.parent.name.startswith("cpu")
    assert list(result["versions"]) == ["torch", "ep_plugin", "nccl", "cuda", "python"]
    assert result["versions"]["torch"] == torch.__version__
    assert result["code_hash"] == hash_sources() and result["commit"] == provenance.commit()
    assert result["command"].startswith("ep-bench moe --backend cpu --ranks 2 --iterations 3 --tokens 40 ")


def test_every_case_has_every_implementation(written: Path) -> None:
    rows = json.loads(written.read_text())["rows"]
    assert all(list(row) == ROW_KEYS for row in rows)
    found: dict[str, list[str]] = {}
    for row in rows:
        found.setdefault(row["case"], []).append(row["impl"])
    assert found == EXPECTED


def test_rows_hold_sound_numbers(written: Path) -> None:
    for row in json.loads(written.read_text())["rows"]:
        assert 0 < row["p10_us"] <= row["median_us"] <= row["p90_us"], row
        tokens = int(row["case"].split("_")[1][1:]) if row["case"].startswith("roundtrip_t") else SIZES["tokens"]
        crossings = 2 if row["case"].startswith("roundtrip") else 1
        assert 0 < row["bytes_wire"] <= crossings * tokens * SIZES["topk"] * SIZES["hidden"] * 4, row
        assert row["gb_s"] == pytest.approx(row["bytes_wire"] / row["median_us"] / 1e3, abs=0.006), row
        assert row["sms"] is None
        assert (row["peer_bytes"] or 0) > 0 if row["impl"] == "ep_plugin" else row["peer_bytes"] is None, row


def test_report_prints_the_ratios_of_a_run(written: Path, tmp_path: Path) -> None:
    picture = tmp_path / "bars.png"
    run = CliRunner().invoke(main, ["report", str(written), "--plot", str(picture)])
    assert run.exit_code == 0, run.output
    table = cells(run.output).splitlines()
    rows = {(row["case"], row["impl"]): row["median_us"] for row in json.loads(written.read_text())["rows"]}
    for (case, impl), median in rows.items():
        (line,) = [line for line in table if line.startswith(f"| {case} | {impl} |")]
        assert line.endswith(f" {median / rows[case, 'ep_plugin']:.2f} × |")
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("content", ['{"rows": [{"case": "x"}]}', "[]", "not JSON", '{"losses": {}}'])
def test_report_refuses_other_files(tmp_path: Path, content: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(content)
    run = CliRunner(env={"COLUMNS": "400"}).invoke(main, ["report", str(path)])
    assert run.exit_code == 2
    assert "other.json" in run.output and "expected" in run.output


def _quantised(rank: int) -> list[tuple[str, int]]:
    wanted = dataclasses.replace(suite(), dtype=["bfloat16", "float8"], case=["dispatch_flat_bf16_to_fp8"])
    rows = time_cases(torch.device("cpu"), wanted.specs(), ["all_to_all"], 1)
    return [(row["impl"], row["bytes_wire"] % (128 + 4)) for row in rows]


def test_rows_that_leave_as_fp8() -> None:
    for found in values(run_ranks(RANKS, _quantised)):
        assert found == [("ep_plugin", 0), (GLOO, 0)]


def test_a_wrong_result_ends_the_run_without_timings(tmp_path: Path) -> None:
    out = tmp_path / "never.json"
    run = CliRunner().invoke(main, moe_arguments(out, "--peer", "tests.bench.test_compare:SwappedRows"))
    assert run.exit_code == 1
    assert "rank 0: dispatch_flat_fp32 by SwappedRows: tokens" in run.output
    assert not out.exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["moe", "--backend", "cpu", "--peer", "deep_ep"], "got 'deep_ep': No module named 'deep_ep'"),
        (
            ["moe", "--backend", "cpu", "--peer", "torch:Absent"],
            "peer: expected all_to_all, row_per_rank, rail, none, or",
        ),
        (["wire", "--backend", "cpu"], "backend: expected one of cuda, got 'cpu'"),
        (["allgather", "--backend", "cpu", "--ranks", "1"], "ranks: expected at least 2, got 1"),
        (["moe", "--backend", "cpu", "--case", "gather*"], "case: expected a pattern for dispatch_flat_fp32, "),
        (["moe", "--backend", "cpu", "--sweep", "sms=4"], "sweep: expected no SMs with cpu, whose kernels run on none"),
        (["moe", "--backend", "cpu", "--sweep", "width=4"], "sweep: expected AXIS=V1,V2,... with an axis of tokens, "),
        (["moe", "--backend", "cpu", "--sweep", "tokens"], "sweep: expected AXIS=V1,V2,... with an axis of tokens, "),
        (["moe", "--backend", "cpu", "--sweep", "tokens=few"], "sweep: expected numbers for tokens, got 'few'"),
        (["moe", "--backend", "cpu", "--sweep", "topk=64"], "topk: expected at most the 32 experts, got 64"),
        (
            ["moe", "--backend", "cpu", "--sweep", "skew=5"],
            "skew: expected at most 4 with these ranks and experts, got 5",
        ),
        (["moe", "--backend", "cpu", "--sweep", "skew=0.5"], "skew: expected at least 1, got 0.5"),
        (["moe", "--backend", "tpu"], "backend: expected one of cpu, cuda, got 'tpu'"),
        (["moe", "--backend", "cpu", "--dtype", "int4"], "dtype: expected one of float32"),
        (
            ["moe", "--backend", "cpu", "--dtype", "float8", "--sweep", "tokens=4"],
            "dtype: expected one of float32, bfloat16, float16, got 'float8'",
        ),
        (["moe", "--backend", "cpu", "--layout", "ragged"], "layout: expected one of flat, token_major"),
        (["moe", "--backend", "cpu", "--hidden", "6"], "hidden: expected rows of a multiple of 16 bytes, got 24"),
        (["moe", "--backend", "cpu", "--experts", "30"], "experts: expected a multiple of the 4 ranks, got 30"),
        (["moe", "--backend", "cpu", "--topk", "33"], "topk: expected at most the 32 experts, got 33"),
        (["moe", "--backend", "cpu", "--iterations", "0"], "iterations: expected at least 1, got 0"),
        (["moe", "--backend", "cpu", "--nodes", "0"], "nodes: expected at least 1, got 0"),
        (["moe", "--backend", "cpu", "--nodes", "3"], "nodes: expected a divisor of 4 ranks, got 3"),
        (["moe", "--backend", "cpu", "--peer", "rail"], "peer: expected none of rail on one node, where no rows cross"),
    ],
)
def test_what_cannot_be_measured_is_refused_by_name(arguments: list[str], says: str) -> None:
    run = CliRunner(env={"COLUMNS": "400"}).invoke(main, arguments)
    assert run.exit_code == 2
    assert says in run.output


def test_an_iteration_lasts_from_the_first_start_to_the_last_end() -> None:
    early = [(0.0, 5.0, 3.0), (100.0, 130.0, 4.0), (200.0, 221.0, 9.0)]
    late = [(2.0, 12.0, 2.0), (101.0, 110.0, 8.0), (201.0, 203.0, 1.0)]
    timing = summarise([early, late])  # 12, 30 and 21 µs; hosts kept for 3, 8 and 9
    assert (timing.median_us, timing.p10_us, timing.p90_us, timing.host_us) == (21.0, 13.8, 28.2, 8.0)


def test_a_clock_without_host_times_has_none() -> None:
    assert summarise([[(0.0, 5.0, math.nan)]]).host_us is None


def test_bytes_are_those_of_the_busiest_rank_and_direction() -> None:
    workload = Workload(ranks=3, tokens=2, hidden=8, topk=2, experts=6)
    ids = [torch.tensor(rows) for rows in ([[2, 3], [2, 0]], [[2, 3], [0, 4]], [[4, 5], [3, 0]])]
    # Arriving at rank 1: three pairs of rank 0 and one of rank 2; as tokens, two and one.
    assert rows_on_the_wire(workload, ids, dedup=False) == 4
    assert rows_on_the_wire(workload, ids, dedup=True) == 3


def test_bytes_of_several_nodes_are_those_between_them() -> None:
    workload = Workload(ranks=4, tokens=2, hidden=8, topk=3, experts=8)  # ranks 0 and 1 are node 0
    ids = [
        torch.tensor(rows)
        for rows in ([[4, 5, 6], [0, 2, 3]], [[4, 6, 7], [5, 7, 0]], [[7, 6, 5]] * 2, [[4, 5, 6]] * 2)
    ]
    assert rows_over_rails(workload, ids, 2).tolist() == [[0, 1], [0, 2], [0, 0], [0, 0]]
    # Rank 1 sends two tokens: to one node; to two ranks of it; for 5 experts there.
    assert rows_on_the_wire(workload, ids, dedup=True, nodes=2, two_levels=True) == 2
    assert rows_on_the_wire(workload, ids, dedup=True, nodes=2) == 4
    assert rows_on_the_wire(workload, ids, dedup=False, nodes=2) == 5


def test_the_hash_covers_sources_and_nothing_else(tmp_path: Path) -> None:
    source = tmp_path / "kernels" / "send.cu"
    source.parent.mkdir()
    source.write_text("one")
    first = hash_sources(["kernels", "absent"], tmp_path)
    (source.parent / "receipt.json").write_text("{}")
    (source.parent / "send.pyc").write_bytes(b"")
    assert hash_sources(["kernels", "absent"], tmp_path) == first
    source.write_text("two")
    changed = hash_sources(["kernels", "absent"], tmp_path)
    source.rename(source.with_name("expand.cu"))
    assert len({first, changed, hash_sources(["kernels", "absent"], tmp_path)}) == 3


def test_the_commit_is_that_of_the_checkout_or_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EP_PLUGIN_COMMIT", "abc")
    assert provenance.commit(tmp_path) == "abc"
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    (source := tmp_path / "ep_plugin" / "one.py").parent.mkdir()
    source.write_text("one")
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        subprocess.run([*git, *words], check=True)
    clean = provenance.commit(tmp_path)
    assert clean is not None and len(clean) == 40
    (tmp_path / "result.json").write_text("{}")
    assert provenance.commit(tmp_path) == clean
    source.write_text("two")
    assert provenance.commit(tmp_path) == f"{clean}-dirty"


@pytest.mark.gpu(2)
def test_the_suite_runs_on_gpus(tmp_path: Path) -> None:
    out = tmp_path / "moe_ht.json"
    sizes = ["--ranks", "2", "--tokens", "256", "--hidden", "1024", "--topk", "4", "--experts", "16"]
    run = CliRunner().invoke(main, ["moe", "--backend", "cuda", *sizes, "--iterations", "5", "--out", str(out)])
    assert run.exit_code == 0, run.output
    rows = json.loads(out.read_text())["rows"]
    cases = {row["case"] for row in rows}
    assert {name.replace("fp32", "bf16") for name in EXPECTED} | {"roundtrip_t512_graph"} <= cases
    assert {(row["case"]) for row in rows if row["impl"] == "floor"} == cases
    assert all(row["sms"] for row in rows if row["impl"] == "ep_plugin")
