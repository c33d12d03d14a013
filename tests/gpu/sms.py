"""Operations of several communicators in random order, on a device whose SMs do not suffice for all of them at once."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ep_plugin import _C, HierarchicalAllGather, MoECommunicator, MoECommunicatorConfig
from ep_plugin.moe.high_throughput.combine import Combine
from ep_plugin.moe.high_throughput.dispatch import Dispatch
from ep_plugin.moe.low_latency import sms as low_latency_sms
from ep_plugin.moe.low_latency.combine import LowLatencyCombine
from ep_plugin.moe.low_latency.dispatch import LowLatencyDispatch
from ep_plugin.runtime import streams as runtime_streams
from tests.gpu.checks import device_of

TOKENS, HIDDEN, TOPK, EXPERTS_EACH, CAPACITY = 20, 64, 2, 2, 96
CTA_BYTES = 16 * 1024  # of a shard that is gathered
FEW = 16
"""The SMs of a GPU that no kernel holds."""
HOLDS, HOLD_NS = 240, 10**9


class Turn:
    """How one rank runs operations on its streams 0 and 1.

    rounds: how many are enqueued before results are compared. on(i): makes stream i current. late(i): makes later work
    on stream i wait until the function that it returns is called. settle: waits for all work. kept: all results, which
    kernels that are enqueued may still use.
    """

    def __init__(
        self,
        rounds: int,
        on: Callable[[int], contextlib.AbstractContextManager[Any]],
        late: Callable[[int], Callable[[], None]],
        settle: Callable[[], None],
    ) -> None:
        self.rounds, self.on, self.late, self.settle = rounds, on, late, settle
        self.kept: list[Any] = []


Results = dict[str, tuple[torch.Tensor, ...]]


def _round_trip(comm: MoECommunicator, x: torch.Tensor, ids: torch.Tensor, kept: list[Any]) -> tuple[torch.Tensor, ...]:
    engine, number = comm.engine, comm.number
    out = comm.in_flight.run(Dispatch(engine, x, ids, None, None, CAPACITY, None, [], number))
    kept.append(out)
    sums, _ = comm.in_flight.run(Combine(engine, out[0], None, None, None, False, list(out[8:]), number))
    return sums, out[5]


def _low_latency(
    comm: MoECommunicator, x: torch.Tensor, ids: torch.Tensor, kept: list[Any]
) -> tuple[torch.Tensor, ...]:
    engine, number = comm.engine, comm.number
    out = comm.in_flight.run(LowLatencyDispatch(engine, x, ids, None, None, None, None, [], number))
    kept.append(out)
    combine = LowLatencyCombine(engine, out[0], None, None, None, False, list(out[8:]), number)
    return comm.in_flight.run(combine)[0], out[4]


def _gather(gather: HierarchicalAllGather, shard: torch.Tensor, ranks: int) -> tuple[torch.Tensor, ...]:
    whole = shard.new_empty(ranks * len(shard))
    gather(whole, shard)
    return (whole,)


def rounds(
    rank: int,
    size: int,
    count: int,
    turn: Turn,
    comms: Sequence[MoECommunicator],
    gather: HierarchicalAllGather,
    gather_sms: int = 2,
) -> int:
    """Runs `count` rounds of all operations, on two streams and in an order that all ranks draw alike. In some, this
    rank is late. Compares results with those of the first round, in which the device runs one operation at a time.

    comms: of high throughput and of low latency. gather_sms: CTAs of a gather. Returns how often this rank was late.
    """
    device = comms[0].engine.device
    drawn, mine = random.Random(7), random.Random(rank)
    data = torch.Generator().manual_seed(rank)
    x = torch.randn(TOKENS, HIDDEN, generator=data).to(torch.bfloat16).to(device)
    experts = [torch.randperm(EXPERTS_EACH * size, generator=data)[:TOPK] for _ in range(TOKENS)]
    ids = torch.stack(experts).to(device)
    shard = torch.randn(gather_sms * CTA_BYTES // 2, generator=data).to(torch.bfloat16).to(device)
    operations: dict[str, Callable[[], tuple[torch.Tensor, ...]]] = {
        "high throughput": functools.partial(_round_trip, comms[0], x, ids, turn.kept),
        "low latency": functools.partial(_low_latency, comms[1], x, ids, turn.kept),
        "gather": functools.partial(_gather, gather, shard, size),
    }
    first: Results = {}
    latest: Results = {}
    late = 0
    for number in range(count):
        begin: Callable[[], None] | None = None
        for name in drawn.sample(sorted(operations), len(operations)):
            stream = drawn.randrange(2)
            if number and begin is None and mine.random() < 0.3:
                begin, late = turn.late(stream), late + 1
            with turn.on(stream):
                latest[name] = operations[name]()
            turn.kept.append(latest[name])
            if not number:
                turn.settle()
        if begin is not None:
            begin()
        first = first or dict(latest)
        if number % turn.rounds == turn.rounds - 1:
            turn.settle()
            for name, tensors in latest.items():
                for got, expected in zip(tensors, first[name], strict=True):
                    # On the host: a kernel that is loaded now would wait for the one that holds SMs.
                    one, other = got.cpu().view(torch.uint8), expected.cpu().view(torch.uint8)
                    assert torch.equal(one, other), f"{name} of round {number}"
    turn.settle()
    for comm in comms:
        comm.check()
    return late


def communicators(size: int, device: torch.device, **settings: Any) -> list[MoECommunicator]:
    """Returns a communicator of high throughput and one of low latency."""
    base: dict[str, Any] = {"num_experts": EXPERTS_EACH * size, "hidden_size": HIDDEN, "topk": TOPK}
    base |= {"max_tokens_per_rank": TOKENS, "timeout_s": 60.0}
    configs = MoECommunicatorConfig(**base | settings), MoECommunicatorConfig(**base, mode="ll")
    return [MoECommunicator(dist.group.WORLD, config, device=device) for config in configs]


def on_few_sms(rank: int, size: int, count: int) -> int:
    """Runs the rounds on a GPU of which kernels of ours hold all but FEW SMs."""
    device = device_of(rank)
    present = torch.cuda.get_device_properties(device).multi_processor_count
    budget = _C.SmBudget(device.index, FEW)
    runtime_streams.budget_of = lambda device: budget
    low_latency_sms.for_device = lambda device, sharing: FEW
    streams = [torch.cuda.Stream(device) for _ in range(2)]
    held, stop = torch.cuda.Stream(device), torch.zeros(1, dtype=torch.int64, device=device)

    def late(stream: int) -> Callable[[], None]:
        with torch.cuda.stream(streams[stream]):
            torch.cuda._sleep(2_000_000)
        return lambda: None

    def settle() -> None:
        for stream in streams:
            stream.synchronize()

    turn = Turn(10, lambda stream: torch.cuda.stream(streams[stream]), late, settle)
    sms = {"dispatch_send_sms": 3, "dispatch_recv_sms": 8, "combine_send_sms": 3, "combine_recv_sms": 8}
    comms, gather = communicators(size, device, **sms), HierarchicalAllGather(path="sm")
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream(device))
    # All memory is made, and all kernels are loaded, while no kernel holds SMs.
    late(0)
    stop.fill_(0)
    rounds(rank, size, 10, turn, comms, gather, FEW // 2)
    torch.cuda.synchronize(device)
    holding = {"num_sms": present - FEW, "nanoseconds": HOLD_NS, "stop": stop.data_ptr(), "stream": held.cuda_stream}
    for _ in range(HOLDS):
        _C.hold(_C.HoldArgs(**holding))
    try:
        return rounds(rank, size, count, turn, comms, gather, FEW // 2)
    finally:
        with torch.cuda.stream(streams[0]):
            stop.fill_(1)
        torch.cuda.synchronize(device)
        for made in (*comms, gather):
            made.close()
