"""The checks of SendReceive on CPU ranks, on GPUs, which ranks may share (checks.device_of)."""

from __future__ import annotations

import contextlib
import datetime
import functools
import itertools
import unittest.mock
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from ep_plugin import SendReceive
from ep_plugin.collectives import send_receive
from ep_plugin.integrations.messages import messages_of
from ep_plugin.integrations.pairs import PairUser
from tests.collectives import test_send_receive as cases
from tests.gpu import checks, over_nodes
from tests.integrations import test_pipelining

KIB = 1024
LANE = 32 * 16 * 16 * KIB  # bytes that a lane of GPUs holds
SIZES = (0, 1, 3, 129, 4095, 4097, 65_537, 200_001, LANE // 4 + 4, LANE + 70_001, 3 * LANE)
WAIT = datetime.timedelta(seconds=100)


@contextlib.contextmanager
def _on(device: torch.device) -> Iterator[None]:
    """In the block tensors and objects are made on `device`, and `wait()` blocks the host, as it does on CPUs."""
    wait, payload = send_receive.MessageWork.wait, cases._payload

    def blocks(work: Any, limit: datetime.timedelta | None = None) -> bool:
        return wait(work, limit or WAIT)

    def made(*args: Any) -> torch.Tensor:
        with torch.device("cpu"):
            return payload(*args).to(device)

    with (
        device,
        unittest.mock.patch.object(cases, "SendReceive", functools.partial(SendReceive, device=device)),
        unittest.mock.patch.object(cases, "_payload", made),
        unittest.mock.patch.object(cases, "SIZES", SIZES),
        unittest.mock.patch.object(send_receive.MessageWork, "wait", blocks),
    ):
        yield


def on_device(rank: int, case: Callable[..., Any], *args: Any) -> Any:
    """What ``case(rank, *args)`` returns there."""
    with _on(checks.device_of(rank)):
        return case(rank, *args)


def small(rank: int) -> None:
    """Messages between neighbours of a node that move by ordinary and by bulk copies, both ways at once."""
    device, peer = checks.device_of(rank), rank ^ 1
    with SendReceive(device=device) as p2p:
        for nbytes in (1001, 200_000):
            sent = torch.full((nbytes,), rank + 1, dtype=torch.uint8, device=device)
            got = torch.zeros_like(sent)
            p2p.exchange(sent, got, peer, peer).wait()
            assert bool((got == peer + 1).all()), nbytes


def across_nodes(rank: int, size: int) -> None:
    on_device(rank, cases._across_nodes)


def pipelines(rank: int, size: int, names: list[str]) -> list[tuple[int, list[str]]]:
    """For each schedule of PyTorch, how often it sent through SendReceive, and what is not as over NCCL."""
    over_nodes.start(rank, size, nodes=1)
    with checks.device_of(rank):
        return [test_pipelining._compares(rank, size, name) for name in names]


def megatron_pipelines(rank: int, size: int, names: list[str]) -> dict[str, tuple[int, int]]:
    """By schedule of Megatron-core, how often it sent through SendReceive, and how much is not as over NCCL."""
    from tests.integrations import test_megatron_pipeline

    over_nodes.start(rank, size, nodes=1)
    stays = unittest.mock.patch.object(test_megatron_pipeline, "make_distributed_optimizer_run_here")
    with checks.device_of(rank), stays:
        return test_megatron_pipeline._compares(rank, size, names)


def loses_a_stage(rank: int, framework: str) -> tuple[int | None, float]:
    """Whom the first stage of a pipeline of two names when the second has died, and how long that takes."""
    from tests.integrations import test_megatron_pipeline

    over_nodes.start(rank, 2, nodes=1)
    if framework == "pytorch":
        return on_device(rank, test_pipelining._loses_a_stage)
    stays = unittest.mock.patch.object(test_megatron_pipeline, "make_distributed_optimizer_run_here")
    with stays:
        return on_device(rank, test_megatron_pipeline._loses_a_stage)


# -- what products wait for ------------------------------------------------------------------------------------------

SIDE, PRODUCTS, MESSAGE = 4096, 40, 8 << 20
LEAD_CYCLES = 20_000_000  # some 10 ms, in which the host enqueues all of it
GAP_US = 20.0


def gaps_between_products(rank: int, size: int, beside: str) -> dict[str, list[float]]:
    """Microseconds between products that follow each other, beside messages both ways, gathers or sums: NCCL's and
    ours, and by arm the round that has the fewest long gaps. A product waits for what began two products before it."""
    over_nodes.start(rank, size, nodes=1)
    device = checks.device_of(rank)
    a, b = (torch.randn(SIDE, SIDE, device=device).bfloat16() for _ in range(2))
    found = {}
    with contextlib.ExitStack() as stack:
        arms = {"messages": _messages, "gathers": _gathers, "sums": _sums}[beside]
        for name, begin in arms(stack, device, rank ^ 1).items():
            rounds = [_gaps(begin, a, b) for _ in range(4)]
            found[name] = min(rounds[1:], key=lambda gaps: sum(gap > GAP_US for gap in gaps))
    return found


Begin = Callable[[], list[Any]]


def _messages(stack: contextlib.ExitStack, device: torch.device, peer: int) -> dict[str, Begin]:
    sent, got = (torch.zeros(MESSAGE, dtype=torch.uint8, device=device) for _ in range(2))
    p2p = stack.enter_context(SendReceive(device=device))

    def stock() -> list[Any]:
        ops = [dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, got, peer)]
        return dist.batch_isend_irecv(ops)

    return {"NCCL": stock, "ours": lambda: [p2p.exchange(sent, got, peer, peer)]}


def _gathers(stack: contextlib.ExitStack, device: torch.device, peer: int) -> dict[str, Begin]:
    """By copy engines, as parameters of a data-parallel bucket are gathered: in place, on a stream of the gather's."""
    run, theirs, ours, mine = _bucket(stack, device, "all_gather", torch.uint8)
    return {
        "NCCL": lambda: [dist.all_gather_into_tensor(theirs, theirs[mine], async_op=True)],
        "ours": lambda: [run(ours, ours[mine])],
    }


def _sums(stack: contextlib.ExitStack, device: torch.device, peer: int) -> dict[str, Begin]:
    """Of gradients in BF16, as those of a data-parallel bucket are summed."""
    run, theirs, ours, mine = _bucket(stack, device, "reduce_scatter", torch.bfloat16)
    return {
        "NCCL": lambda: [dist.reduce_scatter_tensor(theirs[mine], theirs, async_op=True)],
        "ours": lambda: [run(ours[mine], ours)],
    }


def _bucket(
    stack: contextlib.ExitStack, device: torch.device, name: str, dtype: torch.dtype
) -> tuple[Callable[..., Any], torch.Tensor, torch.Tensor, slice]:
    """Our collective `name` beside the stream, a bucket for NCCL and one for ours, and this rank's part of both."""
    pair = PairUser("fsdp2").pair(dist.group.WORLD, device)
    stack.callback(pair.close)
    count = 8 * MESSAGE // dtype.itemsize
    theirs = torch.zeros(count, dtype=dtype, device=device)
    ours = getattr(pair, name).allocate(count, dtype, device)
    part = count // dist.get_world_size()
    mine = slice(dist.get_rank() * part, (dist.get_rank() + 1) * part)
    return functools.partial(pair.run, name, async_op=True), theirs, ours, mine


def _is_product(kernel: str) -> bool:
    return any(word in kernel for word in ("gemm", "nvjet", "cutlass"))


def _gaps(begin: Begin, a: torch.Tensor, b: torch.Tensor) -> list[float]:
    torch.cuda.synchronize()
    dist.barrier()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        torch.cuda._sleep(LEAD_CYCLES)
        under_way: list[list[Any]] = []
        for _ in range(PRODUCTS):
            under_way.append(begin())
            a @ b
            for work in under_way.pop(0) if len(under_way) > 1 else []:
                work.wait()
        for work in under_way.pop():
            work.wait()
        torch.cuda.synchronize()
    events = profiler.profiler.kineto_results.events()
    kernels = [one for one in events if one.device_type() == torch.autograd.DeviceType.CUDA]
    products = [one for one in kernels if _is_product(one.name())]
    assert len(products) == PRODUCTS, {one.name() for one in kernels}
    spans = sorted((one.start_ns(), one.start_ns() + one.duration_ns()) for one in products)
    return [(after[0] - before[1]) / 1e3 for before, after in itertools.pairwise(spans)]


def over_nodes_is_left(rank: int, size: int) -> bool:
    """Whether messages between GPUs of two nodes stay the framework's, and those inside a node do not."""
    tensor = torch.empty(1, device=checks.device_of(rank))
    groups = [dist.new_group([2 * node, 2 * node + 1]) for node in range(size // 2)]
    inside = messages_of("pipelining", groups[rank // 2], tensor)
    return inside is not None and messages_of("pipelining", None, tensor) is None


def captured(rank: int, size: int, replays: int) -> int:
    """A ring of exchanges in a CUDA graph, replayed with new contents, between eager ones. Returns the replays."""
    device = checks.device_of(rank)
    after, before = (rank + 1) % size, (rank - 1) % size
    counts = (1, 40_001, LANE)
    with SendReceive(device=device) as p2p:
        sent = [torch.zeros(count, dtype=torch.uint8, device=device) for count in counts]
        got = [torch.zeros_like(one) for one in sent]

        def ring() -> None:
            works = [p2p.exchange(one, two, after, before) for one, two in zip(sent, got, strict=True)]
            for work in works:
                work.wait()

        def check(number: int) -> None:
            for count, one in zip(counts, got, strict=True):
                assert bool((one == (number + before + count) % 251).all()), (number, count)

        def fill(number: int) -> None:
            for count, one in zip(counts, sent, strict=True):
                one.fill_((number + rank + count) % 251)

        fill(0)
        ring()
        check(0)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            ring()
        for number in range(1, replays + 1):
            fill(number)
            if number % 5:
                graph.replay()
            else:
                ring()
            check(number)
        torch.cuda.synchronize(device)
        p2p.check()
    return replays
