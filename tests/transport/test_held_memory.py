"""The bytes of peer memory that communicators say they hold are those that the kernel has mapped for this rank."""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterator

import torch
import torch.distributed as dist

from ep_plugin import HierarchicalAllGather, HierarchicalReduceScatter, MoECommunicator, MoECommunicatorConfig, deep_ep
from ep_plugin.collectives.control import SETS
from ep_plugin.collectives.send_receive import SendReceive
from ep_plugin.counts import Holder, held_bytes
from ep_plugin.integrations import status
from ep_plugin.integrations.communicators import communicator_of
from ep_plugin.integrations.messages import close_all, messages_of
from ep_plugin.integrations.pairs import PairUser
from tests.ranks import run_ranks, values

SIZE = 2
MOE = {"num_experts": 8, "hidden_size": 256, "topk": 2}


def mapped() -> int:
    """Bytes of this rank's blocks that are mapped here, in whole pages. Those of the other ranks are as large."""
    with open("/proc/self/maps") as file:
        ranges = re.findall(r"^([0-9a-f]+)-([0-9a-f]+) .*/memfd:ep_plugin-", file.read(), re.M)
    return sum(int(end, 16) - int(begin, 16) for begin, end in ranges) // SIZE


def pages(holders: list[Holder]) -> int:
    """What the blocks of `holders` take, in whole pages."""
    buffers = {buffer for one in holders for buffer in one.peer_buffers()}
    assert held_bytes(holders) == sum(buffer.nbytes for buffer in buffers)
    return sum(-(-buffer.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE for buffer in buffers)


def round_trip(comm: MoECommunicator, tokens: int) -> None:
    ids = torch.arange(tokens * 2).view(tokens, 2) % 8
    out, handle = comm.dispatch(torch.ones(tokens, 256, dtype=torch.bfloat16), ids)
    comm.combine(out.tokens, handle)


def _hold(rank: int) -> None:
    assert mapped() == 0
    comm = MoECommunicator(None, MoECommunicatorConfig(**MOE))
    bare = comm.peer_bytes
    assert 0 < bare <= mapped() == pages([comm])
    sizes = []
    for tokens in (64, 8192, 64):  # the pools grow, and stay large
        round_trip(comm, tokens)
        sizes.append(comm.peer_bytes)
        assert mapped() == pages([comm])
    assert bare < sizes[0] < sizes[1] == sizes[2]
    low_latency = MoECommunicator(None, MoECommunicatorConfig(mode="ll", max_tokens_per_rank=16, **MOE))
    before = low_latency.peer_bytes
    round_trip(low_latency, 16)
    assert low_latency.peer_bytes == before + low_latency.engine.memory_bytes
    gather, scatter, messages = HierarchicalAllGather(), HierarchicalReduceScatter(), SendReceive()
    assert gather.peer_bytes == scatter.peer_bytes == 0
    out = gather.allocate(SIZE << 20, torch.uint8)
    assert 0 < gather.peer_bytes - out.nbytes < 10 << 20
    gather(out, torch.zeros(1 << 20, dtype=torch.uint8))
    scatter(torch.empty(4), torch.ones(SIZE * 4))
    everyone: list[Holder] = [comm, low_latency, gather, scatter, messages]
    assert mapped() == pages(everyone)
    control = set(gather.peer_buffers()) & set(scatter.peer_buffers()) & set(messages.peer_buffers())
    assert len(control) == 2 and all(buffer.nbytes % SETS == 0 for buffer in control)  # counted once in `everyone`
    assert held_bytes(everyone) < sum(held_bytes([one]) for one in everyone)
    del out
    for one in list(everyone):
        one.close()  # type: ignore[attr-defined]
        assert held_bytes([one]) == 0
        everyone.remove(one)
        assert mapped() == pages(everyone)
    assert mapped() == 0


def test_what_communicators_hold_is_what_is_mapped() -> None:
    values(run_ranks(SIZE, _hold))


def rows() -> Iterator[tuple[str, int]]:
    return ((row.name, row.peer_bytes) for row in status() if row.peer_bytes)


def _by_integration(rank: int) -> None:
    assert not dict(rows())
    device = torch.device("cpu")
    comm = communicator_of("transformers", None, **MOE)
    round_trip(comm, 64)
    user, other = PairUser("fsdp2"), PairUser("deepspeed")
    pair = user.pair(dist.group.WORLD, device)
    whole = pair.all_gather.allocate(SIZE << 20, torch.uint8, device)
    messages = messages_of("pipelining", None, torch.ones(1))
    assert messages is not None
    held = {"transformers": comm.peer_bytes, "fsdp2": held_bytes([pair]), "pipelining": messages.peer_bytes}
    assert dict(rows()) == held and mapped() == pages([comm, pair, messages])
    other.pair(dist.group.WORLD, device)
    assert dict(rows()) == held | {"deepspeed": held["fsdp2"]}
    del whole
    close_all("pipelining")
    user.leave()
    assert dict(rows()) == {"transformers": comm.peer_bytes, "deepspeed": held_bytes([pair])}
    other.leave()
    assert dict(rows()) == {"transformers": comm.peer_bytes}
    comm.close()
    buffer = deep_ep.Buffer(dist.group.WORLD, low_latency_mode=True, explicitly_destroy=True)
    x, ids = torch.ones(4, 256, dtype=torch.bfloat16), torch.arange(8).view(4, 2)
    buffer.low_latency_dispatch(x, ids, 16, 8, use_fp8=False)
    assert mapped() - 2 * mmap.PAGESIZE < dict(rows())["deep_ep"] <= mapped()
    buffer.destroy()
    assert not dict(rows()) and mapped() == 0


def test_status_shows_what_the_communicators_of_each_integration_hold() -> None:
    values(run_ranks(SIZE, _by_integration))
