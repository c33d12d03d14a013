"""Clocks that release all ranks together and time one call, or several calls in a row.

A sample has three parts, in microseconds: the start and the end of a call on one rank, and the time until the call
returned to the host. On CPUs start and end are read from a clock that the ranks share, and the third part is NaN, since
a call returns when it is over. On CUDA they count from the rank's own start. An iteration lasts from the first start to
the last end; on CUDA that is the time of the slowest rank.

If a sample has several calls, each part is divided by their number. Ranks that share cores start one after the other,
and one call is often over before the last rank starts. With several calls in a row that wait counts once.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

Run = Callable[[], object]
Sample = tuple[float, float, float]
Clock = Callable[[Run], Sample]  # the sample of a call; collective
Name = TypeVar("Name", bound=Hashable)
_FLUSH_FACTOR = 4  # sizes of the L2 cache that are written to empty it
_LEAD_CYCLES = 4_000_000  # of the device's clock, about two milliseconds
_LEAD_NS = 1_000_000  # by which the last rank has left the all-reduce
WARMUP = 3  # calls of each implementation before the timed ones


@dataclass(frozen=True)
class Half:
    """One half of an operation. Clocks time this half alone.

    Attributes:
        start: runs the send half, and returns the call that runs the receive half.
        sends: whether the send half is timed. The other half runs outside of the timed part.
    """

    start: Callable[[], Run]
    sends: bool

    def __call__(self) -> object:
        return self.start()()


def clock_of(device: torch.device, calls: int = 1) -> Clock:
    """Returns the clock for `device`. Each sample has `calls` calls in a row; a sample of a Half has one."""
    sample = _host_sample if device.type == "cpu" else _DeviceClock(device)

    def clock(run: Run) -> Sample:
        if not isinstance(run, Half):
            return sample(run, calls)
        if not run.sends:
            return sample(run.start(), 1)
        receive: list[Run] = []
        found = sample(lambda: receive.append(run.start()), 1)
        receive[0]()
        return found

    return clock


def _repeat(run: Run, calls: int) -> object:
    for _ in range(calls - 1):
        run()
    return run()


def _host_sample(run: Run, calls: int) -> Sample:
    """Times `run` on the host's monotonic clock. The last result is freed after the end of the sample.

    A barrier would release ranks one after the other, as they wake up. So the ranks agree on a moment, and spin until
    then.
    """
    moment = torch.tensor(time.perf_counter_ns() + _LEAD_NS)
    dist.all_reduce(moment, dist.ReduceOp.MAX)
    release = min(int(moment), time.perf_counter_ns() + _LEAD_NS)  # hosts whose clocks differ wait no longer, either
    while time.perf_counter_ns() < release:
        os.sched_yield()
    start = time.perf_counter_ns()
    result = _repeat(run, calls)
    end = time.perf_counter_ns()
    del result
    return start / 1e3 / calls, end / 1e3 / calls, math.nan


class _DeviceClock:
    """Times `run` with device events.

    Before the start event it enqueues a write that empties the L2 cache, and an all-reduce, which no rank leaves early.
    So the devices start together, whatever their hosts do. The host is ahead of the device by a fixed lead, as in a
    training step: enqueueing costs no device time, but a wait of the host inside `run` does.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        self._flush = torch.empty(_FLUSH_FACTOR * l2_bytes, dtype=torch.uint8, device=device)
        self._token = torch.zeros(1, device=device)

    def __call__(self, run: Run, calls: int) -> Sample:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(self._device)
        torch.cuda._sleep(_LEAD_CYCLES)
        self._flush.zero_()
        dist.all_reduce(self._token)
        start.record()
        began = time.perf_counter_ns()
        result = _repeat(run, calls)
        host_us = (time.perf_counter_ns() - began) / 1e3
        end.record()
        torch.cuda.synchronize(self._device)
        del result
        return 0.0, 1e3 * start.elapsed_time(end) / calls, host_us / calls


@dataclass(frozen=True, kw_only=True)
class Timing:
    """The microseconds of an iteration: the median, and the 10th and 90th percentile.

    host_us: the median time until the call returned on the slowest rank; None on CPUs.
    """

    median_us: float
    p10_us: float
    p90_us: float
    host_us: float | None = None


def time_in_turn(clock: Clock, runs: Mapping[Name, Run], iterations: int, warmup: int = WARMUP) -> dict[Name, Timing]:
    """Times several implementations in turns, each turn in the reverse order of the one before. Collective."""
    samples: dict[Name, list[Sample]] = {name: [] for name in runs}
    for turn in range(warmup + iterations):
        for name in runs if turn % 2 == 0 else reversed(list(runs)):
            sample = clock(runs[name])
            if turn >= warmup:
                samples[name].append(sample)
    everyone: list[dict[Name, list[Sample]]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, samples)
    return {name: summarise([theirs[name] for theirs in everyone]) for name in runs}


def summarise(samples: list[list[Sample]]) -> Timing:
    """Returns the statistics of the iterations. `samples` are by rank, then by iteration."""
    table = torch.tensor(samples, dtype=torch.float64)  # [R, iterations, 3]
    host = float(table[:, :, 2].amax(0).quantile(0.5))
    spans = table[:, :, 1].amax(0) - table[:, :, 0].amin(0)
    p10, median, p90 = torch.quantile(spans, torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)).tolist()
    host_us = None if math.isnan(host) else round(host, 1)
    return Timing(median_us=round(median, 1), p10_us=round(p10, 1), p90_us=round(p90, 1), host_us=host_us)
