"""``deep_ep.utils.envs``: process groups of tests and benchmarks, and the check of the links between GPUs."""

from __future__ import annotations

import contextlib
import random

import torch
import torch.distributed as dist

from ep_plugin import env
from ep_plugin.runtime.streams import resolve_device
from ep_plugin.transport.exchange import Exchange
from ep_plugin.transport.groups import Group, checked_group
from ep_plugin.transport.topology import check_peer_access, discover


def init_dist(local_rank: int, num_local_ranks: int, seed: int = 0) -> tuple[int, int, dist.ProcessGroup]:
    """Makes the default process group: NCCL where there is a GPU, else gloo. DeepEP's tests begin with it.

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
    """Seeds torch's and Python's random numbers with `global_seed` plus the rank."""
    seed = global_seed + dist.get_rank()
    torch.manual_seed(seed)
    random.seed(seed)


def check_nvlink_connections(group: Group = None) -> None:
    """Raises NotSupported on every rank, naming a pair, when GPUs of one node cannot reach each other. Collective.

    Buffers make this check themselves. A group without a backend for GPUs passes.
    """
    group = checked_group(group)
    with contextlib.closing(Exchange(group)) as exchange:
        node_map, reports = discover(exchange, resolve_device(group, None))
        check_peer_access(reports, node_map, range(group.size()))
