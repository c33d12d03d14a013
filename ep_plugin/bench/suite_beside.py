"""The suite `beside`: how much longer a matrix product takes beside dispatch and combine, or beside a kernel that only
holds SMs. GPUs only.

Whatever runs beside it is enqueued so often that it outlasts the product. Product and neighbour are enqueued behind one
gate, so that no host decides when they meet. The product is checked before it is timed.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ep_plugin import _C
from ep_plugin.bench import provenance
from ep_plugin.bench.launch import run_on_ranks
from ep_plugin.bench.ours import EpPlugin
from ep_plugin.bench.product import Product
from ep_plugin.bench.results import Row, everyones_wrong, result, row
from ep_plugin.bench.specs import FLAT, SPLITS, TOKEN_MAJOR, Sms
from ep_plugin.bench.timing import Timing, clock_of, summarise, time_in_turn
from ep_plugin.bench.workload import Batch, Workload, batches, rows_received

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
    """What runs beside the product. enqueue: on the current stream; many times if `repeats`; no host waits."""

    name: str
    sms: int | None
    enqueue: Callable[[], object]
    repeats: bool = True


_Maker = Callable[[Workload, torch.device, contextlib.ExitStack], list[Neighbour]]


def run(suite: BesideSuite) -> dict[str, Any]:
    """Runs the suite on ranks of its own. Raises WrongResult."""
    code_hash = provenance.hash_sources()
    found = run_on_ranks(suite.workload.ranks, "cuda", measure, suite)
    return result(SUITE, "cuda", suite.workload.ranks, suite.command(), found, code_hash)


def measure(device: torch.device, suite: BesideSuite) -> dict[str, Any]:
    """One rank's part, the same on every rank. Collective."""
    stage = Stage(device)
    stage.product()
    wrong = everyones_wrong(stage.product.wrong())
    if wrong:
        return {"rows": [], "wrong": wrong}
    alone = stage.time(None, suite.iterations)
    rows = [row(ALONE, "matmul", alone, 0, None)]
    for sms in HELD:
        neighbour = Neighbour(name=f"hold_{sms}sm", sms=sms, enqueue=functools.partial(stage.hold, sms), repeats=False)
        rows.append(_row(neighbour, stage.time(neighbour, suite.iterations)))
    makers: list[_Maker] = [_token_major, *(functools.partial(_flat, budget) for budget in BUDGETS)]
    for make in makers:
        with contextlib.ExitStack() as stack:
            for neighbour in make(suite.workload, device, stack):
                rows.append(_row(neighbour, stage.time(neighbour, suite.iterations, alone.median_us)))
    return {"rows": rows, "wrong": [], "base_case": ALONE}


def _row(neighbour: Neighbour, timing: Timing) -> Row:
    return row(f"matmul_beside_{neighbour.name}", "matmul", timing, 0, neighbour.sms)


def _token_major(workload: Workload, device: torch.device, stack: contextlib.ExitStack) -> list[Neighbour]:
    batch, _ = _inputs(workload, device)
    room = workload.ranks * workload.tokens
    ours = stack.enter_context(
        contextlib.closing(EpPlugin(workload, device, TOKEN_MAJOR, SPLITS["12sm", TOKEN_MAJOR], capacity=room))
    )
    ours.dispatch(batch)
    return [
        Neighbour(
            name="dispatch_token_major_12sm",
            sms=ours.sms("dispatch", batch.row_bytes),
            enqueue=lambda: ours.comm.dispatch_async(batch.x, batch.ids, batch.weights, capacity=room).wait(),
        )
    ]


def _flat(budget: int, workload: Workload, device: torch.device, stack: contextlib.ExitStack) -> list[Neighbour]:
    batch, room = _inputs(workload, device)
    sms = Sms(dispatch=12, expand=budget, combine=budget, add=12)
    ours = stack.enter_context(contextlib.closing(EpPlugin(workload, device, FLAT, sms, capacity=room)))
    received = ours.dispatch(batch)
    y, state = received.tokens, received.state
    ours.combine(y, state)
    return [
        Neighbour(
            name=f"dispatch_flat_expand{budget}",
            sms=ours.sms("dispatch", batch.row_bytes),
            enqueue=lambda: ours.comm.dispatch_async(batch.x, batch.ids, batch.weights, capacity=room).wait(),
        ),
        Neighbour(
            name=f"combine_flat_push{budget}",
            sms=ours.sms("combine", batch.row_bytes),
            enqueue=lambda: ours.combine(y, state),
        ),
    ]


def _inputs(workload: Workload, device: torch.device) -> tuple[Batch, int]:
    """This rank's tokens, and FLAT rows that suffice on every rank."""
    everyone = batches(workload, torch.bfloat16, device)
    return everyone[dist.get_rank()], max(rows_received(workload, [batch.ids for batch in everyone]))


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

    def time(self, neighbour: Neighbour | None, iterations: int, product_us: float = 0.0) -> Timing:
        """The product's time beside `neighbour`, on the slowest rank. Collective."""
        count = 0
        if neighbour is not None:
            count = self._repetitions(neighbour, product_us) if neighbour.repeats else 1
        samples = [self._sample(neighbour, count) for _ in range(3 + iterations)][3:]
        everyone: list[list[tuple[float, float]]] = [[]] * dist.get_world_size()
        dist.all_gather_object(everyone, samples)
        return summarise(everyone)

    def _repetitions(self, neighbour: Neighbour, product_us: float) -> int:
        """How often the neighbour must run to outlast a product that it doubles; the same on every rank."""
        timing = time_in_turn(clock_of(self._device), {neighbour.name: neighbour.enqueue}, 5, 2)[neighbour.name]
        return math.ceil(2 * product_us / timing.median_us) + 1

    def _sample(self, neighbour: Neighbour | None, count: int) -> tuple[float, float]:
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
                assert neighbour is not None
                neighbour.enqueue()
        with torch.cuda.stream(self._multiplying):
            torch.cuda._sleep(_SETTLE_CYCLES)
            start.record()
            self.product()
            end.record()
            self._stop.fill_(1)
        torch.cuda.synchronize(self._device)
        return 0.0, 1e3 * start.elapsed_time(end)
