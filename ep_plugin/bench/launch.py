"""Starts the ranks of a benchmark, one process each, and returns what rank 0 found."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.multiprocessing.spawn import spawn

from ep_plugin.bench.provenance import cores

_RESULT = "ep_bench/result"
_TIMEOUT = datetime.timedelta(seconds=300)


def run_on_ranks(ranks: int, backend: str, function: Callable[..., Any], *args: Any) -> Any:
    """Calls `function(device, *args)` on each rank of a group and returns rank 0's result, which JSON can hold.

    `backend`: "cpu" (gloo) or "cuda" (NCCL, one GPU per rank). `function` is importable by name. Raises
    torch.multiprocessing.ProcessRaisedException with the traceback of the first rank that fails; the others are ended.
    """
    if backend == "cuda" and ranks > torch.cuda.device_count():
        raise ValueError(f"ranks: expected at most one per GPU ({torch.cuda.device_count()} found), got {ranks}")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    spawn(_rank_main, args=(ranks, store.port, backend, function, args), nprocs=ranks)
    return json.loads(store.get(_RESULT))


def _rank_main(
    rank: int, ranks: int, port: int, backend: str, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    store = TCPStore("127.0.0.1", port, is_master=False)
    if backend == "cpu":
        device = torch.device("cpu")
        torch.set_num_threads(max(1, cores() // ranks))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=_TIMEOUT)
    else:
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", store=store, rank=rank, world_size=ranks, timeout=_TIMEOUT, device_id=device)
    result = function(device, *args)
    if rank == 0:
        store.set(_RESULT, json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()
