"""What a peer wrote is checked before it becomes an index: one rank sends nonsense, its peers say so and go on."""

from __future__ import annotations

import ctypes
import datetime
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from ep_plugin import _C
from ep_plugin.errors import EpPluginError
from tests.faults.fault_cases import (
    EXPERTS_PER_RANK,
    nothing_left_behind,
    open_communicator,
    replace_kernels,
    round_trip,
    tokens_for,
)
from tests.ranks import run_ranks, values

SIZE, LIAR, TOKENS = 2, 1, 40
EXPERTS = EXPERTS_PER_RANK * SIZE
PATIENCE_S = 30.0
MOST_TOKENS = 2**31 - 1

# Words of a handle's plan: the routing metadata, and the positions behind it.
META = _C.meta_layout(SIZE, EXPERTS, 1)
RANK_COUNT, COMBINE_BASE = META.rank_count, META.combine_base
SEND_CHUNK_END, RECV_CHUNK_END = META.send_chunk_end, META.recv_chunk_end
SEND_POS = META.words
PAIR_POS = SEND_POS + TOKENS * SIZE

OWN_HANDLE = "handle: expected its tensors as dispatch wrote them, got other contents at step"

# What the liar changes in its plan before which kernel, and what its peer says; rank 0 is the first of each pair.
LIES: dict[str, tuple[str, int, int, str]] = {
    "a negative count": ("notify", RANK_COUNT, -5, "step notify: rank 1 sent an index .* at most 40, got -5"),
    "more rows than tokens": ("notify", RANK_COUNT, 41, "step notify: rank 1 sent an index .* at most 40, got 41"),
    "an expert's rows": (
        "notify",
        RANK_COUNT + SIZE,
        2**30,
        "step notify: rank 1 sent an index .* at most 40, got 1073741824",
    ),
    "a row past the output": ("dispatch_send", PAIR_POS, 2**30, "step dispatch_recv: rank 1 sent an index outside"),
    "a negative row": ("dispatch_send", PAIR_POS, -70, "step dispatch_recv: rank 1 sent an index outside .* got -50"),
    "a chunk past the rows": (
        "dispatch_send",
        SEND_CHUNK_END,
        99,
        "step dispatch_recv: rank 1 sent an index outside .* got 99",
    ),
    "a chunk that goes back": (
        "dispatch_send",
        SEND_CHUNK_END,
        -1,
        "step dispatch_recv: rank 1 sent an index outside .* got -1",
    ),
    "too few rows": (
        "dispatch_send",
        SEND_CHUNK_END + 1,
        39,
        "step dispatch_recv: rank 1 sent an index .* at most 40, got 39",
    ),
    "a chunk of partial rows": ("combine_send", RECV_CHUNK_END, 31, "step combine_recv: rank 1 sent an index outside"),
}
# What a rank finds before it writes: rows beyond int32 or past a pool. It stops, and its peers with it.
OVERRUNS: dict[str, tuple[str, int, int, str]] = {
    "more rows than can be numbered": ("notify", RANK_COUNT, MOST_TOKENS, f"step notify: .* where {MOST_TOKENS} are"),
    "a slot past the pool": ("dispatch_send", SEND_POS, 2**20, f"{OWN_HANDLE} dispatch_send"),
    "a partial row past the pool": ("combine_send", COMBINE_BASE, 2**20, "step combine_send: rows for rank 0 need"),
}


def _lie(comm: Any, before: str, word: int, value: int) -> None:
    """Makes a kernel find `value` where its metadata has something else."""
    honest = getattr(_C.cpu, before)

    def lie(args: Any) -> None:
        ctypes.c_int32.from_address(args.routing.meta + 4 * word).value = value
        if value == MOST_TOKENS:
            args.header.num_tokens = value
        honest(args)

    replace_kernels(comm, **{before: lie})


def _hears(rank: int, case: tuple[str, int, int, str]) -> str:
    comm, other = open_communicator(SIZE, timeout_s=PATIENCE_S), open_communicator(SIZE)
    round_trip(comm, TOKENS)
    if rank == LIAR:
        _lie(comm, *case[:3])
    x, ids, weights = tokens_for(rank, SIZE, TOKENS)
    store = dist.distributed_c10d._get_default_store()
    with pytest.raises((EpPluginError, ValueError)) as caught:
        out, handle = comm.dispatch(x, ids, weights)
        if rank == LIAR and case[0] == "dispatch_send":  # else its combine might find the spoiled handle first
            store.wait(["refused"], datetime.timedelta(seconds=PATIENCE_S))
        comm.combine(out.tokens, handle)
        comm.dispatch(x, ids, weights)
    store.set("refused", "")
    comm.close()
    round_trip(other)
    other.close()
    nothing_left_behind()
    return str(caught.value)


def _check(case: tuple[str, int, int, str], run: Callable[..., Any]) -> None:
    heard, own = values(run_ranks(SIZE, run, case))
    assert re.search(case[3], heard), heard
    assert re.search(f"{case[3]}|{OWN_HANDLE}", own), own  # its next step finds the handle that it has spoiled


@pytest.mark.parametrize("lie", LIES)
def test_nonsense_from_a_peer_is_refused(lie: str) -> None:
    _check(LIES[lie], _hears)


@pytest.mark.parametrize("overrun", OVERRUNS)
def test_no_rank_writes_past_a_pool(overrun: str) -> None:
    _check(OVERRUNS[overrun], _hears)
