"""Starts the ranks of a benchmark, one process each, and returns rank 0's result.

Under a launcher (torchrun, ep_plugin.testing.nodes), which sets RANK and WORLD_SIZE, this process is one of the ranks.
"""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.multiprocessing.spawn import spawn

from ep_plugin import env
from ep_plugin.bench.provenance import cores
from ep_plugin.transport.topology import machine_identity

_RESULT = "ep_bench/result"
_TIMEOUT = datetime.timedelta(seconds=300)


def run_on_ranks(ranks: int, backend: str, function: Callable[..., Any], *args: Any) -> Any:
    """Calls `function(device, *args)` on each rank of a group.

    Under a launcher only rank 0 returns: the other processes end here, so a program can call this once.

    Args:
        ranks: the number of processes.
        backend: "cpu" (gloo) or "cuda" (NCCL, one GPU per rank).
        function: importable by name, as it is sent to the ranks; so are `args`.

    Returns:
        Rank 0's result, as JSON gives it back.

    Raises:
        torch.multiprocessing.ProcessRaisedException: with the traceback of the first rank that fails; the others end.
        ValueError: fewer GPUs than ranks, or a launcher that has started another number of ranks.
    """
    started = env.launcher()
    if started.rank is not None and started.world_size is not None:
        if started.world_size != ranks:
            raise ValueError(f"ranks: expected {started.world_size}, which the launcher has started, got {ranks}")
        return _as_one_of(started.rank, ranks, started.local_rank or 0, backend, function, args)
    if backend == "cuda" and ranks > torch.cuda.device_count():
        raise ValueError(f"ranks: expected at most one per GPU ({torch.cuda.device_count()} found), got {ranks}")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    spawn(_rank_main, args=(ranks, store.port, backend, function, args), nprocs=ranks)
    return json.loads(store.get(_RESULT))


def _as_one_of(
    rank: int, ranks: int, local_rank: int, backend: str, function: Callable[..., Any], args: tuple[Any, ...]
) -> Any:
    device = _init(backend, local_rank, ranks, init_method="env://", rank=rank, world_size=ranks)
    if backend == "cpu":
        _check_one_clock(ranks)
    result = json.loads(json.dumps(function(device, *args)))
    dist.barrier()
    dist.destroy_process_group()
    if rank != 0:
        sys.exit(0)
    return result


def _check_one_clock(ranks: int) -> None:
    """CPUs are timed by the machine's clock, from the first rank's start to the last one's end."""
    machines: list[str] = [""] * ranks
    dist.all_gather_object(machines, machine_identity())
    if len(set(machines)) > 1:
        raise ValueError(f"backend: expected ranks of one machine for cpu, got {len(set(machines))} machines")


def _rank_main(
    rank: int, ranks: int, port: int, backend: str, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    store = TCPStore("127.0.0.1", port, is_master=False)
    device = _init(backend, rank, ranks, store=store, rank=rank, world_size=ranks)
    result = function(device, *args)
    if rank == 0:
        store.set(_RESULT, json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def _init(backend: str, local_rank: int, ranks: int, **group: Any) -> torch.device:
    """The default process group, and this rank's device."""
    if backend == "cpu":
        torch.set_num_threads(max(1, cores() // ranks))
        dist.init_process_group("gloo", timeout=_TIMEOUT, **group)
        return torch.device("cpu")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", timeout=_TIMEOUT, device_id=device, **group)
    return device
