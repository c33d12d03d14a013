"""From a Spec to what is run: the ways to do each case, and what judges them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from ep_plugin.bench.oracle import Oracle, wrong_combine
from ep_plugin.bench.ours import EpPlugin, Recorded
from ep_plugin.bench.peers import AllToAll, AllToAllKept, Dispatcher, QuantizedFirst, Routing, TokenMajorAllToAll
from ep_plugin.bench.specs import CACHED, COMBINE, DISPATCH, FLAT, ROUNDTRIP, Sms, Spec
from ep_plugin.bench.workload import DTYPES, Batch, Workload, batches, rows_on_the_wire, rows_received

T = TypeVar("T")
OURS = "ep_plugin"
ROOM = 1.125  # of the mean rows per rank: what a bounded dispatch has room for, unless a rank receives more


class Exchanger(Dispatcher, Protocol):
    def combine(self, y: torch.Tensor, state: object) -> torch.Tensor:
        """Weighted sum of each token's rows; state: of the dispatch that brought them."""


@dataclass(frozen=True, kw_only=True)
class Peers:
    """What makes the peers, by layout. Fields are importable by name: they are sent to the ranks."""

    flat: Callable[[Workload, torch.device], Exchanger] = AllToAll
    token_major: Callable[[Workload, torch.device], Dispatcher] = TokenMajorAllToAll


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to do a case. wrong: what is wrong with what `run` returned, None when nothing is. sms: known SMs."""

    impl: str
    run: Callable[[], Any]
    wrong: Callable[[Any], str | None]
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
        everyone = [replace(batch, quantize=quantize) for batch in batches(workload, DTYPES[dtype], device)]
        self.mine = everyone[dist.get_rank()]
        self.oracle = Oracle(workload, everyone, layout, dist.get_rank())
        ids = [batch.ids for batch in everyone]
        self.rows_wire = {dedup: rows_on_the_wire(workload, ids, dedup) for dedup in (False, True)}
        self.most_rows = max(rows_received(workload, ids))
        self._ours: dict[tuple[Sms, bool], EpPlugin] = {}
        self._states: dict[int, tuple[Any, object]] = {}
        self._open = contextlib.ExitStack()

    @functools.cached_property
    def peers(self) -> dict[str, Any]:
        """By their names. On CPUs also the one that keeps its memory: fresh memory costs most there."""
        make = self._peers.flat if self.layout is FLAT else self._peers.token_major
        found: dict[str, Any] = {f"{self.library}_all_to_all": make(self.workload, self.device)}
        if self.layout is FLAT and self.library == "gloo":
            found["gloo_all_to_all_kept"] = self.kept
        return {name: QuantizedFirst(peer) for name, peer in found.items()} if self.mine.quantize else found

    @functools.cached_property
    def kept(self) -> AllToAllKept:
        return AllToAllKept(self.workload, self.device)

    @functools.cached_property
    def combine_rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Expert rows of this rank, and what combining everyone's gives."""
        everyones = self.oracle.expert_rows()
        return everyones[dist.get_rank()], self.oracle.combined(everyones)

    @functools.cached_property
    def roundtrip(self) -> torch.Tensor:
        """What experts that change nothing give."""
        return self.oracle.combined(self.oracle.received_rows())

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
    crossings = 2 if spec.what == ROUNDTRIP else 1
    ways = [_way(scene, spec, name, impl, crossings) for name, impl in impls.items()]
    plain = spec.workload.skew == 1 and not spec.quantize
    if spec.peers and spec.what == DISPATCH and scene.layout is FLAT and plain:
        ways.append(_bare_exchange(scene))
    floor = crossings * scene.rows_wire[True] * scene.mine.row_bytes
    return Case(name=spec.name, ways=ways, floor_bytes=floor)


def _way(scene: Scene, spec: Spec, name: str, impl: Any, crossings: int) -> Way:
    mine, oracle = scene.mine, scene.oracle
    run: Callable[[], Any]
    wrong: Callable[[Any], str | None] = oracle.wrong_dispatch
    if spec.what == DISPATCH:
        run = functools.partial(impl.dispatch, mine)
    elif spec.what == CACHED:
        run = functools.partial(impl.dispatch, mine, scene.state(impl))
    elif spec.what == COMBINE:
        y, expected = scene.combine_rows
        run, wrong = functools.partial(impl.combine, y, scene.state(impl)), functools.partial(wrong_combine, expected)
    else:
        run, wrong = functools.partial(_round_trip, impl, mine), functools.partial(wrong_combine, scene.roundtrip)
    if spec.graph and name == OURS:
        run()
        run = Recorded(run)
    return Way(
        impl=name,
        run=run,
        wrong=wrong,
        bytes_wire=crossings * scene.rows_wire[impl.dedup] * mine.row_bytes,
        sms=impl.sms(spec.what) if name == OURS and scene.device.type == "cuda" else None,
    )


def _round_trip(impl: Exchanger, batch: Batch) -> torch.Tensor:
    """Experts that return what they receive."""
    received = impl.dispatch(batch)
    return impl.combine(received.tokens, received.state)


def _bare_exchange(scene: Scene) -> Way:
    """all_to_all_single alone, its rows gathered and its counts known: what the peer cannot be faster than."""
    peer = scene.kept
    routing = peer.dispatch(scene.mine).state
    assert isinstance(routing, Routing)
    leaving = peer.gather(scene.mine, routing.order)
    return Way(
        impl=f"{scene.library}_all_to_all_single",
        run=lambda: peer.exchange(leaving, routing),
        wrong=lambda got: scene.oracle.wrong_dispatch(peer.arrange(got, scene.mine, routing)),
        bytes_wire=scene.rows_wire[peer.dedup] * scene.mine.row_bytes,
    )
