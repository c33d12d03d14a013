"""The suites `moe` and `low-latency` time dispatch and combine of ep_plugin beside the same exchange by collectives.

`bytes_wire` counts the rows and scales that cross to or from the busiest rank in its busier direction; routing and
weights are left out.

`moe` has dispatch, combine, both, and cached dispatch. On GPUs, `floor` is the time in which the rows could cross at
the best rate of SM stores, which is measured just before. With `--nodes` only the bytes between nodes count, there is
no `floor`, and by default there are two more peers. One is an all-to-all that sends a row once per rank. The other is
the rail's own all-to-all of the bytes that ep_plugin must send. With `--sweep` the cases are dispatch and combine of
the given sizes, which are the headline, and of other sizes. `t512` has T = 512. `skew2` sends rank 0 twice the mean
number of rows. `sms12` runs one kernel for each operation, on 12 SMs.

`low-latency` has dispatch and combine in mode="ll", both halves in one and apart. `t64` has T = 64 tokens per rank.
`send` and `receive` are the halves of an operation. All ranks are released together before each half, so a receive half
finds the rows of all ranks. In `routing known` the peer has routed the same tokens before, and exchanges rows without
counts. With `--nodes` only the bytes between nodes count.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import time
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
import torch.distributed as dist
import typer

import ep_plugin.moe.operators  # noqa: F401  imported here, so that neither a construction nor a timed call imports it
from ep_plugin import _C
from ep_plugin.bench.exchange import workload
from ep_plugin.bench.exchange.cases import EpPlugin, time_cases
from ep_plugin.bench.exchange.peers import ALL_TO_ALL, DEEP_EP, RAIL, ROW_PER_RANK, find_peers
from ep_plugin.bench.exchange.workload import DTYPES, SUMMABLE, ExchangeSuite, Spec, Workload
from ep_plugin.bench.suite import BY_BACKEND, CALLS_HELP, SMS_ARE, OverNodes, check_names, matching
from ep_plugin.bench.suites.wire import best_sm_store_rate
from ep_plugin.config import ROW_ALIGNMENT_BYTES, DispatchLayout
from ep_plugin.moe.low_latency.engine import slots_of

LAYOUTS = (DispatchLayout.FLAT.value, DispatchLayout.TOKEN_MAJOR.value)
_SHARED: dict[str, Any] = {"layout": list(LAYOUTS), "case": [], "sweep": []}
_LL: dict[str, Any] = {"dtype": "bfloat16", "tokens": [1, 8, 32, 64, 128, 256]}
LL_CPU_SIZES, LL_CUDA_SIZES = workload.CPU_SIZES | {"hidden": 1024} | _LL, workload.CUDA_SIZES | _LL


@dataclass(frozen=True, kw_only=True)
class MoeSuite(OverNodes, ExchangeSuite):
    """Times dispatch and combine of mixture-of-experts layers, against all-to-all with sort and index."""

    command_name = "moe"
    defaults: ClassVar = {
        "cpu": workload.CPU_SIZES | _SHARED | {"dtype": ["float32"]},
        "cuda": workload.CUDA_SIZES | _SHARED | {"dtype": ["bfloat16", "float8"]},
    }
    least: ClassVar = {"iterations": 1, "nodes": 1}

    dtype: Annotated[list[str], typer.Option(help="float32, bfloat16, float16, float8; repeatable.")] = BY_BACKEND
    layout: Annotated[list[str], typer.Option(help="flat, token_major; repeatable. Default: both.")] = BY_BACKEND
    case: Annotated[list[str], typer.Option(help="Pattern of case names, as a shell's; repeatable.")] = BY_BACKEND
    sweep: Annotated[
        list[str],
        typer.Option(help="tokens, hidden, topk, experts, skew or sms, =V1,V2,...: in place of the usual cases."),
    ] = BY_BACKEND
    peer: Annotated[
        list[str],
        typer.Option(
            help="all_to_all, deep_ep, row_per_rank, rail (of several nodes), none, or an adapter, module:Class, for "
            "another library; repeatable. Default: all_to_all, and on GPUs DeepEP where it is installed; with several "
            "nodes all_to_all, row_per_rank and rail."
        ),
    ] = BY_BACKEND

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.peer is None:
            peers = [ALL_TO_ALL, ROW_PER_RANK, RAIL] if self.nodes > 1 else default_peers(self.backend)
            object.__setattr__(self, "peer", peers)
        check_names("dtype", DTYPES, self.dtype)
        check_names("layout", LAYOUTS, self.layout)
        for name in self.dtype:
            row_bytes, unit = self.hidden * DTYPES[name].itemsize, ROW_ALIGNMENT_BYTES
            if row_bytes % unit:
                raise ValueError(f"hidden: expected rows of a multiple of {unit} bytes, got {row_bytes} with {name}")
        for name in self.peer:
            layouts = [kind.layout.value for kind in find_peers(name)]
            if not set(layouts) & set(LAYOUTS):
                check_names("peer", LAYOUTS, layouts)
        if RAIL in self.peer and self.nodes == 1:
            raise ValueError(f"peer: expected none of rail on one node, where no rows cross rails, got {self.peer}")
        if self.sweep:
            check_names("dtype", SUMMABLE, self.dtype[:1])
            if self.ranks < 2:
                raise ValueError(f"ranks: expected at least 2, whose rows cross between them, got {self.ranks}")
            if self.backend == "cpu" and any(text.startswith("sms=") for text in self.sweep):
                raise ValueError(f"sweep: expected no SMs with cpu, whose kernels run on none, got {self.sweep}")
        self.specs()

    @property
    def name(self) -> str:
        return self.named("moe_sweep" if self.sweep else "moe_ht")

    def specs(self) -> list[Spec]:
        """Returns the cases that `case` selects. A sweep always has its first two cases, the headline."""
        if self.sweep:
            found = workload.sweep_specs(self.workload, self.dtype[0], self.sweep)
        else:
            layouts = tuple(DispatchLayout(name) for name in self.layout)
            found = workload.specs_of(self.workload, tuple(self.dtype), layouts, self.backend == "cuda")
        chosen = matching([spec.name for spec in found], self.case)
        return [spec for spec in found if spec.name in chosen or (self.sweep and spec in found[:2])]

    def measure(self, device: torch.device) -> dict[str, Any]:
        nodes, memory = footprint(device, self.workload, self.dtype[0])
        self.check_nodes(nodes)
        rate, notes = None, [] if self.sweep else [memory]
        if device.type == "cuda":
            notes = [SMS_ARE, *notes]
        if device.type == "cuda" and self.ranks > self.nodes == 1:
            rate, case = best_sm_store_rate(device)
            notes = [f"floor: {rate:.1f} GB/s, the best rate of SM stores in this run ({case})", *notes]
        rows = time_cases(device, self.specs(), self.peer, self.iterations, rate, self.nodes)
        return {"rows": rows, "notes": notes}


def default_peers(backend: str) -> list[str]:
    """Returns the names of the peers on one node. DeepEP needs GPUs."""
    has_deep_ep = backend == "cuda" and importlib.util.find_spec(DEEP_EP) is not None
    return [ALL_TO_ALL, DEEP_EP] if has_deep_ep else [ALL_TO_ALL]


def footprint(device: torch.device, sizes: Workload, dtype: str) -> tuple[int, str]:
    """Returns the number of nodes that the ranks are on, and a sentence on the cost of a FLAT communicator. Collective.

    The cost is its peer memory, and the seconds until its first operations, which allocate its pools, have finished.
    """
    spec = Spec(name="footprint", what=workload.ROUNDTRIP, dtype=dtype, workload=sizes)
    batch = workload.batches(sizes, DTYPES[dtype], device)[dist.get_rank()]
    dist.barrier()
    began = time.perf_counter()
    with contextlib.closing(EpPlugin(spec, device)) as ours:
        out, state = ours.dispatch(batch)
        if dtype in SUMMABLE:
            ours.combine(out.tokens, state)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds, engine = time.perf_counter() - began, ours.comm.engine
        held = ours.comm.peer_bytes / 2**20
        nodes = engine.node_map.num_nodes
    took = f"{seconds:.3f} s until its first dispatch and combine have finished"
    return nodes, f"a communicator takes {held:,.1f} MiB of peer memory, and {took}"


@dataclass(frozen=True, kw_only=True)
class LowLatencySizes(ExchangeSuite):
    """The options that say what the ranks exchange."""

    least: ClassVar = {"ranks": 1, "iterations": 1, "hidden": 128}

    tokens: Annotated[list[int], typer.Option(help="Tokens per rank, T; repeatable.")] = BY_BACKEND  # type: ignore[assignment]
    hidden: Annotated[int, typer.Option(help="Elements of a row, H: a multiple of 128.")] = BY_BACKEND
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16. FP8 rows are quantised from it.")] = BY_BACKEND

    def __post_init__(self) -> None:
        super().__post_init__()
        check_names("dtype", SUMMABLE, [self.dtype])
        if self.hidden % workload.SCALE_BLOCK:
            raise ValueError(f"hidden: expected a multiple of {workload.SCALE_BLOCK}, got {self.hidden}")

    def workloads(self) -> list[Workload]:
        return [self.workload_of(self.ranks, tokens) for tokens in self.tokens]

    def specs(self) -> list[Spec]:
        """Returns, for each workload, dispatch, combine, and dispatch of FP8 rows, each whole and in halves."""
        kinds = [(workload.DISPATCH, False), (workload.COMBINE, False), (workload.DISPATCH, True)]
        halves = ("", workload.SEND, workload.RECEIVE)
        found = []
        for sizes, (what, quantize), half in itertools.product(self.workloads(), kinds, halves):
            kind = f"{'fp8' if quantize else workload.SHORT_NAMES[self.dtype]}_t{sizes.tokens}"
            name = "_".join(filter(None, (what, half, kind)))
            found.append(Spec(name=name, what=what, dtype=self.dtype, workload=sizes, layout=workload.EXPERT_MAJOR,
                              quantize=quantize, half=half, peers=not half))  # fmt: skip
        return found

    def memory_notes(self, nodes: int = 1) -> list[str]:
        """Returns a sentence for each workload: the memory of a communicator on these ranks and on nodes of 8 ranks."""
        notes = []
        for spec in self.specs():
            ranks, shape = spec.workload.ranks, slots_of(spec.config, nodes)[1]
            takes, on_8 = (_C.ll_block_bytes(number, shape) / 2**20 for number in (ranks // nodes, 8))
            notes.append(
                f"a communicator for T = {spec.workload.tokens} takes {takes:,.1f} MiB of peer memory on each of "
                f"{ranks} ranks; on {8 * nodes} ranks {on_8:,.1f} MiB"
            )
        return list(dict.fromkeys(notes))


@dataclass(frozen=True, kw_only=True)
class LowLatencySuite(OverNodes, LowLatencySizes):
    """Times low-latency dispatch and combine of few tokens, against all-to-all with sort and index."""

    command_name = "low-latency"
    defaults: ClassVar = {
        "cpu": LL_CPU_SIZES | {"calls": 8},
        "cuda": LL_CUDA_SIZES | {"calls": 1},
    }
    least: ClassVar = LowLatencySizes.least | {"calls": 1, "nodes": 1}

    peer: Annotated[
        list[str],
        typer.Option(help="all_to_all, deep_ep, row_per_rank (of several nodes), none, or an adapter, module:Class."),
    ] = BY_BACKEND
    calls: Annotated[int, typer.Option(help=f"{CALLS_HELP} Halves are timed one by one.")] = BY_BACKEND

    def __post_init__(self) -> None:
        if self.peer is None:
            object.__setattr__(self, "peer", [ALL_TO_ALL] if self.nodes > 1 else default_peers(self.backend))
        super().__post_init__()
        for name in self.peer:
            find_peers(name)

    @property
    def name(self) -> str:
        return self.named(super().name)

    def measure(self, device: torch.device) -> dict[str, Any]:
        with contextlib.closing(EpPlugin(self.specs()[0], device)) as ours:
            self.check_nodes(ours.comm.engine.node_map.num_nodes)
        rows = time_cases(device, self.specs(), self.peer, self.iterations, nodes=self.nodes, calls=self.calls)
        return {"rows": rows, "notes": self.memory_notes(self.nodes)}
