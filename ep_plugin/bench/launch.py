"""Starts the ranks of a benchmark, one process each, and returns rank 0's result.

A launcher (torchrun, ep_plugin.testing.nodes) sets RANK and WORLD_SIZE. This process then is one of the ranks.
"""

from __future__ import annotations

import datetime
import json
import multiprocessing
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.multiprocessing.spawn import start_processes

from ep_plugin import env
from ep_plugin.bench.provenance import cores
from ep_plugin.transport.topology import host_identity

_RESULT = "ep_bench/result"
_TIMEOUT = datetime.timedelta(seconds=300)


def run_on_ranks(
    ranks: int, backend: str, function: Callable[..., Any], *args: Any, timeout: datetime.timedelta | None = _TIMEOUT
) -> Any:
    """Calls `function(device, *args)` on each rank of a group, under gloo (cpu) or NCCL (cuda, one GPU per rank).

    Under a launcher only rank 0 returns: the other processes end here, so a program can call this once.

    Args:
        function: a function that can be imported by name, because it is pickled. `args` are pickled, too.
        timeout: the timeout of the group; None is the backend's default.

    Returns:
        Rank 0's result, after a round trip through JSON.

    Raises:
        torch.multiprocessing.spawn.ProcessException: a rank has failed. The error has its traceback or signal, and the
            other ranks are ended. They are also ended when this call is interrupted.
        ValueError: there are fewer GPUs than ranks, or a launcher has started another number of ranks.
    """
    call = (backend, timeout, function, args)
    started = env.launcher()
    if started.rank is not None and started.world_size is not None:
        if started.world_size != ranks:
            raise ValueError(f"ranks: expected {started.world_size}, which the launcher has started, got {ranks}")
        result = _run(started.rank, started.local_rank or 0, ranks, None, *call)
        return json.loads(result) if started.rank == 0 else end_process()
    if backend == "cuda" and ranks > torch.cuda.device_count():
        raise ValueError(f"ranks: expected at most one per GPU ({torch.cuda.device_count()} found), got {ranks}")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    # Ranks without GPUs are forks of a process that has imported torch, and end without tearing the interpreter down: a
    # thread of gloo may hold the last collective's tensors. CUDA needs processes that start anew.
    multiprocessing.get_context("forkserver").set_forkserver_preload([__name__, function.__module__])
    method = "forkserver" if backend == "cpu" else "spawn"
    arguments = (ranks, store.port, dict(os.environ), *call)
    started_ranks = start_processes(_started, arguments, ranks, join=False, start_method=method)
    try:
        while not started_ranks.join():
            pass
    finally:
        for process in started_ranks.processes:
            process.terminate()
    return json.loads(store.get(_RESULT))


def end_process() -> NoReturn:
    """Ends this process at once, with status 0.

    A thread of gloo may still release the last collective's tensor. If it asks for the interpreter's lock while the
    interpreter is torn down, the process aborts.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _started(rank: int, ranks: int, port: int, environment: dict[str, str], *call: Any) -> None:
    os.environ.clear()  # a fork has that of the process that it was forked from
    os.environ.update(environment)
    store = TCPStore("127.0.0.1", port, is_master=False)
    result = _run(rank, rank, ranks, store, *call)
    if rank == 0:
        store.set(_RESULT, result)


def _run(
    rank: int, local_rank: int, ranks: int, store: TCPStore | None, backend: str, timeout: Any, function: Any, args: Any
) -> str:
    """Returns this rank's result as JSON. Without a store, the environment says where the ranks meet."""
    device = torch.device("cpu") if backend == "cpu" else torch.device("cuda", local_rank)
    group: dict[str, Any] = {"store": store, "rank": rank, "world_size": ranks, "timeout": timeout}
    if backend == "cpu":
        torch.set_num_threads(max(1, cores() // ranks))
        dist.init_process_group("gloo", **group)
        machines: list[str] = [""] * ranks
        dist.all_gather_object(machines, host_identity())
        if len(set(machines)) > 1:  # CPUs are timed by one machine's clock
            raise ValueError(f"backend: expected ranks of one machine for cpu, got {len(set(machines))} machines")
    else:
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device, **group)
    result = json.dumps(function(device, *args))
    dist.barrier()
    dist.destroy_process_group()
    return result
