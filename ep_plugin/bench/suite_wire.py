"""The suite `wire`: what the links and the SMs give, without any exchange around it.

Every copy, of each kind, chunk and number of SMs, is judged before any is timed: all bytes of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

from ep_plugin.bench import provenance
from ep_plugin.bench.launch import run_on_ranks
from ep_plugin.bench.results import everyones_wrong, result, row
from ep_plugin.bench.wire import CPU_CHUNKS, Copy, CpuWire, GpuWire, Wire, copies_on_gpus, measure_copies

SUITE = "wire"


@dataclass(frozen=True, kw_only=True)
class WireSuite:
    backend: str
    ranks: int
    iterations: int

    def __post_init__(self) -> None:
        if self.ranks < 2:
            raise ValueError(f"ranks: expected at least 2, got {self.ranks}")
        if self.iterations < 1:
            raise ValueError(f"iterations: expected at least 1, got {self.iterations}")

    def command(self) -> str:
        return f"ep-bench wire --backend {self.backend} --ranks {self.ranks} --iterations {self.iterations}"


def run(suite: WireSuite) -> dict[str, Any]:
    """Runs the suite on ranks of its own. Raises WrongResult."""
    code_hash = provenance.hash_sources()
    found = run_on_ranks(suite.ranks, suite.backend, measure, suite)
    return result(SUITE, suite.backend, suite.ranks, suite.command(), found, code_hash)


def measure(device: torch.device, suite: WireSuite) -> dict[str, Any]:
    """One rank's part: the rows, or what was wrong, the same on every rank. Collective."""
    wire: Wire = GpuWire(device) if device.type == "cuda" else CpuWire()
    try:
        copies = [Copy(kind="copy", chunk=chunk) for chunk in CPU_CHUNKS]
        if isinstance(wire, GpuWire):
            copies = copies_on_gpus(wire.present)
        wrong = everyones_wrong(_wrong(wire, copies))
        if wrong:
            return {"rows": [], "wrong": wrong}
        with tqdm(total=len(copies), unit="copy", disable=dist.get_rank() != 0, leave=False) as progress:

            def tell(name: str) -> None:
                progress.set_description(name)
                progress.update()

            timings = measure_copies(wire, device, copies, suite.iterations, tell)
        late = wire.gave_up()
        wrong = everyones_wrong([late] if late else [])
        rows = [row(copy.name, "wire", timings[copy.name], wire.moved(copy), copy.sms) for copy in copies]
        return {"rows": [] if wrong else rows, "wrong": wrong}
    finally:
        wire.close()


def _wrong(wire: Wire, copies: list[Copy]) -> list[str]:
    """What is wrong with any of the copies. Collective."""
    found = [(copy.name, wire.wrong(copy)) for copy in copies]
    return [f"{name}: {problem}" for name, problem in found if problem]
