"""The rank that an error names when the group spans nodes: the one at fault, not a survivor that gave up on it."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from ep_plugin import HierarchicalAllGather, HierarchicalReduceScatter
from ep_plugin.collectives.base import Collective
from ep_plugin.errors import EpPluginError
from tests.collectives.collective_cases import gather_ones, scatter_ones
from tests.faults.fault_cases import set_deadline
from tests.ranks import run_ranks, values

RANKS = 4
DEADLINE_S = 1.5
KINDS: dict[str, type[Collective]] = {"gather": HierarchicalAllGather, "sum": HierarchicalReduceScatter}


def _loses(rank: int, kind: str, victim: int, how: str, count: int) -> EpPluginError:
    comm = KINDS[kind]()
    operation = gather_ones if kind == "gather" else scatter_ones
    operation(comm, 10)
    set_deadline(comm.engine_on(torch.device("cpu")), DEADLINE_S)
    dist.barrier()
    store = dist.distributed_c10d._get_default_store()
    if rank == victim:
        store.set("victim", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP if how == "stopped" else signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(EpPluginError) as caught:
        for _ in range(3):
            operation(comm, count)
    assert time.monotonic() - began < DEADLINE_S + 3
    with pytest.raises(EpPluginError) as again:
        comm.check()
    assert str(again.value) == str(caught.value)
    comm.close()
    if store.add("survivors", 1) == RANKS - 1 and how == "stopped":
        os.kill(int(store.get("victim")), signal.SIGKILL)
    return caught.value


@pytest.mark.deadline
@pytest.mark.parametrize("how", ["killed", "stopped"])
@pytest.mark.parametrize(("victim", "count"), [(0, 10), (3, 600_000)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("per_node", ["1", "2"])
def test_every_survivor_names_the_rank_that_is_gone(
    per_node: str, kind: str, victim: int, how: str, count: int
) -> None:
    outcomes = run_ranks(RANKS, _loses, kind, victim, how, count, env={"EP_PLUGIN_RANKS_PER_NODE": per_node})
    assert outcomes[victim].exitcode == -signal.SIGKILL
    errors = {rank: values([outcomes[rank]])[0] for rank in range(RANKS) if rank != victim}
    said = {rank: (getattr(error, "rank", None), type(error).__name__, str(error)) for rank, error in errors.items()}
    assert all(error.rank == victim for error in errors.values()), said
