"""PyTorch's TokenSwitch over MoECommunicator, against plain torch, where PyTorch has it (`make test-pytorch`)."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from ep_plugin.errors import NotSupported
from tests.moe.moe_cases import named, on_ranks, poisoned

HAS_IT = importlib.util.find_spec("torch.distributed._token_switch") is not None
needs_it = pytest.mark.skipif(not HAS_IT, reason="this PyTorch has no TokenSwitch")

H, K, LOCAL, T_MAX = 24, 3, 4, 9
TOKENS = [(5, 9), (0, 7), (4, 0), (0, 0)]  # of each rank
ROWS = {"flat": 2 * T_MAX, "expert_major": 2 * T_MAX * K}  # room for all
Layer = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Inputs(NamedTuple):
    """Of each rank: x ``[T, H]``, weights ``[T, K]``, ids ``[T, K]``, -1: none; and the experts' factors ``[E, H]``."""

    x: list[torch.Tensor]
    weights: list[torch.Tensor]
    ids: list[torch.Tensor]
    factors: torch.Tensor


def _inputs(tokens: tuple[int, ...], seed: int) -> Inputs:
    generator, E = torch.Generator().manual_seed(seed), LOCAL * len(tokens)
    x = [torch.randn((T, H), generator=generator, requires_grad=True) for T in tokens]
    weights = [torch.rand((T, K), generator=generator, requires_grad=True) for T in tokens]
    ids = [torch.rand((T, E), generator=generator).topk(K).indices for T in tokens]
    ids = [one.masked_fill(torch.rand(one.shape, generator=generator) < 0.2, -1) for one in ids]
    return Inputs(x, weights, ids, torch.randn((E, H), generator=generator, requires_grad=True))


def _plain(given: Inputs, rank: int) -> torch.Tensor:
    """The layer of a rank's tokens with all experts."""
    of_all = (given.x[rank][:, None] * given.factors[given.ids[rank].clamp(min=0)]).tanh()
    used = given.weights[rank] * (given.ids[rank] >= 0)
    return (of_all * used[:, :, None]).sum(1)


def _through(switch: Any, routing: Any, counts: torch.Tensor, given: Inputs, rank: int, rows: int) -> torch.Tensor:
    """The same through a switch, with this rank's experts over all rows, also those that no token has."""
    mine = given.factors[rank * LOCAL : (rank + 1) * LOCAL]
    tokens, weights, ids = switch.dispatch(routing, given.x[rank], given.weights[rank], rows)
    assert tokens.shape == (rows, H) and weights.dtype is torch.float32
    if routing.handle.layout == "flat":
        assert weights.shape == ids.shape == (rows, K) and ids.dtype is torch.int64
        assert torch.equal(counts, torch.stack([(ids == expert).sum() for expert in range(LOCAL)]).int())
        share = torch.stack([(weights * (ids == expert)).sum(1) for expert in range(LOCAL)])
        y = ((tokens * mine[:, None]).tanh() * share[:, :, None]).sum(0)
        received = int((ids >= 0).any(1).sum())
    else:
        assert weights.shape == (rows,) and ids is None
        received = int(counts.sum())
        experts = torch.arange(LOCAL).repeat_interleave(counts)
        experts = torch.nn.functional.pad(experts, (0, rows - received))
        y = (tokens * mine[experts]).tanh() * weights[:, None]
    assert not tokens[received:].any() and not weights[received:].any()
    return switch.combine(routing, y[: max(received, 1)] if rank else y)


def _switch(size: int, rows: int) -> Any:
    from ep_plugin.integrations.token_switch import EpPluginTokenSwitch

    return EpPluginTokenSwitch(dist.group.WORLD, LOCAL * size, T_MAX, rows, H * 4)


def _layers(rank: int, size: int, layout: str) -> None:
    rows = ROWS[layout]
    switch = _switch(size, rows)
    assert switch.max_recv_tokens_per_rank == rows
    for seed, tokens in enumerate(TOKENS):
        with named((layout, tokens)), poisoned():
            given, counts = _inputs(tokens, seed), torch.full((LOCAL + 1,), 77, dtype=torch.int32)
            routing = switch.create_routing(given.ids[rank], counts, layout=layout)
            assert counts[-1] == 77
            other = switch.create_routing(given.ids[rank].flip(1), layout=layout)  # without an exchange
            switch.dispatch(other, given.x[rank].detach(), given.weights[rank].detach(), rows)
            out = _through(switch, routing, counts[:LOCAL], given, rank, rows)
            exact = [_plain(given, one) for one in range(size)]
            torch.testing.assert_close(out, exact[rank])
            factors = [torch.randn_like(one, generator=torch.Generator().manual_seed(seed)) for one in exact]
            wanted = given.x[rank], given.weights[rank], given.factors
            everyone = sum(((one * factor).sum() for one, factor in zip(exact, factors, strict=True)), torch.zeros(()))
            expected = torch.autograd.grad(everyone, wanted)
            got = torch.autograd.grad((out * factors[rank]).sum(), wanted)
            mine = slice(rank * LOCAL, (rank + 1) * LOCAL)
            for actual, wants in zip(got[:2], expected[:2], strict=True):
                torch.testing.assert_close(actual, wants)
            torch.testing.assert_close(got[2][mine], expected[2][mine])
            _writes_to_given_memory(switch, routing, given, rank, rows)


def _writes_to_given_memory(switch: Any, routing: Any, given: Inputs, rank: int, rows: int) -> None:
    """A second dispatch over a routing gives the same rows, here in memory of the caller's. So does combine."""
    x, weights = given.x[rank], given.weights[rank]
    results = switch.dispatch(routing, x, weights, rows)
    out = tuple(one if one is None else torch.full_like(one, 7) for one in results)
    assert switch.dispatch(routing, x, weights, out=out) is out
    for one, other in zip(out, results, strict=True):
        assert one is other is None or torch.equal(one, other)
    sums = torch.full_like(x, 7)
    assert switch.combine(routing, results[0], out=sums) is sums
    assert torch.equal(sums, switch.combine(routing, results[0]))


@needs_it
@pytest.mark.parametrize("layout", ROWS)
def test_results_and_gradients_are_those_of_plain_torch(layout: str) -> None:
    on_ranks(2, _layers, layout)


def _refused(rank: int, size: int) -> None:
    switch, given = _switch(size, T_MAX), _inputs((4, 4), 3)
    x, weights = given.x[rank].detach(), given.weights[rank].detach()
    with pytest.raises(ValueError, match="layout: expected one of flat, expert_major, got 'rank_major'"):
        switch.create_routing(given.ids[rank], layout="rank_major")
    everything_here = torch.arange(K).repeat(4, 1)  # on rank 0
    for layout, rows in (("flat", 8), ("expert_major", 24)):
        routing = switch.create_routing(everything_here, layout=layout)
        with pytest.raises(ValueError, match="combine: expected a routing that a dispatch has used, got a new one"):
            switch.combine(routing, x)
        with pytest.raises(ValueError, match="max_recv_tokens: expected at most max_recv_tokens_per_rank=9, got 10"):
            switch.dispatch(routing, x, weights, 10)
        with pytest.raises(ValueError, match="max_recv_tokens is required"):
            switch.dispatch(routing, x, weights)
        if rank == 0:
            with pytest.raises(ValueError, match=f"max_recv_tokens: expected at least {rows} rows, got 7"):
                switch.dispatch(routing, x, weights, 7)
        else:
            switch.dispatch(routing, x, weights, 7)
    tokens, _, _ = switch.dispatch(switch.create_routing(given.ids[rank], layout="flat"), x, weights, 8)
    assert tokens.shape == (8, H)


@needs_it
def test_what_does_not_fit_is_refused() -> None:
    on_ranks(2, _refused)


@pytest.mark.skipif(HAS_IT, reason="this PyTorch has a TokenSwitch")
def test_an_older_pytorch_is_refused_by_name() -> None:
    with pytest.raises(
        NotSupported, match=r"expected torch.distributed._token_switch, of PyTorch 2.14 or newer, got 2"
    ):
        importlib.import_module("ep_plugin.integrations.token_switch")
