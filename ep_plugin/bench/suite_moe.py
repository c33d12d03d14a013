"""The suite `moe`: dispatch, combine, both, and cached dispatch, of ep_plugin and of the same exchange by collectives.

Every way to do a thing is judged by the oracle before any is timed, and once more after: each time with rows that no
call has moved before, into poisoned memory. `bytes_wire` counts the rows (and scales) that cross to or from the busiest
rank in its busier direction; routing and records are left out. `floor` is how long the rows that must cross take at the
best rate of SM stores that was measured, and judged, just before, on GPUs. `sms` are those of kernels that move rows.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

from ep_plugin.bench import provenance, symm_mem
from ep_plugin.bench.cases import Case, Peers, cases_of
from ep_plugin.bench.launch import run_on_ranks
from ep_plugin.bench.ours import EpPlugin
from ep_plugin.bench.results import SMS_ARE, WrongResult, floor_row, result, row
from ep_plugin.bench.specs import DEFAULT_SMS, Sms, Spec, select, specs_of
from ep_plugin.bench.timing import clock_of, time_in_turn
from ep_plugin.bench.wire import best_sm_store_rate
from ep_plugin.bench.workload import DTYPES, Workload, batches
from ep_plugin.config import ROW_ALIGNMENT_BYTES, DispatchLayout

__all__ = ["SUITE", "MoeSuite", "WrongResult", "measure", "run"]

SUITE = "moe_ht"
WARMUP = 3
LAYOUTS = ("flat", "token_major")


@dataclass(frozen=True, kw_only=True)
class MoeSuite:
    """What one run measures. dtypes: names of workload.DTYPES. layouts: names of DispatchLayout, in lower case.

    cases: patterns of names; empty: all. sms: in place of the cases' own. own_only: without peers.
    """

    backend: str
    workload: Workload
    dtypes: tuple[str, ...]
    layouts: tuple[str, ...]
    iterations: int
    cases: tuple[str, ...] = ()
    sms: Sms = DEFAULT_SMS
    own_only: bool = False
    peers: Peers = field(default_factory=Peers)

    def __post_init__(self) -> None:
        _check_names("backend", ("cpu", "cuda"), (self.backend,))
        _check_names("dtype", tuple(DTYPES), self.dtypes)
        _check_names("layout", LAYOUTS, self.layouts)
        for name in self.dtypes:
            row_bytes = self.workload.hidden * DTYPES[name].itemsize
            if row_bytes % ROW_ALIGNMENT_BYTES:
                raise ValueError(
                    f"hidden: expected rows of a multiple of {ROW_ALIGNMENT_BYTES} bytes, got {row_bytes} with {name}"
                )
        if self.iterations < 1:
            raise ValueError(f"iterations: expected at least 1, got {self.iterations}")
        self.specs()

    def specs(self) -> list[Spec]:
        """The cases that are measured. ValueError when a pattern matches none."""
        layouts = tuple(DispatchLayout(name) for name in self.layouts)
        return select(specs_of(self.workload, self.dtypes, layouts, self.backend == "cuda"), self.cases)

    def command(self) -> str:
        """What a user types for this run."""
        sizes = {name: value for name, value in asdict(self.workload).items() if name not in ("seed", "skew")}
        words = [f"--backend {self.backend}", *(f"--{name} {value}" for name, value in sizes.items())]
        words += [f"--skew {self.workload.skew:g}"] if self.workload.skew != 1 else []
        words += [f"--dtype {name}" for name in self.dtypes] + [f"--layout {name}" for name in self.layouts]
        words += [f"--case '{pattern}'" for pattern in self.cases] + ([f"--sms {self.sms}"] if str(self.sms) else [])
        words += ["--own-only"] if self.own_only else []
        return " ".join(["ep-bench moe", *words, f"--iterations {self.iterations}"])


def _check_names(what: str, known: tuple[str, ...], given: tuple[str, ...]) -> None:
    for name in given:
        if name not in known:
            raise ValueError(f"{what}: expected one of {', '.join(known)}, got {name!r}")


def run(suite: MoeSuite) -> dict[str, Any]:
    """Runs the suite on ranks of its own and returns the result, see results.py. Raises WrongResult."""
    code_hash = provenance.hash_sources()
    found = run_on_ranks(suite.workload.ranks, suite.backend, measure, suite)
    if suite.backend == "cuda" and not suite.own_only and not found["wrong"]:
        found["rows"], found["left_out"] = symm_mem.add_rows(found["rows"], suite.specs(), suite.iterations)
    return result(SUITE, suite.backend, suite.workload.ranks, suite.command(), found, code_hash)


def measure(device: torch.device, suite: MoeSuite) -> dict[str, Any]:
    """One rank's part: the rows of the result, or what was wrong, the same on every rank. Collective."""
    beside = footprint(device, suite.workload, suite.dtypes[0])
    rate = best_sm_store_rate(device) if device.type == "cuda" else None
    if rate is not None and rate.wrong:
        return {"rows": [], "wrong": rate.wrong}
    specs = suite.specs()
    if suite.own_only:
        specs = [replace(spec, peers=False) for spec in specs]
    cases = cases_of(specs, device, suite.peers, suite.sms)
    found = time_cases(device, cases, len(specs), suite.iterations, None if rate is None else rate.gb_s)
    if rate is not None:
        beside["best_sm_copy"] = {"gb_s": round(rate.gb_s, 2), "case": rate.case}
    return {**found, "sms_are": SMS_ARE, **beside}


def time_cases(
    device: torch.device, cases: Iterator[Case], count: int, iterations: int, rate: float | None
) -> dict[str, Any]:
    """Judges and times cases: {"rows", "wrong"}. rate: GB/s of the floors, None without them. Collective."""
    clock, rows = clock_of(device), []
    with tqdm(total=count, unit="case", disable=dist.get_rank() != 0, leave=False) as progress:
        for case in cases:
            progress.set_description(case.name)
            wrong = _judge(case)
            if wrong:
                return {"rows": [], "wrong": wrong}
            timings = time_in_turn(clock, {way.impl: way.run for way in case.ways}, iterations, WARMUP)
            wrong = _judge(case, " (after the timing)")
            if wrong:
                return {"rows": [], "wrong": wrong}
            rows += [row(case.name, way.impl, timings[way.impl], way.bytes_wire, way.sms) for way in case.ways]
            if rate is not None:
                rows.append(floor_row(case.name, case.floor_bytes, rate))
            progress.update()
            del case  # what it holds goes before the next one's comes
    return {"rows": rows, "wrong": []}


def footprint(device: torch.device, workload: Workload, dtype: str) -> dict[str, Any]:
    """Memory beyond tensors of a FLAT communicator that has dispatched and combined, how long it took to make, and how
    long its first operations took, which make its pools: both are over when the device has done them.

    Collective. Of the rank with the most; on GPUs also what the device has less than before, tensors left out.
    """
    batch = batches(workload, DTYPES[dtype], device)[dist.get_rank()]
    dist.barrier()
    before = _device_use(device)
    ours = EpPlugin(workload, device, DispatchLayout.FLAT)
    try:
        dist.barrier()
        began = time.perf_counter()
        out = ours.dispatch(batch)
        if dtype != "float8":
            ours.combine(out.tokens, out.state)
        _finish(device)
        first_operations_s = time.perf_counter() - began
        memory = ours.memory(batch.row_bytes)
        if device.type == "cuda":
            memory["device_bytes"] = _device_use(device) - before
    finally:
        ours.close()
    seconds = {"construction_s": ours.construction_s, "first_operations_s": first_operations_s}
    mine = {"memory": memory, **{name: round(found, 4) for name, found in seconds.items()}}
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, mine)
    return {
        "memory": {name: max(theirs["memory"][name] for theirs in everyones) for name in memory},
        **{name: max(theirs[name] for theirs in everyones) for name in seconds},
    }


def _device_use(device: torch.device) -> int:
    """Bytes of the device in use outside torch's allocator of tensors."""
    if device.type != "cuda":
        return 0
    _finish(device)
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _judge(case: Case, when: str = "") -> list[str]:
    """What is wrong with any way on any rank, a sentence each. Collective."""
    wrong = [(way.impl, problem) for way in case.ways if (problem := way.judge())]
    everyones: list[list[tuple[str, str]]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everyones, wrong)
    return [
        f"{case.name} by {impl}: rank {rank}: {problem}{when}"
        for rank, theirs in enumerate(everyones)
        for impl, problem in theirs
    ]
