"""``deep_ep.utils.testing``: the time of a call, and the times of its kernels."""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ep_plugin.errors import NotSupported

_CACHE_BYTES = 256_000_000  # larger than the L2 cache of any GPU
_BUSY_CYCLES = 20_000_000  # about 10 ms


class Kernel(NamedTuple):
    """One run of a kernel, in microseconds."""

    name: str
    start: float
    duration: float


def bench(
    fn: Callable[[], Any],
    num_warmups: int = 50,
    num_tests: int = 50,
    post_fn: Callable[[], Any] | None = None,
    flush_l2: bool = True,
) -> tuple[float, float, float]:
    """Time `fn`. Returns the mean, the least and the most seconds, without the first timed run. GPUs use CUDA events.

    post_fn: called after each timed run. flush_l2: whether the L2 cache is overwritten before each run.
    """
    for _ in range(num_warmups):
        fn()
    timed = _timed_on_gpu if torch.cuda.is_available() else _timed_on_cpu
    seconds = timed(fn, num_tests, post_fn, flush_l2)[1:]
    return statistics.mean(seconds), min(seconds), max(seconds)


def bench_kineto(
    fn: Callable[[], Any],
    kernel_names: str | tuple[str, ...],
    num_tests: int = 30,
    suppress_kineto_output: bool = False,
    trace_path: str | None = None,
    flush_l2: bool = True,
    barrier_comm_profiling: bool = False,
    num_kernels_per_period: int = 1,
    barrier: Callable[[], Any] | None = None,
) -> Any:
    """Time kernels that `fn` launches, by PyTorch's profiler. For GPUs.

    Args:
        kernel_names: a part of each kernel's name. The names of exactly one kernel may contain it.
        suppress_kineto_output: whether stdout and stderr are closed while the profiler runs.
        trace_path: a file for the Chrome trace.
        flush_l2: whether the L2 cache is overwritten before each run.
        barrier_comm_profiling: whether ranks wait for each other before each run: in `barrier`, or an all-reduce.
        num_kernels_per_period: launches of each kernel by one `fn`.

    Returns:
        Seconds; a list of them for several launches by one `fn`; a list of these for a tuple of names.
    """
    if not torch.cuda.is_available():
        raise NotSupported("bench_kineto(): expected a GPU, got a machine without one; bench() times calls on CPUs")
    with _silenced() if suppress_kineto_output else contextlib.nullcontext():
        profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        fn()  # without the profiler
        torch.cuda.synchronize()
        with profile:
            for _ in range(num_tests):
                _flush(flush_l2)
                if barrier_comm_profiling:
                    torch.cuda._sleep(_BUSY_CYCLES)  # the launches of all ranks are enqueued behind it
                    barrier() if barrier else dist.all_reduce(torch.ones(1, device="cuda"))
                fn()
            torch.cuda.synchronize()
    if trace_path is not None:
        profile.export_chrome_trace(trace_path)
    kernels = [
        Kernel(event.name, event.time_range.start, event.time_range.elapsed_us())
        for event in profile.events() or ()
        if event.device_type.name == "CUDA"
    ]
    names = (kernel_names,) if isinstance(kernel_names, str) else kernel_names
    times = [mean_durations(kernels, name, num_kernels_per_period) for name in names]
    return times[0] if isinstance(kernel_names, str) else times


def mean_durations(kernels: Sequence[Kernel], part: str, per_period: int) -> Any:
    """The mean seconds of the one kernel whose name has this part; a list of them for its launches in each period."""
    found = sorted((kernel for kernel in kernels if part in kernel.name), key=lambda kernel: kernel.start)
    names = {kernel.name for kernel in found}
    if len(names) != 1:
        raise ValueError(f"kernel_names: expected one kernel with {part!r} in its name, got {sorted(names)}")
    if len(found) % per_period:
        raise ValueError(
            f"num_kernels_per_period: expected a divisor of the {len(found)} launches of {part!r}, got {per_period}"
        )
    means = [statistics.mean(kernel.duration for kernel in found[i::per_period]) / 1e6 for i in range(per_period)]
    return means if per_period > 1 else means[0]


def _timed_on_gpu(
    fn: Callable[[], Any], num_tests: int, post_fn: Callable[[], Any] | None, flush_l2: bool
) -> list[float]:
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(num_tests)]
    for start, end in events:
        _flush(flush_l2)
        start.record()
        fn()
        end.record()
        if post_fn is not None:
            post_fn()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1e3 for start, end in events]


def _timed_on_cpu(
    fn: Callable[[], Any], num_tests: int, post_fn: Callable[[], Any] | None, flush_l2: bool
) -> list[float]:
    seconds = []
    for _ in range(num_tests):
        start = time.perf_counter()
        fn()
        seconds.append(time.perf_counter() - start)
        if post_fn is not None:
            post_fn()
    return seconds


def _flush(enabled: bool) -> None:
    if enabled:
        torch.empty(_CACHE_BYTES // 4, dtype=torch.int32, device="cuda").zero_()


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    """Sends this process's stdout and stderr to /dev/null."""
    sys.stdout.flush()
    sys.stderr.flush()
    with open(os.devnull, "w") as null, contextlib.ExitStack() as restored:
        for descriptor in (1, 2):
            saved = os.dup(descriptor)
            restored.callback(os.close, saved)
            restored.callback(os.dup2, saved, descriptor)
            os.dup2(null.fileno(), descriptor)
        restored.callback(sys.stdout.flush)
        restored.callback(sys.stderr.flush)
        yield
