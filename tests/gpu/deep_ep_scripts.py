"""One rank of a test script of DeepEP, unchanged, with ep_plugin.deep_ep as its deep_ep.

Replaced are ``init_dist``, which DeepEP lets users rewrite, since ranks may share a GPU here; the number of seeds of a
pressure test, 1 instead of a billion; and the 100 s after which a rank is masked. DeepEP's reference of its calls and
its generator of routings (``deep_ep/utils/refs.py`` and ``gate.py``) come from the checkout.

On CPUs a script's "cuda" means the CPU, CUDA's events keep the host's time, and kernels are not timed. The rate of the
network adapter, which the pipeline test divides by, is given.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import random
import sys
import time
import types
import unittest.mock
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ep_plugin.deep_ep import low_latency_memory
from ep_plugin.integrations import hooks
from tests.gpu import over_nodes
from tests.gpu.checks import device_of

MASKED_AFTER_S = 8.0


def run(
    rank: int,
    size: int,
    script: Path,
    options: list[str],
    timed: bool = True,
    sizes: Mapping[str, str] | None = None,
    nodes: int = 1,
) -> None:
    """Runs the script's main part on this rank.

    Args:
        timed: whether it measures times, which takes longer than its checks.
        sizes: text of the script, and what stands in its place.
        nodes: emulated nodes, of equally many ranks.
    """
    over_nodes.start(rank, size, nodes)
    hooks.enable(["deep_ep"])
    device = device_of(rank)

    def init_dist(local_rank: int, num_local_ranks: int, seed: int = 0) -> tuple[int, int, dist.ProcessGroup]:
        torch.set_default_dtype(torch.bfloat16)
        torch.set_default_device(device.type)
        torch.manual_seed(seed + rank)
        random.seed(seed + rank)
        return rank, size, dist.new_group()

    def spawn(function: Callable[..., None], args: tuple[Any, ...], nprocs: int) -> None:
        function(rank, *args)

    replaced: dict[str, Callable[..., Any]] = {"init_dist": init_dist}
    if not timed or device.type == "cpu":
        replaced |= {"bench": _called_once, "bench_kineto": _called_once_by_name}
    if device.type == "cpu":
        replaced["get_rdma_gbs"] = lambda: 50.0
    sys.path.insert(0, str(script.parent))
    of_1_x = (script.parent / "utils.py").exists()
    utils = script.parents[2] / "deep_ep" / "utils"
    for name in () if of_1_x else ("gate", "refs"):
        _import_theirs(name, utils / f"{name}.py", device)
    with contextlib.ExitStack() as patches:
        if device.type == "cpu":
            patches.enter_context(_cpu_as_gpu())
        for home in ["utils"] if of_1_x else ["deep_ep.utils.envs", "deep_ep.utils.testing"]:
            module = importlib.import_module(home)
            for name in replaced.keys() & vars(module).keys():
                patches.enter_context(unittest.mock.patch.object(module, name, replaced[name]))
        patches.enter_context(unittest.mock.patch.object(low_latency_memory, "_SHRINK_TIMEOUT_S", MASKED_AFTER_S))
        patches.enter_context(unittest.mock.patch.object(torch.multiprocessing, "spawn", spawn))
        patches.enter_context(unittest.mock.patch.object(dist, "destroy_process_group"))  # tests.ranks does it
        patches.enter_context(
            unittest.mock.patch.object(sys, "argv", [str(script), "--num-processes", str(size), *options])
        )
        source = _on(device, script.read_text()).replace("int(1e9)", "1")
        for given, smaller in (sizes or {}).items():
            assert given in source, f"expected {given} in {script}, found none"
            source = source.replace(given, smaller)
        exec(compile(source, script, "exec"), {"__name__": "__main__"})


def _on(device: torch.device, source: str) -> str:
    return source.replace("'cuda'", f"'{device.type}'")


def _import_theirs(name: str, file: Path, device: torch.device) -> None:
    """A module of DeepEP's own under ``deep_ep.utils``, which imports ours beside it."""
    module = types.ModuleType(f"ep_plugin.deep_ep.utils.{name}")
    module.__package__ = "ep_plugin.deep_ep.utils"
    exec(compile(_on(device, file.read_text()), file, "exec"), vars(module))
    sys.modules[f"deep_ep.utils.{name}"] = module


@contextlib.contextmanager
def _cpu_as_gpu() -> Iterator[None]:
    """What the scripts call of torch.cuda, and bytes of FP8 in exchanges, which gloo knows no FP8 for."""
    with (
        unittest.mock.patch.multiple(
            torch.cuda, synchronize=lambda: None, _sleep=lambda cycles: None, Event=_HostEvent
        ),
        unittest.mock.patch.object(dist, "all_to_all_single", _bytes_of_fp8(dist.all_to_all_single)),
    ):
        yield


class _HostEvent:
    def __init__(self, enable_timing: bool = False) -> None:
        self.seconds = 0.0

    def record(self) -> None:
        self.seconds = time.perf_counter()

    def elapsed_time(self, end: _HostEvent) -> float:
        return (end.seconds - self.seconds) * 1e3


def _bytes_of_fp8(all_to_all_single: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(all_to_all_single)
    def called(output: torch.Tensor, input: torch.Tensor, *args: Any) -> Any:
        if input.dtype is torch.float8_e4m3fn:
            output, input = output.view(torch.uint8), input.view(torch.uint8)
        return all_to_all_single(output, input, *args)

    return called


def _called_once(fn: Callable[[], Any], *args: Any, **how: Any) -> tuple[float, float, float]:
    """In place of `bench`."""
    fn()
    return 1.0, 1.0, 1.0


def _called_once_by_name(
    fn: Callable[[], Any], kernel_names: Any, *args: Any, num_kernels_per_period: int = 1, **how: Any
) -> Any:
    """In place of `bench_kineto`."""
    fn()
    one: Any = 1.0 if num_kernels_per_period == 1 else [1.0] * num_kernels_per_period
    return one if isinstance(kernel_names, str) else [one] * len(kernel_names)
