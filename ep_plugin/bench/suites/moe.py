"""The suite `moe`: dispatch, combine, both, and cached dispatch, of ep_plugin and of the same exchange by collectives.

`bytes_wire` counts the rows and scales that cross to or from the busiest rank in its busier direction; routing is left
out. `floor` is the time of the rows that must cross at the best rate of SM stores, measured just before, on GPUs.

With `--sweep` the cases are dispatch and combine of these sizes, the headline, and of others: `t512` has T = 512,
`skew2` twice the mean of rows for rank 0, `sms12` one kernel for each operation on 12 SMs.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, ClassVar

import torch
import torch.distributed as dist
import typer

from ep_plugin.bench.exchange.cases import OURS, time_cases
from ep_plugin.bench.exchange.ours import EpPlugin
from ep_plugin.bench.exchange.peers import ALL_TO_ALL, find_peers
from ep_plugin.bench.exchange.sizes import CPU_SIZES, CUDA_SIZES, ExchangeSuite
from ep_plugin.bench.exchange.specs import Sms, Spec, parse_sms, select, specs_of, sweep_specs
from ep_plugin.bench.exchange.workload import DTYPES, Workload, batches
from ep_plugin.bench.links import best_sm_store_rate
from ep_plugin.bench.suite import BY_BACKEND, SMS_ARE, Row, check_names
from ep_plugin.config import ROW_ALIGNMENT_BYTES, DispatchLayout
from ep_plugin.moe.high_throughput.sms import usable_sms

LAYOUTS = (DispatchLayout.FLAT.value, DispatchLayout.TOKEN_MAJOR.value)
SUMMABLE = tuple(name for name in DTYPES if name != "float8")
CONSTRUCTION_S = 1  # the most that a communicator with its pools is to take
BARE = "_single"  # after a peer's name: its exchange alone
_SHARED: dict[str, Any] = {"layout": list(LAYOUTS), "peer": [ALL_TO_ALL], "case": [], "sweep": []}


@dataclass(frozen=True, kw_only=True)
class MoeSuite(ExchangeSuite):
    """Dispatch and combine of mixture-of-experts layers, against all-to-all with sort and index."""

    command_name: ClassVar[str] = "moe"
    defaults: ClassVar[dict[str, dict[str, Any]]] = {
        "cpu": CPU_SIZES | _SHARED | {"dtype": ["float32"]},
        "cuda": CUDA_SIZES | _SHARED | {"dtype": ["bfloat16", "float8"]},
    }
    least: ClassVar[dict[str, int]] = {"iterations": 1}

    skew: Annotated[float, typer.Option(help="Rows for rank 0's experts, as a multiple of the mean.")] = 1.0
    dtype: Annotated[list[str], typer.Option(help="float32, bfloat16, float16, float8; repeatable.")] = BY_BACKEND
    layout: Annotated[list[str], typer.Option(help="flat, token_major; repeatable. Default: both.")] = BY_BACKEND
    case: Annotated[list[str], typer.Option(help="Pattern of case names, as a shell's; repeatable.")] = BY_BACKEND
    sms: Annotated[
        str | None, typer.Option(help="SMs in place of all cases' own: dispatch_send=16,dispatch_recv=48,...")
    ] = None
    sweep: Annotated[
        list[str],
        typer.Option(
            help="tokens, hidden, topk, experts, skew or sms, =V1,V2,...: these in place of the usual cases; "
            "repeatable. For other hidden, topk or experts, tokens follow, so that as many bytes cross."
        ),
    ] = BY_BACKEND
    peer: Annotated[
        list[str],
        typer.Option(
            help="all_to_all (the default), none, or an adapter, module:Class, for another library; repeatable."
        ),
    ] = BY_BACKEND

    def __post_init__(self) -> None:
        super().__post_init__()
        check_names("dtype", tuple(DTYPES), self.dtype)
        check_names("layout", LAYOUTS, self.layout)
        for name in self.dtype:
            row_bytes = self.hidden * DTYPES[name].itemsize
            if row_bytes % ROW_ALIGNMENT_BYTES:
                raise ValueError(
                    f"hidden: expected rows of a multiple of {ROW_ALIGNMENT_BYTES} bytes, got {row_bytes} with {name}"
                )
        for name in self.peer:
            find_peers(name)
        self._check_sms()
        if self.sweep:
            check_names("dtype", SUMMABLE, self.dtype[:1])
            if self.ranks < 2:
                raise ValueError(f"ranks: expected at least 2, whose rows cross between them, got {self.ranks}")
        self.specs()

    def _check_sms(self) -> None:
        over_sms = any(text.startswith("sms=") for text in self.sweep)
        if self.sms is not None:
            parse_sms(self.sms)
            if over_sms:
                raise ValueError(f"sweep: expected no sms beside --sms {self.sms}, which all cases have")
        if self.backend == "cpu" and (self.sms is not None or over_sms):
            option = "sms" if self.sms is not None else "sweep"
            raise ValueError(
                f"{option}: expected no SMs with cpu, whose kernels run on none, got {self.sms or self.sweep}"
            )

    @property
    def workload(self) -> Workload:
        return replace(super().workload, skew=self.skew)

    @property
    def name(self) -> str:
        return "moe_sweep" if self.sweep else "moe_ht"

    def file_name(self) -> str:
        if self.sms is not None:
            raise ValueError("out: expected a file with --sms, since folders are for runs with the cases' own SMs")
        return super().file_name()

    def specs(self) -> list[Spec]:
        """The cases. ValueError when a pattern matches none."""
        if self.sweep:
            headline, every = 2, sweep_specs(self.workload, self.dtype[0], self.sweep)
            return every[:headline] + [spec for spec in select(every, self.case) if spec not in every[:headline]]
        layouts = tuple(DispatchLayout(name) for name in self.layout)
        return select(specs_of(self.workload, tuple(self.dtype), layouts, self.backend == "cuda"), self.case)

    def measure(self, device: torch.device) -> dict[str, Any]:
        about: dict[str, Any] = {}
        if self.sweep:
            about["headline"] = asdict(self.workload)
        else:
            about = footprint(device, self.workload, self.dtype[0])
        notes = [] if self.sweep else footprint_notes(about)
        rate = None
        if device.type == "cuda":
            rate, case = best_sm_store_rate(device)
            about["best_sm_copy"] = {"gb_s": round(rate, 2), "case": case}
            notes.insert(0, f"floor: {rate:.1f} GB/s, the best rate of SM stores in this run ({case})")
        specs, left_out = that_fit(self.specs(), usable_sms(device))
        sms: Sms = parse_sms(self.sms) if self.sms else {}
        rows = time_cases(device, specs, self.peer, sms, self.iterations, rate)
        notes += over_bare(rows) + ([SMS_ARE] if rate is not None else []) + left_out
        if self.sweep:
            about["efficiency"] = relative_efficiency(rows)
        return {"rows": rows, "notes": notes, **about}


def that_fit(specs: list[Spec], usable: int) -> tuple[list[Spec], list[str]]:
    """The cases that a device with `usable` SMs for kernels can run, and a sentence for each of the others."""
    fitting = [spec for spec in specs if spec.sms.get("dispatch_send_sms", 0) <= usable]
    reason = f"left out, since kernels may hold at most {usable} of this device's SMs"
    return fitting, [f"{spec.name}: {reason}" for spec in specs if spec not in fitting]


def relative_efficiency(rows: list[Row]) -> dict[str, float]:
    """By case: bytes over time, relative to the headline of the same operation."""
    speed = {row["case"]: row["bytes_wire"] / row["median_us"] for row in rows if row["impl"] == OURS}
    return {case: round(found / speed[f"{case.rpartition('_')[0]}_headline"], 3) for case, found in speed.items()}


def over_bare(rows: list[Row]) -> list[str]:
    """A sentence for each peer whose bare exchange was timed too: how much longer the whole takes."""
    medians = {(row["case"], row["impl"]): row["median_us"] for row in rows}
    ratios: dict[str, list[str]] = {}
    for (case, impl), bare in medians.items():
        whole = medians.get((case, impl.removesuffix(BARE))) if impl.endswith(BARE) else None
        if whole is not None:
            ratios.setdefault(impl, []).append(f"{whole / bare:.2f} × in {case}")
    return [f"{impl.removesuffix(BARE)} over {impl}: {', '.join(listed)}" for impl, listed in ratios.items()]


def footprint(device: torch.device, workload: Workload, dtype: str) -> dict[str, Any]:
    """Memory and construction of a FLAT communicator, on the rank with the most. Collective.

    memory: bytes beyond tensors after a dispatch and a combine; on GPUs also the device's memory in use beyond that of
    before, tensors left out. construction_s, and first_operations_s, which allocate the pools: until the device has
    finished.
    """
    batch = batches(workload, DTYPES[dtype], device)[dist.get_rank()]
    dist.barrier()
    before = _device_use(device)
    ours = EpPlugin(workload, device, DispatchLayout.FLAT)
    try:
        dist.barrier()
        began = time.perf_counter()
        out = ours.dispatch(batch)
        if dtype in SUMMABLE:
            ours.combine(out.tokens, out.state)
        used = _device_use(device)
        seconds = {"construction_s": ours.construction_s, "first_operations_s": time.perf_counter() - began}
        memory = ours.memory(batch.row_bytes)
    finally:
        ours.close()
    if device.type == "cuda":
        memory["device_bytes"] = used - before
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, (memory, seconds))
    return {
        "memory": {name: max(theirs[name] for theirs, _ in everyones) for name in memory},
        **{name: round(max(theirs[name] for _, theirs in everyones), 4) for name in seconds},
    }


def footprint_notes(found: dict[str, Any]) -> list[str]:
    """Sentences on the memory and the construction of a communicator."""
    memory = {name: f"{value / 2**20:,.1f} MiB" for name, value in found["memory"].items()}
    device = f"; on the device {memory['device_bytes']}" if "device_bytes" in memory else ""
    alone, first = found["construction_s"], found["first_operations_s"]
    verdict = f"expected under {CONSTRUCTION_S} s" + ("" if alone + first < CONSTRUCTION_S else ", which it is not")
    return [
        f"memory beyond tensors: {memory['beyond_tensors_bytes']} (pools {memory['pool_bytes']}, control "
        f"{memory['control_bytes']}), limit {memory['limit_bytes']}{device}",
        f"construction of a communicator: {alone:.3f} s, its first operations, which allocate its pools: {first:.3f} "
        f"s; together {alone + first:.3f} s, {verdict}",
    ]


def _device_use(device: torch.device) -> int:
    """Bytes of the device in use outside torch's allocator of tensors, once the device has finished; 0 for CPUs."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)
