"""Measures the rate at which ranks of a node copy from each other, and compares it with the rate in our results."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ep_plugin.doctor.findings import OK, WARNING, Finding
from ep_plugin.errors import EpPluginError

if TYPE_CHECKING:
    import torch

    from ep_plugin.transport.exchange import Exchange
    from ep_plugin.transport.topology import NodeMap

INSTALL_BENCH = "pip install '.[bench]' in the repository's root"
_SECONDS = 2.0
_BYTES = {"cpu": 16 * 2**20, "cuda": 256 * 2**20}
# What we measured, in GB/s per rank, and where: for CPUs an all-gather of 16 MiB in
# benchmarks/results/cpu2/allgather.json, for GPUs ce_pull in benchmarks/results/h200x4/wire.json.
_COMMITTED = {"cpu": (2.2, "4 ranks on 2 cores"), "cuda": (369.6, "4 H200")}
_ENOUGH = 0.7  # of the committed rate
_TOKENS, _HIDDEN, _TOPK, _EXPERTS = 4096, 7168, 8, 256  # the case of README's table


def copy_rate(within: Exchange, device: torch.device) -> float:
    """Returns the GB/s at which this rank reads the next rank's memory while all ranks of the node do the same.

    Collective over the ranks of the node.

    Raises:
        EpPluginError: the memory cannot be shared, or the bytes are not those that the next rank wrote.
    """
    import torch

    from ep_plugin.collectives.blocks import tensor_at
    from ep_plugin.transport import open_memory

    nbytes = _BYTES[device.type]
    following = (within.rank + 1) % within.size

    def synchronize() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    with contextlib.closing(open_memory(within, device)) as memory:
        ptrs = memory.allocate(nbytes, "ep-doctor").ptrs
        tensor_at(ptrs[within.rank], nbytes, device).fill_(within.rank + 1)
        theirs, copy = tensor_at(ptrs[following], nbytes, device), torch.zeros(nbytes, dtype=torch.uint8, device=device)
        synchronize()
        within.barrier("ep-doctor: filled")
        copies, began = 0, time.monotonic()
        while (elapsed := time.monotonic() - began) < _SECONDS or not copies:
            copy.copy_(theirs)
            synchronize()
            copies += 1
        within.barrier("ep-doctor: read")
        wrong = int((copy != following + 1).sum())
    if wrong:
        raise EpPluginError(f"expected {nbytes} bytes of local rank {following}, got others in {wrong} places")
    return copies * nbytes / elapsed / 1e9


def describe(node_map: NodeMap, gbps: float, device: torch.device) -> Iterator[Finding]:
    """Compares the rate with the committed one, and predicts the least time of a dispatch at that rate."""
    try:
        from ep_plugin.bench.plan import DISPATCH, TWO_LEVEL, Plan, expected_rows, least_seconds
    except ModuleNotFoundError as error:
        what = f"each rank copies {gbps:.1f} GB/s; there is no prediction without {error.name}"
        yield Finding(WARNING, "copy rate", what, INSTALL_BENCH)
        return
    committed, where = _COMMITTED[device.type]
    what = f"each rank copies {gbps:.1f} GB/s from the next one; we measured {committed:g} between {where}"
    if device.type == "cuda" and gbps < _ENOUGH * committed:
        do = "see `nvidia-smi nvlink --status`: GPUs that only PCIe joins are slower, and so is a GPU that others use"
        yield Finding(WARNING, "copy rate", what, do)
    else:
        yield Finding(OK, "copy rate", what)
    nodes, ranks = node_map.num_nodes, node_map.ranks_per_node
    size = nodes * ranks
    experts = -(-_EXPERTS // size) * size
    plan = Plan(nodes=nodes, ranks=ranks, tokens=_TOKENS, hidden=_HIDDEN, topk=_TOPK, experts=experts, link_gbps=gbps)
    seconds = least_seconds(plan, TWO_LEVEL, DISPATCH, expected_rows(plan)[TWO_LEVEL], weights=True)
    rail = f", and {plan.rail_gbps:g} GB/s assumed between nodes" if nodes > 1 else ""
    shape = f"{_TOKENS} tokens of {_HIDDEN} BF16 elements per rank, top {_TOPK} of {experts} experts"
    what = f"at least {seconds * 1e3:.2f} ms for {shape}, at that rate{rail}"
    yield Finding(OK, "dispatch", what)
