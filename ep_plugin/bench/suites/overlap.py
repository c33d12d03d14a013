"""The suite `overlap`: the time that communication adds to matrix products that run beside it. GPUs only.

Two products are enqueued on one stream and the communication on another, of high priority as FSDP2's; one event
releases both. A row's time is that of both streams together. The products alone are timed in turn with the rest, and
`excess_us` is the time that each implementation adds to them: 0, if it were hidden altogether. Results are compared as
they are timed: beside the products.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import torch
import typer

from ep_plugin.bench.exchange.cases import Scene, problems, ways_of
from ep_plugin.bench.exchange.peers import ALL_TO_ALL
from ep_plugin.bench.exchange.sizes import CUDA_SIZES, ExchangeSuite
from ep_plugin.bench.exchange.specs import CACHED, COMBINE, DISPATCH, FLAT, SPLITS, Spec
from ep_plugin.bench.exchange.workload import Batch
from ep_plugin.bench.suite import BY_BACKEND, WARMUP, check_names, require_right, row
from ep_plugin.bench.suites.collectives import MIB, AllGatherSuite
from ep_plugin.bench.timing import Run, clock_of, time_in_turn
from ep_plugin.collectives import HierarchicalAllGather

ALONE = "products_alone"
GATHER = "allgather"
PRODUCTS = 2
SIZE = 8192
_COMPARED = 64  # rows and columns of the product

# Products and communication as one call, which returns the communication's result.
Beside = Callable[[Callable[[], None], Run], Run]


@dataclass(frozen=True, kw_only=True)
class OverlapSuite(ExchangeSuite):
    """The time that all-gather, dispatch and combine add to two matrix products beside them. GPUs only."""

    command_name: ClassVar[str] = "overlap"
    defaults: ClassVar[dict[str, dict[str, Any]]] = {
        "cuda": CUDA_SIZES | {"beside": [GATHER, DISPATCH, COMBINE], "size": [256 * MIB, 512 * MIB]}
    }

    beside: Annotated[list[str], typer.Option(help="allgather, dispatch, combine; repeatable. Default: all.")] = (
        BY_BACKEND
    )
    size: Annotated[list[int], typer.Option(help="Bytes gathered; repeatable. Default: 256 and 512 MiB.")] = BY_BACKEND

    def __post_init__(self) -> None:
        if self.backend == "cpu":
            raise ValueError(
                "backend: expected cuda, since on a CPU the cores that multiply are those that communicate (ep-bench "
                "allgather --backend cpu times the gather alone), got 'cpu'"
            )
        super().__post_init__()
        check_names("beside", (GATHER, DISPATCH, COMBINE), self.beside)
        self.gathers(self.backend)

    def gathers(self, backend: str) -> AllGatherSuite:
        return AllGatherSuite(backend=backend, ranks=self.ranks, size=self.size)

    def measure(self, device: torch.device) -> dict[str, Any]:
        return measure_beside(device, self, Product(device), _on_two_streams(device))


class Product:
    """A call multiplies two fixed matrices, ``[size, size]`` each, on the current stream, into one output."""

    def __init__(self, device: torch.device, dtype: torch.dtype = torch.bfloat16, size: int = SIZE) -> None:
        random = torch.Generator(device).manual_seed(0)
        self._a, self._b = (torch.randn(size, size, generator=random, device=device, dtype=dtype) for _ in range(2))
        self._out = torch.empty_like(self._a)

    def __call__(self) -> None:
        torch.mm(self._a, self._b, out=self._out)

    def wrong(self) -> list[str]:
        """A sentence when the latest product is wrong in some rows and columns, in float64. It is then forgotten."""
        some = slice(None, None, max(1, len(self._a) // _COMPARED))
        expected = self._a[some].double() @ self._b[:, some].double()
        error = float((self._out[some][:, some].double() - expected).abs().max() / expected.abs().max())
        self._out.fill_(torch.nan)
        return [] if error <= 1e-2 else [f"matmul: expected a relative error of at most 1e-2, got {error:g}"]


@dataclass(frozen=True, kw_only=True)
class Neighbour:
    """One communication beside the products. wrong: sentences on what is wrong with any of `ways`; collective."""

    case: str
    ways: list[Any]
    bytes_wire: dict[str, int]
    wrong: Callable[[], list[str]]


def measure_beside(device: torch.device, suite: OverlapSuite, product: Product, beside: Beside) -> dict[str, Any]:
    """The result of `OverlapSuite.measure`, with these products. Collective."""

    def products() -> None:
        for _ in range(PRODUCTS):
            product()

    def check() -> None:
        found = [sentence for neighbour in neighbours for sentence in neighbour.wrong() + product.wrong()]
        require_right(found)

    with ExitStack() as opened:
        neighbours = [
            *_gathers(device, suite, lambda run: beside(products, run), opened),
            *_exchanges(device, suite, lambda run: beside(products, run), opened),
        ]
        runs = {(each.case, way.impl): way.run for each in neighbours for way in each.ways}
        check()
        timings = time_in_turn(clock_of(device), {(ALONE, "matmul"): products, **runs}, suite.iterations, WARMUP)
        check()
    alone = timings[ALONE, "matmul"]
    rows = [row(ALONE, "matmul", alone, 0)]
    excess: dict[str, dict[str, float]] = {}
    for each in neighbours:
        for way in each.ways:
            timing = timings[each.case, way.impl]
            rows.append(row(each.case, way.impl, timing, each.bytes_wire[way.impl], way.sms))
            excess.setdefault(each.case, {})[way.impl] = round(timing.median_us - alone.median_us, 1)
    return {"rows": rows, "notes": [], "base_case": ALONE, "excess_us": excess}


def _gathers(
    device: torch.device, suite: OverlapSuite, beside: Callable[[Run], Run], opened: ExitStack
) -> list[Neighbour]:
    if GATHER not in suite.beside:
        return []
    gathers = suite.gathers("cuda" if device.type == "cuda" else "cpu")
    ours = {"ep_plugin": opened.enter_context(HierarchicalAllGather(path="copy_engine"))}
    found = []
    for size in suite.size:
        ways = [replace(way, run=beside(way.run)) for way in gathers.ways(device, size, ours)]
        case = f"products_beside_{size // MIB}MiB" if size % MIB == 0 else f"products_beside_{size}B"
        wire = {way.impl: gathers.bytes_wire(size) for way in ways}
        wrong = functools.partial(gathers.wrong, size, ways)
        found.append(Neighbour(case=case, ways=ways, bytes_wire=wire, wrong=wrong))
    return found


def _exchanges(
    device: torch.device, suite: OverlapSuite, beside: Callable[[Run], Run], opened: ExitStack
) -> list[Neighbour]:
    """Combine, and a dispatch over known routing, which does not wait on the host; on few SMs."""
    specs = [
        Spec(
            name=f"products_beside_{what}",
            what=CACHED if what == DISPATCH else what,
            dtype="bfloat16",
            layout=FLAT,
            workload=suite.workload,
            sms=SPLITS["12sm", FLAT],
        )
        for what in (DISPATCH, COMBINE)
        if what in suite.beside
    ]
    if not specs:
        return []
    scene = opened.enter_context(closing(Scene(specs[0], device, [ALL_TO_ALL])))
    found = []
    for spec in specs:
        ways = ways_of(scene, spec, lambda impl: _BesideProducts(impl, beside))
        wire = {way.impl: way.bytes_wire for way in ways}
        found.append(
            Neighbour(case=spec.name, ways=ways, bytes_wire=wire, wrong=functools.partial(problems, spec.name, ways))
        )
    return found


class _BesideProducts:
    """An implementation whose dispatches and combines run beside the products."""

    def __init__(self, impl: Any, beside: Callable[[Run], Run]) -> None:
        self._impl, self._beside, self.dedup, self.sms = impl, beside, impl.dedup, getattr(impl, "sms", None)

    def dispatch(self, batch: Batch, previous: Any = None) -> Any:
        return self._beside(lambda: self._impl.dispatch(batch, previous))()

    def combine(self, y: torch.Tensor, state: Any) -> Any:
        return self._beside(lambda: self._impl.combine(y, state))()


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
