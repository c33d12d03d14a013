"""The control path of gathers and scatters on GPUs, on CPUs: kernels that do what the arguments say, in plain copies.

It is where shards are pushed to and pulled from, the staging block and its pieces, and what goes which way, that is
judged here; kernels, streams and handshakes are judged in tests/gpu.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ep_plugin import _C, HierarchicalAllGather, HierarchicalReduceScatter
from ep_plugin.collectives import cuda
from ep_plugin.collectives.base import Collective
from ep_plugin.collectives.calls import Calls
from ep_plugin.collectives.cuda import CudaNode, gather_sms
from ep_plugin.errors import DisagreementError
from tests.collective_cases import BF16, FP32, gathered_by_gloo, poisoned, reduced, same_bits, shard
from tests.ranks import run_ranks, values

STAGING_BYTES = 20_000 * 16
COUNTS = (1, 17, 4096, 20_001, 300_001)  # with path="auto" the last goes another way than the others
DTYPES = {_C.Element.FLOAT32: FP32, _C.Element.BFLOAT16: BF16}


class _Arguments(SimpleNamespace):
    """Any kernel's arguments, lists too."""

    def __getattr__(self, name: str) -> Any:
        assert name.startswith("set_"), name
        return lambda ranks: setattr(self, name.removeprefix("set_"), list(ranks))


class _Kernels:
    """What the three kernels do, between barriers of the node in place of handshakes and flags."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.pushed: list[_Arguments] = []
        self.pulled = self.small = 0

    def push_shard(self, args: _Arguments) -> None:
        self.pushed.append(args)
        dist.barrier(self._group)
        for target in filter(None, args.targets):
            ctypes.memmove(target, args.input, args.bytes)
        dist.barrier(self._group)
        if args.landing:
            for rank, output in enumerate(args.outputs):
                if rank != args.comm.rank:
                    ctypes.memmove(output, args.landing + rank * args.bytes, args.bytes)

    def pull_shards(self, args: _Arguments) -> None:
        self.pulled += 1
        dist.barrier(self._group)
        self._sum(args.sources, args.output, args)
        dist.barrier(self._group)

    def small_shards(self, args: _Arguments) -> None:
        self.small += 1
        rank, ranks = args.comm.rank, range(args.comm.num_ranks)
        dist.barrier(self._group)
        for peer in ranks:
            ctypes.memmove(args.words[peer] + rank * args.bytes, args.inputs[peer], args.bytes)
        dist.barrier(self._group)
        landed = [args.words[rank] + source * args.bytes for source in ranks]
        if args.element >= 0:
            self._sum(landed, args.outputs[rank], args)
            return
        for source in ranks:
            if source != rank:
                ctypes.memmove(args.outputs[source], landed[source], args.bytes)

    def _sum(self, sources: list[int], output: int, args: _Arguments) -> None:
        dtype = DTYPES[args.element]
        parts = [_memory(source, args.bytes).view(dtype) for source in sources]
        total = parts[0].to(FP32)
        for part in parts[1:]:
            total = total + part
        _memory(output, args.bytes).view(dtype).copy_(total * args.scale if args.scale != 1 else total)


def _memory(address: int, nbytes: int, _: Any = None) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_ubyte * nbytes).from_address(address), dtype=torch.uint8)


def _as_on_gpus(made: Collective, path: str, per_node: int) -> _Kernels:
    """Gives the object's engine the node that serves GPUs."""
    groups = [
        dist.new_group(list(range(first, first + per_node))) for first in range(0, dist.get_world_size(), per_node)
    ]
    names = ("place_word", "staging_block", "most_ctas", "Step")
    arguments = ("PushShardArgs", "PullShardsArgs", "SmallShardsArgs")
    cuda._C = SimpleNamespace(**dict.fromkeys(arguments, _Arguments), **{name: getattr(_C, name) for name in names})
    cuda.bytes_at = _memory
    engine = made.engine_on(torch.device("cpu"))
    node = CudaNode.__new__(CudaNode)
    node._engine, node._path = weakref.proxy(engine), path
    node._lanes = SimpleNamespace(enter=lambda: 0, capturing=lambda: False)
    node.staging = engine.memory.allocate(STAGING_BYTES, "staging")
    node._step = STAGING_BYTES // engine.node_size // 16 * 16
    node._calls = Calls(engine)
    node._words = engine.memory.allocate(_C.small_words_bytes(engine.node_size), "words")
    node.stream_words = SimpleNamespace(addresses=[])
    node.number, node.words, node.pending = 0, torch.zeros(2, dtype=torch.int64), deque()
    engine.inside = node
    engine.kernels = _Kernels(groups[dist.get_rank() // per_node])
    return engine.kernels


def _gathers(rank: int, size: int, per_node: int, path: str) -> None:
    gather = HierarchicalAllGather()
    kernels = _as_on_gpus(gather, path, per_node)
    cuda.SM_BELOW_BYTES = cuda.SMALL_BYTES
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
        assert all(args.landing == 0 for args in kernels.pushed), "an allocated output went through the staging block"
        ours.copy_(poisoned(size * count, BF16))
        gather.all_gather(list(ours.chunk(size)), mine)
        assert same_bits(ours, expected), f"parts of an allocated output, {count}"
        listed = [poisoned(count, BF16) for _ in range(size)]
        gather.all_gather(listed, mine)
        assert same_bits(torch.cat(listed), expected), f"list, {count}"
    by_engines = [args for args in kernels.pushed if args.num_ctas == 0]
    assert all(path == "copy_engine" or (path == "auto" and args.landing == 0) for args in by_engines)
    assert bool(by_engines) == (path != "sm")
    numbers = [args.number for args in by_engines]
    assert numbers == sorted(set(numbers))
    assert max(args.num_ctas for args in kernels.pushed) <= _C.most_ctas
    if per_node == size:
        assert kernels.small == (4 * (len(COUNTS) - 1) if path == "auto" else 0)
    gather.close()


@pytest.mark.parametrize(
    ("size", "per_node", "path"), [(2, 2, "auto"), (3, 3, "copy_engine"), (3, 3, "auto"), (4, 2, "sm")]
)
def test_shards_are_pushed_where_they_belong(size: int, per_node: int, path: str) -> None:
    environment = {"EP_PLUGIN_RANKS_PER_NODE": str(per_node)}
    values(run_ranks(size, _gathers, size, per_node, path, env=environment))


def _scatters(rank: int, size: int, per_node: int, path: str) -> None:
    scatter = HierarchicalReduceScatter()
    kernels = _as_on_gpus(scatter, path, per_node)
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
    assert kernels.pulled > 0 and (kernels.small > 0) == (path == "auto")
    scatter.close()


@pytest.mark.parametrize(("size", "per_node", "path"), [(2, 2, "sm"), (3, 3, "auto"), (3, 3, "sm"), (4, 2, "auto")])
def test_shards_are_pulled_from_where_they_lie(size: int, per_node: int, path: str) -> None:
    values(run_ranks(size, _scatters, size, per_node, path, env={"EP_PLUGIN_RANKS_PER_NODE": str(per_node)}))


class _Late(_Kernels):
    """A kernel runs when the next operation is ordered after it, as on a stream that is busy."""

    waiting: _Arguments | None = None

    def pull_shards(self, args: _Arguments) -> None:
        self.waiting = args

    def run(self) -> int:
        args, self.waiting = self.waiting, None
        if args is not None:
            super().pull_shards(args)
        return 0


def _scatters_of_two_streams(rank: int, size: int) -> None:
    """Foreign inputs, all through the one staging block, whose readers are late."""
    scatter, count = HierarchicalReduceScatter(), STAGING_BYTES // size // FP32.itemsize // 4 * 4
    _as_on_gpus(scatter, "sm", size)
    engine = scatter.engine_on(torch.device("cpu"))
    late = engine.kernels = _Late(dist.new_group())
    engine.inside._lanes = SimpleNamespace(enter=late.run, capturing=lambda: False)
    inputs, outs, expected = [], [], []
    for seed in range(6):
        whole = [shard(seed, source, size * count, FP32).view(size, count) for source in range(size)]
        inputs.append(whole[rank].flatten())
        outs.append(poisoned(count, FP32))
        expected.append(reduced(whole, rank, size, 1.0))
        scatter(outs[-1], inputs[-1])
    late.run()
    for turn, (out, right) in enumerate(zip(outs, expected, strict=True)):
        assert same_bits(out, right), f"operation {turn}"
    scatter.close()


@pytest.mark.parametrize("size", [2, 3])
def test_staging_is_not_written_before_the_operation_before_has_read_it(size: int) -> None:
    values(run_ranks(size, _scatters_of_two_streams, size))


def _captured(rank: int, size: int, path: str) -> None:
    """Blocks that a graph uses are not handed out again when the tensors made of them are gone."""
    gather, scatter = HierarchicalAllGather(num_buffers=1), HierarchicalReduceScatter(num_buffers=1)
    used = []
    for made in (gather, scatter):
        _as_on_gpus(made, path, size)
        engine = made.engine_on(torch.device("cpu"))
        whole, part = made.allocate(size * 100, FP32), torch.ones(100)
        whole.fill_(1.0)
        used.append(whole.data_ptr())
        engine.lanes.capturing = engine.inside._lanes.capturing = lambda: True
        made(*((whole, part) if made is gather else (part, whole)))
        engine.lanes.capturing = engine.inside._lanes.capturing = lambda: False
        del whole
        dist.barrier()
        later = [made.allocate(size * 100, FP32) for _ in range(3)]
        assert used[-1] not in [tensor.data_ptr() for tensor in later]
        made.close()


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
    before, now = (
        SimpleNamespace(cuda_stream=kind, wait_stream=waited.append, number=number)
        for number, kind in enumerate((earlier, current))
    )
    monkeypatch.setattr(cuda._C, "stream_capturing", lambda stream, _: stream == "recording", raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: now)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: current == "recording")
    lanes = cuda.StreamLanes(torch.device("cuda", 0))
    lanes._last = before  # type: ignore[assignment]
    assert lanes.enter() == now.cuda_stream
    assert waited == ([before] if waits else [])
    assert lanes.enter() == now.cuda_stream and len(waited) == waits


class _Device:
    """It takes whatever is enqueued, and does nothing; the host goes on."""

    def push_shard(self, args: _Arguments) -> None: ...

    pull_shards = small_shards = push_shard


def _on_a_device(made: Collective, path: str = "copy_engine") -> Collective:
    _as_on_gpus(made, path, dist.get_world_size())
    made.engine_on(torch.device("cpu")).kernels = _Device()
    return made


def _gather_of(gather: Any, count: int, dtype: torch.dtype = FP32, allocated: bool = False) -> None:
    size = gather.group.size() * count
    gather(gather.allocate(size, dtype) if allocated else torch.empty(size, dtype=dtype), torch.ones(count).to(dtype))


def _scatter_of(scatter: Any, dtype: torch.dtype) -> None:
    scatter(torch.empty(8, dtype=dtype), torch.ones(8 * scatter.group.size(), dtype=dtype))


# What is made, what all call of which rank 1 calls it otherwise, and what the error says.
DIFFERENT: dict[str, tuple[type[Collective], Callable[[Any, bool], None], str]] = {
    "sizes": (
        HierarchicalAllGather,
        lambda gather, odd: _gather_of(gather, 11 if odd else 10),
        "at step gather: bytes of a shard is 4",
    ),
    "pieces of the staging block": (
        HierarchicalAllGather,
        lambda gather, odd: _gather_of(gather, 40_000 if odd else 20_000),
        "at step gather: bytes of a shard is ",
    ),
    "sizes that go different ways": (
        HierarchicalAllGather,
        lambda gather, odd: _gather_of(gather, 3_000_000 if odd else 10),
        "at step gather: bytes of a shard is ",
    ),
    "small sums": (
        HierarchicalReduceScatter,
        lambda scatter, odd: _scatter_of(scatter, torch.float16 if odd else BF16),
        "at step scatter: element is",
    ),
    "a block and other memory": (
        HierarchicalAllGather,
        lambda gather, odd: _gather_of(gather, 10, allocated=not odd),
        "none (not from allocate) on rank 1",
    ),
    "elements of a sum": (
        HierarchicalReduceScatter,
        lambda scatter, odd: _scatter_of(scatter, torch.float16 if odd else BF16),
        "at step scatter: element is",
    ),
}


def _differs(rank: int, name: str) -> list[str]:
    """What a rank is told by its call, if it was not the first to make it, and by its next checks."""
    kind, operation, _ = DIFFERENT[name]
    made = _on_a_device(kind(), "auto" if name in ("sizes that go different ways", "small sums") else "copy_engine")
    if name == "a block and other memory" and rank == 1:
        made.allocate(30, FP32)  # which all ranks call
    said = []
    try:
        operation(made, rank == 1)
    except DisagreementError as error:
        said.append(str(error))
    dist.barrier()
    for _ in range(2):
        with pytest.raises(DisagreementError) as caught:
            made.check()
        said.append(str(caught.value))
    with pytest.raises(DisagreementError):
        operation(made, False)
    made.close()
    return said


@pytest.mark.parametrize("name", DIFFERENT)
def test_hosts_compare_what_copy_engines_do_not(name: str) -> None:
    for said in values(run_ranks(3, _differs, name)):
        for sentence in said:
            assert "ranks disagree on one call of communicator" in sentence, sentence
            assert DIFFERENT[name][2] in sentence and "on rank 1" in sentence, sentence


def _far_apart(rank: int) -> None:
    """One rank's host is further ahead than calls are remembered, then the other; then they differ."""
    gather = _on_a_device(HierarchicalAllGather())
    for ahead in (0, 1):
        for turn in range(2):
            if (turn == 0) == (rank == ahead):
                for call in range(1500):
                    _gather_of(gather, 1 + call % 7)
            dist.barrier()
    if rank == 1:
        _gather_of(gather, 5)
    dist.barrier()
    if rank == 0:
        with pytest.raises(DisagreementError, match="bytes of a shard is 24 on rank 0, 20 on rank 1"):
            _gather_of(gather, 6)
    dist.barrier()
    with pytest.raises(DisagreementError, match="bytes of a shard is 24 on rank 0, 20 on rank 1"):
        gather.check()


def test_a_host_that_is_far_ahead_is_no_disagreement() -> None:
    values(run_ranks(2, _far_apart))


def _at_once(rank: int, calls: int) -> int:
    """Hosts call freely, so that posts are read while they change."""
    gather = _on_a_device(HierarchicalAllGather())
    for call in range(calls):
        _gather_of(gather, 1 + call % 5)
    dist.barrier()
    gather.check()
    return calls


def test_posts_that_change_as_they_are_read_are_no_disagreement() -> None:
    values(run_ranks(3, _at_once, 20_000))


@pytest.mark.parametrize(
    ("path", "nbytes", "ranks", "sms"),
    [
        ("auto", 16, 4, 3),
        ("auto", 32 << 10, 2, 8),
        ("auto", cuda.SMALL_BYTES // 4, 4, 63),
        ("auto", 1 << 20, 4, 32),
        ("auto", cuda.SM_BELOW_BYTES // 4, 4, 0),
        ("auto", cuda.SM_BELOW_BYTES // 4 - 16, 4, 32),
        ("sm", 1 << 30, 4, 32),
        ("sm", 3 * (16 << 10), 8, 3),
        ("copy_engine", 16, 2, 0),
    ],
)
def test_which_way_a_gather_goes(path: str, nbytes: int, ranks: int, sms: int) -> None:
    assert gather_sms(path, nbytes, ranks) == sms


@pytest.mark.parametrize("given", ["", "copy-engine", None])
def test_bad_path(given: Any) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match="path: expected one of auto, copy_engine, sm, got"):
            HierarchicalAllGather(path=given)
    finally:
        dist.destroy_process_group()
