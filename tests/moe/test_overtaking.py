"""A fast rank must not overwrite what a slow one has yet to read, nor say that rows are there before they are.

The slow rank is held between two of its steps, not slowed down: the fast one then shows by the step in which its
deadline passes whether it waited before its first store.
"""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from ep_plugin import _C, DispatchLayout, MoECommunicator, PeerTimeout
from tests.faults.fault_cases import open_communicator, open_with_deadline, tokens_for
from tests.ranks import run_ranks, values

SIZE, COUNT = 2, 70
FAST, SLOW = 0, 1
LAYOUTS = [DispatchLayout.FLAT, DispatchLayout.TOKEN_MAJOR]


def _pair(rank: int, layout: DispatchLayout) -> MoECommunicator:
    """The fast rank has a short deadline, and the slow one a long one."""
    return open_with_deadline(SIZE, 1 if rank == FAST else 15, layout=layout)


def _signal(what: str) -> None:
    dist.distributed_c10d._get_default_store().set(what, "")


def _await_signal(what: str) -> None:
    dist.distributed_c10d._get_default_store().wait([what])


def _expected_rows(rank: int, layout: DispatchLayout) -> torch.Tensor:
    """The first column of the rows that `rank` receives. It marks each row by its token."""
    sources = [tokens_for(source, SIZE, COUNT) for source in range(SIZE)]
    first, ids = torch.cat([x[:, 0] for x, _, _ in sources]), torch.cat([ids for _, ids, _ in sources])
    if layout is DispatchLayout.TOKEN_MAJOR:
        return first[(ids // 2 == rank).any(dim=1)]
    return torch.cat([first[(ids == expert).any(dim=1)] for expert in (2 * rank, 2 * rank + 1)])


def _dispatch_over_a_reader(rank: int, layout: DispatchLayout) -> None:
    if rank == SLOW:
        os.environ["EP_PLUGIN_TEST_GATE"] = "dispatch_recv"
    comm = _pair(rank, layout)
    x, ids, weights = tokens_for(rank, SIZE, COUNT)
    out, handle = comm.dispatch(x, ids, weights)  # the slow rank stays in its receive
    if rank == FAST:
        slow_board = comm.engine.boards._ptrs[SLOW]
        while _C.gate_reached(slow_board) == 0:
            time.sleep(0.001)
        with pytest.raises(PeerTimeout) as caught:
            comm.dispatch(torch.full_like(x, torch.nan), ids, weights, previous_handle=handle)
        assert (caught.value.rank, caught.value.step) == (SLOW, "dispatch_send")
        _C.open_gate(slow_board)
    torch.testing.assert_close(out.tokens[:, 0], _expected_rows(rank, layout), rtol=0, atol=0)
    assert torch.equal(out.tokens[:, 1:], out.tokens[:, :1] + torch.arange(1.0, 8.0))


@pytest.mark.deadline
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_send_waits_for_the_reader_of_the_rows_before(layout: DispatchLayout) -> None:
    values(run_ranks(SIZE, _dispatch_over_a_reader, layout))


def _combine_over_a_reader(rank: int, layout: DispatchLayout) -> None:
    comm = _pair(rank, layout)
    x, ids, weights = tokens_for(rank, SIZE, COUNT)
    out, handle = comm.dispatch(x, ids, weights)
    if rank == FAST:
        z = comm.combine(out.tokens, handle, weights=out.weights)
        with pytest.raises(PeerTimeout) as caught:
            comm.combine(torch.full_like(out.tokens, torch.nan), handle, weights=out.weights)
        assert (caught.value.rank, caught.value.step) == (SLOW, "combine_send")
        _signal("the fast rank has tried")
    else:
        work = comm.combine_async(out.tokens, handle, weights=out.weights)
        _await_signal("the fast rank has tried")
        z = work.wait()
    torch.testing.assert_close(z, x)


@pytest.mark.deadline
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_combine_send_waits_for_the_reader_of_the_partial_rows_before(layout: DispatchLayout) -> None:
    values(run_ranks(SIZE, _combine_over_a_reader, layout))


def _long_rows(rank: int) -> None:
    """Rows are so long that a reader that starts too early finds rows of the previous round, with other values."""
    hidden, count = 16384, 40
    comm = open_communicator(SIZE, hidden_size=hidden)
    _, ids, weights = tokens_for(rank, SIZE, count)
    for turn in range(12):
        x = torch.full((count, hidden), float(100 * turn + rank))
        out, handle = comm.dispatch(x, ids, weights)
        sources = torch.tensor([float(100 * turn + source) for source in range(SIZE)])
        per_source = out.tokens.shape[0] // 2 // SIZE
        expected = sources.repeat_interleave(per_source).repeat(2)  # within an expert ordered by source
        assert torch.equal(out.tokens, expected.unsqueeze(1).expand_as(out.tokens)), f"dispatch, round {turn}"
        assert torch.equal(comm.combine(out.tokens, handle, weights=out.weights), x), f"combine, round {turn}"


def test_rows_are_there_when_their_signal_is() -> None:
    values(run_ranks(SIZE, _long_rows))
