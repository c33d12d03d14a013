"""How the cases run: each implementation of a case, compared with the oracle before and after it is timed.

Every comparison uses rows (and routes, where those are not given) that no call has moved before, and memory that holds
NaN. (A graph's memory is its own: there the result holds NaN.) So results of an earlier call are wrong.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

from ep_plugin.bench.exchange.oracle import Oracle, poisoned, wrong_combine
from ep_plugin.bench.exchange.ours import EpPlugin, Recorded
from ep_plugin.bench.exchange.peers import AllToAll, Received, find_peers, quantized
from ep_plugin.bench.exchange.specs import CACHED, COMBINE, DISPATCH, ROUNDTRIP, Sms, Spec
from ep_plugin.bench.exchange.workload import (
    DTYPES,
    Batch,
    batches,
    expert_factors,
    expert_rows,
    other_rows,
    rows_on_the_wire,
    rows_received,
)
from ep_plugin.bench.suite import WARMUP, Row, require_right, row
from ep_plugin.bench.timing import Timing, clock_of, time_in_turn

OURS, FLOOR = "ep_plugin", "floor"
ROOM = 1.125  # of the mean rows per rank: the capacity of a dispatch that has one, unless a rank receives more


@dataclass(frozen=True, kw_only=True)
class Way:
    """One implementation of a case. run: is timed. check: does the same to rows that no call has moved before.

    `check` is collective and returns a sentence on what is wrong with the result, or None. sms: of the kernels that
    move rows, where known.
    """

    impl: str
    run: Callable[[], Any]
    check: Callable[[], str | None]
    bytes_wire: int
    sms: int | None = None


class Scene:
    """Shared by the cases of one workload, dtype and layout: inputs, the oracle, implementations, routings."""

    def __init__(self, spec: Spec, device: torch.device, peers: list[str]) -> None:
        self.workload, self.layout, self.device = spec.workload, spec.layout, device
        self.library = "nccl" if device.type == "cuda" else "gloo"
        made = batches(spec.workload, DTYPES[spec.dtype], device)
        self._everyone = [replace(batch, quantize=spec.quantize) for batch in made]
        self.mine = self._everyone[dist.get_rank()]
        self.rows = Oracle(spec.workload, self._everyone, spec.layout, dist.get_rank()).rows()
        ids = [batch.ids for batch in self._everyone]
        self.rows_wire = {dedup: rows_on_the_wire(spec.workload, ids, dedup) for dedup in (False, True)}
        self._most_rows = max(rows_received(spec.workload, ids))
        self._peer_names = peers
        self._turn = 0
        self._ours: dict[tuple[Any, ...], EpPlugin] = {}
        self._states: dict[int, tuple[Any, Any]] = {}
        self._open = contextlib.ExitStack()

    def others(self, reroute: bool = True) -> tuple[Batch, Oracle]:
        """This rank's batch with other rows than `mine` and than before, and the oracle for the batches of all ranks.

        As many rows cross as with `mine`. reroute: False keeps the ids. Collective.
        """
        self._turn += 1
        everyone = other_rows(self._everyone, self._turn, reroute)
        return everyone[dist.get_rank()], Oracle(self.workload, everyone, self.layout, dist.get_rank())

    def expert_rows(self, rank: int, rows: int) -> torch.Tensor:
        """`[rows, H]`, as the experts of `rank` might return them; others after each call of `others`."""
        return expert_rows(self.workload, rank, rows, self._turn, self.mine.x.dtype, self.device)

    @functools.cached_property
    def factors(self) -> torch.Tensor:
        return expert_factors(self.workload, self.mine.x.dtype, self.device)

    @functools.cached_property
    def peers(self) -> dict[str, Any]:
        """The peers of this layout by their names in results."""
        kinds = [kind for name in self._peer_names for kind in find_peers(name) if kind.layout is self.layout]
        return {self._name_of(kind): kind(self.workload, self.device) for kind in kinds}

    def _name_of(self, kind: type) -> str:
        return f"{self.library}_all_to_all" if kind.__module__ == AllToAll.__module__ else kind.__name__

    def ours(self, sms: Sms, bounded: bool) -> EpPlugin:
        """The communicator with these SMs. bounded: its dispatches have a capacity."""
        key = (*sorted(sms.items()), bounded)
        if key not in self._ours:
            mean = self.workload.tokens * self.workload.topk
            room = max(self._most_rows, int(ROOM * mean)) if bounded else None
            made = EpPlugin(self.workload, self.device, self.layout, sms, capacity=room)
            self._ours[key] = self._open.enter_context(contextlib.closing(made))
        return self._ours[key]

    def state(self, impl: Any) -> Any:
        """The routing of a dispatch by `impl`."""
        if id(impl) not in self._states:
            self._states[id(impl)] = (impl, impl.dispatch(self.mine).state)
        return self._states[id(impl)][1]

    def close(self) -> None:
        self._open.close()


def time_cases(
    device: torch.device, specs: list[Spec], peers: list[str], sms: Sms, iterations: int, rate: float | None = None
) -> list[Row]:
    """Compares and times the cases. Collective.

    Args:
        peers: names as `find_peers` takes them.
        sms: SMs that replace those of the cases.
        rate: GB/s of the floors; None leaves the floors out.

    Raises:
        WrongResult: an implementation disagrees with the oracle.
    """
    clock, rows = clock_of(device), []
    progress = tqdm(specs, unit="case", disable=dist.get_rank() != 0, leave=False)
    with contextlib.closing(_Scenes(device, peers)) as scenes:
        for spec in progress:
            progress.set_description(spec.name)
            scene = scenes.of(spec)
            ways = ways_of(scene, replace(spec, sms={**spec.sms, **sms}))
            require_right(problems(spec.name, ways))
            timings = time_in_turn(clock, {way.impl: way.run for way in ways}, iterations, WARMUP)
            require_right(problems(spec.name, ways, " (after the timing)"))
            rows += [row(spec.name, way.impl, timings[way.impl], way.bytes_wire, way.sms) for way in ways]
            if rate is not None:
                crossings = 2 if spec.what == ROUNDTRIP else 1
                rows.append(floor_row(spec.name, crossings * scene.rows_wire[True] * scene.mine.row_bytes, rate))
            del ways, scene  # the memory goes before the next case's comes
    return rows


def floor_row(case: str, bytes_wire: int, rate_gb_s: float) -> Row:
    """The time of the rows that must cross, each once per rank, at the best rate of SM stores in the same run."""
    us = round(bytes_wire / rate_gb_s / 1e3, 1)
    return row(case, FLOOR, Timing(median_us=us, p10_us=us, p90_us=us), bytes_wire)


class _Scenes:
    """One scene at a time."""

    def __init__(self, device: torch.device, peers: list[str]) -> None:
        self._device, self._peers = device, peers
        self._scene: Scene | None = None
        self._key: Any = None

    def of(self, spec: Spec) -> Scene:
        key = (spec.workload, spec.dtype, spec.layout, spec.quantize)
        if self._scene is None or key != self._key:
            self.close()
            self._scene, self._key = Scene(spec, self._device, self._peers), key
        return self._scene

    def close(self) -> None:
        if self._scene is not None:
            self._scene.close()
        self._scene = None


def problems(case: str, ways: list[Way], when: str = "") -> list[str]:
    """A sentence for each way that disagrees with the oracle on this rank. Collective."""
    found = [(way.impl, way.check()) for way in ways]
    return [f"{case} by {impl}: {problem}{when}" for impl, problem in found if problem]


def ways_of(scene: Scene, spec: Spec, wrap: Callable[[Any], Any] = lambda impl: impl) -> list[Way]:
    """The implementations of a case, each wrapped by `wrap`. Collective."""
    peers = scene.peers if spec.peers else {}
    impls = {OURS: scene.ours(spec.sms, spec.capacity), **peers}
    ways = [_way(scene, spec, name, wrap(impl)) for name, impl in impls.items()]
    plain = spec.workload.skew == 1 and not spec.quantize
    bare = [impl for impl in peers.values() if isinstance(impl, AllToAll)]
    if spec.what == DISPATCH and plain and bare:
        ways.append(_bare_exchange(scene, bare[0]))
    return ways


def _way(scene: Scene, spec: Spec, name: str, impl: Any) -> Way:
    run: Callable[[], Any]
    check: Callable[[], str | None]
    if spec.quantize and name != OURS:
        impl = _QuantizedFirst(impl)
    if spec.what == DISPATCH:
        run, check = functools.partial(impl.dispatch, scene.mine), functools.partial(check_dispatch, scene, impl)
    elif spec.what == CACHED:
        state = scene.state(impl)
        run = functools.partial(impl.dispatch, scene.mine, state)
        check = functools.partial(check_dispatch, scene, impl, state)
    elif spec.what == COMBINE:
        run = functools.partial(impl.combine, scene.expert_rows(dist.get_rank(), scene.rows), scene.state(impl))
        check = functools.partial(check_combine, scene, impl)
    else:
        run, check = _round_trips(scene, impl, spec.graph and name == OURS)
    wide, crossings = scene.mine.row_bytes, 2 if spec.what == ROUNDTRIP else 1
    return Way(
        impl=name,
        run=run,
        check=check,
        bytes_wire=crossings * scene.rows_wire[impl.dedup] * wide,
        sms=impl.sms(spec.what, wide, spec.quantize) if name == OURS and scene.device.type == "cuda" else None,
    )


class _QuantizedFirst:
    """A peer whose rows torch quantises before."""

    def __init__(self, peer: Any) -> None:
        self._peer, self.dedup = peer, peer.dedup

    def dispatch(self, batch: Batch, previous: Any = None) -> Received:
        return self._peer.dispatch(quantized(batch), previous)


def check_dispatch(scene: Scene, impl: Any, previous: Any = None) -> str | None:
    """previous: the routing of scene.mine, to be used again."""
    batch, oracle = scene.others(reroute=previous is None)
    with poisoned():
        received = impl.dispatch(batch, previous)
    return oracle.wrong_dispatch(received)


def check_combine(scene: Scene, impl: Any) -> str | None:
    """Takes routes and weights of a dispatch of its own."""
    batch, oracle = scene.others()
    state = impl.dispatch(batch).state
    y = scene.expert_rows(dist.get_rank(), oracle.rows())
    with poisoned():
        z = impl.combine(y, state)
    return wrong_combine(oracle.combined(lambda rank: scene.expert_rows(rank, oracle.rows(rank))), z)


def _round_trips(scene: Scene, impl: Any, graph: bool) -> tuple[Callable[[], Any], Callable[[], str | None]]:
    """The call that is timed, with experts that return their rows, and its check, with experts that differ.

    A graph contains its experts. So there are two, one of each kind of experts, and both are compared.
    """
    steps: list[Callable[[Batch], torch.Tensor]] = [
        functools.partial(_round_trip, impl, factors) for factors in (scene.factors, None)
    ]
    recorded = [Recorded(step, scene.mine) for step in steps] if graph else []
    run = recorded[1] if graph else functools.partial(steps[1], scene.mine)

    def check() -> str | None:
        if not graph:
            return _check_round_trip(scene, steps[0], scene.factors)
        # Both run on every rank, whatever the first one finds: they are collective.
        differing = _check_round_trip(scene, recorded[0].of, scene.factors)
        timed = _check_round_trip(scene, recorded[1].of, torch.ones_like(scene.factors))
        return differing or timed

    return run, check


def _check_round_trip(scene: Scene, step: Callable[[Batch], torch.Tensor], factors: torch.Tensor) -> str | None:
    batch, oracle = scene.others()
    with poisoned():
        z = step(batch)
    return wrong_combine(oracle.combined(lambda rank: oracle.scaled_rows(rank, factors)), z)


def _round_trip(impl: Any, factors: torch.Tensor | None, batch: Batch) -> torch.Tensor:
    """factors: `[E]` that experts multiply their rows by; None: experts return their rows."""
    received = impl.dispatch(batch)
    y = received.tokens if factors is None else received.tokens * _of_rows(factors, received).unsqueeze(1)
    return impl.combine(y, received.state)


def _of_rows(factors: torch.Tensor, received: Received) -> torch.Tensor:
    """The factor of each FLAT row; of padding, any."""
    local = factors.view(dist.get_world_size(), -1)[dist.get_rank()]
    if received.row_experts is not None:
        return local[received.row_experts.clamp(min=0).long()]
    assert received.counts is not None
    return local.repeat_interleave(received.counts.long(), output_size=len(received.tokens))


def _bare_exchange(scene: Scene, peer: AllToAll) -> Way:
    """all_to_all_single alone, its rows gathered and its counts known: the least that the peer takes."""
    routing = peer.dispatch(scene.mine).state
    leaving = peer.leaving(scene.mine, routing.token)

    def check() -> str | None:
        batch, oracle = scene.others(reroute=False)
        with poisoned():
            arrived = peer.exchange(peer.leaving(batch, routing.token), routing)
        return oracle.wrong_dispatch(peer.arrange(arrived, batch, routing))

    return Way(
        impl=f"{scene.library}_all_to_all_single",
        run=lambda: peer.exchange(leaving, routing),
        check=check,
        bytes_wire=scene.rows_wire[False] * scene.mine.row_bytes,
    )
