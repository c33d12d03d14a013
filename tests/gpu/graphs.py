"""One captured step (dispatch, experts, combine), replayed with new inputs and judged on the device.

Shapes: R ranks, T tokens per rank, H hidden size, K experts per token, E_l experts per rank, P = R * T * K pairs. A
graph's shapes are fixed: a rank has fewer tokens when the ids of the rest are -1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch

from ep_plugin import CaptureRefused, DispatchOutput, MoECommunicator
from tests.gpu.checks import ONE_KERNEL, TOKEN_MAJOR, Case, check_round, communicator, synchronize
from tests.ranks import note

REPLAYS = 1000
EAGER_EVERY = 50
CASE = Case(tokens=48, hidden=260, topk=4, experts_per_rank=8, dtype=torch.float32)
OTHER = Case(tokens=60, hidden=128, topk=3, layout=TOKEN_MAJOR)
# Relative to the sum of the terms' magnitudes. All is float32, and half an epsilon goes for an expert's row, for each
# of K terms on a rank, and for each of at most K partial sums at a node, and at the owner: 13 halves with K = 4.
TOLERANCE = 10 * torch.finfo(torch.float32).eps
JUDGED = ("tokens", "weights", "row_expert_ids", "num_tokens_per_expert", "overflow and required", "combine")


class Batch(NamedTuple):
    """x ``[R, T, H]``, ids ``[R, T, K]`` and weights ``[R, T, K]`` of all ranks."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor


class Expected(NamedTuple):
    """What one rank receives with a capacity of P rows, and its combined tokens in float64."""

    tokens: torch.Tensor
    weights: torch.Tensor
    row_expert_ids: torch.Tensor
    counts: torch.Tensor
    z: torch.Tensor
    magnitude: torch.Tensor


def random_batch(size: int, generator: torch.Generator) -> Batch:
    """The same on every rank, on the CPU. Each rank has its own number of valid tokens, from none to all."""
    shape = (size, CASE.tokens, CASE.topk)
    valid = torch.randint(0, CASE.tokens + 1, (size, 1, 1), generator=generator)
    scores = torch.rand((size, CASE.tokens, CASE.experts_per_rank * size), generator=generator)
    dropped = torch.rand(shape, generator=generator) < CASE.dropped
    dropped |= torch.arange(CASE.tokens)[None, :, None] >= valid
    return Batch(
        x=torch.randn((size, CASE.tokens, CASE.hidden), generator=generator),
        ids=scores.topk(CASE.topk, dim=2).indices.masked_fill(dropped, -1),
        weights=torch.rand(shape, generator=generator) + 0.1,  # a pair that is lost must show
    )


def factors(size: int) -> torch.Tensor:
    """``[E]``: expert e multiplies its rows by factor[e]."""
    experts = CASE.experts_per_rank * size
    return 0.5 + torch.arange(experts) / experts


def _room(size: int) -> int:
    return size * CASE.tokens * CASE.topk


def step(comm: MoECommunicator, given: Batch, factor: torch.Tensor) -> tuple[DispatchOutput, torch.Tensor]:
    """What is captured. given: this rank's x ``[T, H]``, ids and weights ``[T, K]``."""
    out, handle = comm.dispatch(given.x, given.ids, given.weights, capacity=_room(comm.size))
    assert out.row_expert_ids is not None
    mine = factor[comm.rank * CASE.experts_per_rank :]
    y = out.tokens * mine[out.row_expert_ids.clamp(min=0).long()].unsqueeze(1)
    return out, comm.combine(y, handle, weights=out.weights)


def expected(batch: Batch, rank: int, factor: torch.Tensor) -> Expected:
    """The oracle, in shapes that do not depend on the routing, so that the host waits for nothing."""
    per_rank, topk = len(factor) // len(batch.ids), batch.ids.shape[2]
    ids, local = batch.ids.flatten(0, 1), batch.ids.flatten(0, 1) - rank * per_rank
    here = (ids >= 0) & (local >= 0) & (local < per_rank)
    expert, order = torch.where(here, local, per_rank).flatten().sort(stable=True)  # pairs of other ranks come last
    present = expert < per_rank
    own = batch.ids[rank]
    share = torch.where(own >= 0, batch.weights[rank].double() * factor.double()[own.clamp(min=0)], 0.0)
    z = batch.x[rank].double() * share.sum(1, keepdim=True)
    return Expected(
        tokens=torch.where(present[:, None], batch.x.flatten(0, 1)[order // topk], 0.0),
        weights=torch.where(present, batch.weights.flatten()[order], 0.0),
        row_expert_ids=torch.where(present, expert, -1),
        counts=(expert[:, None] == torch.arange(per_rank, device=expert.device)).sum(0),
        z=z,
        magnitude=z.abs(),
    )


def judge(wrong: torch.Tensor, out: DispatchOutput, z: torch.Tensor, oracle: Expected) -> None:
    """Marks in `wrong`, bool ``[len(JUDGED)]``, what is not as the oracle says; enqueued, the host does not look."""
    assert out.overflow is not None and out.required is not None
    verdicts = (
        (out.tokens != oracle.tokens).any(),
        (out.weights != oracle.weights).any(),
        (out.row_expert_ids != oracle.row_expert_ids).any(),
        (out.num_tokens_per_expert != oracle.counts).any(),
        (out.overflow != 0) | (out.required != oracle.counts.sum()),
        (~((z.double() - oracle.z).abs() <= TOLERANCE * oracle.magnitude)).any(),
    )
    wrong.logical_or_(torch.stack(verdicts))


def replayed_in_one_kernel(rank: int, size: int) -> int:
    """The same where the SMs that send also receive."""
    return replayed(rank, size, **ONE_KERNEL)


def recorded_step(
    comm: MoECommunicator, static: Batch, factor: torch.Tensor
) -> Callable[[], tuple[DispatchOutput, torch.Tensor]]:
    """A call that replays a capture of `step`. On a CPU, which has no graphs, it runs `step`."""
    if comm.engine.device.type != "cuda":
        return lambda: step(comm, static, factor)
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded, capture_error_mode="thread_local"):
        results = step(comm, static, factor)

    def replay() -> tuple[DispatchOutput, torch.Tensor]:
        recorded.replay()
        return results

    return replay


def replayed(rank: int, size: int, replays: int = REPLAYS, **sms: int) -> int:
    """So many replays of one capture, with eager steps of this and of another communicator between them."""
    generator = torch.Generator().manual_seed(size)
    with (
        communicator(CASE, rank, size, timeout_s=60, max_tokens_per_rank=CASE.tokens, **sms) as comm,
        communicator(OTHER, rank, size, timeout_s=60) as other,
    ):
        device = comm.engine.device
        factor = factors(size).to(device)
        static = Batch(*(part[rank].to(device) for part in random_batch(size, generator)))
        step(comm, static, factor)  # makes the pools, which cannot grow under a capture
        synchronize(device)
        replay = recorded_step(comm, static, factor)
        wrong = torch.zeros((replays, len(JUDGED)), dtype=torch.bool, device=device)
        for turn in range(replays):
            batch = random_batch(size, generator)
            for to, source in zip(static, batch, strict=True):
                to.copy_(source[rank])
            out, z = replay()
            oracle = expected(Batch(*(part.to(device) for part in batch)), rank, factor)
            judge(wrong[turn], out, z, oracle)
            if turn % EAGER_EVERY == 0:
                note(f"replay {turn} of {replays}")
                judge(wrong[turn], *step(comm, static, factor), oracle)
                check_round(comm, CASE, turn)
                check_round(other, OTHER, turn)
            if turn == replays // 2:  # wider rows grow the pools; the graph goes on in those it was captured with
                scales = torch.ones((CASE.tokens, 64), device=device)
                comm.dispatch(static.x, static.ids, static.weights, scales=scales, capacity=_room(size))
        failed = [(turn, JUDGED[what]) for turn, what in wrong.nonzero().tolist()]
        assert not failed, f"{len(failed)} wrong results of {replays} replays, first {failed[:5]}"
        comm.check()
    return replays


def torn(rank: int, size: int) -> list[bool]:
    """An eager dispatch that is waited for in a capture is refused there, complete or not, and the capture goes on.

    Returns whether two captures have numbers, of their own, and none is left after them.
    """
    generator = torch.Generator().manual_seed(size)
    with communicator(CASE, rank, size, timeout_s=60, max_tokens_per_rank=CASE.tokens) as comm:
        device, numbers = comm.engine.device, []
        factor = factors(size).to(device)
        batch = random_batch(size, generator)
        static = Batch(*(part[rank].to(device) for part in batch))
        oracle = expected(Batch(*(part.to(device) for part in batch)), rank, factor)
        wrong = torch.zeros(len(JUDGED), dtype=torch.bool, device=device)
        step(comm, static, factor)
        for complete in (False, True):
            work = comm.dispatch_async(*static, capacity=_room(size))
            if complete:
                judge(wrong, *step(comm, static, factor), oracle)
            torch.cuda.synchronize()
            recorded = torch.cuda.CUDAGraph()
            with torch.cuda.graph(recorded, capture_error_mode="thread_local"):
                numbers.append(comm.engine.streams.capturing())
                with pytest.raises(CaptureRefused, match="begun before the capture .* in it$"):
                    work.wait()
                out, z = step(comm, static, factor) if complete else (None, static.x + 1)
                assert comm.engine.streams.capturing() == numbers[-1]
            recorded.replay()
            if out is not None:
                judge(wrong, out, z, oracle)
            late, _ = work.wait()
            wrong[0] |= (late.tokens != oracle.tokens).any()
        failed = [JUDGED[what] for what in wrong.nonzero().flatten().tolist()]
        assert not failed, failed
        return [0 not in numbers, numbers[0] != numbers[1], comm.engine.streams.capturing() == 0]


def refused(rank: int, size: int) -> bool:
    """A capture that finds no pool is refused by name, and goes on. Returns whether it was one capture throughout."""
    with communicator(CASE, rank, size, timeout_s=60, max_tokens_per_rank=CASE.tokens) as comm:
        device = comm.engine.device
        batch = random_batch(size, torch.Generator().manual_seed(size))
        static = Batch(*(part[rank].to(device) for part in batch))
        torch.cuda.synchronize()
        recorded = torch.cuda.CUDAGraph()
        with torch.cuda.graph(recorded, capture_error_mode="thread_local"):
            number = comm.engine.streams.capturing()
            with pytest.raises(CaptureRefused, match="dispatch pool has 0 bytes"):
                comm.dispatch(*static, capacity=_room(size))
            same = number != 0 and comm.engine.streams.capturing() == number
            doubled = static.x * 2
        recorded.replay()
        assert torch.equal(doubled, static.x * 2)
        out, _ = comm.dispatch(*static, capacity=_room(size))
        oracle = expected(Batch(*(part.to(device) for part in batch)), rank, factors(size).to(device))
        assert torch.equal(out.tokens, oracle.tokens)
        return same
