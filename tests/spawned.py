"""Ranks as real processes: spawned, joined into a gloo group, their results and errors brought back to the test."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as dist

_PATIENCE_S = 120


class RankFailed(AssertionError):
    """A rank raised, or died without being told to; the message holds its traceback or exit code."""


def die() -> None:
    """Ends this rank as a crash would: SIGKILL, no clean-up of any kind."""
    os.kill(os.getpid(), signal.SIGKILL)


def run_ranks(size: int, function: Callable[..., Any], *args: Any, killed: tuple[int, ...] = ()) -> list[Any]:
    """Runs ``function(rank, size, *args)`` in ``size`` processes and returns what each returned, in rank order.

    ``function`` is importable by name. The default group is gloo over a store that the calling process serves, so that
    it outlives every rank. Ranks in ``killed`` must end by SIGKILL; their result is None.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    ends = [context.Pipe(duplex=False) for _ in range(size)]
    processes = [
        context.Process(target=_main, args=(rank, size, store.port, ends[rank][1], function, args), daemon=True)
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    for _, send_end in ends:
        send_end.close()
    try:
        return [_result_of(rank, processes[rank], ends[rank][0], rank in killed) for rank in range(size)]
    finally:
        for process in processes:
            process.kill()
            process.join()


def _result_of(rank: int, process: multiprocessing.process.BaseProcess, end: Connection, killed: bool) -> Any:
    try:
        if not end.poll(_PATIENCE_S):
            raise RankFailed(f"rank {rank} did not finish within {_PATIENCE_S} s")
        succeeded, result = end.recv()
    except EOFError:
        process.join(_PATIENCE_S)
        if killed and process.exitcode == -signal.SIGKILL:
            return None
        raise RankFailed(f"rank {rank} ended without a result, exit code {process.exitcode}") from None
    if not succeeded:
        raise RankFailed(f"rank {rank} raised:\n{result}")
    process.join(_PATIENCE_S)
    if process.exitcode != 0:
        raise RankFailed(f"rank {rank} returned its result and then ended with exit code {process.exitcode}")
    return result


def _main(
    rank: int, size: int, port: int, end: Connection, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    import torch

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    timeout = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    try:
        end.send((True, function(rank, size, *args)))
    except BaseException:
        end.send((False, traceback.format_exc()))
