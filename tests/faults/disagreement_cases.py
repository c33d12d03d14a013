"""Ranks that disagree, on the configuration or on one call: what differs, and what every rank then says."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ep_plugin import DispatchLayout
from ep_plugin.errors import DisagreementError
from tests.faults.fault_cases import finish, here, nothing_left_behind, open_communicator, round_trip, tokens_for

SIZE = 3
FAILS = 1  # the rank that differs
PATIENCE_S = 20.0  # far more than any of this may take: nothing ends by a deadline
QUICKLY_S = 5.0

CONFIGS = {
    "num_experts": {"num_experts": 12},
    "num_experts that no ranks divide": {"num_experts": 13},
    "hidden_size": {"hidden_size": 16},
    "topk": {"topk": 3},
    "layout": {"layout": DispatchLayout.TOKEN_MAJOR},
    "expert_alignment": {"expert_alignment": 4},
    "max_tokens_per_rank": {"max_tokens_per_rank": 100},
    "max_row_bytes": {"max_row_bytes": 64},
}


def configs_differ(rank: int) -> dict[str, str]:
    said = {}
    for name, settings in CONFIGS.items():
        began = time.monotonic()
        with pytest.raises(DisagreementError) as caught:
            open_communicator(SIZE, timeout_s=PATIENCE_S, **(settings if rank == FAILS else {}))
        assert time.monotonic() - began < QUICKLY_S
        said[name] = str(caught.value)
    nothing_left_behind()
    with open_communicator(SIZE) as comm:
        round_trip(comm)
    return said


def assert_configs_named(outcomes: list[dict[str, str]]) -> None:
    for rank, said in enumerate(outcomes):
        for name, text in said.items():
            field, value = next(iter(CONFIGS[name].items()))
            shown = value.name if isinstance(value, DispatchLayout) else value
            assert f"{field}={shown}" in text
            assert f" on rank {rank}, " in text and text.endswith(f" on rank {FAILS if rank != FAILS else 0}")


def _dispatch(comm: Any, rank: int, hidden: int = 8, dtype: Any = None, k: int = 2, **beside: Any) -> Any:
    x, ids, weights = tokens_for(rank, SIZE, 9, hidden)
    given = {"topk_weights": weights} | beside
    if given["topk_weights"] is not None:
        given["topk_weights"] = weights[:, :k]
    return comm.dispatch(x.to(dtype or x.dtype), ids[:, :k].contiguous(), **given)


def _cached(comm: Any, rank: int, odd: bool, **differs: Any) -> None:
    _, handle = _dispatch(comm, rank)
    _dispatch(comm, rank, previous_handle=handle, **(differs if odd else {}))


def _combine(comm: Any, rank: int, dtype: Any, hidden: int = 8) -> None:
    _, handle = _dispatch(comm, rank)
    comm.combine(torch.zeros(int(handle.totals[1]), hidden, dtype=dtype, device=here()), handle)


def _backward(comm: Any, rank: int, odd: bool, hidden: int) -> None:
    x, ids, weights = tokens_for(rank, SIZE, 9, hidden)
    out, _ = comm.dispatch(x.requires_grad_(), ids, weights.requires_grad_(not odd))
    out.tokens.sum().backward()


Call = Callable[[Any, int, bool], Any]
CALLS: dict[str, tuple[str, Call]] = {
    "dispatch: hidden size": ("row bytes is", lambda c, r, odd: _dispatch(c, r, hidden=16 if odd else 8)),
    "dispatch: dtype": ("torch.int32 on rank 1", lambda c, r, odd: _dispatch(c, r, dtype=torch.int32 if odd else None)),
    "dispatch: top-k": ("top-k is", lambda c, r, odd: _dispatch(c, r, k=1 if odd else 2)),
    "dispatch: weights": (
        "weight bytes is",
        lambda c, r, odd: _dispatch(c, r, **({"topk_weights": None} if odd else {})),
    ),
    "dispatch: scales": (
        "scale bytes is",
        lambda c, r, odd: _dispatch(c, r, scales=torch.ones(9, 2, device=here()) if odd else None),
    ),
    "dispatch: scales' width": (
        "scale bytes is",
        lambda c, r, odd: _dispatch(c, r, scales=torch.ones(9, 3 + odd, device=here())),
    ),
    "dispatch: quantised rows": (
        "row bytes is",
        lambda c, r, odd: _dispatch(c, r, hidden=16, quantize="e4m3" if odd else None),
    ),
    "cached dispatch: dtype": ("dtype is", lambda c, r, odd: _cached(c, r, odd, dtype=torch.int32)),
    "cached dispatch: wider rows": ("dispatch pool needs", lambda c, r, odd: _cached(c, r, odd, hidden=128)),
    "combine: dtype": ("dtype is", lambda c, r, odd: _combine(c, r, torch.float16 if odd else torch.bfloat16)),
    "combine: wider rows on one": (
        "combine pool needs",
        lambda c, r, odd: _combine(c, r, torch.float32, hidden=128 if odd else 64),
    ),
    "combine: wider rows on the others": (
        "combine pool needs",
        lambda c, r, odd: _combine(c, r, torch.float32, hidden=64 if odd else 128),
    ),
    "backward: weights that ride back": ("weight bytes is", lambda c, r, odd: _backward(c, r, odd, 8)),
    "backward: weights that make rows longer": ("combine pool needs", lambda c, r, odd: _backward(c, r, odd, 32)),
}


def calls_differ(rank: int) -> list[tuple[str, str, float]]:
    said = []
    healthy = open_communicator(SIZE)
    for name, (_, call) in CALLS.items():
        comm = open_communicator(SIZE, hidden_size=128, timeout_s=PATIENCE_S)
        _combine(comm, rank, torch.float32)  # pools of some size are there
        finish(comm)
        dist.barrier()  # an abort also ends what a slower rank has not quite finished
        began = time.monotonic()
        with pytest.raises(DisagreementError) as caught:
            call(comm, rank, rank == FAILS)
            finish(comm)
        said.append((name, str(caught.value), time.monotonic() - began))
        with pytest.raises(DisagreementError) as again:
            round_trip(comm)
        assert str(again.value) == str(caught.value)
        comm.close()
        round_trip(healthy)
    return said


def assert_calls_named(outcomes: list[list[tuple[str, str, float]]]) -> None:
    for said in outcomes:
        for name, text, took in said:
            assert isinstance(text, str) and text.startswith("ranks disagree on one call of communicator"), (name, text)
            assert CALLS[name][0] in text, (name, text)
            assert ("at step notify" in text) == name.startswith("dispatch: "), (name, text)
            assert f"on rank {FAILS}" in text and ("on rank 0" in text or "on rank 2" in text), (name, text)
            assert took < QUICKLY_S, (name, took)
