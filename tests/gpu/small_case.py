"""One rank of small operations of every kind, for compute-sanitizer, which watches the process it starts: dispatch and
combine, in low latency too, their backward, a gather, a reduction and messages.

`python tests/gpu/small_case.py RANK SIZE STORE [NODES]`, where STORE is a file that all ranks name and none has used
before. NODES is 1 or 2: the emulated nodes of the ranks, which may share a GPU.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.gpu import checks, collectives, gradients, low_latency, messages, over_nodes


def small(rank: int, size: int, nodes: int) -> None:
    """Two layouts, small enough for a tool that slows kernels by orders of magnitude."""
    for layout in (checks.FLAT, checks.TOKEN_MAJOR):
        case = checks.Case(tokens=70, hidden=256, topk=3, experts_per_rank=4, layout=layout)
        with checks.communicator(case, rank, size, timeout_s=120) as comm:
            checks.check_round(comm, case, seed=1)
    gradients.check_gradients(rank, size, checks.FLAT, torch.bfloat16)
    if nodes == 1:  # which low latency serves
        low_latency.few_and_many(rank, size)
    if size > 1:
        messages.small(rank)
        for path in collectives.PATHS:
            collectives.gather_and_scatter_once(rank, size, path, nodes)


if __name__ == "__main__":
    rank, size, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    nodes = int(sys.argv[4]) if len(sys.argv) > 4 else 1
    if nodes not in (1, over_nodes.NODES):
        sys.exit(f"small_case: NODES: expected 1 or {over_nodes.NODES}, got {nodes}")
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
    if nodes > 1:
        over_nodes.start(rank, size)
    small(rank, size, nodes)
    dist.destroy_process_group()
    print(f"small_case: rank {rank} of {size} on {nodes} node(s) passed")
