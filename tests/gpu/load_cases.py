"""Load statistics on GPUs: sums in device memory, CUDA graphs, and what recording adds to a step.

Shapes: R ranks, T tokens per rank, K experts per token, E_l experts of a rank.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

import ep_plugin
from ep_plugin import LoadStats, MoECommunicator, MoECommunicatorConfig
from tests.gpu import checks, graphs
from tests.moe.moe_cases import named

CASES = ("plain", "token_major", "aligned", "empty_ranks", "all_dropped", "one_rank_receives_all")
REPLAYS, ROUNDS, LAYERS = 7, 60, 4
LATE_S = 0.6


def chosen(ids: list[torch.Tensor], rank: int, per_rank: int) -> torch.Tensor:
    """``[R, E_l]``: the tokens that all routers chose the experts of `rank` for. ids: of all ranks, on the host."""
    experts = per_rank * len(ids)
    counts = torch.stack([torch.bincount(each[each >= 0], minlength=experts) for each in ids])
    return counts.view(len(ids), len(ids), per_rank)[:, rank]


@contextlib.contextmanager
def no_synchronisation(device: torch.device) -> Iterator[None]:
    """torch raises an error where it would wait for the device."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def counted(rank: int, size: int, **sms: int) -> None:
    """Dispatches with and without a capacity, and with a handle, equal a count of what the routers chose."""
    ep_plugin.record_stats()
    for name in CASES:
        case = checks.CASES[name]
        given = checks.make_inputs(case, size, seed=3)
        room = size * case.tokens * case.topk * max(1, case.alignment)
        with named(name), checks.communicator(case, rank, size, max_tokens_per_rank=case.tokens, **sms) as comm:
            x, ids, weights = (part[rank].to(comm.engine.device) for part in (given.x, given.ids, given.weights))
            for turn in range(3):
                with no_synchronisation(comm.engine.device) if turn else contextlib.nullcontext():
                    out, handle = comm.dispatch(x, ids, weights, capacity=room if turn == 2 else None)
                    comm.combine(out.tokens, handle, weights=out.weights)
                    comm.dispatch(x, ids, weights, previous_handle=handle, capacity=room if turn == 2 else None)
            found = comm.stats(reset=True)
            assert torch.equal(found.tokens, 3 * chosen(given.ids, rank, case.experts_per_rank))
            assert found.dropped_ids == 3 * int((given.ids[rank] == -1).sum()) and found.dropped_rows == 0
            assert (found.dispatches, found.cached_dispatches, found.combines) == (3, 3, 3)
            _check_bytes(found, size)
            assert not comm.stats().tokens.any()


def _check_bytes(found: LoadStats, size: int) -> None:
    """All ranks together have received as many bytes as they have sent."""
    both = torch.tensor([found.link_bytes_sent, found.link_bytes_received])
    dist.all_reduce(both)
    assert both[0] == both[1]


def replayed(rank: int, size: int) -> None:
    """Every replay of a graph counts; so do eager steps before and after it."""
    generator = torch.Generator().manual_seed(size)
    ep_plugin.record_stats()
    with checks.communicator(graphs.CASE, rank, size, max_tokens_per_rank=graphs.CASE.tokens) as comm:
        device = comm.engine.device
        factor, batch = graphs.factors(size).to(device), graphs.random_batch(size, generator)
        static = graphs.Batch(*(part[rank].to(device) for part in batch))
        graphs.step(comm, static, factor)
        checks.synchronize(device)
        replay = graphs.recorded_step(comm, static, factor)
        comm.stats(reset=True)
        expected = torch.zeros(size, graphs.CASE.experts_per_rank, dtype=torch.int64)
        for turn in range(REPLAYS):
            batch = graphs.random_batch(size, generator)
            for to, source in zip(static, batch, strict=True):
                to.copy_(source[rank])
            replay()
            if turn == 3:
                graphs.step(comm, static, factor)
            expected += chosen(list(batch.ids), rank, graphs.CASE.experts_per_rank) * (2 if turn == 3 else 1)
        assert torch.equal(comm.stats().tokens, expected)


def low_latency(rank: int, size: int) -> None:
    """Low-latency dispatches, in a CUDA graph too, and the times that their kernels waited."""
    case = checks.Case(tokens=40, hidden=256, topk=4, ragged=9)
    given = checks.make_inputs(case, size, seed=5)
    ep_plugin.record_stats()
    config = MoECommunicatorConfig(
        num_experts=size * case.experts_per_rank,
        hidden_size=case.hidden,
        topk=case.topk,
        mode="ll",
        max_tokens_per_rank=case.tokens,
    )
    with MoECommunicator(None, config, checks.device_of(rank)) as comm:
        device = comm.engine.device
        x, ids = given.x[rank].to(device), given.ids[rank].to(device)

        def step() -> None:
            out, handle = comm.dispatch(x, ids)
            comm.combine(out.tokens.nan_to_num(), handle)

        step()
        with no_synchronisation(device):
            step()
        checks.synchronize(device)
        assert torch.equal(comm.stats(reset=True).tokens, 2 * chosen(given.ids, rank, case.experts_per_rank))
        replay: Callable[[], Any] = step
        if device.type == "cuda":
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                step()
            replay = graph.replay
        for _ in range(REPLAYS):
            replay()
        found = comm.stats()
        assert torch.equal(found.tokens, REPLAYS * chosen(given.ids, rank, case.experts_per_rank))
        assert bool((found.waited_ns >= 0).all())


def late(rank: int, size: int, **sms: int) -> None:
    """A dispatch, one with a handle and a combine count how long each rank is waited for, when the last one is late."""
    case = checks.Case(tokens=40, hidden=256, topk=4)
    given = checks.make_inputs(case, size, seed=5)
    ep_plugin.record_stats()
    with checks.communicator(case, rank, size, **sms) as comm:
        x, ids = given.x[rank].to(comm.engine.device), given.ids[rank].to(comm.engine.device)
        out, handle = comm.dispatch(x, ids)
        comm.combine(out.tokens, handle)
        for operation in (
            lambda: comm.dispatch(x, ids),
            lambda: comm.dispatch(x, ids, previous_handle=handle),
            lambda: comm.combine(out.tokens, handle),
        ):
            comm.stats(reset=True)
            dist.barrier()
            if rank == size - 1:
                time.sleep(LATE_S)
            operation()
            seconds = comm.stats().waited_ns.double() / 1e9
            assert float(seconds[:-1].max()) < 0.4 * LATE_S, seconds
            assert (0.6 * LATE_S < float(seconds[-1]) < 2 * LATE_S) == (rank != size - 1), seconds


def profiled(rank: int, size: int) -> dict[str, dict[str, int]]:
    """The calls of CUDA and the kernels of one dispatch and its combine, by name; without and with recording."""
    case = checks.CASES["real_widths"]
    given, found = checks.make_inputs(case, size, seed=1), {}
    with checks.communicator(case, rank, size) as comm:
        x, ids, weights = (part[rank].to(comm.engine.device) for part in (given.x, given.ids, given.weights))
        for on in (False, True):
            ep_plugin.record_stats(on)
            for _ in range(3):
                out, handle = comm.dispatch(x, ids, weights)
                comm.combine(out.tokens, handle, weights=out.weights)
            checks.started(comm)
            with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as traced:
                out, handle = comm.dispatch(x, ids, weights)
                comm.combine(out.tokens, handle, weights=out.weights)
            found[str(on)] = dict(Counter(event.name for event in traced.events()))
            checks.synchronize(comm.engine.device)
    return found


def timed(rank: int, size: int, trains: bool) -> tuple[float, float]:
    """Milliseconds of a step with the headline's batch, without and with recording: a dispatch and its combine, or the
    forward and backward passes of some layers of experts. The shortest of some steps, which other tests disturb least.
    """
    case = checks.Case(tokens=4096, ragged=0, hidden=7168, topk=8, experts_per_rank=256 // size, dropped=0.0)
    generator = torch.Generator().manual_seed(rank)
    with checks.communicator(case, rank, size) as comm:
        device = comm.engine.device
        x = torch.randn(case.tokens, case.hidden, generator=generator).to(case.dtype).to(device)
        weights, ids = (part.to(device) for part in torch.rand(case.tokens, 256, generator=generator).topk(case.topk))
        up, down = (torch.randn(shape, device=device).to(case.dtype) / 64 for shape in ((7168, 1024), (1024, 7168)))

        def round_trip() -> None:
            out, handle = comm.dispatch(x, ids, weights)
            comm.combine(out.tokens, handle, weights=out.weights)

        def train() -> None:
            z = x.requires_grad_()
            for _ in range(LAYERS):
                out, handle = comm.dispatch(z, ids, weights)
                z = z + comm.combine((out.tokens @ up).relu() @ down, handle, weights=out.weights)
            z.float().square().mean().backward()
            x.grad = None

        times: dict[bool, list[float]] = {False: [], True: []}
        for turn in range(2 * ROUNDS):
            on = turn % 2 == 1
            ep_plugin.record_stats(on)
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            checks.started(comm)
            begin.record()
            train() if trains else round_trip()
            end.record()
            end.synchronize()
            slowest = torch.tensor(begin.elapsed_time(end))
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            times[on].append(float(slowest))
    return min(times[False]), min(times[True])
