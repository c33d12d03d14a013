"""The implementations of a case, each with the check that compares it with plain torch.

Every comparison uses rows (and routes, where those are not given) that no call has moved before, and memory that holds
NaN. (A graph's memory is its own: there the result holds NaN.) So results of an earlier call are wrong.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

from ep_plugin.bench.exchange.peers import PLAIN, RAIL, find_peers
from ep_plugin.bench.exchange.rail import RailAllToAll
from ep_plugin.bench.exchange.workload import (
    CACHED,
    COMBINE,
    DISPATCH,
    DTYPES,
    ROUNDTRIP,
    Batch,
    Sms,
    Spec,
    Workload,
    batches,
    expert_factors,
    other_rows,
    rows_by_rank,
    rows_on_the_wire,
    rows_over_rails,
)
from ep_plugin.bench.suite import FLOOR, OURS, Row, Way, backend_of, row, time_ways
from ep_plugin.bench.timing import Run, Timing, clock_of
from ep_plugin.config import DispatchLayout, MoECommunicatorConfig
from ep_plugin.moe.communicator import MoECommunicator
from ep_plugin.moe.layout import DispatchOutput
from ep_plugin.moe.reference import reference_dispatch, reference_quantize

ROOM = 1.125  # of the mean rows per rank: the capacity of a dispatch that has one, unless a rank receives more

Check = Callable[[], str | None]
Step = Callable[[Batch], torch.Tensor]


class Scene:
    """A case's inputs and implementations, and the comparison with plain torch. Methods are collective.

    wrap: is applied to each call of an implementation, timed or compared. nodes: of as many consecutive ranks each.
    """

    def __init__(
        self, spec: Spec, device: torch.device, wrap: Callable[[Run], Run] = lambda run: run, nodes: int = 1
    ) -> None:
        self.spec, self.device, self.wrap, self.rank, self.nodes = spec, device, wrap, dist.get_rank(), nodes
        made = batches(spec.workload, DTYPES[spec.dtype], device)
        self._everyone = [replace(batch, quantize=spec.quantize) for batch in made]
        self.mine, self.ids = self._everyone[self.rank], [batch.ids for batch in made]
        self.factors = expert_factors(spec.workload, self.mine.x.dtype, device)
        self._turn = 0

    def bytes_wire(self, dedup: bool, two_levels: bool = False) -> int:
        rows = rows_on_the_wire(self.spec.workload, self.ids, dedup, self.nodes, two_levels)
        return self.spec.crossings * rows * self.mine.row_bytes

    def ways(self, peers: list[str], opened: contextlib.ExitStack) -> list[Way]:
        """ep_plugin and the peers, which are named as `find_peers` takes them. `opened` closes ep_plugin's."""
        spec, device = self.spec, self.device
        most = int(rows_by_rank(spec.workload, self.ids, dedup=False).sum(0).max())
        capacity = max(most, int(ROOM * self.ids[0].numel())) if spec.capacity else None
        ours = EpPlugin(spec.workload, device, spec.layout, spec.sms, capacity)
        opened.enter_context(contextlib.closing(ours))
        impls: dict[str, Any] = {OURS: ours}
        backend = backend_of(device)
        for peer in peers if spec.peers else []:
            for kind in find_peers(peer):
                if kind.layout is spec.layout:
                    impls[f"{backend}_{peer}" if peer in PLAIN else kind.__name__] = kind(spec.workload, device)
        sms = {}
        if device.type == "cuda":
            sms = {OURS: sms_of(ours.comm, spec.what, spec.workload, self.mine.row_bytes, spec.quantize)}
        ways = []
        for name, impl in impls.items():
            run, check = self._calls(impl)
            wire = self.bytes_wire(impl.dedup, two_levels=impl is ours)
            ways.append(Way(case=spec.name, impl=name, run=run, check=check, bytes_wire=wire, sms=sms.get(name)))
        if RAIL in peers and spec.peers:
            ways.append(self._rail_way(f"{backend}_{RAIL}"))
        return ways

    def _rail_way(self, name: str) -> Way:
        """The all-to-all between nodes of the bytes of ep_plugin's rows, ids and weights."""
        spec, K = self.spec, self.spec.workload.topk
        beside = 4 * K * (2 if spec.what != CACHED else 1)  # float32 weights, and int32 ids where they are new
        there = 0 if spec.what == COMBINE else self.mine.row_bytes + beside
        back = self.mine.row_bytes if spec.what in (COMBINE, ROUNDTRIP) else 0
        rail = RailAllToAll(rows_over_rails(spec.workload, self.ids, self.nodes), there, back, self.device)
        wire = self.bytes_wire(dedup=True, two_levels=True)
        return Way(case=spec.name, impl=name, run=self.wrap(rail), check=rail.check, bytes_wire=wire)

    def _calls(self, impl: Any) -> tuple[Run, Check]:
        """The call that is timed, and its check.

        Experts return their rows in the call that is timed, and multiply them in its check. A graph contains its
        experts, which return their rows in both.
        """
        spec, mine = self.spec, self.mine
        if spec.what in (DISPATCH, CACHED):
            state = impl.dispatch(mine)[1] if spec.what == CACHED else None
            check = functools.partial(self._check_dispatch, impl, state)
            return self.wrap(functools.partial(impl.dispatch, mine, state)), check
        plain: Step = functools.partial(_round_trip, impl, None)
        if spec.graph:
            graph = Recorded(plain, mine)
            return graph, functools.partial(self._check_round_trip, graph.of, torch.ones_like(self.factors))
        multiplying: Step = functools.partial(_round_trip, impl, self.factors)
        check = functools.partial(self._check_round_trip, multiplying, self.factors)
        if spec.what == ROUNDTRIP:
            return self.wrap(functools.partial(plain, mine)), check
        out, state = impl.dispatch(mine)
        return self.wrap(functools.partial(impl.combine, out.tokens, state)), check

    def _check_dispatch(self, impl: Any, previous: Any) -> str | None:
        """previous: the routing of `mine`, to be used again; None: a new one."""
        everyone = self._others(reroute=previous is None)
        with poisoned():
            found: Any = self.wrap(lambda: impl.dispatch(everyone[self.rank], previous))()
        return wrong_dispatch(found[0], everyone, self.spec.workload, self.spec.layout, self.rank)

    def _check_round_trip(self, step: Step, factors: torch.Tensor) -> str | None:
        """factors: `[E]`, by which the experts of `step` multiply their rows."""
        batch = self._others()[self.rank]
        with poisoned():
            z: Any = self.wrap(lambda: step(batch))()
        return wrong_combine(z, batch, factors, roundings=4 if self.nodes == 1 else 5)

    def _others(self, reroute: bool = True) -> list[Batch]:
        """The batches of all ranks with other rows than before; as many cross. reroute: False keeps the ids."""
        self._turn += 1
        return other_rows(self._everyone, self._turn, reroute)


def time_cases(
    device: torch.device,
    specs: list[Spec],
    peers: list[str],
    iterations: int,
    rate: float | None = None,
    nodes: int = 1,
) -> list[Row]:
    """Compares and times the cases. Collective. Raises WrongResult when an implementation disagrees with the oracle.

    peers: names as `find_peers` takes them. rate: GB/s of the floors; None leaves the floors out. nodes: see `Scene`.
    """
    clock, rows = clock_of(device), list[Row]()
    for spec in tqdm(specs, unit="case", disable=dist.get_rank() != 0, leave=False):
        with contextlib.ExitStack() as opened:
            scene = Scene(spec, device, nodes=nodes)
            rows += time_ways(clock, scene.ways(peers, opened), iterations)
            if rate is not None:
                rows.append(floor_row(spec.name, scene.bytes_wire(dedup=True), rate))
    return rows


def floor_row(case: str, bytes_wire: int, rate_gb_s: float) -> Row:
    """The time of the rows that must cross, each once per rank, at the best rate of SM stores in the same run."""
    us = max(0.1, round(bytes_wire / rate_gb_s / 1e3, 1))
    return row(case, FLOOR, Timing(median_us=us, p10_us=us, p90_us=us), bytes_wire)


def _round_trip(impl: Any, factors: torch.Tensor | None, batch: Batch) -> torch.Tensor:
    """factors: `[E]` that experts multiply their rows by; None: experts return their rows."""
    out, state = impl.dispatch(batch)
    y = out.tokens if factors is None else out.tokens * row_factors(factors, out).unsqueeze(1)
    return impl.combine(y, state)


def row_factors(factors: torch.Tensor, out: DispatchOutput) -> torch.Tensor:
    """The factor of each FLAT row's expert; of padding, any."""
    local = factors.view(dist.get_world_size(), -1)[dist.get_rank()]
    if out.row_expert_ids is not None:
        return local[out.row_expert_ids.clamp(min=0).long()]
    return local.repeat_interleave(out.num_tokens_per_expert.long(), output_size=len(out.tokens))


class EpPlugin:
    """Dispatch and combine of one communicator. The constructor is collective; the caller closes it.

    capacity: rows of every dispatch's output, so that the host does not wait; None: as many as arrive.
    """

    dedup = True

    def __init__(
        self, sizes: Workload, device: torch.device, layout: DispatchLayout, sms: Sms, capacity: int | None = None
    ) -> None:
        config = MoECommunicatorConfig(
            num_experts=sizes.experts,
            hidden_size=sizes.hidden,
            topk=sizes.topk,
            max_tokens_per_rank=sizes.tokens,
            layout=layout,
            **sms,
        )
        self.comm = MoECommunicator(None, config, device)
        self._capacity = capacity

    def dispatch(self, batch: Batch, previous: Any = None) -> tuple[DispatchOutput, Any]:
        known: dict[str, Any] = {"previous_handle": None if previous is None else previous[0]}
        options = known | {"capacity": self._capacity, "quantize": "e4m3" if batch.quantize else None}
        out, handle = self.comm.dispatch(batch.x, batch.ids, batch.weights, batch.scales, **options)
        return out, (handle, out.weights)

    def combine(self, y: torch.Tensor, state: Any) -> torch.Tensor:
        return self.comm.combine(y, state[0], weights=state[1])

    def close(self) -> None:
        self.comm.close()


def sms_of(comm: MoECommunicator, what: str, workload: Workload, row_bytes: int, quantize: bool = False) -> int:
    """SMs of an operation's kernels that move rows of `row_bytes`; of a round trip, those of its larger half.

    The kernels of plan and notify run before, for some microseconds, and are not counted.
    """
    dispatch = sum(comm.engine.dispatch_sms(workload.tokens, row_bytes, workload.topk, quantize))
    combine = sum(comm.engine.combine_sms(workload.tokens, row_bytes, workload.topk))
    return {COMBINE: combine, ROUNDTRIP: max(dispatch, combine)}.get(what, dispatch)


class Recorded:
    """A CUDA graph of `step`, with a batch of its own that starts as a copy of `batch`. A call replays the graph.

    Every call returns the same memory. The constructor runs `step` once, so it is collective when `step` is.
    """

    def __init__(self, step: Step, batch: Batch) -> None:
        self._batch = batch.clone()
        step(self._batch)
        self._capture(step)

    def _capture(self, step: Step) -> None:
        self._graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        # NCCL's watchdog thread queries events meanwhile, which would end a capture of all threads.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._result = step(self._batch)

    def __call__(self) -> torch.Tensor:
        self._replay()
        return self._result

    def of(self, batch: Batch) -> torch.Tensor:
        """Replays the graph with the rows, ids and weights of `batch`, which stay for later calls, into NaN."""
        self._batch.copy_(batch)
        self._result.fill_(torch.nan)
        return self()

    def _replay(self) -> None:
        self._graph.replay()


def wrong_dispatch(
    got: DispatchOutput, everyone: list[Batch], workload: Workload, layout: DispatchLayout, rank: int
) -> str | None:
    """How `got` differs from the rows that belong to this rank, bit for bit; None when it does not.

    Weights, row_expert_ids and num_tokens_per_expert are compared where `got` has them.

    everyone: the batches of all ranks, each of T tokens.
    """
    with everyone[rank].x.device:  # the oracle makes its own tensors on the default device
        ids, weights = [batch.ids for batch in everyone], [batch.weights for batch in everyone]
        numbers = list(torch.arange(sum(map(len, ids))).unsqueeze(1).split(len(ids[0])))  # in place of rows
        expected = reference_dispatch(numbers, ids, weights, num_experts=workload.experts, layout=layout)[rank]
    source = expected.tokens.squeeze(1)
    sent = [reference_quantize(batch.x) if batch.quantize else (batch.x, batch.scales) for batch in everyone]
    rows = torch.cat([x.view(torch.int64) for x, _ in sent])[source]  # compared as bits, whatever the type
    scales = [scales for _, scales in sent if scales is not None]
    pairs = {
        "tokens": (got.tokens.view(torch.int64), rows),
        "scales": (got.scales, torch.cat(scales)[source] if scales else None),
        "topk_ids": (got.topk_ids, expected.topk_ids),
    }
    for name in ("weights", "row_expert_ids", "num_tokens_per_expert"):
        if getattr(got, name) is not None:
            pairs[name] = getattr(got, name), getattr(expected, name)
    for name, pair in pairs.items():
        problem = _difference(*pair)
        if problem:
            return f"{name}: {problem}"
    return None


def wrong_combine(got: torch.Tensor, batch: Batch, factors: torch.Tensor, roundings: int = 4) -> str | None:
    """How `[T, H]` differs from the weighted sums in float64; None when every element is within roundings of them.

    Four roundings to the rows' type are allowed (weights, a product, a rank's sum, the result), a fifth with several
    nodes (a node's sum), and those of float32 sums, relative to the sum of the terms' magnitudes.

    factors: `[E]`, by which the experts multiplied their rows.
    """
    if got.shape != batch.x.shape:
        return f"expected shape {tuple(batch.x.shape)}, got {tuple(got.shape)}"
    exact, magnitude = (torch.zeros_like(batch.x, dtype=torch.float64) for _ in range(2))
    for ids, weights in zip(batch.ids.t(), batch.weights.t(), strict=True):
        term = (batch.x * factors[ids].unsqueeze(1)).double() * weights.double().unsqueeze(1)
        exact += term
        magnitude += term.abs()
    allowed = roundings / 2 * torch.finfo(got.dtype).eps + 32 * torch.finfo(torch.float32).eps
    errors = (got.double() - exact).abs() / (magnitude + torch.finfo(got.dtype).smallest_normal)
    wrong = ~(errors <= allowed)  # written so that NaN is wrong
    if not bool(wrong.any()):
        return None
    worst, rows = float(errors.max()), int(wrong.any(1).sum())
    return f"expected relative errors of at most {allowed:g}, got {worst:g}, and more in {rows} of {len(got)} rows"


def _difference(got: torch.Tensor | None, expected: torch.Tensor | None) -> str | None:
    if expected is None or got is None:
        return None if got is expected else f"expected {'none' if expected is None else 'some'}, got the opposite"
    if got.shape != expected.shape:
        return f"expected shape {tuple(expected.shape)}, got {tuple(got.shape)}"
    wrong = got != expected
    differing = (wrong if wrong.dim() == 1 else wrong.any(1)).nonzero()
    if len(differing) == 0:
        return None
    first = int(differing[0])
    return f"expected the oracle's values, got others in {len(differing)} of {got.shape[0]} rows, first row {first}"


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Fills memory that torch allocates inside with NaN, or with the largest integers.

    PyTorch ties this setting to deterministic algorithms. The warnings of operations that have none are left out.
    """
    settings: Any = torch.utils.deterministic  # its annotations leave the setting out
    mode, fill = torch.get_deterministic_debug_mode(), settings.fill_uninitialized_memory
    torch.set_deterministic_debug_mode("warn")  # use_deterministic_algorithms would import the compiler
    settings.fill_uninitialized_memory = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        settings.fill_uninitialized_memory = fill
