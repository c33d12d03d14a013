"""The suite `beside`: how much longer a matrix product takes beside dispatch and combine, or beside a kernel that only
holds SMs. GPUs only.

Whatever runs beside it is enqueued so often that it outlasts the product. Product and neighbour are enqueued behind one
gate, so that no host decides when they meet. Before each timing the neighbour's own results are judged, with rows that
no call has moved before, and the product that was made beside it.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from ep_plugin import _C
from ep_plugin.bench import provenance
from ep_plugin.bench.cases import Peers, Scene, judge_combine, judge_dispatch
from ep_plugin.bench.launch import run_on_ranks
from ep_plugin.bench.ours import EpPlugin
from ep_plugin.bench.peers import Received
from ep_plugin.bench.product import Product
from ep_plugin.bench.results import Row, everyones_wrong, result, row
from ep_plugin.bench.specs import FLAT, SPLITS, TOKEN_MAJOR, Sms
from ep_plugin.bench.timing import Timing, clock_of, summarise, time_in_turn
from ep_plugin.bench.workload import Batch, Workload
from ep_plugin.config import DispatchLayout

SUITE = "beside"
ALONE = "matmul_alone"
HELD = (12, 24, 48, 64)
BUDGETS = (12, 24, 48)  # of expand and of add, beside 12 for the other half
_GATE_CYCLES = 10_000_000  # some 5 ms: the hosts enqueue everything meanwhile
_SETTLE_CYCLES = 100_000  # some 50 µs: the neighbour has started when the product does
_MOST_NS = 50_000_000  # that SMs are held for when nobody stops it


@dataclass(frozen=True, kw_only=True)
class BesideSuite:
    workload: Workload
    iterations: int

    def __post_init__(self) -> None:
        if self.iterations < 1:
            raise ValueError(f"iterations: expected at least 1, got {self.iterations}")

    def command(self) -> str:
        sizes = ("ranks", "tokens", "hidden", "topk", "experts")
        words = [f"--{name} {getattr(self.workload, name)}" for name in sizes]
        return " ".join(["ep-bench beside", *words, f"--iterations {self.iterations}"])


@dataclass(frozen=True, kw_only=True)
class Neighbour:
    """What runs beside the product. enqueue: on the current stream; many times if `repeats`; no host waits.

    judge: does the same to other rows and says what is wrong with the result, None when nothing is; collective.
    """

    case: str
    sms: int | None = None
    enqueue: Callable[[], object]
    judge: Callable[[], str | None] = lambda: None
    repeats: bool = True


def run(suite: BesideSuite) -> dict[str, Any]:
    """Runs the suite on ranks of its own. Raises WrongResult."""
    code_hash = provenance.hash_sources()
    found = run_on_ranks(suite.workload.ranks, "cuda", measure, suite)
    return result(SUITE, "cuda", suite.workload.ranks, suite.command(), found, code_hash)


def measure(device: torch.device, suite: BesideSuite) -> dict[str, Any]:
    """One rank's part, the same on every rank. Collective."""
    stage, rows = Stage(device), list[Row]()
    with contextlib.closing(_neighbours(stage, suite.workload, device)) as neighbours:
        for neighbour in neighbours:
            wrong = _wrong(neighbour.case, neighbour.judge())
            count = 1
            if neighbour.repeats and not wrong:
                count = stage.repetitions(neighbour, rows[0]["median_us"])
            wrong = wrong or _wrong(neighbour.case, stage.wrong(neighbour, count))
            if wrong:
                return {"rows": [], "wrong": wrong}
            timing = stage.time(neighbour, count, suite.iterations)
            rows.append(row(neighbour.case, "matmul", timing, 0, neighbour.sms))
    return {"rows": rows, "wrong": [], "base_case": ALONE}


def _wrong(case: str, problem: str | None) -> list[str]:
    """The problem of any rank. Collective."""
    return everyones_wrong([f"{case}: {problem}"] if problem else [])


def _neighbours(stage: Stage, workload: Workload, device: torch.device) -> Generator[Neighbour, None, None]:
    """Nothing, then SMs that are held, then dispatches and combines, whose memory goes before the next one's comes."""
    yield Neighbour(case=ALONE, enqueue=lambda: None, repeats=False)
    for held in HELD:
        enqueue = functools.partial(stage.hold, held)
        yield Neighbour(case=f"matmul_beside_hold_{held}sm", sms=held, enqueue=enqueue, repeats=False)
    with contextlib.closing(Bounded(workload, device, TOKEN_MAJOR, SPLITS["12sm", TOKEN_MAJOR])) as ours:
        yield ours.dispatching("dispatch_token_major_12sm")
    for budget in BUDGETS:
        sms = Sms(dispatch=12, expand=budget, combine=budget, add=12)
        with contextlib.closing(Bounded(workload, device, FLAT, sms)) as ours:
            yield ours.dispatching(f"dispatch_flat_expand{budget}")
            yield ours.combining(f"combine_flat_push{budget}")


class Bounded:
    """A communicator as it runs beside the product: with room for as many rows as the busiest rank receives, and with
    dispatches that are asynchronous. Rows that it has room for and that do not come are cut off."""

    dedup = True

    def __init__(self, workload: Workload, device: torch.device, layout: DispatchLayout, sms: Sms) -> None:
        self._scene = Scene(workload, "bfloat16", layout, device, Peers())
        self._room = self._scene.most_rows if layout is FLAT else workload.ranks * workload.tokens
        self._ours = EpPlugin(workload, device, layout, sms, capacity=self._room)

    def dispatching(self, name: str) -> Neighbour:
        """Dispatches of the same rows."""
        self.dispatch(self._scene.mine)
        return Neighbour(
            case=f"matmul_beside_{name}",
            sms=self._ours.sms("dispatch", self._scene.mine.row_bytes),
            enqueue=functools.partial(self._ours.dispatch_async, self._scene.mine),
            judge=functools.partial(judge_dispatch, self._scene, self),
        )

    def combining(self, name: str) -> Neighbour:
        """Combines of the rows that one dispatch brought."""
        received = self._ours.dispatch_async(self._scene.mine)
        self._ours.combine(received.tokens, received.state)
        return Neighbour(
            case=f"matmul_beside_{name}",
            sms=self._ours.sms("combine", self._scene.mine.row_bytes),
            enqueue=functools.partial(self._ours.combine, received.tokens, received.state),
            judge=functools.partial(judge_combine, self._scene, self),
        )

    def dispatch(self, batch: Batch, previous: object = None) -> Received:
        received, rows = self._ours.dispatch_async(batch), self._scene.rows
        parts = {name: getattr(received, name) for name in ("tokens", "ids", "weights", "row_experts")}
        return replace(received, **{name: part[:rows] for name, part in parts.items() if part is not None})

    def combine(self, y: torch.Tensor, state: object) -> torch.Tensor:
        whole = y.new_empty((self._room, y.shape[1]))
        whole[: len(y)] = y
        return self._ours.combine(whole, state)

    def close(self) -> None:
        self._ours.close()


class Stage:
    """The product, its stream, and the stream of whatever runs beside it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.product = Product(device)
        self._stop = torch.zeros(1, dtype=torch.int64, device=device)
        self._token = torch.zeros(1, device=device)
        self._gate, self._multiplying, self._beside = (torch.cuda.Stream(device) for _ in range(3))
        torch.cuda.synchronize(device)

    def hold(self, sms: int) -> None:
        stream = torch.cuda.current_stream(self._device).cuda_stream
        _C.hold(_C.HoldArgs(nanoseconds=_MOST_NS, num_sms=sms, stop=self._stop.data_ptr(), stream=stream))

    def wrong(self, neighbour: Neighbour, count: int) -> str | None:
        """What is wrong with a product beside `count` runs of the neighbour. Collective."""
        self.product.forget()
        self._sample(neighbour, count)
        return "; ".join(self.product.wrong()) or None

    def time(self, neighbour: Neighbour, count: int, iterations: int) -> Timing:
        """The product's time beside `count` runs of the neighbour, on the slowest rank. Collective."""
        samples = [self._sample(neighbour, count) for _ in range(3 + iterations)][3:]
        everyone: list[list[tuple[float, float]]] = [[]] * dist.get_world_size()
        dist.all_gather_object(everyone, samples)
        return summarise(everyone)

    def repetitions(self, neighbour: Neighbour, product_us: float) -> int:
        """How often the neighbour must run to outlast a product that it doubles; the same on every rank."""
        timing = time_in_turn(clock_of(self._device), {neighbour.case: neighbour.enqueue}, 5, 2)[neighbour.case]
        return math.ceil(2 * product_us / timing.median_us) + 1

    def _sample(self, neighbour: Neighbour, count: int) -> tuple[float, float]:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(self._device)
        self._stop.zero_()
        self._gate.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._gate):
            torch.cuda._sleep(_GATE_CYCLES)
            dist.all_reduce(self._token)
        self._multiplying.wait_stream(self._gate)
        self._beside.wait_stream(self._gate)
        with torch.cuda.stream(self._beside):
            for _ in range(count):
                neighbour.enqueue()
        with torch.cuda.stream(self._multiplying):
            torch.cuda._sleep(_SETTLE_CYCLES)
            start.record()
            self.product()
            end.record()
            self._stop.fill_(1)
        torch.cuda.synchronize(self._device)
        return 0.0, 1e3 * start.elapsed_time(end)
