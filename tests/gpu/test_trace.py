"""What the device does in a dispatch and in a combine: our kernels, nothing else. Writes trace.json here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from tests.gpu import checks
from tests.ranks import run_ranks, values

TRACE = Path(__file__).with_name("trace.json")
DISPATCH = ("plan_kernel", "notify_kernel", "send_kernel", "admit_kernel", "expand_kernel")
COMBINE = ("push_kernel", "admit_kernel", "add_kernel")
ROWS_BYTES = 1 << 20  # an allocation of at least this holds rows; routing and tables are below


def traced_round(rank: int, size: int) -> dict[str, Any]:
    case = checks.Case(tokens=4096, ragged=0, hidden=7168, topk=8, experts_per_rank=256 // size, dropped=0.0)
    generator = torch.Generator().manual_seed(rank)
    device = checks.device_of(rank)
    x = torch.randn(case.tokens, case.hidden, generator=generator).to(case.dtype).to(device)
    weights, ids = (part.to(device) for part in torch.rand(case.tokens, 256, generator=generator).topk(case.topk))
    with checks.communicator(case, rank, size, timeout_s=60) as comm:
        for _ in range(5):
            out, handle = comm.dispatch(x, ids, weights)
            comm.combine(out.tokens, handle, weights=out.weights)
        torch.cuda.synchronize()
        dist.barrier()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], profile_memory=True) as dispatch:
            out, handle = comm.dispatch(x, ids, weights)
            torch.cuda.synchronize()
        dist.barrier()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], profile_memory=True) as combine:
            comm.combine(out.tokens, handle, weights=out.weights)
            torch.cuda.synchronize()
        return {"rows": len(out.tokens), "dispatch": summary(dispatch), "combine": summary(combine)}


def summary(profiler: Any) -> dict[str, Any]:
    """Device work and allocations of row size, in microseconds from the first kernel."""
    events = [event for event in profiler.profiler.kineto_results.events()]
    work = [
        event for event in events if event.device_type() == torch.autograd.DeviceType.CUDA and event.duration_ns() > 0
    ]
    work = [event for event in work if event.name() != "[memory]"]
    first = min(event.start_ns() for event in work)
    memory = [event for event in events if event.name() == "[memory]" and event.nbytes() >= ROWS_BYTES]
    return {
        "device": [
            {
                "name": event.name(),
                "start_us": (event.start_ns() - first) / 1e3,
                "duration_us": event.duration_ns() / 1e3,
                "stream": event.device_resource_id(),
            }
            for event in sorted(work, key=lambda event: event.start_ns())
        ],
        "row_allocations": [{"at_us": (event.start_ns() - first) / 1e3, "bytes": event.nbytes()} for event in memory],
    }


@pytest.mark.gpu(2)
def test_only_our_kernels_and_one_output_allocation() -> None:
    size = min(4, torch.cuda.device_count())
    traces = values(run_ranks(size, traced_round, size, start="spawn", timeout_s=120))
    hardware = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
    TRACE.write_text(json.dumps({"hardware": hardware, "ranks": traces}, indent=1) + "\n")
    for trace in traces:
        for operation, kernels in (("dispatch", DISPATCH), ("combine", COMBINE)):
            names = [event["name"] for event in trace[operation]["device"]]
            assert len(names) == len(kernels), names
            assert all(any(kernel in name for name in names) for kernel in kernels), names
            assert len(trace[operation]["row_allocations"]) == 1, trace[operation]["row_allocations"]
