"""`ep-bench allgather` and `reduce-scatter`: what they measure on CPUs, and that wrong results are not timed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from ep_plugin.bench import cli
from ep_plugin.bench.suite import measured
from ep_plugin.bench.suites import collectives
from ep_plugin.bench.suites.collectives import AllGatherSuite, CollectiveSuite, ReduceScatterSuite
from ep_plugin.collectives.backends.paths import SM_BELOW_BYTES, gather_sms, scatter_sms
from ep_plugin.transport.rails import CHUNK_BYTES
from tests.ranks import run_ranks, values

RANKS = 2
CASES = {
    "allgather": {"ep_plugin", "ep_plugin, foreign output", "gloo"},
    "reduce-scatter": {"ep_plugin", "ep_plugin, foreign input", "gloo"},
}


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("command", CASES)
def test_a_result_has_every_implementation_at_every_size(
    command: str, nodes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EP_PLUGIN_RANKS_PER_NODE", str(RANKS // nodes))  # the command sets it for its ranks
    out = tmp_path / "result.json"
    arguments = [command, "--backend", "cpu", "--ranks", str(RANKS), "--nodes", str(nodes), "--iterations", "2"]
    done = CliRunner().invoke(cli.main, [*arguments, "--size", "64", "--size", "80000", "--out", str(out)])
    assert done.exit_code == 0, done.output
    result = json.loads(out.read_text())
    name = command.replace("-", "_")
    assert result["suite"] == (name if nodes == 1 else f"{name}_2_nodes")
    given = ["--iterations 2", f"--nodes {nodes}", "--size 64 --size 80000", "--dtype float32"]
    assert result["command"] == " ".join(["ep-bench", *arguments[:5], *given])
    found = {(row["case"], row["impl"]) for row in result["rows"]}
    assert found == {(size, impl) for size in ("64", "80000") for impl in CASES[command]}
    for row in result["rows"]:
        assert row["bytes_wire"] == int(row["case"]) // 2 and row["median_us"] > 0
        assert (row["peer_bytes"] is None) == (row["impl"] == "gloo"), row


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("command", CASES)
def test_a_dtype_other_than_the_default_is_in_the_name(command: str, dtype: str, tmp_path: Path) -> None:
    arguments = [command, "--backend", "cpu", "--ranks", str(RANKS), "--iterations", "2", "--size", "64"]
    done = CliRunner().invoke(cli.main, [*arguments, "--dtype", dtype, "--out", str(tmp_path) + "/"])
    assert done.exit_code == 0, done.output
    (written,) = tmp_path.rglob("*.json")
    short = {"bfloat16": "bf16", "float16": "fp16"}[dtype]
    assert written.name == f"{command.replace('-', '_')}_{short}.json"
    result = json.loads(written.read_text())
    assert result["command"].endswith(f"--size 64 --dtype {dtype}")
    assert {(row["case"], row["impl"]) for row in result["rows"]} == {("64", impl) for impl in CASES[command]}
    assert all(row["bytes_wire"] == 32 for row in result["rows"])


@pytest.mark.parametrize(("backend", "dtype"), [("cpu", "float32"), ("cuda", "bfloat16")])
def test_the_tensors_have_the_dtype_that_was_asked_for(backend: str, dtype: str) -> None:
    for given in (None, "float32", "bfloat16", "float16"):
        for what in (AllGatherSuite, ReduceScatterSuite):
            suite = what(backend=backend, ranks=RANKS, size=[64], dtype=given)
            assert suite.dtype == (given or dtype)
            whole = suite._empty(torch.device("cpu"), 64)
            assert (whole.dtype, whole.nbytes) == (getattr(torch, given or dtype), 64)


class _Wrong:
    """An all-gather that loses the last element."""

    path, rail_bytes_sent, maps_nothing_on = "auto", 0, ()

    def __init__(self, **_: Any) -> None: ...

    def engine_on(self, device: torch.device) -> Any:
        return SimpleNamespace(node_map=SimpleNamespace(num_nodes=1))

    def allocate(self, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(size, dtype=dtype)

    def __call__(self, out: torch.Tensor, source: torch.Tensor) -> None:
        if out.numel() > source.numel():
            torch.distributed.all_gather(list(out.chunk(RANKS)), source.clone())
        out[-1] = 0

    def close(self) -> None: ...


def _compared(rank: int) -> list[str]:
    collectives.HierarchicalAllGather = _Wrong  # type: ignore[assignment, misc]
    found = measured(torch.device("cpu"), AllGatherSuite(backend="cpu", ranks=RANKS, size=[64], iterations=1))
    assert "rows" not in found
    return found["wrong"]


def test_nothing_is_timed_when_a_gather_is_wrong() -> None:
    for wrong in values(run_ranks(RANKS, _compared)):
        assert "rank 0: 64 by ep_plugin: expected plain torch's result for the same inputs, got another" in wrong
        assert not any("gloo" in sentence for sentence in wrong)


class _Wasteful(collectives.HierarchicalReduceScatter):
    """It counts a byte too many on its rail."""

    calls = 0

    def __call__(self, *args: Any, **more: Any) -> Any:
        self.calls += 1
        return super().__call__(*args, **more)

    @property
    def rail_bytes_sent(self) -> int:
        return super().rail_bytes_sent + self.calls


def _counted(rank: int) -> list[str]:
    collectives.HierarchicalReduceScatter = _Wasteful  # type: ignore[misc]
    suite = ReduceScatterSuite(backend="cpu", ranks=RANKS, nodes=2, size=[64], iterations=2)
    os.environ["EP_PLUGIN_RANKS_PER_NODE"] = str(RANKS // 2)
    found = measured(torch.device("cpu"), suite)
    assert "rows" not in found
    return found["wrong"]


def test_bytes_on_the_rail_are_counted_and_others_than_a_shard_are_wrong() -> None:
    for wrong in values(run_ranks(RANKS, _counted)):
        assert wrong == [
            f"rank {rank}: 64 by {impl}: expected 32 bytes over the rail in a call, got 33"
            for rank in range(RANKS)
            for impl in ("ep_plugin", "ep_plugin, foreign input")
        ]


LARGE, SMALL = 2 * SM_BELOW_BYTES, 256 << 10
OF_CHUNKS = gather_sms("sm", CHUNK_BYTES["cuda"], 2)


@pytest.mark.parametrize(
    ("what", "ranks", "nodes", "size", "path", "sms"),
    [
        (AllGatherSuite, 4, 1, LARGE, "auto", 0),
        (AllGatherSuite, 4, 1, SMALL, "auto", gather_sms("auto", SMALL // 4, 4)),
        (AllGatherSuite, 4, 2, LARGE, "auto", OF_CHUNKS),  # what the rails bring goes by chunks, which take a kernel
        (AllGatherSuite, 4, 2, SMALL, "auto", gather_sms("auto", SMALL // 4, 2)),
        (AllGatherSuite, 4, 2, LARGE, "copy_engine", 0),
        (AllGatherSuite, 2, 2, LARGE, "sm", 0),  # a node of one rank has nobody to gather with
        (ReduceScatterSuite, 4, 1, LARGE, "auto", 64),
        (ReduceScatterSuite, 4, 2, SMALL, "auto", scatter_sms("auto", SMALL // 4, 2, 64)),
        (ReduceScatterSuite, 2, 2, LARGE, "auto", 0),
    ],
)
def test_sms_are_those_of_the_largest_kernel(
    what: type[CollectiveSuite], ranks: int, nodes: int, size: int, path: str, sms: int
) -> None:
    suite = what(backend="cuda", ranks=ranks, nodes=nodes, size=[size])
    assert OF_CHUNKS > 0
    assert suite.most_sms(size, path) == sms


@pytest.mark.parametrize(
    ("ranks", "nodes", "size", "path", "sms"),
    [
        (4, 1, SMALL, "auto", gather_sms("auto", SMALL // 4, 4)),
        (4, 1, LARGE, "auto", 64),  # through the staging block, by the kernel that copies on
        (4, 2, LARGE, "auto", 64),
        (4, 1, LARGE, "copy_engine", 0),
        (2, 2, LARGE, "auto", 0),
    ],
)
def test_outputs_that_peers_have_not_mapped_take_a_kernel(
    ranks: int, nodes: int, size: int, path: str, sms: int
) -> None:
    suite = AllGatherSuite(backend="cuda", ranks=ranks, nodes=nodes, size=[size])
    assert suite.most_sms(size, path, foreign=True) == sms
    assert gather_sms("sm", 16 << 10, 4, mapped=False) == 1  # as many as a piece wants


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"ranks": 1}, "ranks: expected at least 2, got 1"),
        ({"nodes": 3}, "nodes: expected a divisor of 2 ranks, got 3"),
        ({"iterations": 0}, "iterations: expected at least 1, got 0"),
        ({"size": [12]}, "size: expected a multiple of 8 bytes, an element for each rank, got 12"),
        ({"size": [6], "dtype": "float16"}, "size: expected a multiple of 4 bytes, an element for each rank, got 6"),
        ({"dtype": "float8"}, "dtype: expected one of float32, bfloat16, float16, got 'float8'"),
    ],
)
def test_what_cannot_be_measured(given: dict[str, Any], says: str) -> None:
    good: dict[str, Any] = {"backend": "cpu", "ranks": 2, "nodes": 1, "size": [64], "iterations": 1}
    with pytest.raises(ValueError, match=says):
        ReduceScatterSuite(**(good | given))
