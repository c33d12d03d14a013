"""When each kernel of a dispatch and a combine over nodes runs, and which others run beside it.

    python -m ep_plugin.testing.nodes --device cuda --nodes 2 --ranks 2 -- \\
        python benchmarks/timeline_over_nodes.py --nodes 2 --chunks 4 OUT.json

The profiler traces rank 0. Ranks that share a GPU need NVIDIA's multi-process service, else they take turns.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import typer
from torch.profiler import ProfilerActivity, profile

from ep_plugin import MoECommunicator, MoECommunicatorConfig, env
from ep_plugin.bench.exchange.workload import CUDA_SIZES, ExchangeSuite, batches
from ep_plugin.bench.suite import OverNodes

WARMUPS = 3


@dataclass(frozen=True, kw_only=True)
class Timeline(OverNodes, ExchangeSuite):
    """One dispatch, with totals or a capacity, and one combine."""

    command_name: ClassVar[str] = "timeline-over-nodes"
    defaults: ClassVar = {"cuda": CUDA_SIZES}
    chunks: int

    def command(self) -> str:
        return f"python benchmarks/timeline_over_nodes.py OUT.json --nodes {self.nodes} --chunks {self.chunks}"

    def measure(self, device: torch.device) -> dict[str, Any]:
        batch = batches(self.workload, torch.bfloat16, device)[dist.get_rank()]
        config = MoECommunicatorConfig(
            num_experts=self.experts, hidden_size=self.hidden, topk=self.topk, max_tokens_per_rank=self.tokens,
            rail_chunks=self.chunks, timeout_s=60,
        )  # fmt: skip
        rows: list[dict[str, Any]] = []
        with MoECommunicator(None, config, device) as comm:
            self.check_nodes(comm.engine.node_map.num_nodes)
            out, handle = comm.dispatch(batch.x, batch.ids, batch.weights)
            capacity = 2 * out.tokens.shape[0]
            calls: dict[str, Callable[[], Any]] = {
                "dispatch": lambda: comm.dispatch(batch.x, batch.ids, batch.weights),
                "dispatch_capacity": lambda: comm.dispatch(batch.x, batch.ids, batch.weights, capacity=capacity),
                "combine": lambda: comm.combine(out.tokens, handle, weights=out.weights),
            }
            for case, call in calls.items():
                rows += [{"case": case, **kernel} for kernel in timeline(call)]
        return {"rows": rows, "notes": [f"microseconds of rank 0's kernels and copies; {self.chunks} chunks"]}


def timeline(call: Callable[[], Any]) -> list[dict[str, Any]]:
    """Kernels and copies of one call in the order of their starts, in microseconds from the first. Collective."""
    for _ in range(WARMUPS):
        call()
    for _ in range(2):  # the first profile of a process begins late
        dist.barrier()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            call()
            torch.cuda.synchronize()
    cuda = torch.autograd.DeviceType.CUDA
    events = [event for event in profiler.profiler.kineto_results.events() if event.device_type() == cuda]
    events = sorted((event for event in events if event.duration_ns() > 0), key=lambda event: event.start_ns())
    work = [
        {
            "kernel": short(event.name()),
            "stream": event.device_resource_id(),
            "start_us": round((event.start_ns() - events[0].start_ns()) / 1e3, 1),
            "us": round(event.duration_ns() / 1e3, 1),
        }
        for event in events
    ]
    for one in work:
        others = (other for other in work if other["stream"] != one["stream"] and meet(one, other))
        one["beside"] = sorted({other["kernel"] for other in others})
    return work


def meet(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one["start_us"] < other["start_us"] + other["us"] and other["start_us"] < one["start_us"] + one["us"]


def short(name: str) -> str:
    """The kernel's name without namespaces, templates and arguments."""
    found = re.search(r"ep_\w+|nccl\w+|Mem\w+ ?\w*", name)
    return found[0] if found else name


def main(out: Path, nodes: int = 2, chunks: int = 4) -> None:
    made = Timeline(backend="cuda", ranks=env.launcher().world_size, nodes=nodes, chunks=chunks).run()
    out.write_text(json.dumps(made, indent=1) + "\n")
    for line in made["rows"]:
        print("{case:18} {kernel:28} {stream:4} {start_us:10.1f} {us:10.1f}".format(**line), *line["beside"])


if __name__ == "__main__":
    typer.run(main)
