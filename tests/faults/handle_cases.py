"""Handles whose contents were overwritten, for the CPU, the emulation and GPUs (fault_cases.here).

Autograd refuses a saved tensor that was changed in place. So these cases write through `data`, which it does not see.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ep_plugin import _C, DispatchLayout, MoECommunicator
from ep_plugin.errors import EpPluginError
from ep_plugin.moe.layout import DispatchHandle
from tests.faults.fault_cases import EXPERTS_PER_RANK, TOPK, finish, open_with_deadline, tokens_for

SIZE, COUNT = 2, 70
HUGE = 2**30
SAID = "handle: expected its tensors as dispatch wrote them, got other contents at step"
EXTREMES = (-HUGE, HUGE, -(2**31), 2**31 - 1)


def _plan_parts(size: int) -> dict[str, slice]:
    """Where the parts of a plan lie (MetaLayout in csrc/common/layout.h), then the positions of tokens."""
    layout = _C.meta_layout(size, EXPERTS_PER_RANK * size, 1)
    names = [name for name, value in vars(_C.MetaLayout).items() if isinstance(value, property)]
    begins = sorted((getattr(layout, name), name) for name in names)
    parts = {name: slice(begin, end) for (begin, name), (end, _) in itertools.pairwise(begins)}
    return parts | {"send_pos": slice(layout.words, layout.words + COUNT * size)}


# The parts from which each operation computes addresses: with any of the extremes in one of them, it must fail.
READ_BY_COMBINE = ("rank_count", "send_base", "combine_base", "recv_offset", "send_chunk_end", "recv_chunk_end")
READ_BY_DISPATCH = ("rank_count", "send_base", "send_chunk_end", "recv_offset", "token_base")
READ_BY_DISPATCH += ("expert_offset", "expert_rows")
NUM_EXTREMES = len(READ_BY_COMBINE) + len(READ_BY_DISPATCH) + 3


def _combine(comm: MoECommunicator, handle: DispatchHandle, rows: torch.Tensor, weights: torch.Tensor) -> None:
    del weights
    comm.combine(rows, handle)


def _cached_dispatch(comm: MoECommunicator, handle: DispatchHandle, rows: torch.Tensor, weights: torch.Tensor) -> None:
    del rows, weights
    x, ids, given = tokens_for(comm.rank, comm.size, COUNT)
    comm.dispatch(x, ids, given, previous_handle=handle)


def _backward(comm: MoECommunicator, handle: DispatchHandle, rows: torch.Tensor, weights: torch.Tensor) -> None:
    """The backward of the dispatch that made `handle`: gradients of weights return to their owners."""
    del comm, handle
    (rows.sum() + weights.sum()).backward()


Use = Callable[[MoECommunicator, DispatchHandle, torch.Tensor, torch.Tensor], None]


def _try(rank: int, size: int, layout: DispatchLayout, use: Use, spoil: Callable[[DispatchHandle], Any]) -> str:
    """What `use` raises on this rank, where rank 0 has spoiled its handle; "" where nothing."""
    comm = open_with_deadline(size, 2, layout=layout)  # a rank that finds fewer rows in its handle sends fewer
    x, ids, weights = tokens_for(rank, size, COUNT)
    out, handle = comm.dispatch(x.requires_grad_(), ids, weights.requires_grad_())
    finish(comm)
    dist.barrier()  # no rank is in that dispatch when another one fails
    if rank == 0:
        spoil(handle)
    said = ""
    try:
        use(comm, handle, out.tokens, out.weights)
        finish(comm)
    except (ValueError, EpPluginError) as error:
        said = str(error)
    comm.close()
    dist.barrier()
    return said


def extremes_are_refused(rank: int, size: int, layout: DispatchLayout) -> int:
    """Extremes in every part, a part at a time. Returns how many this rank has refused, or heard of."""
    parts = _plan_parts(size)
    trials: list[tuple[str, Use]] = [(part, _combine) for part in READ_BY_COMBINE]
    trials += [(part, _cached_dispatch) for part in READ_BY_DISPATCH]
    trials += [("send_pos", _combine), ("send_pos", _cached_dispatch), ("recv_rows", _combine)]
    refused = 0
    for number, (part, use) in enumerate(trials):
        value = EXTREMES[number % len(EXTREMES)]
        if part in ("send_pos", "recv_rows"):
            value = HUGE  # a negative one says that there is no row

        def spoil(handle: DispatchHandle, part: str = part, value: int = value) -> None:
            if part == "recv_rows":
                handle.recv_rows.data.fill_(value)
            else:
                handle.plan.data[parts[part]].fill_(value)

        said = _try(rank, size, layout, use, spoil)
        if rank == 0:
            assert SAID in said, f"{part} = {value} in {use.__name__}: {said!r}"
        refused += SAID in said
    return refused


def ids_beyond_the_last_do_no_harm(rank: int, size: int, layout: DispatchLayout) -> None:
    """No kernel of a backward reads the handle's ids: the positions decide where a weight's gradient returns."""
    assert _try(rank, size, layout, _backward, lambda handle: handle.topk_ids.data.fill_(HUGE)) == ""


def rows_apart_are_refused(rank: int, size: int) -> None:
    """In TOKEN_MAJOR all pairs of a slot came with one row."""

    def spoil(handle: DispatchHandle) -> None:
        handle.recv_rows.data[:] = torch.arange(TOPK)

    said = _try(rank, size, DispatchLayout.TOKEN_MAJOR, _combine, spoil)
    assert rank != 0 or SAID in said, said


def anything_goes(rank: int, size: int, layout: DispatchLayout, seed: int, trials: int) -> int:
    """Words anywhere in a handle, overwritten at random. Whatever happens, it is a result or an error of ours."""
    numbers = random.Random(seed)
    refused = 0
    for _ in range(trials):
        use = numbers.choice((_combine, _cached_dispatch, _backward))
        field = numbers.choice(("topk_ids", "plan", "plan", "plan", "recv_rows"))
        where, value = numbers.random(), numbers.choice((*EXTREMES, -1, 0, 1, 5, 77, numbers.randrange(-500, 500)))
        whole = numbers.random() < 0.3

        def spoil(
            handle: DispatchHandle, field: str = field, at: float = where, to: int = value, whole: bool = whole
        ) -> None:
            words = getattr(handle, field).data.view(-1)
            # Most of the plan's words are positions, which are many and alike: rather one of those before them.
            last = (
                _C.meta_layout(size, EXPERTS_PER_RANK * size, 1).words if field == "plan" and at < 0.8 else len(words)
            )
            if whole:
                words[:last].fill_(to)
            elif last > 0:
                words[int(at * (last - 1))] = to

        refused += _try(rank, size, layout, use, spoil) != ""
    return refused
