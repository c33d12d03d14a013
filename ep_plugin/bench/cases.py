"""The cases of the suite `moe`, each with the ways to do it: ep_plugin, the peer, and the peer's bare exchange."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from ep_plugin.bench.oracle import Oracle, wrong_combine
from ep_plugin.bench.ours import EpPlugin
from ep_plugin.bench.peers import AllToAll, AllToAllKept, Dispatcher, Routing, TokenMajorAllToAll
from ep_plugin.bench.workload import (
    DTYPES,
    SHORT_NAMES,
    Batch,
    Workload,
    batches,
    rows_on_the_wire,
)
from ep_plugin.config import DispatchLayout

T = TypeVar("T")


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
    """One way to do a case. wrong: what is wrong with what `run` returned, None when nothing is."""

    impl: str
    run: Callable[[], Any]
    wrong: Callable[[Any], str | None]
    bytes_wire: int


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    ways: list[Way]


class Scene:
    """What the cases of one dtype and layout share: everyone's tokens, this rank's own, and the oracle."""

    def __init__(self, workload: Workload, dtype: str, layout: DispatchLayout, device: torch.device) -> None:
        self.workload, self.device = workload, device
        self.short_dtype = SHORT_NAMES[dtype]
        self.summable = dtype != "float8"
        self.library = "nccl" if device.type == "cuda" else "gloo"
        everyone = batches(workload, DTYPES[dtype], device)
        self.mine = everyone[dist.get_rank()]
        self.oracle = Oracle(workload, everyone, layout, dist.get_rank())
        ids = [batch.ids for batch in everyone]
        self._rows = {dedup: rows_on_the_wire(workload, ids, dedup) for dedup in (False, True)}

    def way(self, impl: str, dedup: bool, run: Callable[[], T], wrong: Callable[[T], str | None]) -> Way:
        return Way(impl=impl, run=run, wrong=wrong, bytes_wire=self._rows[dedup] * self.mine.row_bytes)


def flat_cases(scene: Scene, peers: Peers) -> Iterator[Case]:
    """Dispatch to FLAT rows, the same over known routing, and, where rows can be summed, combine and the round trip."""
    mine, oracle, dtype = scene.mine, scene.oracle, scene.short_dtype
    with contextlib.closing(EpPlugin(scene.workload, scene.device, DispatchLayout.FLAT)) as ours:
        peer = peers.flat(scene.workload, scene.device)
        kept = AllToAllKept(scene.workload, scene.device)
        impls: dict[str, Exchanger] = {"ep_plugin": ours, f"{scene.library}_all_to_all": peer}
        if scene.library == "gloo":
            impls["gloo_all_to_all_kept"] = kept

        def each(run: Callable[[str, Exchanger], T], wrong: Callable[[T], str | None]) -> list[Way]:
            return [
                scene.way(name, impl.dedup, functools.partial(run, name, impl), wrong) for name, impl in impls.items()
            ]

        ways = each(lambda _, impl: impl.dispatch(mine), oracle.wrong_dispatch)
        ways.append(_bare_exchange(scene, kept))
        yield Case(name=f"dispatch_flat_{dtype}", ways=ways)

        states = {name: impl.dispatch(mine).state for name, impl in impls.items()}
        ways = each(lambda name, impl: impl.dispatch(mine, states[name]), oracle.wrong_dispatch)
        yield Case(name=f"dispatch_cached_{dtype}", ways=ways)
        if not scene.summable:
            return
        everyones_y = oracle.expert_rows()
        y, expected = everyones_y[dist.get_rank()], oracle.combined(everyones_y)
        del everyones_y
        ways = each(lambda name, impl: impl.combine(y, states[name]), functools.partial(wrong_combine, expected))
        yield Case(name=f"combine_flat_{dtype}", ways=ways)

        expected = oracle.combined(oracle.received_rows())
        ways = each(lambda _, impl: _round_trip(impl, mine), functools.partial(wrong_combine, expected))
        yield Case(name=f"roundtrip_flat_{dtype}", ways=ways)


def token_major_cases(scene: Scene, peers: Peers) -> Iterator[Case]:
    """Dispatch to TOKEN_MAJOR rows."""
    with contextlib.closing(EpPlugin(scene.workload, scene.device, DispatchLayout.TOKEN_MAJOR)) as ours:
        peer = peers.token_major(scene.workload, scene.device)
        impls: dict[str, Dispatcher] = {"ep_plugin": ours, f"{scene.library}_all_to_all": peer}
        ways = [
            scene.way(name, impl.dedup, functools.partial(impl.dispatch, scene.mine), scene.oracle.wrong_dispatch)
            for name, impl in impls.items()
        ]
        yield Case(name=f"dispatch_token_major_{scene.short_dtype}", ways=ways)


def _round_trip(impl: Exchanger, batch: Batch) -> torch.Tensor:
    """Experts that return what they receive."""
    received = impl.dispatch(batch)
    return impl.combine(received.tokens, received.state)


def _bare_exchange(scene: Scene, peer: AllToAllKept) -> Way:
    """all_to_all_single alone, its rows gathered and its counts known: what the peer cannot be faster than."""
    routing = peer.dispatch(scene.mine).state
    assert isinstance(routing, Routing)
    leaving = peer.gather(scene.mine, routing.order)
    return scene.way(
        f"{scene.library}_all_to_all_single",
        peer.dedup,
        lambda: peer.exchange(leaving, routing),
        lambda got: scene.oracle.wrong_dispatch(peer.arrange(got, scene.mine, routing)),
    )
