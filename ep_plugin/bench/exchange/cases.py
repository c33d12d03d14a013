"""The implementations of a case, each with a check that compares it with plain torch.

Every comparison uses rows that no call has moved before, new routes unless the routing is given, and memory that holds
NaN. (A graph has memory of its own, in which only the result is set to NaN.) So the result of an earlier call is wrong.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

from ep_plugin.bench.exchange.oracle import expert_rows, poisoned, wrong_combine, wrong_dispatch
from ep_plugin.bench.exchange.peers import ALL_TO_ALL, RAIL, RailAllToAll, find_peers, name_in_results
from ep_plugin.bench.exchange.workload import (
    CACHED,
    COMBINE,
    DISPATCH,
    DTYPES,
    EXPERT_MAJOR,
    FLAT,
    ROUNDTRIP,
    SEND,
    Batch,
    Spec,
    Workload,
    batches,
    expert_factors,
    other_rows,
    rows_by_rank,
    rows_on_the_wire,
    rows_over_rails,
)
from ep_plugin.bench.suite import FLOOR, OURS, Row, Through, Way, backend_of, row, time_ways
from ep_plugin.bench.timing import Half, Run, Timing, clock_of
from ep_plugin.config import DispatchLayout
from ep_plugin.moe.communicator import MoECommunicator
from ep_plugin.moe.layout import DispatchOutput

ROOM = 1.125  # a capacity is this times the mean of the ranks' rows, or more if a rank receives more


class Scene:
    """A case's inputs and implementations, and the comparison with plain torch. Methods are collective.

    nodes: the number of nodes. Each has the same number of consecutive ranks.
    """

    def __init__(self, spec: Spec, device: torch.device, nodes: int = 1) -> None:
        self.spec, self.device, self.rank, self.nodes = spec, device, dist.get_rank(), nodes
        made = batches(spec.workload, DTYPES[spec.dtype], device)
        self.everyone = [replace(batch, quantize=spec.quantize) for batch in made]
        self.mine, self.ids = self.everyone[self.rank], [batch.ids for batch in made]
        self.factors = expert_factors(spec.workload, self.mine.x.dtype, device)
        self._turn = 0

    def bytes_wire(self, dedup: bool, two_levels: bool = False) -> int:
        rows = rows_on_the_wire(self.spec.workload, self.ids, dedup, self.nodes, two_levels)
        return self.spec.crossings * rows * self.mine.row_bytes

    def fresh(self, reroute: bool = True) -> list[Batch]:
        """Returns batches of all ranks that no call has moved before. reroute: they also have other routes."""
        self._turn += 1
        return other_rows(self.everyone, self._turn, reroute)

    def judge(
        self,
        found: Mapping[int, Any],
        everyone: list[Batch],
        layout: DispatchLayout = FLAT,
        exact_fp8: bool = True,
        multiplied: bool = True,
    ) -> str | None:
        """Compares results for the batches `everyone` with plain torch. Returns the first difference in words, or None.

        found: for each rank of this process, the rows that a dispatch has brought, or the sums `[T, H]` of its tokens.
        layout: the layout of the rows. exact_fp8: FP8 rows are rounded as torch rounds them. multiplied: experts have
            multiplied their rows by their factors; False: by 1.
        """
        spec, factors = self.spec, self.factors if multiplied else torch.ones_like(self.factors)
        for rank, got in found.items():
            if isinstance(got, DispatchOutput):
                problem = wrong_dispatch(got, everyone, spec.workload, layout, rank, exact_fp8)
            else:
                problem = wrong_combine(got, everyone[rank], factors, roundings=4 if self.nodes == 1 else 5)
            if problem:
                return problem
        return None

    def ways(self, peers: list[str], opened: contextlib.ExitStack) -> list[Way]:
        """Makes the implementations of ep_plugin and of the peers. peers: names as `find_peers` takes them. `opened`
        closes ep_plugin's objects."""
        spec, device = self.spec, self.device
        most = int(rows_by_rank(spec.workload, self.ids, dedup=False).sum(0).max())
        capacity = max(most, int(ROOM * self.ids[0].numel())) if spec.capacity else None
        ours = EpPlugin(spec, device, capacity)
        opened.enter_context(contextlib.closing(ours))
        sms = None
        if device.type == "cuda" and spec.layout is not EXPERT_MAJOR:
            sms = sms_of(ours.comm, spec.what, spec.workload, self.mine.row_bytes, spec.quantize)
        wire = self.bytes_wire(spec.dedup, two_levels=True)
        ways = [replace(self._way(OURS, ours, spec.what), bytes_wire=wire, sms=sms, holders=[ours.comm])]
        for peer in peers if spec.peers else []:
            for kind in find_peers(peer):
                if not serves(kind, spec):
                    continue
                impl, name = kind(spec.workload, device), name_in_results(peer, backend_of(device))
                if peer == ALL_TO_ALL and spec.layout is EXPERT_MAJOR and spec.what == DISPATCH:
                    ways.append(self._way(f"{name}, routing known", impl, CACHED))
                ways.append(self._way(name, impl, spec.what))
        if RAIL in peers and spec.peers:
            ways.append(self._rail_way(name_in_results(RAIL, backend_of(device)), wire))
        return ways

    def _rail_way(self, name: str, bytes_wire: int) -> Way:
        """Makes an all-to-all between nodes that sends as many bytes as ep_plugin's rows, ids and weights have."""
        spec, K = self.spec, self.spec.workload.topk
        beside = 4 * K * (2 if spec.what != CACHED else 1)  # float32 weights, and int32 ids if they are new
        there = 0 if spec.what == COMBINE else self.mine.row_bytes + beside
        back = self.mine.row_bytes if spec.what in (COMBINE, ROUNDTRIP) else 0
        rail = RailAllToAll(rows_over_rails(spec.workload, self.ids, self.nodes), there, back, self.device)
        return Way(case=spec.name, impl=name, run=rail, check=rail.check, bytes_wire=bytes_wire)

    def _way(self, name: str, impl: Any, what: str) -> Way:
        """Makes the timed call and the check of one implementation.

        In a timed round trip experts return their rows unchanged. In a compared round trip they multiply them. A graph
        contains its experts, so they return their rows unchanged in both.
        """
        spec = self.spec
        # The timed call keeps this state. Each check makes a state of its own.
        given: list[Any] = [self.mine, impl.dispatch(self.mine)[1] if what == CACHED else None]
        method = getattr(impl, ("start_" if spec.half else "") + (COMBINE if what == COMBINE else DISPATCH))

        def round_trip(batch: Batch, multiply: bool = False) -> torch.Tensor:
            out, state = impl.dispatch(batch)
            return impl.combine(expert_rows(self.factors, out, self.rank) if multiply else out.tokens, state)

        def call() -> Any:
            return method(*given)

        run: Run = Half(call, spec.half == SEND) if spec.half else call
        judged = run
        if spec.graph:
            graph = Recorded(round_trip, self.mine)
            run, judged = graph, lambda: graph.of(given[0])
        elif what == ROUNDTRIP:
            run, judged = lambda: round_trip(given[0]), lambda: round_trip(given[0], multiply=True)

        def check(through: Through) -> str | None:
            everyone = self.fresh(reroute=what != CACHED)
            given[0] = everyone[self.rank]
            with poisoned():
                if what == COMBINE:
                    out, state = impl.dispatch(given[0])
                    given[:] = expert_rows(self.factors, out, self.rank), state
                got = through(judged)
            if what in (DISPATCH, CACHED):
                got = impl.in_order(*got) if hasattr(impl, "in_order") else got[0]
            exact_fp8 = getattr(impl, "exact_fp8", True)
            return self.judge({self.rank: got}, everyone, impl.layout, exact_fp8, multiplied=not spec.graph)

        return Way(case=spec.name, impl=name, run=run, check=check, bytes_wire=self.bytes_wire(impl.dedup))


def serves(kind: Any, spec: Spec) -> bool:
    """Returns whether the peer `kind` takes part in a case. FLAT peers bring rows in the order of EXPERT_MAJOR."""
    if spec.dtype not in getattr(kind, "dtypes", DTYPES):
        return False
    return kind.layout is spec.layout or (spec.layout is EXPERT_MAJOR and kind.layout is FLAT)


def time_cases(
    device: torch.device,
    specs: list[Spec],
    peers: list[str],
    iterations: int,
    rate: float | None = None,
    nodes: int = 1,
    calls: int = 1,
) -> list[Row]:
    """Compares and times the cases. Collective. Raises WrongResult when an implementation disagrees with the oracle.

    peers: names as `find_peers` takes them. rate: GB/s of the floors; None leaves the floors out. nodes: see `Scene`.
    calls: the number of calls in a row, see `clock_of`.
    """
    clock, rows = clock_of(device, calls), list[Row]()
    for spec in tqdm(specs, unit="case", disable=dist.get_rank() != 0, leave=False):
        with contextlib.ExitStack() as opened:
            scene = Scene(spec, device, nodes=nodes)
            rows += time_ways(clock, scene.ways(peers, opened), iterations)
            if rate is not None:
                rows.append(floor_row(spec.name, scene.bytes_wire(dedup=True), rate))
    return rows


def floor_row(case: str, bytes_wire: int, rate_gb_s: float) -> Row:
    """Returns the time of the rows that must cross, each once per rank, at the best rate of SM stores of this run."""
    us = max(0.1, round(bytes_wire / rate_gb_s / 1e3, 1))
    return row(case, FLOOR, Timing(median_us=us, p10_us=us, p90_us=us), bytes_wire)


class EpPlugin:
    """Dispatch and combine of one communicator, whole or in halves. Made collectively; the caller closes it.

    capacity: rows of every dispatch's output, so that the host does not wait. None: the output has as many rows as
    arrive.
    """

    dedup = True

    def __init__(self, spec: Spec, device: torch.device, capacity: int | None = None) -> None:
        self.comm = MoECommunicator(None, spec.config, device)
        self.layout, self.close, self._capacity = spec.layout, self.comm.close, capacity

    def dispatch(self, batch: Batch, previous: Any = None) -> tuple[DispatchOutput, Any]:
        return self._made(batch, *self.comm.dispatch(*self._given(batch, previous)))

    def combine(self, y: torch.Tensor, state: Any) -> torch.Tensor:
        weights = None if self.layout is DispatchLayout.TOKEN_MAJOR else state[1]  # experts have weighted these rows
        return self.comm.combine(y, state[0], weights=weights)

    def start_dispatch(self, batch: Batch, previous: Any = None) -> Callable[[], tuple[DispatchOutput, Any]]:
        """Runs the send half. Returns a call that runs the receive half."""
        work = self.comm.dispatch_async(*self._given(batch, previous))
        return lambda: self._made(batch, *work.wait())

    def start_combine(self, y: torch.Tensor, state: Any) -> Callable[[], torch.Tensor]:
        return self.comm.combine_async(y, state[0], weights=state[1]).wait

    def _given(self, batch: Batch, previous: Any) -> tuple[Any, ...]:
        weights = None if self.layout is EXPERT_MAJOR else batch.weights  # in mode="ll" combine takes them
        handle, quantize = None if previous is None else previous[0], "e4m3" if batch.quantize else None
        return batch.x, batch.ids, weights, batch.scales, handle, self._capacity, quantize

    def _made(self, batch: Batch, out: DispatchOutput, handle: Any) -> tuple[DispatchOutput, Any]:
        return out, (handle, batch.weights if out.weights is None else out.weights)


def sms_of(comm: MoECommunicator, what: str, workload: Workload, row_bytes: int, quantize: bool = False) -> int:
    """Returns the SMs of an operation's kernels that move rows of `row_bytes`. For a round trip: of the operation with
    more SMs.

    It does not count the kernels of plan and notify, which run earlier, for some microseconds.
    """
    dispatch = sum(comm.engine.dispatch_sms(workload.tokens, row_bytes, workload.topk, quantize))
    combine = sum(comm.engine.combine_sms(workload.tokens, row_bytes, workload.topk))
    return {COMBINE: combine, ROUNDTRIP: max(dispatch, combine)}.get(what, dispatch)


class Recorded:
    """A CUDA graph of `step`, with a batch of its own that starts as a copy of `batch`. A call replays the graph.

    Every call returns the same memory. The constructor runs `step` once, so it is collective when `step` is.
    """

    def __init__(self, step: Callable[[Batch], torch.Tensor], batch: Batch) -> None:
        self._batch = batch.clone()
        step(self._batch)
        self._capture(step)

    def _capture(self, step: Callable[[Batch], torch.Tensor]) -> None:
        self._graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        # NCCL's watchdog thread queries events meanwhile. That would end a capture that covers all threads.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._result = step(self._batch)

    def __call__(self) -> torch.Tensor:
        self._replay()
        return self._result

    def of(self, batch: Batch) -> torch.Tensor:
        """Replays the graph with the rows, ids and weights of `batch`, into a result that held NaN. Later calls use
        the same rows, ids and weights."""
        self._batch.copy_(batch)
        self._result.fill_(torch.nan)
        return self()

    def _replay(self) -> None:
        self._graph.replay()
