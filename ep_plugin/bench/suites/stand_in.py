"""The suite `low-latency-stand-in`: what low-latency dispatch and combine take beside the time of the links.

N ranks share one GPU, each on 1/N of its SMs, in one process. Their rows go to memory of the same GPU. The kernels of
all ranks for an operation, or for one half of it, are in one CUDA graph, so the host adds nothing. The rows of a case:

- `ep_plugin`: the time of the graph.
- `floor`: the bytes of the busiest rank at `--rate`.
- `predicted`: their sum without `launch`, the time of a graph of N kernels that do nothing. Links and kernels overlap,
  so links should cost less; a rank on a GPU of its own has N times the SMs.

On CPUs ranks are threads, and the kernels those of CPUs: that tests the suite, and predicts nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
import typer

from ep_plugin.bench.exchange.cases import floor_row
from ep_plugin.bench.exchange.stand_in import Share, StandIn, Together
from ep_plugin.bench.exchange.workload import Batch, Workload, other_rows
from ep_plugin.bench.suite import BY_BACKEND, OURS, Row, Way, row, time_ways
from ep_plugin.bench.suites.low_latency import (
    CPU_SIZES,
    CUDA_SIZES,
    TOKENS,
    Half,
    LowLatencySizes,
    clock_of_halves,
    config_of,
    inputs_of,
    memory_note,
    wrong_rows,
    wrong_sums,
)
from ep_plugin.bench.timing import Run, Timing
from ep_plugin.moe.low_latency.combine import LowLatencyCombine
from ep_plugin.moe.low_latency.dispatch import LowLatencyDispatch
from ep_plugin.moe.low_latency.in_flight import RECEIVE, SEND

PREDICTED, LAUNCH = "predicted", "launch"
_TIMES = ("median_us", "p10_us", "p90_us")


class SharedScene:
    """The inputs of one T and type for all ranks, their operations, and the comparison with plain torch."""

    def __init__(self, workload: Workload, dtype: str, quantize: bool, device: torch.device) -> None:
        inputs = inputs_of(workload, dtype, quantize, device)
        self.workload, self.device, self.inputs = workload, device, inputs
        self.everyone = inputs.everyone
        self.fixed = [batch.clone() for batch in inputs.everyone]
        self.ranks = StandIn(workload.ranks, config_of(workload, inputs.element), device)
        self.turn = 0
        self.counters = [torch.zeros(1, device=device) for _ in self.ranks.ranks]
        self.dispatch = Together(self.ranks, self._dispatch_of, [SEND | RECEIVE])
        self.dispatch_halves = Together(self.ranks, self._dispatch_of, [SEND, RECEIVE])
        self.dispatch.run()
        if quantize:
            return
        self.y = [made[0].clone() for made in self.dispatch.results()]
        self.combine = Together(self.ranks, self._combine_of, [SEND | RECEIVE])
        self.combine_halves = Together(self.ranks, self._combine_of, [SEND, RECEIVE])

    def _dispatch_of(self, rank: Share) -> LowLatencyDispatch:
        mine = self.fixed[rank.rank]
        return LowLatencyDispatch(rank, mine.x, mine.ids, None, None, None, self.inputs.quantize, [], 0)

    def _combine_of(self, rank: Share) -> LowLatencyCombine:
        routing = list(self.dispatch.results()[rank.rank][-2:])
        weights = self.fixed[rank.rank].weights
        return LowLatencyCombine(rank, self.y[rank.rank], weights, None, None, False, routing, 0)

    def ways(self) -> list[Way]:
        found = self._ways("dispatch", self.dispatch, self.dispatch_halves)
        if self.inputs.quantize is None:
            found += self._ways("combine", self.combine, self.combine_halves)
        return found

    def _ways(self, what: str, whole: Together, halves: Together) -> list[Way]:
        def nothing(*_: Any) -> None: ...

        send, receive = halves.runs
        runs: dict[str, Run] = {
            what: whole.run,
            f"{what}_send": Half(lambda _: send(), nothing, lambda _: receive()),
            f"{what}_receive": Half(lambda _: receive(), send, nothing),
        }
        check = self.check_dispatch if what == "dispatch" else self.check_combine
        judged = {what: lambda: check(whole)} | dict.fromkeys(list(runs)[1:], lambda: check(halves))
        sms = self.ranks.ranks[0].num_sms if self.device.type == "cuda" else None
        suffix, bytes_wire = f"{self.inputs.name}_x{self.workload.ranks}", self.inputs.our_bytes_wire(what)
        return [
            Way(case=f"{name}_{suffix}", impl=OURS, run=run, check=judged[name], bytes_wire=bytes_wire, sms=sms)
            for name, run in runs.items()
        ]

    def check_dispatch(self, operation: Together) -> str | None:
        """Compares a dispatch of other rows and routes with plain torch."""
        everyone = self._change_inputs()
        operation.run()
        self.ranks.check()
        for rank, made in enumerate(operation.results()):
            problem = wrong_rows(self.inputs, everyone, rank, made[0], made[4])
            if problem:
                return problem
        return None

    def check_combine(self, operation: Together) -> str | None:
        """Does so for a combine."""
        everyone = self._change_inputs()
        self.dispatch.run()
        for rank, made in enumerate(self.dispatch.results()):
            self.y[rank].copy_(self.inputs.expert_rows(rank, made[0], made[4]))
        operation.run()
        self.ranks.check()
        for mine, (sums, _) in zip(everyone, operation.results(), strict=True):
            if problem := wrong_sums(self.inputs, mine, sums):
                return problem
        return None

    def _change_inputs(self) -> list[Batch]:
        self.turn += 1
        everyone = other_rows(self.everyone, self.turn, reroute=True)
        for fixed, other in zip(self.fixed, everyone, strict=True):
            fixed.copy_(other)
        return everyone


@dataclass(frozen=True, kw_only=True)
class StandInSuite(LowLatencySizes):
    """Low-latency dispatch and combine of several ranks that share one GPU: their cost beside the links."""

    command_name = "low-latency-stand-in"
    defaults: ClassVar = {
        "cpu": {**CPU_SIZES, "ranks": 1, "share": [2], "tokens": [8, 64]},
        "cuda": {**CUDA_SIZES, "ranks": 1, "share": [2, 4], "tokens": TOKENS},
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
        rows: list[Row] = []
        notes = [f"floor: {self.rate:g} GB/s per GPU and direction, as given"]
        for workload in self.workloads():
            for quantize in (False, True):
                scene = SharedScene(workload, self.dtype, quantize, device)
                timed = time_ways(clock_of_halves(device), [*scene.ways(), _launch(scene)], self.iterations)
                *cases, launch = timed
                rows += [launch, *(line for each in cases for line in self._lines(each, launch["median_us"]))]
                if not quantize:
                    notes.append(memory_note(workload, config_of(workload, scene.inputs.element)))
        return {"rows": rows, "notes": notes}

    def _lines(self, measured: Row, launch_us: float) -> list[Row]:
        """The row of a case, and those of its links and of the sum. A receive half waits for no link: all is there."""
        case, found, link_us = measured["case"], [measured], 0.0
        if "_receive_" not in case:
            found.append(floor_row(case, measured["bytes_wire"], self.rate))
            link_us = found[-1]["median_us"]
        sums = {name: max(0.1, round(measured[name] + link_us - launch_us, 1)) for name in _TIMES}
        return [*found, row(case, PREDICTED, Timing(**sums), 0)]


def _launch(scene: SharedScene) -> Way:
    """A graph of one kernel for each rank, which does nothing."""
    counters = scene.counters  # a graph does not keep them alive

    def all_of_them() -> None:
        scene.ranks.at_once(lambda rank: counters[rank].add_(1))

    all_of_them()
    run = scene.ranks.recorded(all_of_them)
    return Way(case=f"{LAUNCH}_{scene.inputs.name}_x{len(counters)}", impl=OURS, run=run)
