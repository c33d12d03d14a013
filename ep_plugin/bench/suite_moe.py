"""The suite `moe`: dispatch, combine, both, and cached dispatch, of ep_plugin and of the same exchange by collectives.

Every way to do a thing is judged by the oracle, on poisoned memory, before any is timed. `bytes_wire` counts the rows
(and scales) that cross to or from the busiest rank in its busier direction; routing and records are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

from ep_plugin.bench import provenance
from ep_plugin.bench.cases import Case, Peers, Scene, Way, flat_cases, token_major_cases
from ep_plugin.bench.launch import run_on_ranks
from ep_plugin.bench.ours import default_sms
from ep_plugin.bench.timing import Timing, clock_of, time_in_turn
from ep_plugin.bench.workload import DTYPES, Workload
from ep_plugin.config import ROW_ALIGNMENT_BYTES, DispatchLayout

SUITE = "moe_ht"
WARMUP = 3
LAYOUT_CASES = {"flat": flat_cases, "token_major": token_major_cases}


@dataclass(frozen=True, kw_only=True)
class MoeSuite:
    """What one run measures. dtypes: names of workload.DTYPES. layouts: names of DispatchLayout, in lower case."""

    backend: str
    workload: Workload
    dtypes: tuple[str, ...]
    layouts: tuple[str, ...]
    iterations: int
    peers: Peers = field(default_factory=Peers)

    def __post_init__(self) -> None:
        _check_names("backend", ("cpu", "cuda"), (self.backend,))
        _check_names("dtype", tuple(DTYPES), self.dtypes)
        _check_names("layout", tuple(LAYOUT_CASES), self.layouts)
        for name in self.dtypes:
            row_bytes = self.workload.hidden * DTYPES[name].itemsize
            if row_bytes % ROW_ALIGNMENT_BYTES:
                raise ValueError(
                    f"hidden: expected rows of a multiple of {ROW_ALIGNMENT_BYTES} bytes, got {row_bytes} with {name}"
                )
        if self.iterations < 1:
            raise ValueError(f"iterations: expected at least 1, got {self.iterations}")

    @property
    def num_cases(self) -> int:
        flat = sum(2 if name == "float8" else 4 for name in self.dtypes)
        return sum({"flat": flat, "token_major": len(self.dtypes)}[layout] for layout in self.layouts)

    def command(self) -> str:
        """What a user types for this run."""
        sizes = {name: value for name, value in asdict(self.workload).items() if name != "seed"}
        words = [f"--backend {self.backend}", *(f"--{name} {value}" for name, value in sizes.items())]
        words += [f"--dtype {name}" for name in self.dtypes] + [f"--layout {name}" for name in self.layouts]
        return " ".join(["ep-bench moe", *words, f"--iterations {self.iterations}"])


def _check_names(what: str, known: tuple[str, ...], given: tuple[str, ...]) -> None:
    for name in given:
        if name not in known:
            raise ValueError(f"{what}: expected one of {', '.join(known)}, got {name!r}")


class WrongResult(RuntimeError):
    """An implementation disagreed with the oracle, so nothing was timed."""


def run(suite: MoeSuite) -> dict[str, Any]:
    """Runs the suite on ranks of its own and returns the result as design.md §9 has it. Raises WrongResult."""
    code_hash = provenance.hash_sources()
    found = run_on_ranks(suite.workload.ranks, suite.backend, measure, suite)
    if found["wrong"]:
        raise WrongResult("\n".join(found["wrong"]))
    return {
        "suite": SUITE,
        "hardware": provenance.hardware(suite.backend, suite.workload.ranks),
        "versions": provenance.versions(),
        "code_hash": code_hash,
        "command": suite.command(),
        "rows": found["rows"],
    }


def measure(device: torch.device, suite: MoeSuite) -> dict[str, list[Any]]:
    """One rank's part: the rows of the result, or what was wrong, the same on every rank. Collective."""
    clock, rows = clock_of(device), []
    with tqdm(total=suite.num_cases, unit="case", disable=dist.get_rank() != 0, leave=False) as progress:
        for case in _cases(device, suite):
            progress.set_description(case.name)
            wrong = _judge(case, device)
            if wrong:
                return {"rows": [], "wrong": wrong}
            timings = time_in_turn(clock, {way.impl: way.run for way in case.ways}, suite.iterations, WARMUP)
            rows += [_row(case.name, way, timings[way.impl], device) for way in case.ways]
            progress.update()
    return {"rows": rows, "wrong": []}


def _cases(device: torch.device, suite: MoeSuite) -> Iterator[Case]:
    for dtype in suite.dtypes:
        for layout in suite.layouts:
            scene = Scene(suite.workload, dtype, DispatchLayout(layout), device)
            yield from LAYOUT_CASES[layout](scene, suite.peers)


def _judge(case: Case, device: torch.device) -> list[str]:
    """What is wrong with any way on any rank, a sentence each. Collective."""
    wrong = []
    for way in case.ways:
        _poison(device, 2 * max(each.bytes_wire for each in case.ways))
        problem = way.wrong(way.run())
        if problem:
            wrong.append(f"{case.name} by {way.impl}: rank {dist.get_rank()}: {problem}")
    everyones: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everyones, wrong)
    return [sentence for theirs in everyones for sentence in theirs]


def _poison(device: torch.device, nbytes: int) -> None:
    """Leaves bytes that no row holds where the allocator will place the next output."""
    torch.full((nbytes + 1,), 0xFF, dtype=torch.uint8, device=device)


def _row(case: str, way: Way, timing: Timing, device: torch.device) -> dict[str, Any]:
    sms = default_sms(case) if device.type == "cuda" and way.impl == "ep_plugin" else None
    gb_s = round(way.bytes_wire / timing.median_us / 1e3, 2)
    return {"case": case, "impl": way.impl, **asdict(timing), "bytes_wire": way.bytes_wire, "gb_s": gb_s, "sms": sms}
