"""`ep-bench overlap`: its rows and comparisons, with CPU products before communication in place of two streams."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from ep_plugin.bench import cli
from ep_plugin.bench.exchange import cases
from ep_plugin.bench.exchange.cases import EpPlugin
from ep_plugin.bench.suite import measured
from ep_plugin.bench.suites import overlap
from ep_plugin.bench.suites.overlap import ALONE, MIB, OverlapSuite, Product
from ep_plugin.bench.timing import WARMUP, Run
from ep_plugin.moe.layout import DispatchOutput
from tests.bench.test_bench import cells
from tests.ranks import run_ranks, values

RANKS = 2
SUITE = OverlapSuite(
    backend="cuda", ranks=RANKS, size=[MIB, 80_000], iterations=3, tokens=40, hidden=128, topk=2, experts=6
)
GATHERS = ("ep_plugin", "gloo", "ep_plugin, foreign output")
MESSAGES = ("ep_plugin", "gloo")
EXCHANGES = ("ep_plugin", "gloo_all_to_all")


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
    overlap.Product = functools.partial(kind, dtype=torch.float32, size=256)  # type: ignore[assignment, misc]
    overlap._on_two_streams = lambda device: _one_after_another
    return measured(torch.device("cpu"), SUITE)


def _counted(rank: int) -> tuple[dict[str, Any], int]:
    return _measured(rank, _Counted), _Counted.calls


def test_every_way_is_timed_beside_the_products_and_its_excess_is_over_the_products_alone() -> None:
    (found, calls), _ = values(run_ranks(RANKS, _counted))
    assert found["base_case"] == ALONE
    gathers = {"products_beside_1MiB": MIB // 2, "products_beside_80000B": 40_000}
    messages = {"products_beside_1MiB_ring": MIB, "products_beside_80000B_ring": 80_000}
    exchanges = ("products_beside_dispatch", "products_beside_combine")
    alone, *beside = found["rows"]
    assert (alone["case"], alone["impl"], alone["bytes_wire"]) == (ALONE, "matmul", 0)
    expected = {(case, impl) for case in gathers for impl in GATHERS}
    expected |= {(case, impl) for case in messages for impl in MESSAGES}
    expected |= {(case, impl) for case in exchanges for impl in EXCHANGES}
    assert {(row["case"], row["impl"]) for row in beside} == expected
    for row in beside:
        assert row["bytes_wire"] == (gathers | messages).get(row["case"], row["bytes_wire"]) > 0
    # Two products for each call that is timed, the products alone among them, and for each of two comparisons.
    timed = (WARMUP + SUITE.iterations) * len(found["rows"])
    assert calls == overlap.PRODUCTS * (2 * len(found["rows"]) + timed)


def test_nothing_is_timed_when_the_product_is_wrong() -> None:
    for found in values(run_ranks(RANKS, _measured, _Lost)):
        assert any(
            "rank 1: products_alone by matmul: expected a product with a relative error of at most" in sentence
            for sentence in found["wrong"]
        )


class SwappedRows(EpPlugin):
    """Two rows of a dispatch change places."""

    def dispatch(self, batch: Any, previous: Any = None) -> tuple[DispatchOutput, Any]:
        out, state = super().dispatch(batch, previous)
        out.tokens[[0, 1]] = out.tokens[[1, 0]]
        return out, state


class LastTokenMissing(EpPlugin):
    """The last token of a combine is never written."""

    def combine(self, y: torch.Tensor, state: Any) -> torch.Tensor:
        out = super().combine(y, state)
        z = torch.empty_like(out)
        z[:-1] = out[:-1]
        return z


def _with(rank: int, kind: type[EpPlugin]) -> dict[str, Any]:
    cases.EpPlugin = kind  # type: ignore[misc]
    return _measured(rank, Product)


@pytest.mark.parametrize(
    ("kind", "case", "what"),
    [
        (SwappedRows, "products_beside_dispatch", "tokens: expected the oracle's values, got others in 2 of"),
        (LastTokenMissing, "products_beside_combine", "relative errors"),
    ],
)
def test_nothing_is_timed_when_an_exchange_is_wrong(kind: type[EpPlugin], case: str, what: str) -> None:
    for found in values(run_ranks(RANKS, _with, kind)):
        for rank in range(RANKS):
            start = f"rank {rank}: {case} by ep_plugin: "
            assert any(sentence.startswith(start) and what in sentence for sentence in found["wrong"])


def test_a_cpu_is_refused_with_what_to_do_instead() -> None:
    done = CliRunner(env={"COLUMNS": "400"}).invoke(cli.main, ["overlap", "--backend", "cpu"])
    assert done.exit_code == 2
    assert "backend: expected cuda, since on a CPU the cores that multiply are those that communicate" in done.output
    assert "ep-bench allgather --backend cpu" in done.output


def test_what_cannot_be_gathered_is_refused() -> None:
    with pytest.raises(ValueError, match="size: expected a multiple of 8 bytes, an element for each rank, got 12"):
        OverlapSuite(backend="cuda", ranks=4, size=[12])


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
    text = cells(done.output)
    assert "| beside | nccl | 3,210 | 3,205 | 3,215 | | 350 | 2.50 × | 1.07 × |" in text
    assert "| beside | low-contention | 2,858 | 2,853 | 2,863 | | -2 | -0.01 × | 0.95 × |" in text
    assert "| products_alone | matmul | 2,860 | 2,855 | 2,865 | | | | |" in text
    assert "- nccl zero-cta is left out: RuntimeError: it fails" in done.output
    assert picture.read_bytes().startswith(b"\x89PNG")
