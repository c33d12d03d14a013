"""Clocks: one call on all ranks at a time, released together, and what its samples say.

A sample is when this rank started and ended, in microseconds, on a clock that the ranks share (CPU) or since its own
start (CUDA). An iteration took from the first start to the last end: on CUDA that is the slowest rank's time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

Run = Callable[[], object]
Name = TypeVar("Name", bound=Hashable)
_FLUSH_FACTOR = 4  # times the L2 cache: what is written to empty it
_LEAD_CYCLES = 1_000_000  # of the device's clock, about half a millisecond


class Clock(Protocol):
    def measure(self, run: Run) -> tuple[float, float]:
        """Start and end of `run` on this rank. Collective."""


class HostClock:
    """Monotonic time of one host. What `run` returns is freed after its end, what it drops inside counts."""

    def measure(self, run: Run) -> tuple[float, float]:
        dist.barrier()
        start = time.perf_counter_ns()
        result = run()
        end = time.perf_counter_ns()
        del result
        return start / 1e3, end / 1e3


class DeviceClock:
    """Device events around `run`, after a write that empties the L2 cache and an all-reduce that no rank leaves early.

    Both are enqueued with the start event, on the current stream, so the device is released by its peers and not by
    its own host. The host is ahead by a fixed lead, as in the middle of a training step: what it enqueues without
    waiting costs no device time; what it waits for inside `run` does.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        self._flush = torch.empty(_FLUSH_FACTOR * l2_bytes, dtype=torch.uint8, device=device)
        self._token = torch.zeros(1, device=device)

    def measure(self, run: Run) -> tuple[float, float]:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(self._device)
        torch.cuda._sleep(_LEAD_CYCLES)
        self._flush.zero_()
        dist.all_reduce(self._token)
        start.record()
        result = run()
        end.record()
        torch.cuda.synchronize(self._device)
        del result
        return 0.0, 1e3 * start.elapsed_time(end)


def clock_of(device: torch.device) -> Clock:
    return HostClock() if device.type == "cpu" else DeviceClock(device)


def stream_of_its_own(device: torch.device) -> AbstractContextManager[Any]:
    """The current stream, inside, is not the default one, which NCCL's copy-engine collectives refuse before 2.29.7
    (github.com/NVIDIA/nccl/issues/2003). CPUs have no streams."""
    if device.type == "cpu":
        return nullcontext()
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    return torch.cuda.stream(stream)


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Microseconds of one iteration: the median, and what a tenth of the iterations stayed below and above."""

    median_us: float
    p10_us: float
    p90_us: float


def time_in_turn(clock: Clock, runs: dict[Name, Run], iterations: int, warmup: int) -> dict[Name, Timing]:
    """Times several ways to do one thing, in turns, each in the reverse order of the last one. Collective."""
    samples: dict[Name, list[tuple[float, float]]] = {name: [] for name in runs}
    names = list(runs)
    for turn in range(warmup + iterations):
        for name in names if turn % 2 == 0 else reversed(names):
            sample = clock.measure(runs[name])
            if turn >= warmup:
                samples[name].append(sample)
    everyone: list[dict[Name, list[tuple[float, float]]]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, samples)
    return {name: summarise([theirs[name] for theirs in everyone]) for name in names}


def summarise(samples: list[list[tuple[float, float]]]) -> Timing:
    """`samples[rank][iteration]` to the statistics of the iterations."""
    table = torch.tensor(samples, dtype=torch.float64)  # [R, iterations, 2]
    spans = table[:, :, 1].amax(0) - table[:, :, 0].amin(0)
    p10, median, p90 = torch.quantile(spans, torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)).tolist()
    return Timing(median_us=round(median, 1), p10_us=round(p10, 1), p90_us=round(p90, 1))
