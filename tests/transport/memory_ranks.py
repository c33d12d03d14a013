"""Ranks for the tests of memory and exchanges: they must all end well, but for those that are to be killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

from tests.ranks import run_ranks, values

GROUP_TIMEOUT_S = 120


def die() -> None:
    """Ends this rank as a crash would: SIGKILL, no clean-up of any kind."""
    os.kill(os.getpid(), signal.SIGKILL)


def run(
    size: int, function: Callable[..., Any], *args: Any, killed: tuple[int, ...] = (), start: str = "forkserver"
) -> list[Any]:
    """What ``function(rank, size, *args)`` returned on each rank but those in ``killed``, which must end by SIGKILL."""
    outcomes = run_ranks(size, function, size, *args, timeout_s=GROUP_TIMEOUT_S, start=start)
    for rank in killed:
        assert outcomes[rank].exitcode == -signal.SIGKILL, f"rank {rank} was to be killed: {outcomes[rank]}"
    return values([outcome for rank, outcome in enumerate(outcomes) if rank not in killed])
