"""The control path of gathers and scatters on GPUs, on CPUs: kernels that do what the arguments say, in plain copies.

It is where shards are pushed to and summed from, the staging block and its pieces, and what goes which way, that is
judged here; kernels, streams and handshakes are judged in tests/gpu.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ep_plugin import _C, HierarchicalAllGather, HierarchicalReduceScatter
from ep_plugin.collectives.backends import paths
from ep_plugin.collectives.backends.paths import gather_sms, scatter_sms
from ep_plugin.errors import CaptureRefused, CommunicatorClosed
from ep_plugin.runtime import streams as runtime_streams
from ep_plugin.runtime.streams import CudaStreams
from tests.collectives.collective_cases import BF16, FP32, gathered_by_gloo, poisoned, reduced, same_bits, shard
from tests.gpu_stand_in import as_on_gpus
from tests.ranks import run_ranks, values

COUNTS = (1, 17, 4096, 20_001, 300_001)  # with path="auto" the last goes another way than the others


def _gathers(rank: int, size: int, per_node: int, path: str) -> None:
    gather = HierarchicalAllGather()
    paths.SM_BELOW_BYTES = paths.SMALL_BYTES
    kernels = as_on_gpus(gather, path, per_node)
    for seed, count in enumerate(COUNTS):
        mine = shard(seed, rank, count, BF16)
        expected = gathered_by_gloo(mine)
        foreign = poisoned(size * count, BF16)
        gather(foreign, mine)
        assert same_bits(foreign, expected), f"foreign output, {count}"
        kernels.pushed.clear()
        ours = gather.allocate(size * count, BF16)
        ours.copy_(poisoned(size * count, BF16))
        part = ours.narrow(0, rank * count, count)
        part.copy_(mine)
        gather(ours, part)
        assert same_bits(ours, expected), f"in place, {count}"
        assert all(args.staging == 0 for args in kernels.pushed), "an allocated output went through the staging block"
        ours.copy_(poisoned(size * count, BF16))
        gather.all_gather(list(ours.chunk(size)), mine)
        assert same_bits(ours, expected), f"parts of an allocated output, {count}"
        listed = [poisoned(count, BF16) for _ in range(size)]
        gather.all_gather(listed, mine)
        assert same_bits(torch.cat(listed), expected), f"list, {count}"
    by_engines = [args for args in kernels.pushed if args.num_ctas == 0]
    assert all(path == "copy_engine" or (path == "auto" and args.staging == 0) for args in by_engines)
    assert bool(by_engines) == (path != "sm")
    numbers = [args.number for args in by_engines]
    assert numbers == sorted(set(numbers))
    assert max(args.num_ctas for args in kernels.pushed) <= _C.max_ctas
    if per_node == size:
        assert kernels.small_calls == (4 * (len(COUNTS) - 1) if path == "auto" else 0)
    gather.close()


@pytest.mark.parametrize(
    ("size", "per_node", "path"), [(2, 2, "auto"), (3, 3, "copy_engine"), (3, 3, "auto"), (4, 2, "sm")]
)
def test_shards_are_pushed_where_they_belong(size: int, per_node: int, path: str) -> None:
    environment = {"EP_PLUGIN_RANKS_PER_NODE": str(per_node)}
    values(run_ranks(size, _gathers, size, per_node, path, env=environment))


def _scatters(rank: int, size: int, per_node: int, path: str) -> None:
    scatter = HierarchicalReduceScatter(sms=5)
    kernels = as_on_gpus(scatter, path, per_node)
    for seed, count in enumerate(COUNTS):
        for dtype in (BF16, FP32):
            whole = [shard(seed, source, size * count, dtype).view(size, count) for source in range(size)]
            expected = reduced(whole, rank, per_node, 1 / size)
            out = poisoned(count, dtype)
            scatter(out, whole[rank].flatten(), op=dist.ReduceOp.AVG)
            assert same_bits(out, expected), f"foreign input, {count} of {dtype}"
            ours = scatter.allocate(size * count, dtype)
            ours.copy_(whole[rank].flatten())
            out = poisoned(count, dtype)
            scatter(out, ours, op=dist.ReduceOp.AVG)
            assert same_bits(out, expected), f"allocated input, {count} of {dtype}"
    assert kernels.most_summed_by == 5 and (kernels.small_calls > 0) == (path == "auto")
    scatter.close()


@pytest.mark.parametrize(("size", "per_node", "path"), [(2, 2, "sm"), (3, 3, "auto"), (3, 3, "sm"), (4, 2, "auto")])
def test_shards_are_summed_from_where_they_lie(size: int, per_node: int, path: str) -> None:
    values(run_ranks(size, _scatters, size, per_node, path, env={"EP_PLUGIN_RANKS_PER_NODE": str(per_node)}))


def _captured(rank: int, size: int, path: str) -> None:
    """Blocks that a graph uses are not handed out again when the tensors made of them are gone."""
    gather = HierarchicalAllGather(num_buffers=1)
    as_on_gpus(gather, path, size)
    engine = gather.engine_on(torch.device("cpu"))
    whole = gather.allocate(size * 100, FP32).fill_(1.0)
    used = whole.data_ptr()
    gather(whole, torch.ones(100))  # as before any capture
    engine.streams.capturing = lambda: True  # type: ignore[method-assign]
    gather(whole, torch.ones(100))
    engine.streams.capturing = lambda: False  # type: ignore[method-assign]
    del whole
    dist.barrier()
    later = [gather.allocate(size * 100, FP32) for _ in range(3)]
    engine.streams.capturing = lambda: True
    with pytest.raises(CaptureRefused, match="expected a free block of .* run one step of this shape"):
        gather.allocate(size * 100, FP32)
    engine.streams.capturing = lambda: False
    later.append(gather.allocate(size * 100, FP32))
    assert used not in [tensor.data_ptr() for tensor in later]
    gather.close()


def _refuses(rank: int) -> None:
    """Rank 0 holds a block that rank 1 asks about late: when rank 0 waits for it or, if they do not meet, has refused
    so many captures that its answer is written over."""
    gather = HierarchicalAllGather()
    engine = gather.engine_on(torch.device("cpu"))
    engine.timeout_s = 10.0
    first, second = (gather.allocate(100, FP32) for _ in range(2))
    held = [first] if rank == 0 else []
    del first, second
    store, wait_requests = dist.distributed_c10d._get_default_store(), _C.wait_requests

    def says_that_it_waits(*args: Any) -> int:
        store.set("rank 0 waits", "")
        return wait_requests(*args)

    dist.barrier()
    if rank == 0:
        setattr(_C, "wait_requests", says_that_it_waits)  # noqa: B010  # the stub has a function
    else:
        store.wait(["rank 0 waits"])
    held.append(gather.allocate(100, FP32))
    engine.streams.capturing = lambda: True  # type: ignore[method-assign]
    for _ in range(200):
        with pytest.raises(CaptureRefused):
            gather.allocate(100, FP32)
    store.set("rank 0 waits", "")
    engine.streams.capturing = lambda: False  # type: ignore[method-assign]
    assert len(gather.allocate(100, FP32)) == 100
    gather.close()


def test_refused_captures_meet_the_peers() -> None:
    values(run_ranks(2, _refuses))


def _maps_nothing(rank: int) -> None:
    HierarchicalReduceScatter.maps_nothing_on = ("cpu",)
    scatter = HierarchicalReduceScatter()
    assert scatter.allocate((3, 5), BF16, "cpu").shape == (3, 5)
    assert scatter._engine is None, "ranks met for memory that nobody maps"
    as_on_gpus(scatter, "sm", 2)
    given, out = scatter.allocate(2 * 100, FP32, "cpu").fill_(rank + 1.0), torch.empty(100)
    scatter(out, given)
    assert not scatter.maps(given) and out.tolist() == [3.0] * 100
    scatter.close()
    with pytest.raises(CommunicatorClosed):
        scatter.allocate(10, FP32, "cpu")


def test_inputs_of_sums_are_ordinary_memory() -> None:
    values(run_ranks(2, _maps_nothing))


def _stages_late(rank: int) -> None:
    gather = HierarchicalAllGather()
    kernels = as_on_gpus(gather, "sm", 2)
    engine = gather.engine_on(torch.device("cpu"))
    allocated, other = gather.allocate(2 * COUNTS[-1], BF16), poisoned(2 * COUNTS[-1], BF16)
    mine = shard(0, rank, COUNTS[-1], BF16)
    gather(allocated, mine)
    assert not engine.workspaces, "memory for what has never been asked for"
    _makes_first(engine, "staging", lambda: gather(other, mine))
    assert same_bits(other, allocated) and kernels.pushed[-1].staging != 0
    gather.close()


def _makes_first(engine: Any, name: str, operation: Callable[[], object]) -> None:
    """The first such operation makes the memory, which a capture cannot do."""
    before = set(engine.workspaces)
    engine.streams.capturing = lambda: True
    with pytest.raises(CaptureRefused, match=f"expected one operation .* before a CUDA graph .* makes {name}"):
        operation()
    assert not engine.blocks._captured, "a block was kept for a graph that was refused"
    engine.streams.capturing = lambda: False
    operation()
    assert set(engine.workspaces) - before == {name}


def test_staging_is_made_when_it_is_needed() -> None:
    values(run_ranks(2, _stages_late))


def _works_late(rank: int) -> None:
    with HierarchicalAllGather() as gather, HierarchicalReduceScatter() as scatter:
        for made in (gather, scatter):
            as_on_gpus(made, "auto", 2)
        of_gather, of_scatter = (made.engine_on(torch.device("cpu")) for made in (gather, scatter))
        few, total = torch.full((4,), rank + 1.0), torch.empty(2)
        gathered = gather.allocate(8, FP32)
        _makes_first(of_gather, "words", lambda: gather(gathered, few))
        _makes_first(of_scatter, "words", lambda: scatter(total, few))
        many, large = torch.full((2 * COUNTS[-1],), rank + 1.0), torch.empty(COUNTS[-1])
        _makes_first(of_scatter, "cells", lambda: scatter(large, many))
        assert total.tolist() == [3.0, 3.0] and bool((large == 3.0).all())


def test_words_and_cells_are_made_when_they_are_needed() -> None:
    values(run_ranks(2, _works_late))


@pytest.mark.parametrize("path", ["auto", "sm"])
def test_blocks_of_a_graph_are_not_handed_out_again(path: str) -> None:
    values(run_ranks(2, _captured, 2, path))


@pytest.mark.parametrize(
    ("earlier", "current", "waits"),
    [("eager", "eager", True), ("eager", "recording", False), ("recording", "recording", True)],
)
def test_streams_of_one_graph_follow_each_other(
    earlier: str, current: str, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[Any] = []
    before, now = 0, 7  # handles: the first is the default stream's
    recording = {handle for handle, kind in ((before, earlier), (now, current)) if kind == "recording"}

    def capture(stream: int, device: int) -> bool:
        return stream in recording

    order = _C.StreamOrder(_C.SmBudget(0, 132, capture, lambda *given: waited.append(given)))
    assert order.enter(before, 1) == before and not waited
    assert order.enter(now, 1) == now
    assert waited == ([(now, before, 0)] if waits else [])
    assert order.enter(now, 1) == now and len(waited) == waits
    waited.clear()
    monkeypatch.setattr(_C, "stream_capture", capture, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: now, raising=False)
    monkeypatch.setattr(_C, "order_streams", lambda *given: waited.append(given), raising=False)
    monkeypatch.setattr(runtime_streams, "budget_of", lambda _: _C.SmBudget(0, 132))
    streams = CudaStreams(torch.device("cuda", 0))
    assert streams.follow(before) == now and waited == ([(now, before, 0)] if waits else [])
    assert streams.follow(now) == now and len(waited) == waits
    vars(streams)["_own"] = SimpleNamespace(cuda_stream=before)
    for _ in range(2):  # operations in flight may go on there after a join
        waited.clear()
        streams.join()
        assert waited == ([(now, before, 0)] if waits else [])


def _finds_blocks(rank: int) -> None:
    gather = HierarchicalAllGather()
    kernels = as_on_gpus(gather, "copy_engine", 2)
    engine = gather.engine_on(torch.device("cpu"))
    outputs = [gather.allocate(2 * COUNTS[-1], BF16) for _ in range(2)]
    shards = [output.narrow(0, rank * COUNTS[-1], COUNTS[-1]) for output in outputs]
    for turn in range(3):
        for output, part in zip(outputs, shards, strict=True):
            gather(output, part.fill_(10 * turn + rank))
            assert output[:: COUNTS[-1]].tolist() == [10 * turn, 10 * turn + 1]
    assert [args.block for args in kernels.pushed] == [0, 1] * 3
    assert [pending.number for pending in engine.waits.pending] == list(range(1, 7))
    engine.blocks._forget(0)  # as if the block were closed
    gather(outputs[0], shards[0])
    assert kernels.pushed[-1].block == _C.staging_block, "an operation found a block that is closed"
    in_one_piece = paths.ways("copy_engine", 2).staged_bytes // BF16.itemsize
    for count, pieces in ((in_one_piece, 1), (in_one_piece + 1, 2)):  # pieces use the block one after the other
        foreign, part = torch.empty(2 * count, dtype=BF16), torch.empty(count, dtype=BF16)
        for turn in range(3):
            kernels.pushed.clear()
            gather(foreign, part.fill_(10 * turn + rank))
            assert foreign[::count].tolist() == [10 * turn, 10 * turn + 1] and len(kernels.pushed) == pieces
    gather.close()


def test_gathers_go_to_the_blocks_that_are_open() -> None:
    values(run_ranks(2, _finds_blocks))


@pytest.mark.parametrize(
    ("path", "nbytes", "ranks", "sms"),
    [
        ("auto", 16, 4, 3),
        ("auto", 32 << 10, 2, 8),
        ("auto", paths.SMALL_BYTES // 4, 4, 66),
        ("auto", 1 << 20, 4, 64),
        ("auto", paths.SM_BELOW_BYTES // 4, 4, 0),
        ("auto", paths.SM_BELOW_BYTES // 4 - 16, 4, 64),
        ("sm", 1 << 30, 4, 64),
        ("sm", 3 * (16 << 10), 8, 3),
        ("copy_engine", 16, 2, 0),
    ],
)
def test_which_way_a_gather_goes(path: str, nbytes: int, ranks: int, sms: int) -> None:
    assert gather_sms(path, nbytes, ranks) == sms


@pytest.mark.parametrize(
    ("path", "nbytes", "ranks", "allowed", "sms"),
    [("auto", 16, 4, 24, 3), ("auto", 1 << 20, 4, 24, 24), ("auto", 1 << 20, 4, 64, 64), ("sm", 32 << 10, 4, 64, 2)],
)
def test_how_many_sms_a_sum_takes(path: str, nbytes: int, ranks: int, allowed: int, sms: int) -> None:
    assert scatter_sms(path, nbytes, ranks, allowed) == sms


@pytest.mark.parametrize(("present", "sms"), [(132, 64), (58, 58)])
def test_sums_take_no_more_sms_than_a_device_has(present: int, sms: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=present))
    assert paths.most_sum_sms(torch.device("cuda", 0), 64) == sms


@pytest.mark.parametrize("given", ["", "copy-engine", None])
def test_bad_path(given: Any) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match="path: expected one of auto, copy_engine, sm, got"):
            HierarchicalAllGather(path=given)
    finally:
        dist.destroy_process_group()
