"""The suite `low-latency-stand-in` times what low-latency dispatch and combine cost beside the time of the links.

N ranks share one GPU in one process. Each has a stream and 1/N of the SMs. They run the same operations and kernels as
ranks in processes of their own, but there is no group, and rows go to memory of the same GPU. One CUDA graph has the
kernels of all ranks for an operation, or for one half of it, so the host adds no time. A case has these rows:

- `ep_plugin`: the time of the graph.
- `floor`: the time of the busiest rank's bytes at `--rate`.
- `predicted`: the sum of both, minus `launch`, the time of a graph of N kernels that do nothing. The real time should
  be less, since links and kernels overlap, and a rank on a GPU of its own has N times the SMs.

On CPUs the ranks are threads that run the kernels of CPUs. That tests the suite, and predicts nothing.
"""

from __future__ import annotations

import functools
import gc
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Annotated, Any, ClassVar

import torch
import typer

from ep_plugin import _C
from ep_plugin.bench.exchange.cases import Scene, floor_row
from ep_plugin.bench.exchange.oracle import expert_rows, poisoned
from ep_plugin.bench.exchange.peers import received
from ep_plugin.bench.exchange.workload import COMBINE, DISPATCH, EXPERT_MAJOR, SEND, Spec, Workload
from ep_plugin.bench.suite import BY_BACKEND, OURS, Row, Through, Way, row, time_ways
from ep_plugin.bench.suites.moe import LL_CPU_SIZES, LL_CUDA_SIZES, LowLatencySizes
from ep_plugin.bench.timing import Half, Run, Timing, clock_of
from ep_plugin.config import MoECommunicatorConfig
from ep_plugin.errors import EpPluginError
from ep_plugin.moe.layout import DispatchOutput, DispatchResult
from ep_plugin.moe.low_latency import sms
from ep_plugin.moe.low_latency.combine import LowLatencyCombine
from ep_plugin.moe.low_latency.dispatch import LowLatencyDispatch
from ep_plugin.moe.low_latency.engine import Functions, LowLatencyEngine, control_of
from ep_plugin.moe.low_latency.in_flight import LowLatencyCall
from ep_plugin.moe.low_latency.load import LowLatencyLoad
from ep_plugin.runtime.streams import CudaStreams, Streams, kernels_for
from ep_plugin.transport.topology import NodeMap

PREDICTED, LAUNCH = "predicted", "launch"
TIMEOUT_S = 20.0


class Share(LowLatencyEngine):
    """The engine of one of `ranks` ranks, without group and boards. `StandIn` gives it the memory of all ranks."""

    _error, closed, _to_close, checks_ids = None, False, False, False

    def __init__(self, rank: int, ranks: int, config: MoECommunicatorConfig, device: torch.device) -> None:
        assert config.max_tokens_per_rank is not None
        self.device, self.timeout_s = device, TIMEOUT_S
        self.rank = self.index = rank
        self.size = self.node_size = ranks
        self.node, self.node_map = 0, NodeMap((tuple(range(ranks)),))
        self.rails: Any = SimpleNamespace(nodes=[], bytes_sent=0)
        self.places = None
        self.local_experts, self.max_tokens = config.num_experts // ranks, config.max_tokens_per_rank
        self.config_hash = config.agreement_hash() & 0x7FFFFFFF
        self._set_sizes(config)
        self.kernels, self.num_sms = kernels_for(device), sms.for_device(device, ranks)
        self.streams = Streams() if device.type == "cpu" else CudaStreams(device)
        self._outputs, self.lock = deque(maxlen=2), threading.RLock()
        zeros = functools.partial(torch.zeros, dtype=torch.uint8)
        self.state, self.ll_state = zeros(_C.state_bytes, device=device), zeros(_C.ll_state_bytes, device=device)
        self.block = zeros(self.memory_bytes, device=device)
        self._board = zeros(_C.board_bytes(self.local_experts), pin_memory=device.type == "cuda")
        self.boards: Any = SimpleNamespace(device_address=self._board.data_ptr())
        self.call_log = _C.CallLog(self, {})
        self.control = control_of(self, self._board.data_ptr(), {})
        self.functions = Functions(**self.control.functions())
        self.load = LowLatencyLoad(self, self.local_experts, self.control)

    @property
    def name(self) -> str:
        return f"rank {self.rank} of the stand-in"

    def used_by_this_thread(self) -> None:
        """Does nothing: no peer is to be told of a thread that ends."""

    def operation_failed(self, error: BaseException, what: str) -> None:
        """Does nothing, for the same reason."""

    def check(self) -> None:
        if not _C.board_quiet(self._board.data_ptr()):
            fault = _C.board_fault(self._board.data_ptr())
            raise EpPluginError(f"{self.name}: (code, step, peer, field, expected, seen) = {fault}")


class StandIn:
    """The ranks. It lets all of them do something at the same time."""

    def __init__(self, ranks: int, config: MoECommunicatorConfig, device: torch.device) -> None:
        self.device = device
        self.ranks = [Share(rank, ranks, config, device) for rank in range(ranks)]
        for rank in self.ranks:
            rank.comm = rank._comm_struct([share.block.data_ptr() for share in self.ranks], config.num_experts)
            rank.control.set_comm(rank.comm)
        if device.type == "cuda":
            self._streams = [torch.cuda.Stream(device) for _ in self.ranks]
        else:
            self._threads = ThreadPoolExecutor(ranks)

    def at_once(self, does: Callable[[int], object]) -> None:
        """Calls does(rank) for every rank, on its stream or in its thread. The caller's stream waits for all ranks."""
        if self.device.type == "cpu":
            list(self._threads.map(does, range(len(self.ranks))))
            return
        caller = torch.cuda.current_stream(self.device)
        for stream in self._streams:
            stream.wait_stream(caller)
        for rank, stream in enumerate(self._streams):
            with torch.cuda.stream(stream):
                does(rank)
        for stream in self._streams:
            caller.wait_stream(stream)

    def recorded(self, does: Callable[[], object], pool: Any = None) -> Callable[[], object]:
        """Captures `does` in a CUDA graph with memory from `pool`, and returns its replay. Returns `does` on CPUs."""
        if self.device.type == "cpu":
            return does
        gc.collect()  # a graph that is deleted during a capture makes the capture fail
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            does()
        return graph.replay

    def check(self) -> None:
        """Waits for all that is enqueued. Raises EpPluginError for a fault of any rank."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        for rank in self.ranks:
            rank.check()


class Together:
    """One operation that all ranks run at the same time, with fixed inputs.

    Args:
        make: makes the call of a rank.
        apart: whether the halves are launched one after the other. On GPUs each launch has a graph of its own.
    """

    def __init__(self, ranks: StandIn, make: Callable[[Share], LowLatencyCall], apart: bool = False) -> None:
        self._ranks, self._make = ranks, make
        self._made: list[Any] = [None] * len(ranks.ranks)
        launches = [self._start, self._collect] if apart else [self._whole]
        for rank in ranks.ranks:
            call = make(rank)
            call.check()
            call.remember()
        for launch in launches:  # loads the kernels, since none may be loaded while another kernel waits for it
            ranks.at_once(launch)
        ranks.check()
        pool = torch.cuda.graph_pool_handle() if ranks.device.type == "cuda" else None
        self._runs = [ranks.recorded(functools.partial(ranks.at_once, launch), pool) for launch in launches]

    def run(self) -> None:
        for part in self._runs:
            part()

    def start(self) -> Run:
        """Launches the first half and returns the launch of the second."""
        send, receive = self._runs
        send()
        return receive

    def results(self) -> list[Any]:
        """Returns the results of the latest run. A graph overwrites them at each run."""
        return self._made

    def _whole(self, rank: int) -> None:
        self._made[rank] = self._make(self._ranks.ranks[rank]).run("")

    def _start(self, rank: int) -> None:
        self._made[rank] = self._make(self._ranks.ranks[rank]).run("start_")

    def _collect(self, rank: int) -> None:
        self._made[rank] = self._made[rank].collect()


class SharedScene(Scene):
    """The operations of all ranks for cases that differ only in operation and half, and their comparison."""

    def __init__(self, specs: list[Spec], device: torch.device) -> None:
        super().__init__(specs[0], device)
        self._specs = specs
        self._fixed = [batch.clone() for batch in self.everyone]
        self.ranks = StandIn(self.spec.workload.ranks, self.spec.config, device)
        self._counters = [torch.zeros(1, device=device) for _ in self.ranks.ranks]  # a graph keeps no tensor alive
        self._dispatch = Together(self.ranks, self._dispatch_of)
        self._dispatch.run()
        self._y = [out.tokens.clone() for out in _received(self._dispatch)]
        self._operations = {(DISPATCH, False): self._dispatch}
        for what, apart in dict.fromkeys((spec.what, spec.half != "") for spec in specs[1:]):
            make: Any = self._combine_of if what == COMBINE else self._dispatch_of
            self._operations[what, apart] = Together(self.ranks, make, apart)

    def _dispatch_of(self, rank: Share) -> LowLatencyDispatch:
        mine = self._fixed[rank.rank]
        return LowLatencyDispatch(rank, mine.x, mine.ids, None, None, None, "e4m3" if mine.quantize else None, [], 0)

    def _combine_of(self, rank: Share) -> LowLatencyCombine:
        routing = list(self._dispatch.results()[rank.rank][-2:])
        weights = self._fixed[rank.rank].weights
        return LowLatencyCombine(rank, self._y[rank.rank], weights, None, None, False, routing, 0)

    def shared_ways(self) -> Iterator[Way]:
        """Yields the cases, and a graph of one kernel per rank that does nothing."""
        sms = self.ranks.ranks[0].num_sms if self.device.type == "cuda" else None
        for spec in self._specs:
            operation = self._operations[spec.what, spec.half != ""]
            run: Run = Half(operation.start, spec.half == SEND) if spec.half else operation.run
            check = functools.partial(self._check, spec.what, operation)
            wire = self.bytes_wire(spec.dedup)
            yield Way(case=self._named(spec.name), impl=OURS, run=run, check=check, bytes_wire=wire, sms=sms)

        def all_of_them() -> None:
            self.ranks.at_once(lambda rank: self._counters[rank].add_(1))

        all_of_them()
        launch = self._named(self.spec.name.replace(DISPATCH, LAUNCH))
        yield Way(case=launch, impl=OURS, run=self.ranks.recorded(all_of_them))

    def _named(self, name: str) -> str:
        return f"{name}_x{len(self._counters)}"

    def _check(self, what: str, operation: Together, _: Through) -> str | None:
        everyone = self.fresh()
        for fixed, other in zip(self._fixed, everyone, strict=True):
            fixed.copy_(other)
        with poisoned():
            if what == COMBINE:
                self._dispatch.run()
                for rank, out in enumerate(_received(self._dispatch)):
                    self._y[rank].copy_(expert_rows(self.factors, out, rank))
            operation.run()
            self.ranks.check()
            found = [sums for sums, _ in operation.results()] if what == COMBINE else _received(operation)
        return self.judge(dict(enumerate(found)), everyone, EXPERT_MAJOR)


def _received(dispatch: Together) -> list[DispatchOutput]:
    """Returns what each rank has received."""
    results = [DispatchResult(*made[:-2]) for made in dispatch.results()]  # without the handle's tensors
    return [received(tokens=got.tokens, scales=got.scales, num_tokens_per_expert=got.expert_counts) for got in results]


@dataclass(frozen=True, kw_only=True)
class StandInSuite(LowLatencySizes):
    """Times low-latency dispatch and combine of several ranks that share one GPU: their cost beside the links."""

    command_name = "low-latency-stand-in"
    defaults: ClassVar = {
        "cpu": LL_CPU_SIZES | {"ranks": 1, "share": [2], "tokens": [8, 64]},
        "cuda": LL_CUDA_SIZES | {"ranks": 1, "share": [2, 4]},
    }

    share: Annotated[list[int], typer.Option(help="Ranks that share the device; repeatable.")] = BY_BACKEND
    rate: Annotated[float, typer.Option(help="GB/s of the links per GPU and direction, by `ep-bench wire`.")] = 354.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ranks != 1:
            raise ValueError(f"ranks: expected 1 process, whose ranks are `share`, got {self.ranks}")
        if self.rate <= 0:
            raise ValueError(f"rate: expected more than 0, got {self.rate}")

    def workloads(self) -> list[Workload]:
        return [self.workload_of(share, tokens) for share in self.share for tokens in self.tokens]

    def measure(self, device: torch.device) -> dict[str, Any]:
        clock, rows = clock_of(device), list[Row]()
        for _, alike in itertools.groupby(self.specs(), lambda spec: (spec.workload, spec.quantize)):
            *cases, launch = time_ways(clock, [*SharedScene([*alike], device).shared_ways()], self.iterations)
            rows += [launch, *(line for each in cases for line in self._lines(each, launch["median_us"]))]
        notes = [f"floor: {self.rate:g} GB/s per GPU and direction, as given", *self.memory_notes()]
        return {"rows": rows, "notes": notes}

    def _lines(self, measured: Row, launch_us: float) -> list[Row]:
        """Returns the rows of a case, its links and their sum. A receive half has no links: all rows have arrived."""
        case, found, link_us = measured["case"], [measured], 0.0
        if "_receive_" not in case:
            found.append(floor_row(case, measured["bytes_wire"], self.rate))
            link_us = found[-1]["median_us"]
        times = ("median_us", "p10_us", "p90_us")
        sums = {name: max(0.1, round(measured[name] + link_us - launch_us, 1)) for name in times}
        return [*found, row(case, PREDICTED, Timing(**sums), 0)]
