"""The suite `overlap` times what communication adds to matrix products that run beside it. GPUs only.

Two products are enqueued on one stream. The communication is enqueued on another stream, of high priority like
FSDP2's. One event releases both. The time of a row is that of both streams together. The products alone are timed in
turn with the rest, so a report shows the time that each implementation adds to them. It would be 0 for communication
that is hidden completely. Results are also compared while the products run.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import torch
import typer

from ep_plugin.bench.exchange.cases import Scene
from ep_plugin.bench.exchange.peers import ALL_TO_ALL
from ep_plugin.bench.exchange.workload import CACHED, COMBINE, CUDA_SIZES, SENDS_ON_12, ExchangeSuite, Spec
from ep_plugin.bench.suite import BY_BACKEND, OURS, Through, Way, time_ways
from ep_plugin.bench.suites.collectives import MIB, RING, AllGatherSuite, SendReceiveSuite
from ep_plugin.bench.timing import Run, clock_of
from ep_plugin.collectives import HierarchicalAllGather
from ep_plugin.collectives.send_receive import SendReceive

ALONE = "products_alone"
PRODUCTS = 2
SIZE = 8192
_COMPARED = 64  # this many rows and columns of the product are compared

Beside = Callable[[Callable[[], None], Run], Run]  # makes one call of both, which returns the communication's result


@dataclass(frozen=True, kw_only=True)
class OverlapSuite(ExchangeSuite):
    """Times what all-gather, messages, dispatch and combine add to two products beside them. GPUs only."""

    command_name = "overlap"
    defaults: ClassVar = {"cuda": CUDA_SIZES | {"size": [256 * MIB, 512 * MIB]}}

    size: Annotated[
        list[int],
        typer.Option(help="Bytes gathered, and of a message round a ring; repeatable. Default: 256 and 512 MiB."),
    ] = BY_BACKEND

    def __post_init__(self) -> None:
        if self.backend == "cpu":
            raise ValueError(
                "backend: expected cuda, since on a CPU the cores that multiply are those that communicate (ep-bench "
                "allgather --backend cpu times the gather alone), got 'cpu'"
            )
        super().__post_init__()
        self.gathers(self.backend)

    def gathers(self, backend: str) -> AllGatherSuite:
        return AllGatherSuite(backend=backend, ranks=self.ranks, size=self.size)

    def measure(self, device: torch.device) -> dict[str, Any]:
        product, beside = Product(device), _on_two_streams(device)

        def products() -> None:
            for _ in range(PRODUCTS):
                product()

        def check_products(_: Through) -> str | None:
            products()
            return product.wrong()

        def beside_products(way: Way) -> Way:
            def check(_: Through) -> str | None:
                problem = way.check(lambda run: beside(products, run)())
                return product.wrong() or problem

            return replace(way, run=beside(products, way.run), check=check)

        ways = list[Way]()
        with ExitStack() as opened:
            gather = opened.enter_context(HierarchicalAllGather(path="copy_engine"))
            messages = opened.enter_context(SendReceive(device=device))
            gathers = self.gathers(device.type)
            ring = SendReceiveSuite(backend=device.type, ranks=self.ranks, size=self.size, pattern=[RING])
            for size in self.size:
                case = f"products_beside_{size // MIB}MiB" if size % MIB == 0 else f"products_beside_{size}B"
                ways += [replace(way, case=case) for way in gathers.ways(device, size, {OURS: gather})]
                ways += [replace(way, case=f"{case}_ring") for way in ring.ways(device, RING, size, messages)]
            # The routing of the dispatch is known, so the host does not wait.
            for case, what in (("products_beside_dispatch", CACHED), ("products_beside_combine", COMBINE)):
                spec = Spec(name=case, what=what, dtype="bfloat16", workload=self.workload, sms=SENDS_ON_12)
                ways += Scene(spec, device).ways([ALL_TO_ALL], opened)
            alone = Way(case=ALONE, impl="matmul", run=products, check=check_products)
            rows = time_ways(clock_of(device), [alone, *map(beside_products, ways)], self.iterations)
        return {"rows": rows, "notes": [], "base_case": ALONE}


class Product:
    """Multiplies two fixed matrices, ``[size, size]`` each, on the current stream, into one output at each call."""

    def __init__(self, device: torch.device, dtype: torch.dtype = torch.bfloat16, size: int = SIZE) -> None:
        random = torch.Generator(device).manual_seed(0)
        self._a, self._b = (torch.randn(size, size, generator=random, device=device, dtype=dtype) for _ in range(2))
        self._out = torch.empty_like(self._a)

    def __call__(self) -> None:
        torch.mm(self._a, self._b, out=self._out)

    def wrong(self) -> str | None:
        """Returns a sentence if some rows and columns of the latest product differ from float64. Erases the product."""
        some = slice(None, None, max(1, len(self._a) // _COMPARED))
        expected = self._a[some].double() @ self._b[:, some].double()
        error = float((self._out[some][:, some].double() - expected).abs().max() / expected.abs().max())
        self._out.fill_(torch.nan)
        return None if error <= 1e-2 else f"expected a product with a relative error of at most 1e-2, got {error:g}"


def _on_two_streams(device: torch.device) -> Beside:
    stream = torch.cuda.Stream(device, priority=-1)

    def beside(products: Callable[[], None], communicate: Run) -> Run:
        def run() -> object:
            current = torch.cuda.current_stream(device)
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                result = communicate()
            products()
            current.wait_stream(stream)
            return result

        return run

    return beside
