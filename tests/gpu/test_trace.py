"""What the device does in a dispatch and in a combine: our kernels, nothing else, receivers beside senders.

Writes trace.json here: per rank and operation the kernels of one round, in microseconds from the first one's start.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from tests.gpu import checks
from tests.ranks import run_ranks, values

TRACE = Path(__file__).with_name("trace.json")
KERNELS = {
    "dispatch": ("ep_plan", "ep_notify", "ep_dispatch_send", "ep_dispatch_recv"),
    "combine": ("ep_combine_send", "ep_combine_recv"),
}
OVERLAPS = {"dispatch": ("ep_dispatch_send", "ep_dispatch_recv"), "combine": ("ep_combine_send", "ep_combine_recv")}
ROWS_BYTES = 1 << 20  # an allocation of at least this holds rows; routing and tables are below
ROUNDS = 60  # on a machine that does other work too, the host is late in most
LEAD_CYCLES = 4_000_000  # of the device's clock, about two milliseconds: the host, slower when traced, gets ahead
LEAD_KERNEL, RELEASE = "spin_kernel", "nccl"  # in the names of what comes before each round
ONE_AFTER_ANOTHER = os.environ.get("CUDA_LAUNCH_BLOCKING") == "1"  # then nothing overlaps by design


def traced_rounds(rank: int, size: int) -> dict[str, Any]:
    """One rank of the headline's batch: a timeline of each round, and what one more round allocates for rows."""
    case = checks.Case(tokens=4096, ragged=0, hidden=7168, topk=8, experts_per_rank=256 // size, dropped=0.0)
    generator = torch.Generator().manual_seed(rank)
    device = checks.device_of(rank)
    x = torch.randn(case.tokens, case.hidden, generator=generator).to(case.dtype).to(device)
    weights, ids = (part.to(device) for part in torch.rand(case.tokens, 256, generator=generator).topk(case.topk))
    nccl = dist.new_group(list(range(size)), backend="nccl")
    token = torch.zeros(1, device=device)

    def release() -> None:
        """The device goes on when all ranks have come here, and a while after its host has."""
        dist.barrier()
        torch.cuda._sleep(LEAD_CYCLES)
        dist.all_reduce(token, group=nccl)

    with checks.communicator(case, rank, size, timeout_s=60) as comm:
        for _ in range(5):
            release()
            out, handle = comm.dispatch(x, ids, weights)
            comm.combine(out.tokens, handle, weights=out.weights)
        operations: dict[str, Callable[[], Any]] = {
            "dispatch": lambda: comm.dispatch(x, ids, weights),
            "combine": lambda: comm.combine(out.tokens, handle, weights=out.weights),
        }
        traced: dict[str, Any] = {"rows": len(out.tokens)}
        for name, run in operations.items():
            traced[name] = {"rounds": timelines(run, release), "row_allocations": row_allocations(run)}
        return traced


def timelines(run: Callable[[], Any], release: Callable[[], None]) -> list[list[dict[str, Any]]]:
    """What the device did in each of ROUNDS calls. The host is traced no more than that needs: it would be late."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(ROUNDS):
            release()
            run()
            torch.cuda.synchronize()
    return rounds_of(profiler.profiler.kineto_results.events())


def rounds_of(events: list[Any]) -> list[list[dict[str, Any]]]:
    """Device work after each release, in its order, in microseconds from the first."""
    work = [event for event in events if event.device_type() == torch.autograd.DeviceType.CUDA]
    rounds: list[list[Any]] = []
    released = False
    for event in sorted(work, key=lambda event: event.start_ns()):
        if LEAD_KERNEL in event.name():
            released = False
        elif RELEASE in event.name().lower():
            if not released:
                rounds.append([])
            released = True
        elif released and event.duration_ns() > 0:
            rounds[-1].append(event)
    return [
        [
            {
                "name": event.name(),
                "start_us": (event.start_ns() - work[0].start_ns()) / 1e3,
                "duration_us": event.duration_ns() / 1e3,
                "stream": event.device_resource_id(),
            }
            for event in work
        ]
        for work in rounds
    ]


def row_allocations(run: Callable[[], Any]) -> list[int]:
    """Bytes of each allocation of row size in one call, on whichever device."""
    torch.cuda.synchronize()
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], profile_memory=True) as profiler:
        run()
        torch.cuda.synchronize()
    events = profiler.profiler.kineto_results.events()
    return [event.nbytes() for event in events if event.name() == "[memory]" and event.nbytes() >= ROWS_BYTES]


def span(work: list[dict[str, Any]], kernel: str) -> tuple[float, float]:
    """When the kernel of this name started and ended, in microseconds."""
    (event,) = (event for event in work if kernel in event["name"])
    return event["start_us"], event["start_us"] + event["duration_us"]


def quickest(rounds_per_rank: list[list[list[dict[str, Any]]]]) -> int:
    """The round whose slowest rank was done first: the one that other work on the machine disturbed least."""
    ends = [[max(e["start_us"] + e["duration_us"] for e in work) for work in rounds] for rounds in rounds_per_rank]
    slowest = [max(of_ranks) for of_ranks in zip(*ends, strict=True)]
    return slowest.index(min(slowest))


@pytest.mark.gpu(2)
def test_our_kernels_alone_overlapping_with_one_output_allocation() -> None:
    size = min(4, torch.cuda.device_count())
    traces = values(run_ranks(size, traced_rounds, size, timeout_s=120))
    for name, kernels in KERNELS.items():
        for trace in traces:
            assert len(trace[name]["rounds"]) == ROUNDS
            for work in trace[name]["rounds"]:
                names = [event["name"] for event in work]
                assert len(names) == len(kernels), names
                assert all(any(kernel in name for name in names) for kernel in kernels), names
            assert len(trace[name]["row_allocations"]) == 1, trace[name]["row_allocations"]
        chosen = quickest([trace[name]["rounds"] for trace in traces])
        for trace in traces:
            trace[name]["device"] = trace[name].pop("rounds")[chosen]
    if ONE_AFTER_ANOTHER:
        return
    hardware = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
    TRACE.write_text(json.dumps({"hardware": hardware, "ranks": traces}, indent=1) + "\n")
    for name, (sender, receiver) in OVERLAPS.items():
        for rank, trace in enumerate(traces):
            starts, ends = span(trace[name]["device"], receiver)[0], span(trace[name]["device"], sender)[1]
            assert starts < ends, f"rank {rank}: {receiver} starts at {starts:.0f} us, {sender} ends at {ends:.0f}"
