"""``deep_ep.utils.envs``: process groups of tests and benchmarks, and the check of the links between GPUs."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path

import torch
import torch.distributed as dist

from ep_plugin import env
from ep_plugin.deep_ep.nodes import get_logical_domain_size, get_physical_domain_size, nodes_of
from ep_plugin.runtime.streams import resolve_device
from ep_plugin.transport.exchange import Exchange
from ep_plugin.transport.groups import Group, checked_group
from ep_plugin.transport.topology import check_peer_access, discover

__all__ = [
    "check_nvlink_connections",
    "dist_print",
    "get_global_seed",
    "get_local_seed",
    "get_logical_domain_size",
    "get_physical_domain_size",
    "get_rdma_gbs",
    "init_dist",
    "init_seed",
]

_global_seed = 0


def init_dist(local_rank: int, num_local_ranks: int, seed: int = 0) -> tuple[int, int, dist.ProcessGroup]:
    """Make the default process group: NCCL where there is a GPU, else gloo. DeepEP's tests begin with it.

    It reads ``MASTER_ADDR`` and ``MASTER_PORT``. ``WORLD_SIZE`` is the number of nodes here and ``RANK`` the number of
    this one; without them there is one node. New tensors are bfloat16, and on this rank's GPU, by default from then on.

    Args:
        local_rank: of this process on its node, and the index of its GPU.
        num_local_ranks: ranks on each node.
        seed: of torch's and Python's random numbers, to which the rank is added.

    Returns:
        The rank, the number of ranks, and a group of all of them.
    """
    launcher, (address, port) = env.launcher(), env.master()
    size = (launcher.world_size or 1) * num_local_ranks
    rank = (launcher.rank or 0) * num_local_ranks + local_rank
    gpus = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if gpus else "gloo",
        init_method=f"tcp://{address}:{port}",
        world_size=size,
        rank=rank,
        device_id=device if gpus else None,
    )
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device(device.type)
    init_seed(seed)
    return dist.get_rank(), dist.get_world_size(), dist.new_group(list(range(size)))


def init_seed(global_seed: int) -> None:
    """Seed torch's and Python's random numbers with `global_seed` plus the rank."""
    global _global_seed
    _global_seed = global_seed
    torch.manual_seed(get_local_seed())
    random.seed(get_local_seed())


def get_global_seed() -> int:
    """Return the seed of the last `init_seed`, 0 before."""
    return _global_seed


def get_local_seed() -> int:
    """Return the seed of this rank: the global one plus the rank."""
    return _global_seed + dist.get_rank()


def dist_print(s: str = "", once_in_node: bool = False) -> None:
    """Print `s`, then wait for all ranks of the default group. once_in_node: whether only a node's first rank prints.

    Collective.
    """
    if not once_in_node or nodes_of(checked_group(None)).local_rank_of(dist.get_rank()) == 0:
        print(s, flush=True)
    dist.barrier()


def get_rdma_gbs(nic_name: str = "mlx5_0") -> float:
    """Return the rate of a network adapter's first port in GB/s, as the kernel states it; 0.0 without the adapter."""
    try:
        rate = Path("/sys/class/infiniband", nic_name, "ports/1/rate").read_text()  # such as "400 Gb/sec (4X NDR)"
    except OSError:
        return 0.0
    return float(rate.split()[0]) / 8


def check_nvlink_connections(group: Group = None) -> None:
    """Raise NotSupported on every rank if GPUs of one node cannot reach each other. It names a pair. Collective.

    Buffers make this check themselves. A group without a backend for GPUs passes.
    """
    group = checked_group(group)
    with contextlib.closing(Exchange(group)) as exchange:
        node_map, reports = discover(exchange, resolve_device(group, None))
        check_peer_access(reports, node_map, range(group.size()))
