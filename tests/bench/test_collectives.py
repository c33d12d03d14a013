"""`ep-bench allgather` and `reduce-scatter`: what they measure on CPUs, and that wrong results are not timed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from ep_plugin.bench import cli, collective_peers, suite_collectives
from ep_plugin.bench.suite_collectives import GATHER, SCATTER, CollectiveSuite
from ep_plugin.bench.timing import stream_of_its_own
from ep_plugin.collectives.backends.cuda import SM_BELOW_BYTES, gather_sms, scatter_sms
from ep_plugin.collectives.backends.cuda_gather import foreign_gather_sms
from ep_plugin.transport.rails import CHUNK_BYTES
from tests.ranks import run_ranks, values

RANKS = 2
CASES = {
    "allgather": {"ep_plugin", "ep_plugin, foreign output", "gloo"},
    "reduce-scatter": {"ep_plugin", "ep_plugin, foreign input", "gloo"},
}


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("command", CASES)
def test_a_result_has_every_implementation_at_every_size(command: str, nodes: int, tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    arguments = [command, "--backend", "cpu", "--ranks", str(RANKS), "--nodes", str(nodes), "--iterations", "2"]
    done = CliRunner().invoke(cli.main, [*arguments, "--size", "64", "--size", "80000", "--out", str(out)])
    assert done.exit_code == 0, done.output
    result = json.loads(out.read_text())
    name = command.replace("-", "_")
    assert result["suite"] == (name if nodes == 1 else f"{name}_2_nodes")
    assert result["command"] == " ".join(["ep-bench", *arguments[:7], "--size 64 --size 80000", *arguments[7:]])
    found = {(row["case"], row["impl"]) for row in result["rows"]}
    assert found == {(size, impl) for size in ("64", "80000") for impl in CASES[command]}
    for row in result["rows"]:
        assert row["bytes_wire"] == int(row["case"]) // 2 and row["median_us"] > 0


class _Wrong:
    """An all-gather that loses the last element."""

    path, rail_bytes_sent = "auto", 0

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


def _judged(rank: int) -> list[str]:
    suite_collectives.HierarchicalAllGather = _Wrong  # type: ignore[assignment, misc]
    suite = CollectiveSuite(what=GATHER, backend="cpu", ranks=RANKS, nodes=1, sizes=(64,), iterations=1)
    found = suite_collectives.measure(torch.device("cpu"), suite)
    assert not found["rows"]
    return found["wrong"]


def test_nothing_is_timed_when_a_gather_is_wrong() -> None:
    for wrong in values(run_ranks(RANKS, _judged)):
        assert "rank 0: 64 by ep_plugin: not what plain torch makes of the same inputs" in wrong
        assert not any("gloo" in sentence for sentence in wrong)


class _Wasteful(suite_collectives.HierarchicalReduceScatter):
    """It counts a byte too many on its rail."""

    calls = 0

    def __call__(self, *args: Any, **more: Any) -> Any:
        self.calls += 1
        return super().__call__(*args, **more)

    @property
    def rail_bytes_sent(self) -> int:
        return super().rail_bytes_sent + self.calls


def _counted(rank: int) -> list[str]:
    suite_collectives.HierarchicalReduceScatter = _Wasteful  # type: ignore[misc]
    suite = CollectiveSuite(what=SCATTER, backend="cpu", ranks=RANKS, nodes=2, sizes=(64,), iterations=2)
    with suite_collectives._emulated(suite):
        found = suite_collectives.measure(torch.device("cpu"), suite)
    assert not found["rows"]
    return found["wrong"]


def test_bytes_on_the_rail_are_counted_and_others_than_a_shard_are_wrong() -> None:
    for wrong in values(run_ranks(RANKS, _counted)):
        assert wrong == [
            f"rank {rank}: 64 by {impl}: expected 32 bytes over the rail in each call, got [33]"
            for rank in range(RANKS)
            for impl in ("ep_plugin", "ep_plugin, foreign input")
        ]


def _streams(rank: int) -> list[str]:
    """Where a peer's calls were: tried, judged and timed."""
    here, seen = ["default"], []

    @contextmanager
    def own(device: torch.device) -> Iterator[None]:
        here[0] = "own"
        yield
        here[0] = "default"

    def make(*sizes: Any) -> Any:
        source, out, run = collective_peers._backend_gather(*sizes)
        return source, out, lambda: (seen.append(here[0]), run())[1]

    suite_collectives.stream_of_its_own = own
    suite_collectives.PEERS = {(GATHER, "cpu"): {"noted": make}}
    suite = CollectiveSuite(what=GATHER, backend="cpu", ranks=RANKS, nodes=1, sizes=(64,), iterations=2)
    found = suite_collectives.measure(torch.device("cpu"), suite)
    assert "noted" in {row["impl"] for row in found["rows"]}
    assert len(seen) == 1 + 2 + suite_collectives.WARMUP + suite.iterations
    return seen


def test_every_call_is_on_one_stream() -> None:
    for seen in values(run_ranks(RANKS, _streams)):
        assert set(seen) == {"own"}


def test_that_stream_follows_the_one_before_and_is_not_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []
    made = SimpleNamespace(wait_stream=lambda other: said.append(("waits for", other)))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: made)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "default")
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext(said.append(("enters", stream))))
    with stream_of_its_own(torch.device("cpu")):
        assert not said
    with stream_of_its_own(torch.device("cuda", 0)):
        assert said == [("waits for", "default"), ("enters", made)]


def _left_out(rank: int) -> list[str]:
    """The peers of GPUs where there are none."""
    for what in (GATHER, SCATTER):
        suite_collectives.PEERS[what, "cpu"] |= suite_collectives.PEERS[what, "cuda"]
    found = []
    for what in (GATHER, SCATTER):
        suite = CollectiveSuite(what=what, backend="cpu", ranks=RANKS, nodes=1, sizes=(64,), iterations=1)
        found += suite_collectives.measure(torch.device("cpu"), suite)["left_out"]
    return found


def test_a_peer_that_does_not_run_here_is_left_out_by_name() -> None:
    for found in values(run_ranks(RANKS, _left_out)):
        assert [sentence.split(" is left out: ")[0] for sentence in found] == [
            "nccl zero-cta",
            "low-contention",
            "nccl window",
            "low-contention",
            "low-contention, foreign input",
        ]


def test_a_window_has_room_for_input_and_output() -> None:
    source, out = collective_peers._places(torch.empty(16, dtype=torch.uint8), torch.float32, 3, 1)
    assert (len(source), len(out)) == (3, 1) and out.data_ptr() == source.data_ptr() + 12
    with pytest.raises(ValueError, match="size: expected at most 16 bytes, got 20"):
        collective_peers._places(torch.empty(16, dtype=torch.uint8), torch.float32, 4, 1)


LARGE, SMALL = 2 * SM_BELOW_BYTES, 256 << 10
OF_CHUNKS = gather_sms("sm", CHUNK_BYTES["cuda"], 2)


@pytest.mark.parametrize(
    ("what", "ranks", "nodes", "size", "path", "sms"),
    [
        (GATHER, 4, 1, LARGE, "auto", 0),
        (GATHER, 4, 1, SMALL, "auto", gather_sms("auto", SMALL // 4, 4)),
        (GATHER, 4, 2, LARGE, "auto", OF_CHUNKS),  # what the rails bring goes by chunks, which take a kernel
        (GATHER, 4, 2, SMALL, "auto", gather_sms("auto", SMALL // 4, 2)),
        (GATHER, 4, 2, LARGE, "copy_engine", 0),
        (GATHER, 2, 2, LARGE, "sm", 0),  # a node of one rank has nobody to gather with
        (SCATTER, 4, 1, LARGE, "auto", 64),
        (SCATTER, 4, 2, SMALL, "auto", scatter_sms("auto", SMALL // 4, 2, 64)),
        (SCATTER, 2, 2, LARGE, "auto", 0),
    ],
)
def test_sms_are_those_of_the_largest_kernel(what: str, ranks: int, nodes: int, size: int, path: str, sms: int) -> None:
    suite = CollectiveSuite(what=what, backend="cuda", ranks=ranks, nodes=nodes, sizes=(size,), iterations=1)
    assert OF_CHUNKS > 0
    assert suite_collectives.most_sms(suite, size, path) == sms


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
    suite = CollectiveSuite(what=GATHER, backend="cuda", ranks=ranks, nodes=nodes, sizes=(size,), iterations=1)
    assert suite_collectives.most_sms(suite, size, path, foreign=True) == sms
    assert foreign_gather_sms("sm", 16 << 10, 4) == 1  # as many as a piece wants


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"ranks": 1}, "ranks: expected at least 2, got 1"),
        ({"nodes": 3}, "nodes: expected a divisor of 2 ranks, got 3"),
        ({"iterations": 0}, "iterations: expected at least 1, got 0"),
        ({"sizes": (12,)}, "size: expected a multiple of 8 bytes, an element for each rank, got 12"),
    ],
)
def test_what_cannot_be_measured(given: dict[str, Any], says: str) -> None:
    good: dict[str, Any] = {"what": SCATTER, "backend": "cpu", "ranks": 2, "nodes": 1, "sizes": (64,), "iterations": 1}
    with pytest.raises(ValueError, match=says):
        CollectiveSuite(**(good | given))
