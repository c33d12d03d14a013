"""What ranks of emulated nodes run in tests: ``python node_ranks.py NAME`` calls the function of that name.

Each prints one line of JSON, written at once so that lines of several ranks do not mix.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any


def say(result: dict[str, Any]) -> None:
    os.write(1, (json.dumps(result) + "\n").encode())


def where() -> dict[str, Any]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "EP_PLUGIN_HOST")
    return {**{name: os.environ[name] for name in names}, "network": os.readlink("/proc/self/ns/net")}


def wait_for_ever() -> None:
    say({**where(), "pid": os.getpid()})
    signal.pause()


def fail() -> None:
    """The rank that $VICTIM names ends as $HOW says; the others wait for it in vain."""
    if os.environ["RANK"] == os.environ["VICTIM"]:
        if os.environ["HOW"] == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        sys.exit(int(os.environ["HOW"]))
    signal.pause()


def fail_by_itself_later() -> None:
    """Rank 1 dies; the others notice through gloo and say so."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    victim = torch.tensor([os.getpid()])
    try:
        dist.broadcast(victim, 1)
        dist.barrier()  # nobody dies before all are through with the line above
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1))
    except RuntimeError:
        say({"raised": dist.get_rank()})
        until = time.monotonic() + 30
        while os.path.exists(f"/proc/{victim.item()}") and time.monotonic() < until:
            time.sleep(0.01)  # it goes when the launcher has seen rank 1's end
        sys.exit(1)


def topology() -> dict[str, Any]:
    """The node map, and how memory of peers is refused to groups that span nodes and given to groups that do not."""
    import torch
    import torch.distributed as dist

    from ep_plugin.errors import NotSupported
    from ep_plugin.transport import open_memory
    from ep_plugin.transport.exchange import Exchange
    from ep_plugin.transport.topology import discover

    dist.init_process_group("gloo")
    node_map, _ = discover(Exchange(), torch.device("cpu"))
    rank, refused = dist.get_rank(), []
    inside = [dist.new_group(list(ranks)) for ranks in node_map.nodes][node_map.node_of(rank)]
    rail = [dist.new_group(list(node_map.rail(local))) for local in range(2)][node_map.local_rank_of(rank)]
    for group in (dist.group.WORLD, rail):
        try:
            open_memory(Exchange(group), torch.device("cpu"))
        except NotSupported as error:
            refused.append(str(error))
    memory = open_memory(Exchange(inside), torch.device("cpu"))
    reached = len(memory.allocate(4096, "test").ptrs)
    memory.close()
    dist.barrier()
    dist.destroy_process_group()
    return {"nodes": node_map.nodes, "refused": refused, "reached": reached}


def broadcast_times() -> dict[str, Any]:
    """Seconds to send 2 MiB to a rank of the same node and to one of the other."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    data = torch.full((2**21,), dist.get_rank(), dtype=torch.uint8)
    seconds = {}
    for name, pair in (("inside", (0, 1)), ("across", (0, 2))):
        dist.barrier()
        began = time.monotonic()
        if dist.get_rank() == pair[0]:
            dist.send(data, pair[1])
        elif dist.get_rank() == pair[1]:
            dist.recv(data, pair[0])
            assert not data.any()
            seconds[name] = time.monotonic() - began
    dist.barrier()
    dist.destroy_process_group()
    return seconds


def dispatch_and_combine() -> dict[str, Any]:
    """The cases of one node, and the bytes that cross."""
    import torch.distributed as dist

    from tests.moe import test_across_nodes as over

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    for function, *_ in over.ONE_NODE_CASES:
        function(rank, size)
    for near in (False, True):
        over._bytes_on_rails(rank, size, int(os.environ["LOCAL_WORLD_SIZE"]), near)
    dist.barrier()
    dist.destroy_process_group()
    return {"passed": len(over.ONE_NODE_CASES)}


def train_fsdp2() -> dict[str, Any]:
    """FSDP2 over all ranks of all nodes, through its own collectives and through ours."""
    import torch.distributed as dist

    from ep_plugin.integrations import fsdp2
    from ep_plugin.integrations.pairs import _pairs
    from tests.integrations import fsdp2_cases as cases

    dist.init_process_group("gloo")
    case = cases.CASES["plain"]
    stock = cases.train(case, cases.build(case))
    differences = {}
    for reduces in (False, True):
        model = cases.build(case)
        fsdp2.enable(model, reduce_scatter=reduces)
        differences[str(reduces)] = cases.difference(cases.train(case, model), stock)
    pairs = list(_pairs.values())
    result = {"differences": differences, "rails": [pair.all_gather.rail_bytes_sent for pair in pairs]}
    dist.barrier()
    dist.destroy_process_group()
    return result


if __name__ == "__main__":
    result = globals()[sys.argv[1]]()
    if result is not None:
        say(result)
