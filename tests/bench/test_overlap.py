"""`ep-bench overlap`: its rows and its judge, with CPU products before gathers in place of two streams."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from ep_plugin.bench import cli, collective_peers, suite_collectives, suite_overlap
from ep_plugin.bench.product import Product
from ep_plugin.bench.suite_collectives import GATHER
from ep_plugin.bench.suite_overlap import ALONE, MIB, OverlapSuite
from ep_plugin.bench.timing import Run
from tests.ranks import run_ranks, values

RANKS = 2
SUITE = OverlapSuite(backend="cpu", ranks=RANKS, sizes=(MIB, 80_000), iterations=3)
IMPLS = ("ep_plugin", "gloo", "ep_plugin, foreign output")


class _Counted(Product):
    calls = 0

    def __call__(self) -> None:
        _Counted.calls += 1
        super().__call__()


class _Lost(Product):
    """It multiplies nothing."""

    def __call__(self) -> None:
        self._out.zero_()


def _one_after_another(product: Callable[[], None], gather: Run) -> Run:
    def run() -> object:
        product()
        return gather()

    return run


def _measured(rank: int, kind: type[Product]) -> dict[str, Any]:
    device = torch.device("cpu")
    return suite_overlap.measure_beside(device, SUITE, kind(device, torch.float32, 256), _one_after_another)


def _counted(rank: int) -> tuple[dict[str, Any], int]:
    return _measured(rank, _Counted), _Counted.calls


def test_every_way_is_timed_beside_the_products_and_its_excess_is_over_the_products_alone() -> None:
    (found, calls), _ = values(run_ranks(RANKS, _counted))
    assert found["wrong"] == [] and found["left_out"] == [] and found["base_case"] == ALONE
    cases = {"products_beside_1MiB": MIB // 2, "products_beside_80000B": 40_000}
    alone, *beside = found["rows"]
    assert (alone["case"], alone["impl"], alone["bytes_wire"]) == (ALONE, "matmul", 0)
    assert {(row["case"], row["impl"]) for row in beside} == {(case, impl) for case in cases for impl in IMPLS}
    for row in beside:
        assert row["bytes_wire"] == cases[row["case"]]
        excess = found["excess_us"][row["case"]][row["impl"]]
        assert excess == pytest.approx(row["median_us"] - alone["median_us"], abs=0.05)
    # Two products for each way that is judged twice, and for each that is timed, the products alone among them.
    turns = suite_overlap.WARMUP + SUITE.iterations
    assert calls == suite_overlap.PRODUCTS * (2 * len(beside) + turns * (len(beside) + 1))


def _streams(rank: int) -> set[str]:
    """Where products and gathers were enqueued, also the calls that find out which peers run here."""
    here, seen = ["default"], set()

    @contextmanager
    def own(device: torch.device) -> Iterator[None]:
        here[0] = "own"
        yield

    def make(*sizes: Any) -> Any:
        source, out, run = collective_peers._backend_gather(*sizes)
        return source, out, lambda: (seen.add(here[0]), run())[1]

    suite_overlap.stream_of_its_own = own
    suite_overlap.Product = lambda device: Product(device, torch.float32, 256)  # type: ignore[assignment, misc]
    suite_overlap._on_two_streams = lambda device: _one_after_another
    suite_collectives.PEERS[GATHER, "cpu"]["noted"] = make
    assert suite_overlap.measure(torch.device("cpu"), SUITE)["rows"]
    return seen


def test_peers_are_tried_on_the_stream_of_the_products() -> None:
    for seen in values(run_ranks(RANKS, _streams)):
        assert seen == {"own"}


def test_nothing_is_timed_when_the_product_is_wrong() -> None:
    for found in values(run_ranks(RANKS, _measured, _Lost)):
        assert found["rows"] == []
        assert any("rank 1: matmul: expected a relative error of at most" in sentence for sentence in found["wrong"])


def test_a_cpu_is_refused_with_what_to_do_instead() -> None:
    done = CliRunner(env={"COLUMNS": "400"}).invoke(cli.main, ["overlap", "--backend", "cpu"])
    assert done.exit_code == 2
    assert "backend: expected cuda, since on a CPU the cores that multiply are those that gather" in done.output
    assert "ep-bench allgather --backend cpu" in done.output


def test_what_cannot_be_gathered_is_refused() -> None:
    with pytest.raises(ValueError, match="size: expected a multiple of 8 bytes, an element for each rank, got 12"):
        OverlapSuite(ranks=4, sizes=(12,), iterations=30)
    suite = OverlapSuite(ranks=4, sizes=(64, 128), iterations=30)
    assert suite.command() == "ep-bench overlap --backend cuda --ranks 4 --size 64 --size 128 --iterations 30"


def _row(case: str, impl: str, median: float, bytes_wire: int = 0) -> dict[str, Any]:
    numbers = {"median_us": median, "p10_us": median - 5, "p90_us": median + 5, "bytes_wire": bytes_wire, "gb_s": 0.0}
    return {"case": case, "impl": impl, **numbers, "sms": 0 if impl == "ep_plugin" else None}


def test_a_report_shows_what_each_way_adds(tmp_path: Path) -> None:
    excess = {"ep_plugin": 140.0, "nccl": 350.0, "low-contention": -2.0}
    result = {
        "suite": "overlap", "hardware": "4 x GPU", "versions": {}, "code_hash": "0" * 64, "command": "c",
        "base_case": ALONE,
        "rows": [_row(ALONE, "matmul", 2860), *(_row("beside", impl, 2860 + more) for impl, more in excess.items())],
        "excess_us": {"beside": excess},
        "left_out": ["nccl zero-cta is left out: RuntimeError: it fails"],
    }  # fmt: skip
    path, picture = tmp_path / "overlap.json", tmp_path / "overlap.png"
    path.write_text(json.dumps(result))
    done = CliRunner().invoke(cli.main, ["report", str(path), "--case", "bes*", "--plot", str(picture)])
    assert done.exit_code == 0, done.output
    assert "| beside | nccl | 3,210 | 3,205 | 3,215 |  | 1.122 × | 350 | 2.50 × | 1.07 × |" in done.output
    assert "| products_alone | matmul | 2,860 | 2,855 | 2,865 |  | 1.000 × |  |  |  |" in done.output
    assert "| beside | 0 | 140 | 350 | -2 | 0.40 × |  |" in done.output
    assert "- nccl zero-cta is left out: RuntimeError: it fails" in done.output
    assert picture.read_bytes().startswith(b"\x89PNG")
