"""From a Spec to what is run: the ways to do each case, and what judges them.

Every judgement is of rows (and routes, where those are not given) that no call has moved before, into memory that holds
NaN (of a graph, whose memory is its own, the result): what an earlier call left behind, anywhere, is wrong.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from ep_plugin.bench.oracle import Oracle, wrong_combine
from ep_plugin.bench.ours import EpPlugin, Recorded
from ep_plugin.bench.peers import (
    AllToAll,
    AllToAllKept,
    Dispatcher,
    Exchanger,
    InPieces,
    QuantizedFirst,
    Received,
    Routing,
    TokenMajorAllToAll,
    quantized,
    tune,
)
from ep_plugin.bench.peers_dedup import DedupAllToAll
from ep_plugin.bench.poison import poisoned
from ep_plugin.bench.specs import CACHED, COMBINE, DISPATCH, FLAT, ROUNDTRIP, Sms, Spec
from ep_plugin.bench.workload import (
    DTYPES,
    Batch,
    Workload,
    batches,
    expert_factors,
    expert_rows,
    other_rows,
    rows_on_the_wire,
    rows_received,
)

OURS = "ep_plugin"
ROOM = 1.125  # of the mean rows per rank: what a bounded dispatch has room for, unless a rank receives more


@dataclass(frozen=True, kw_only=True)
class Peers:
    """What makes the peers, by layout. Fields are importable by name: they are sent to the ranks."""

    flat: Callable[[Workload, torch.device], InPieces] = AllToAll
    dedup: Callable[[Workload, torch.device], InPieces] = DedupAllToAll
    token_major: Callable[[Workload, torch.device], Dispatcher] = TokenMajorAllToAll


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to do a case. run: is timed. judge: does the same to rows that no call has moved before and says what is
    wrong with the result, None when nothing is; collective. sms: SMs of the kernels that move rows, where known."""

    impl: str
    run: Callable[[], Any]
    judge: Callable[[], str | None]
    bytes_wire: int
    sms: int | None = None


@dataclass(frozen=True, kw_only=True)
class Case:
    """floor_bytes: of the rows that must cross, each once per rank that needs it."""

    name: str
    ways: list[Way]
    floor_bytes: int


class Scene:
    """What the cases of one workload, type and layout share: inputs, the oracle, communicators, routings."""

    def __init__(
        self,
        workload: Workload,
        dtype: str,
        layout: Any,
        device: torch.device,
        peers: Peers,
        quantize: bool = False,
    ) -> None:
        self.workload, self.layout, self.device, self._peers = workload, layout, device, peers
        self.library = "nccl" if device.type == "cuda" else "gloo"
        self._everyone = [replace(batch, quantize=quantize) for batch in batches(workload, DTYPES[dtype], device)]
        self.mine = self._everyone[dist.get_rank()]
        self.rows = Oracle(workload, self._everyone, layout, dist.get_rank()).rows()
        ids = [batch.ids for batch in self._everyone]
        self.rows_wire = {dedup: rows_on_the_wire(workload, ids, dedup) for dedup in (False, True)}
        self.most_rows = max(rows_received(workload, ids))
        self._turn = 0
        self._ours: dict[tuple[Sms, bool], EpPlugin] = {}
        self._states: dict[int, tuple[Any, object]] = {}
        self._open = contextlib.ExitStack()

    def others(self, reroute: bool = True) -> tuple[Batch, Oracle]:
        """What this rank brings instead of `mine`, others each time, and the oracle for what everyone brings.

        The rows that cross are as many as with `mine`. reroute: otherwise the ids stay. All ranks ask alike.
        """
        self._turn += 1
        everyone = other_rows(self._everyone, self._turn, reroute)
        return everyone[dist.get_rank()], Oracle(self.workload, everyone, self.layout, dist.get_rank())

    def expert_rows(self, rank: int, rows: int) -> torch.Tensor:
        """What the experts of `rank` might return, `[rows, H]`; others after each call of `others`."""
        return expert_rows(self.workload, rank, rows, self._turn, self.mine.x.dtype, self.device)

    @functools.cached_property
    def factors(self) -> torch.Tensor:
        return expert_factors(self.workload, self.mine.x.dtype, self.device)

    @functools.cached_property
    def peers(self) -> dict[str, Any]:
        """By their names. On CPUs also the one that keeps its memory: fresh memory costs most there."""
        if self.layout is not FLAT:
            return {f"{self.library}_all_to_all": self._peers.token_major(self.workload, self.device)}
        found: dict[str, Any] = {f"{self.library}_all_to_all": self._tuned(self._peers.flat)}
        if self.library == "gloo":
            found["gloo_all_to_all_kept"] = self.kept
        return {name: QuantizedFirst(peer) for name, peer in found.items()} if self.mine.quantize else found

    @functools.cached_property
    def dedup(self) -> dict[str, Any]:
        """The peer that sends each row once per rank, by its name."""
        return {f"{self.library}_all_to_all_dedup": self._tuned(self._peers.dedup)}

    def _tuned(self, make: Callable[[Workload, torch.device], InPieces]) -> InPieces:
        peer = make(self.workload, self.device)
        if self.device.type == "cuda":  # where gathers and exchanges can overlap
            tune(peer, quantized(self.mine) if self.mine.quantize else self.mine, self.device)
        return peer

    @functools.cached_property
    def kept(self) -> AllToAllKept:
        return AllToAllKept(self.workload, self.device)

    def ours(self, sms: Sms, bounded: bool) -> EpPlugin:
        """The communicator with these SMs; bounded: its dispatches have a capacity."""
        if (sms, bounded) not in self._ours:
            mean = self.workload.tokens * self.workload.topk
            room = max(self.most_rows, int(ROOM * mean)) if bounded else None
            made = EpPlugin(self.workload, self.device, self.layout, sms, capacity=room)
            self._ours[sms, bounded] = self._open.enter_context(contextlib.closing(made))
        return self._ours[sms, bounded]

    def state(self, impl: Any) -> object:
        """The routing of a dispatch by `impl`."""
        if id(impl) not in self._states:
            self._states[id(impl)] = (impl, impl.dispatch(self.mine).state)
        return self._states[id(impl)][1]

    def close(self) -> None:
        self._open.close()


def cases_of(specs: list[Spec], device: torch.device, peers: Peers, override: Sms) -> Iterator[Case]:
    """The cases one by one; what they share is closed after the last that needs it. Collective.

    override: SMs that go before those of the specs.
    """
    scene, key = None, None
    try:
        for spec in specs:
            if key != (spec.workload, spec.dtype, spec.layout, spec.quantize):
                if scene is not None:
                    scene.close()
                scene = None  # its memory goes before the next one's comes
                key = (spec.workload, spec.dtype, spec.layout, spec.quantize)
                scene = Scene(spec.workload, spec.dtype, spec.layout, device, peers, spec.quantize)
            assert scene is not None
            yield _case(scene, replace(spec, sms=override.over(spec.sms)))
    finally:
        if scene is not None:
            scene.close()


def _case(scene: Scene, spec: Spec) -> Case:
    impls: dict[str, Any] = {OURS: scene.ours(spec.sms, spec.capacity)}
    if spec.peers:
        impls |= scene.peers
    plain = spec.peers and scene.layout is FLAT and spec.workload.skew == 1 and not spec.quantize
    if plain and spec.what in (DISPATCH, COMBINE):
        impls |= scene.dedup
    crossings = 2 if spec.what == ROUNDTRIP else 1
    ways = [_way(scene, spec, name, impl, crossings) for name, impl in impls.items()]
    if plain and spec.what == DISPATCH:
        ways.append(_bare_exchange(scene))
    floor = crossings * scene.rows_wire[True] * scene.mine.row_bytes
    return Case(name=spec.name, ways=ways, floor_bytes=floor)


def _way(scene: Scene, spec: Spec, name: str, impl: Any, crossings: int) -> Way:
    run: Callable[[], Any]
    judge: Callable[[], str | None]
    if spec.what == DISPATCH:
        run, judge = functools.partial(impl.dispatch, scene.mine), functools.partial(judge_dispatch, scene, impl)
    elif spec.what == CACHED:
        state = scene.state(impl)
        run = functools.partial(impl.dispatch, scene.mine, state)
        judge = functools.partial(judge_dispatch, scene, impl, state)
    elif spec.what == COMBINE:
        run = functools.partial(impl.combine, scene.expert_rows(dist.get_rank(), scene.rows), scene.state(impl))
        judge = functools.partial(judge_combine, scene, impl)
    else:
        run, judge = _round_trips(scene, impl, spec.graph and name == OURS)
    if spec.what in (COMBINE, ROUNDTRIP):
        run()  # a peer chooses how to sum when it is first called, which is not to be in poisoned memory
    wide = scene.mine.row_bytes
    return Way(
        impl=name,
        run=run,
        judge=judge,
        bytes_wire=crossings * scene.rows_wire[impl.dedup] * wide,
        sms=impl.sms(spec.what, wide, spec.quantize) if name == OURS and scene.device.type == "cuda" else None,
    )


def judge_dispatch(scene: Scene, impl: Dispatcher, previous: object = None) -> str | None:
    """previous: the routing of scene.mine, to be used again."""
    batch, oracle = scene.others(reroute=previous is None)
    with poisoned():
        received = impl.dispatch(batch, previous)
    return oracle.wrong_dispatch(received)


def judge_combine(scene: Scene, impl: Exchanger) -> str | None:
    """With routes and weights of a dispatch of its own."""
    batch, oracle = scene.others()
    state = impl.dispatch(batch).state
    y = scene.expert_rows(dist.get_rank(), oracle.rows())
    with poisoned():
        z = impl.combine(y, state)
    return wrong_combine(oracle.combined(lambda rank: scene.expert_rows(rank, oracle.rows(rank))), z)


def _round_trips(scene: Scene, impl: Exchanger, graph: bool) -> tuple[Callable[[], Any], Callable[[], str | None]]:
    """What is timed, with experts that return what they receive, and what judges it.

    Judged with experts that can be told apart. A graph has its experts in it: both are judged, that with such experts
    and the one that is timed.
    """
    steps: list[Callable[[Batch], torch.Tensor]] = [
        functools.partial(_round_trip, impl, factors) for factors in (scene.factors, None)
    ]
    recorded = [Recorded(step, scene.mine) for step in steps] if graph else []
    run = recorded[1] if graph else functools.partial(steps[1], scene.mine)

    def judge() -> str | None:
        if not graph:
            return _judge_round_trip(scene, steps[0], scene.factors)
        # Both on every rank, whatever the first says: they are collective.
        told_apart = _judge_round_trip(scene, recorded[0].of, scene.factors)
        timed = _judge_round_trip(scene, recorded[1].of, torch.ones_like(scene.factors))
        return told_apart or timed

    return run, judge


def _judge_round_trip(scene: Scene, step: Callable[[Batch], torch.Tensor], factors: torch.Tensor) -> str | None:
    batch, oracle = scene.others()
    with poisoned():
        z = step(batch)
    return wrong_combine(oracle.combined(lambda rank: oracle.scaled_rows(rank, factors)), z)


def _round_trip(impl: Exchanger, factors: torch.Tensor | None, batch: Batch) -> torch.Tensor:
    """factors: `[E]`, what each expert multiplies its rows by; None: experts return what they receive."""
    received = impl.dispatch(batch)
    y = received.tokens if factors is None else received.tokens * _of_rows(factors, received).unsqueeze(1)
    return impl.combine(y, received.state)


def _of_rows(factors: torch.Tensor, received: Received) -> torch.Tensor:
    """The factor of each FLAT row. Rows that were not received have any."""
    local = factors.view(dist.get_world_size(), -1)[dist.get_rank()]
    if received.row_experts is not None:
        return local[received.row_experts.clamp(min=0).long()]
    assert received.counts is not None
    return local.repeat_interleave(received.counts.long(), output_size=len(received.tokens))


def _bare_exchange(scene: Scene) -> Way:
    """all_to_all_single alone, its rows gathered and its counts known: what the peer cannot be faster than."""
    peer = scene.kept
    routing = peer.dispatch(scene.mine).state
    assert isinstance(routing, Routing)
    leaving = peer.leaving(scene.mine, routing).clone()

    def judge() -> str | None:
        batch, oracle = scene.others(reroute=False)
        with poisoned():
            arrived = peer.exchange(peer.leaving(batch, routing), routing)
        return oracle.wrong_dispatch(peer.arrange([arrived], batch, routing))

    return Way(
        impl=f"{scene.library}_all_to_all_single",
        run=lambda: peer.exchange(leaving, routing),
        judge=judge,
        bytes_wire=scene.rows_wire[peer.dedup] * scene.mine.row_bytes,
    )
