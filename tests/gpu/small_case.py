"""A small dispatch and combine on one or two ranks, for compute-sanitizer: `python tests/gpu/small_case.py`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.gpu import checks
from tests.ranks import run_ranks, values


def small(rank: int, size: int) -> None:
    """Two layouts, small enough for a tool that slows kernels by orders of magnitude."""
    for layout in (checks.FLAT, checks.TOKEN_MAJOR):
        case = checks.Case(tokens=70, hidden=256, topk=3, experts_per_rank=4, layout=layout)
        with checks.communicator(case, rank, size, timeout_s=120) as comm:
            checks.check_round(comm, case, seed=1)


if __name__ == "__main__":
    for size in (1, 2):
        values(run_ranks(size, small, size, start="spawn", timeout_s=280))
    print("small_case: passed")
