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

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
import typer

from ep_plugin.bench.exchange.cases import Scene, floor_row
from ep_plugin.bench.exchange.oracle import expert_rows
from ep_plugin.bench.exchange.peers import received
from ep_plugin.bench.exchange.stand_in import Share, StandIn, Together
from ep_plugin.bench.exchange.workload import COMBINE, DISPATCH, EXPERT_MAJOR, SEND, Batch, Spec, Workload
from ep_plugin.bench.suite import BY_BACKEND, OURS, Row, Way, row, time_ways
from ep_plugin.bench.suites.low_latency import CPU_SIZES, CUDA_SIZES, LowLatencySizes
from ep_plugin.bench.timing import Half, Run, Timing, clock_of
from ep_plugin.moe.layout import DispatchOutput, DispatchResult
from ep_plugin.moe.low_latency.combine import LowLatencyCombine
from ep_plugin.moe.low_latency.dispatch import LowLatencyDispatch

PREDICTED, LAUNCH = "predicted", "launch"
_TIMES = ("median_us", "p10_us", "p90_us")


class SharedScene(Scene):
    """The operations of all ranks, of cases that differ in operation and half alone, and their comparison."""

    def __init__(self, specs: list[Spec], device: torch.device) -> None:
        super().__init__(specs[0], device)
        self._specs = specs
        self._fixed = [batch.clone() for batch in self.everyone]
        self.ranks = StandIn(self.spec.workload.ranks, self.spec.config, device)
        self._counters = [torch.zeros(1, device=device) for _ in self.ranks.ranks]  # a graph does not keep them alive
        self._dispatch = Together(self.ranks, self._dispatch_of)
        self._dispatch.run()
        self._y = [out.tokens.clone() for out in _received(self._dispatch)]
        self._operations = {(DISPATCH, False): self._dispatch}
        makers: dict[str, Any] = {DISPATCH: self._dispatch_of, COMBINE: self._combine_of}
        for what, apart in dict.fromkeys((spec.what, spec.half != "") for spec in specs[1:]):
            self._operations[what, apart] = Together(self.ranks, makers[what], apart)

    def _dispatch_of(self, rank: Share) -> LowLatencyDispatch:
        mine = self._fixed[rank.rank]
        return LowLatencyDispatch(rank, mine.x, mine.ids, None, None, None, "e4m3" if mine.quantize else None, [], 0)

    def _combine_of(self, rank: Share) -> LowLatencyCombine:
        routing = list(self._dispatch.results()[rank.rank][-2:])
        weights = self._fixed[rank.rank].weights
        return LowLatencyCombine(rank, self._y[rank.rank], weights, None, None, False, routing, 0)

    def shared_ways(self) -> Iterator[Way]:
        """The cases, and a graph of one kernel for each rank, which does nothing."""
        sms = self.ranks.ranks[0].num_sms if self.device.type == "cuda" else None
        for spec in self._specs:
            operation = self._operations[spec.what, spec.half != ""]
            run: Run = Half(operation.start, spec.half == SEND) if spec.half else operation.run
            check = functools.partial(self.judge, functools.partial(self._moved, spec.what, operation), EXPERT_MAJOR)
            wire = self.bytes_wire(spec.dedup)
            yield Way(case=self._named(spec.name), impl=OURS, run=run, check=check, bytes_wire=wire, sms=sms)

        def all_of_them() -> None:
            self.ranks.at_once(lambda rank: self._counters[rank].add_(1))

        all_of_them()
        launch = self._named(self.spec.name.replace(DISPATCH, LAUNCH))
        yield Way(case=launch, impl=OURS, run=self.ranks.recorded(all_of_them))

    def _named(self, name: str) -> str:
        return f"{name}_x{len(self._counters)}"

    def _moved(self, what: str, operation: Together, everyone: list[Batch]) -> dict[int, Any]:
        """Runs the operation with these batches as its inputs. Returns its results by rank."""
        for fixed, other in zip(self._fixed, everyone, strict=True):
            fixed.copy_(other)
        if what == COMBINE:
            self._dispatch.run()
            for rank, out in enumerate(_received(self._dispatch)):
                self._y[rank].copy_(expert_rows(self.factors, out, rank))
        operation.run()
        self.ranks.check()
        sums_or_rows = [sums for sums, _ in operation.results()] if what == COMBINE else _received(operation)
        return dict(enumerate(sums_or_rows))


def _received(dispatch: Together) -> list[DispatchOutput]:
    """What each rank has."""
    results = [DispatchResult(*made[:-2]) for made in dispatch.results()]  # without the handle's tensors
    return [received(tokens=got.tokens, scales=got.scales, num_tokens_per_expert=got.expert_counts) for got in results]


@dataclass(frozen=True, kw_only=True)
class StandInSuite(LowLatencySizes):
    """Low-latency dispatch and combine of several ranks that share one GPU: their cost beside the links."""

    command_name = "low-latency-stand-in"
    defaults: ClassVar = {
        "cpu": CPU_SIZES | {"ranks": 1, "share": [2], "tokens": [8, 64]},
        "cuda": CUDA_SIZES | {"ranks": 1, "share": [2, 4]},
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
        """The row of a case, and those of its links and of the sum. A receive half waits for no link: all is there."""
        case, found, link_us = measured["case"], [measured], 0.0
        if "_receive_" not in case:
            found.append(floor_row(case, measured["bytes_wire"], self.rate))
            link_us = found[-1]["median_us"]
        sums = {name: max(0.1, round(measured[name] + link_us - launch_us, 1)) for name in _TIMES}
        return [*found, row(case, PREDICTED, Timing(**sums), 0)]
