"""One rank of a test script of DeepEP, unchanged, with ep_plugin.deep_ep as its deep_ep.

Replaced are ``init_dist``, which DeepEP lets users rewrite, since ranks may share a GPU here; the number of seeds of a
pressure test, 1 instead of a billion; and the 100 s after which a rank is masked.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import unittest.mock
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ep_plugin.deep_ep import low_latency
from ep_plugin.integrations import hooks
from tests.gpu import over_nodes
from tests.gpu.checks import device_of

MASKED_AFTER_S = 8.0


def run(rank: int, size: int, script: Path, options: list[str], timed: bool = True) -> None:
    """Runs the script's main part on this rank. timed: whether it measures times; that takes longer than its checks."""
    over_nodes.start(rank, size, nodes=1)
    hooks.enable(["deep_ep"])
    device = device_of(rank)

    def init_dist(local_rank: int, num_local_ranks: int, seed: int = 0) -> tuple[int, int, dist.ProcessGroup]:
        torch.set_default_dtype(torch.bfloat16)
        torch.set_default_device(device.type)
        torch.manual_seed(seed + rank)
        return rank, size, dist.new_group()

    def spawn(function: Callable[..., None], args: tuple[Any, ...], nprocs: int) -> None:
        function(rank, *args)

    replaced: dict[str, Callable[..., Any]] = {"init_dist": init_dist}
    if not timed:
        replaced |= {"bench": _called_once, "bench_kineto": _called_once_by_name}
    sys.path.insert(0, str(script.parent))
    of_1_x = (script.parent / "utils.py").exists()
    with contextlib.ExitStack() as patches:
        for home in ["utils"] if of_1_x else ["deep_ep.utils.envs", "deep_ep.utils.testing"]:
            module = importlib.import_module(home)
            for name in replaced.keys() & vars(module).keys():
                patches.enter_context(unittest.mock.patch.object(module, name, replaced[name]))
        patches.enter_context(unittest.mock.patch.object(low_latency, "_SHRINK_TIMEOUT_S", MASKED_AFTER_S))
        patches.enter_context(unittest.mock.patch.object(torch.multiprocessing, "spawn", spawn))
        patches.enter_context(unittest.mock.patch.object(dist, "destroy_process_group"))  # tests.ranks does it
        patches.enter_context(
            unittest.mock.patch.object(sys, "argv", [str(script), "--num-processes", str(size), *options])
        )
        source = script.read_text().replace("int(1e9)", "1")
        exec(compile(source, script, "exec"), {"__name__": "__main__"})


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
