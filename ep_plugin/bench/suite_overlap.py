"""The suite `overlap`: what an all-gather costs that runs beside matrix products. GPUs only.

Two products are enqueued on one stream and the gather on another, of high priority as FSDP2's; both are released by one
event. A row's time is that of both streams together. The products alone are timed in turn with the rest, and
`excess_us` is what each way adds to them: nothing, if it were hidden altogether. Gathers are judged as they are timed:
beside the products.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from ep_plugin.bench import provenance
from ep_plugin.bench.launch import run_on_ranks
from ep_plugin.bench.product import Product
from ep_plugin.bench.results import everyones_wrong, result, row
from ep_plugin.bench.suite_collectives import GATHER, MIB, WARMUP, CollectiveSuite, Way, judge, ways_of
from ep_plugin.bench.timing import Run, clock_of, stream_of_its_own, time_in_turn
from ep_plugin.collectives import HierarchicalAllGather

SUITE = "overlap"
ALONE = "products_alone"
PRODUCTS = 2
SIZES = (256 * MIB, 512 * MIB)

# `product`, as often as it is to run, on the current stream, and beside it what returns the gather's result.
Beside = Callable[[Callable[[], None], Run], Run]


@dataclass(frozen=True, kw_only=True)
class OverlapSuite:
    """What one run measures. sizes: bytes of the gathered outputs."""

    ranks: int
    sizes: tuple[int, ...]
    iterations: int
    backend: str = "cuda"

    def __post_init__(self) -> None:
        _ = self.gathers  # refuses what cannot be gathered

    @property
    def gathers(self) -> CollectiveSuite:
        return CollectiveSuite(
            what=GATHER,
            backend=self.backend,
            ranks=self.ranks,
            nodes=1,
            sizes=self.sizes,
            iterations=self.iterations,
        )

    def command(self) -> str:
        words = [f"--backend {self.backend}", f"--ranks {self.ranks}", *(f"--size {size}" for size in self.sizes)]
        return " ".join(["ep-bench overlap", *words, f"--iterations {self.iterations}"])


def run(suite: OverlapSuite) -> dict[str, Any]:
    """Runs the suite on ranks of its own. Raises WrongResult."""
    code_hash = provenance.hash_sources()
    found = run_on_ranks(suite.ranks, suite.backend, measure, suite)
    return result(SUITE, suite.backend, suite.ranks, suite.command(), found, code_hash)


def measure(device: torch.device, suite: OverlapSuite) -> dict[str, Any]:
    """One rank's part. Collective."""
    with stream_of_its_own(device):
        return measure_beside(device, suite, Product(device), _on_two_streams(device))


def measure_beside(device: torch.device, suite: OverlapSuite, product: Product, beside: Beside) -> dict[str, Any]:
    """The rows, or what was wrong, the same on every rank. Collective."""
    left_out: list[str] = []

    def products() -> None:
        for _ in range(PRODUCTS):
            product()

    with HierarchicalAllGather(path="copy_engine") as ours:
        ways: dict[tuple[int, str], Way] = {}
        for size in suite.sizes:
            for way in ways_of(suite.gathers, device, size, {"ep_plugin": ours}, left_out):
                ways[size, way.impl] = replace(way, run=beside(products, way.run))
        wrong = _wrong(suite, product, ways)
        if not wrong:
            runs: dict[tuple[int, str], Run] = {(0, ALONE): products, **{name: ways[name].run for name in ways}}
            timings = time_in_turn(clock_of(device), runs, suite.iterations, WARMUP)
            wrong = _wrong(suite, product, ways)
        if wrong:
            return {"rows": [], "wrong": wrong}
    alone = timings[0, ALONE]
    rows = [row(ALONE, "matmul", alone, 0, None)]
    excess: dict[str, dict[str, float]] = {}
    for (size, impl), way in ways.items():
        timing, case = timings[size, impl], case_of(size)
        rows.append(row(case, impl, timing, suite.gathers.bytes_wire(size), way.sms))
        excess.setdefault(case, {})[impl] = round(timing.median_us - alone.median_us, 1)
    found = {"rows": rows, "wrong": [], "base_case": ALONE, "excess_us": excess}
    return found | {"left_out": list(dict.fromkeys(left_out))}


def case_of(size: int) -> str:
    return f"products_beside_{size // MIB}MiB" if size % MIB == 0 else f"products_beside_{size}B"


def _wrong(suite: OverlapSuite, product: Product, ways: dict[tuple[int, str], Way]) -> list[str]:
    """What is wrong with any gather on any rank, or with the product after them. Collective."""
    found = []
    for size in suite.sizes:
        found += judge(suite.gathers, size, [way for (its, _), way in ways.items() if its == size])
    return everyones_wrong(found + product.wrong())


def _on_two_streams(device: torch.device) -> Beside:
    stream = torch.cuda.Stream(device, priority=-1)

    def beside(product: Callable[[], None], gather: Run) -> Run:
        def run() -> object:
            current = torch.cuda.current_stream(device)
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                gathered = gather()
            product()
            current.wait_stream(stream)
            return gathered

        return run

    return beside
