"""What ranks on GPUs do in the tests of all-gather and reduce-scatter. The oracle is plain torch: every rank can work
out every other's input (tests.collectives.collective_cases)."""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ep_plugin import _C, HierarchicalAllGather, HierarchicalReduceScatter, NotSupported, PeerTimeout
from ep_plugin.errors import DisagreementError, PeerAborted
from ep_plugin.integrations.pairs import PairUser
from tests.collectives.collective_cases import BF16, DTYPES, FP16, FP32, reduced, same_bits, shard
from tests.gpu.checks import device_of

# Elements of a shard: one byte to several pieces of the staging block, on and beside sixteen bytes.
SIZES = (1, 3, 16, 129, 4096, 65_537, 1 << 20, (1 << 22) + 16)
LARGE = (40 << 20) + 4097  # several chunks of a rail, and not a whole number of them
PATHS = ("auto", "copy_engine", "sm")
DEADLINE_S = 4.0


def _poisoned(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.full((count * dtype.itemsize,), 0xA5, dtype=torch.uint8, device=device).view(dtype)


def gathers(rank: int, size: int, path: str, backend: str | None = None) -> int:
    """Over the default group, or over one of all ranks with this `backend`."""
    device = device_of(rank)
    torch.cuda.set_device(device)
    counts = (*SIZES, LARGE) if size <= 4 else SIZES[1::2]
    cases = [(count, torch.uint8) for count in counts] + [(129, dtype) for dtype in DTYPES]
    group = None if backend is None else dist.new_group(backend=backend)
    with HierarchicalAllGather(group, path=path) as gather:
        for seed, (count, dtype) in enumerate(cases):
            expected = torch.cat([shard(seed, source, count, dtype) for source in range(size)]).to(device)
            mine = shard(seed, rank, count, dtype).to(device)
            foreign = _poisoned(size * count, dtype, device)
            gather(foreign, mine)
            assert same_bits(foreign, expected), f"foreign output, {count} of {dtype}"
            ours = gather.allocate((size * count,), dtype=dtype, device=device)
            ours.copy_(_poisoned(size * count, dtype, device))
            part = ours.narrow(0, rank * count, count)
            part.copy_(mine)
            gather(output_tensor=ours, input_tensor=part, group=gather.group, async_op=False)
            assert same_bits(ours, expected), f"in place, {count} of {dtype}"
            ours.copy_(_poisoned(size * count, dtype, device))
            work = gather(ours, mine, async_op=True)
            assert isinstance(work, dist.Work) and work.wait()
            assert same_bits(ours, expected), f"allocated output, {count} of {dtype}"
            listed = [_poisoned(count, dtype, device) for _ in range(size)]
            gather.all_gather(listed, mine)
            assert same_bits(torch.cat(listed), expected), f"list, {count} of {dtype}"
        torch.cuda.synchronize()
        gather.check()
    return len(cases)


def scatters(rank: int, size: int, per_node: int, path: str = "auto", backend: str | None = None) -> int:
    device = device_of(rank)
    torch.cuda.set_device(device)
    premul = dist._make_nccl_premul_sum(0.375)
    operations = [(dist.ReduceOp.SUM, 1.0), (dist.ReduceOp.AVG, 1.0 / size), (premul, 0.375)]
    counts = (1, 5, 4096, 70_001, 600_001, 3_000_001) if size <= 4 else (5, 1_600_001)
    cases = [(count, dtype) for count in counts for dtype in ((BF16, FP16, FP32) if size <= 4 else (BF16,))]
    group = None if backend is None else dist.new_group(backend=backend)
    with HierarchicalReduceScatter(group, path=path) as scatter:
        for seed, (count, dtype) in enumerate(cases):
            whole = [shard(seed, source, size * count, dtype).view(size, count) for source in range(size)]
            mine = whole[rank].flatten().to(device)
            for op, scale in operations:
                expected = reduced(whole, rank, per_node, scale).to(device)
                what = f"{op}, {count} of {dtype}"
                out = _poisoned(count, dtype, device)
                scatter(out, mine, op=op)
                assert torch.equal(out, expected), what
                ours = scatter.allocate(size * count + 1, dtype=dtype, device=device)[1:]  # not on 16 bytes
                ours.copy_(mine)
                place = ours.narrow(0, rank * count, count)
                scatter(output_tensor=place, input_tensor=ours, group=scatter.group, op=op)
                assert same_bits(place, out), f"in place, {what}"
        torch.cuda.synchronize()
        scatter.check()
        with pytest.raises(ValueError, match="on GPUs, got torch.float64"):
            scatter(torch.empty(2, device=device).double(), torch.empty(2 * size, device=device).double())
    return len(cases)


def scatters_of_two_streams(rank: int, size: int, rounds: int) -> int:
    """Sums of two streams in turn, one of which is often busy: all go through the same cells."""
    device = device_of(rank)
    torch.cuda.set_device(device)
    count = 5 << 20  # each cell is used some times
    streams = [torch.cuda.Stream(device) for _ in range(2)]
    wholes = [torch.empty(size * count, device=device) for _ in streams]
    outs = [_poisoned(count, FP32, device) for _ in streams]
    wrong = torch.zeros((rounds, len(streams)), dtype=torch.bool, device=device)
    torch.cuda.synchronize()
    with HierarchicalReduceScatter() as scatter:
        for turn in range(rounds):
            for index, (stream, whole, out) in enumerate(zip(streams, wholes, outs, strict=True)):
                with torch.cuda.stream(stream):
                    if (turn + index) % 2 == 0:
                        torch.cuda._sleep(2_000_000)
                    whole.fill_(10.0 * turn + 5 * index + rank)
                    scatter(out, whole)
                    total = size * (10.0 * turn + 5 * index) + size * (size - 1) / 2
                    wrong[turn, index] = (out != total).any()
        torch.cuda.synchronize()
        failed = wrong.nonzero().tolist()
        assert not failed, f"{len(failed)} wrong of {wrong.numel()}, first (turn, stream) {failed[:5]}"
        scatter.check()
    return rounds


def gather_and_scatter_once(rank: int, size: int, path: str, nodes: int = 1) -> None:
    """A gather and a reduction of a few odd bytes, and of some that path "auto" takes another way."""
    device = device_of(rank)
    torch.cuda.set_device(device)
    with HierarchicalAllGather(path=path) as gather, HierarchicalReduceScatter(path=path) as scatter:
        for count in (1001, (1 << 18) + 8):
            whole = [shard(count, source, size * count, BF16).view(size, count) for source in range(size)]
            out = _poisoned(size * count, BF16, device)
            gather(out, whole[rank][0].to(device))
            assert same_bits(out.cpu(), torch.cat([theirs[0] for theirs in whole])), f"gather of {count}"
            total = _poisoned(count, BF16, device)
            scatter(total, whole[rank].flatten().to(device))
            assert torch.equal(total.cpu(), reduced(whole, rank, size // nodes, 1.0)), f"sum of {count}"


def replayed(rank: int, size: int, path: str) -> int:
    """A captured gather and scatter, replayed with new data, with eager ones between."""
    device = device_of(rank)
    torch.cuda.set_device(device)
    count, replays = 4096 + 16, 200
    with HierarchicalAllGather(path=path) as gather, HierarchicalReduceScatter(path=path) as scatter:
        out = gather.allocate(size * count, FP32, device)
        whole = scatter.allocate(size * count, FP32, device)
        other = gather.allocate(size * 64, FP32, device)
        mine, total = torch.zeros(count, device=device), torch.zeros(count, device=device)
        # More chunks than there are cells, in all lanes; the eager one has fewer lanes, or goes by words with flags.
        large, of_large = torch.zeros(size << 22, device=device), torch.zeros(1 << 22, device=device)
        eager, of_eager = torch.zeros(size * 70_001, device=device), torch.zeros(70_001, device=device)

        def step() -> None:
            gather(out, mine)
            whole.copy_(out)
            scatter(total, whole)
            large.copy_(mine[:1].expand_as(large))
            scatter(of_large, large)

        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            step()
        wrong = torch.zeros(replays, dtype=torch.bool, device=device)
        for turn in range(replays):
            mine.fill_(turn * size + rank)
            graph.replay()
            sources = turn * size + torch.arange(size, device=device, dtype=FP32)
            wrong[turn] |= (out.view(size, count) != sources[:, None]).any()
            wrong[turn] |= (total != size * (turn * size + rank)).any()
            wrong[turn] |= (of_large != sources.sum()).any()
            if turn % 10 == 0:
                scatter(of_eager, eager.fill_(turn + rank))
                wrong[turn] |= (of_eager != sources.sum() - size * turn * (size - 1)).any()
                gather(other, torch.full((64,), float(turn + rank), device=device))
                wrong[turn] |= (other.view(size, 64)[:, 0] != sources - turn * size + turn).any()
        failed = wrong.nonzero().flatten().tolist()
        assert not failed, f"{len(failed)} wrong replays of {replays}, first {failed[:5]}"
        gather.check()
    return replays


# Elements of a shard: those of a few words, of many, and of more than kernels of words take.
MIXED = (256, 4, 70_001, 17, 200_003)


def two_groups(rank: int, size: int, calls: int) -> list[list[int]]:
    """The group of all and another, of all too or of every other rank: their gathers alternate, by kernels and by copy
    engines. Returns the number of the call and of the group of each that was wrong."""
    device = device_of(rank)
    torch.cuda.set_device(device)
    others = [dist.new_group(list(range(first, size, size // 2))) for first in range(size // 2)]
    other = others[rank % len(others)]
    members = [list(range(size)), dist.get_process_group_ranks(other)]
    numbers = torch.arange(max(MIXED), dtype=torch.int32, device=device) * 1024
    sources = [torch.tensor(ranks, dtype=torch.int32, device=device)[:, None] for ranks in members]
    wrong = torch.zeros((calls, 2), dtype=torch.bool, device=device)
    with HierarchicalAllGather() as every, HierarchicalAllGather(other, path="copy_engine") as some:
        for call in range(calls):
            if call == calls // 2:
                before = _taken(device)
            count = MIXED[call % len(MIXED)]
            for index, gather in enumerate((every, some)):
                out = gather.allocate(len(members[index]) * count, torch.int32, device)
                gather(out, numbers[:count] + (call * size + rank))
                expected = numbers[:count] + (sources[index] + call * size)
                wrong[call, index] = (out.view(-1, count) != expected).any()
        after = _taken(device)
        assert all(now <= then for now, then in zip(after, before, strict=True)), (before, after)
        assert all(len(gather.engine_on(device).blocks) <= 12 for gather in (every, some))
        return wrong.nonzero().tolist()


def inputs_that_are_freed(rank: int, size: int) -> int:
    """Asynchronous calls whose inputs nobody keeps, while rank 1 is late. Returns how many were right."""
    device, count, right = device_of(rank), 1 << 20, 0
    torch.cuda.set_device(device)
    pair = PairUser("fsdp2").pair(dist.group.WORLD, device)
    wholes, parts = torch.empty(size * count, device=device), torch.empty(count, device=device)
    expected = torch.arange(1.0, size + 1, device=device)
    for _ in range(4):  # in the first the memory is made
        for name, output, given in (("all_gather", wholes, count), ("reduce_scatter", parts, size * count)):
            torch.cuda.synchronize()
            dist.barrier()
            if rank == 1:
                torch.cuda._sleep(200_000_000)
            mine = torch.full((given,), rank + 1.0, device=device)
            work = pair.run(name, output, mine, async_op=True)
            del mine
            other = torch.full((given,), -1.0, device=device)  # in the same memory, if that is free
            work.wait()
            wanted = expected.repeat_interleave(count) if output is wholes else expected.sum().expand(count)
            right += bool(torch.equal(output, wanted)) and bool((other == -1).all())
    pair.close()
    return right


def _taken(device: torch.device) -> tuple[int, int]:
    """What this process has: bytes of PyTorch's on the device, and open files."""
    return torch.cuda.memory_allocated(device), len(os.listdir("/proc/self/fd"))


def without_sms(rank: int, size: int) -> bool:
    """A gather by copy engines is over while a kernel of the user's holds every SM."""
    device = device_of(rank)
    torch.cuda.set_device(device)
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    with HierarchicalAllGather(path="copy_engine") as gather:
        count = 1 << 20
        out = gather.allocate(size * count, torch.uint8, device)
        part = out.narrow(0, rank * count, count)
        part.fill_(rank + 1)
        gather(out, part)
        out.fill_(0)
        part.fill_(rank + 1)
        stop = torch.zeros(1, dtype=torch.int64, device=device)
        one = torch.ones(1, dtype=torch.int64).pin_memory()
        held, beside = torch.cuda.Stream(device), torch.cuda.Stream(device)
        torch.cuda.synchronize()
        dist.barrier()
        nanoseconds = 900_000_000
        hold = _C.HoldArgs(nanoseconds=nanoseconds, num_sms=sms, stop=stop.data_ptr(), stream=held.cuda_stream)
        _C.hold(hold)
        began = time.monotonic()
        with torch.cuda.stream(beside):
            gather(out, part)
            done = torch.cuda.Event()
            done.record()
        done.synchronize()
        took = time.monotonic() - began
        still_held = not held.query()
        with torch.cuda.stream(beside):
            stop.copy_(one, non_blocking=True)
        torch.cuda.synchronize()
        assert out.view(size, count).eq(torch.arange(1, size + 1, device=device)[:, None]).all()
        assert still_held, f"the gather took {took:.3f} s and was over after the kernel"
    return still_held


def refused(rank: int) -> str:
    device = device_of(rank)
    with pytest.raises(NotSupported) as caught:
        HierarchicalAllGather().allocate(10, torch.uint8, device)
    return str(caught.value)


def wait_after_close(rank: int, path: str) -> bool:
    """A Work of an operation that close has waited for."""
    device = device_of(rank)
    torch.cuda.set_device(device)
    gather, count = HierarchicalAllGather(path=path), 1 << 16
    out = _poisoned(gather.group.size() * count, torch.uint8, device)
    work = gather(out, torch.full((count,), rank, dtype=torch.uint8, device=device), async_op=True)
    gather.close()
    assert work is not None and work.wait() is True
    return bool((out.view(-1, count) == torch.arange(len(out) // count, device=device)[:, None]).all())


# What rank 1 passes otherwise than its peers.
DIFFERENT = {"bytes": "bytes of a shard is", "memory": "place in peer memory is"}


def differ(rank: int, path: str, what: str) -> str:
    """What every rank is told when rank 1 gathers other bytes, or into memory of another kind."""
    device = device_of(rank)
    torch.cuda.set_device(device)
    gather = HierarchicalAllGather(path=path)
    size, count = gather.group.size(), 1 << 20  # more than small gathers, which may go to any memory
    out = gather.allocate(size * count, torch.uint8, device)
    mine, foreign = torch.ones(count, dtype=torch.uint8, device=device), torch.empty_like(out)
    gather(out, mine)
    torch.cuda.synchronize()
    dist.barrier()
    odd = rank == 1
    with contextlib.suppress(DisagreementError):  # those that call first learn of it later
        if what == "bytes":
            its = count - 16 if odd else count
            gather(foreign[: size * its], mine[:its])
        else:
            gather(foreign if odd else out, mine)
    torch.cuda.synchronize()
    dist.barrier()
    with pytest.raises(DisagreementError) as caught:
        gather.check()
    gather.close()
    return str(caught.value)


def disagree(rank: int, odd: int, kinds: list[str]) -> str:
    """What a rank is told when `odd` gathers another size, or sums another dtype, than the others."""
    device = device_of(rank)
    torch.cuda.set_device(device)
    kind = kinds[rank == odd]
    size = dist.get_world_size()
    count = {"small": 1000, "smaller": 40, "large": 1 << 20, "halves": 2000}[kind]
    dtype = BF16 if kind == "halves" else FP32
    sums = "halves" in kinds
    made = HierarchicalReduceScatter() if sums else HierarchicalAllGather()
    with pytest.raises((DisagreementError, PeerAborted)) as caught:
        whole, part = (
            torch.zeros(size * count, dtype=dtype, device=device),
            torch.zeros(count, dtype=dtype, device=device),
        )
        made(*((part, whole) if sums else (whole, part)))
        for _ in range(200):
            torch.cuda.synchronize()
            made.check()
            time.sleep(0.05)
    made.close()
    return str(caught.value)


def survive(rank: int, path: str, victim: int, behind: int = 0) -> tuple[int | None, str, float]:
    """What a survivor is told when `victim` dies, and after how long. path: of a gather, or "sum". behind: kernels that
    its host enqueues next."""
    device = device_of(rank)
    torch.cuda.set_device(device)
    group = dist.new_group(timeout=datetime.timedelta(seconds=DEADLINE_S))
    made: Any
    if path == "sum":  # more chunks than there are cells
        made, count = HierarchicalReduceScatter(group), 8 << 20
        out, given = torch.empty(count, device=device), torch.ones(group.size() * count, device=device)
    else:
        made, count = HierarchicalAllGather(group, path=path), 1 << 16
        out = made.allocate(group.size() * count, torch.uint8, device)
        given = torch.ones(count, dtype=torch.uint8, device=device)
    made(out, given)
    torch.cuda.synchronize()
    dist.barrier()
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    began, work, later = time.monotonic(), None, torch.zeros(1, device=device)
    with pytest.raises(PeerTimeout) as caught:
        work = made(out, given, async_op=True)
        for _ in range(behind):
            later.add_(1)
        torch.cuda.synchronize()
        made.check()
    took = time.monotonic() - began
    with pytest.raises(PeerTimeout):
        made(out, given)
    made.close()
    if work is not None:  # the call itself may have learnt of the death
        with pytest.raises(PeerTimeout):
            work.wait()
    return caught.value.rank, caught.value.step, took
