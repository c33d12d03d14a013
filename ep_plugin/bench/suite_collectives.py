"""The suites `allgather` and `reduce-scatter`: ours, the backend's own, and on GPUs what else PyTorch offers.

A case is a size in bytes: of the gathered output, or of the input that is scattered. Every way to do it is judged by
plain torch before any is timed, and once more after, each time into poisoned memory. `bytes_wire` are those that any
way must bring to a rank: from its peers, or with several nodes over its rail, where ep_plugin's are counted as they
are sent. `sms` are the most that one of ep_plugin's kernels takes; what the backend takes for its rails is not in it.
On GPUs everything is tried and timed on one stream, which is not the default one.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

from ep_plugin import _C
from ep_plugin.bench import provenance
from ep_plugin.bench.collective_peers import PEERS
from ep_plugin.bench.launch import run_on_ranks
from ep_plugin.bench.results import everyones_wrong, result, row
from ep_plugin.bench.timing import clock_of, stream_of_its_own, time_in_turn
from ep_plugin.collectives import HierarchicalAllGather, HierarchicalReduceScatter
from ep_plugin.collectives.backends.cuda import gather_sms, scatter_sms
from ep_plugin.collectives.backends.cuda_gather import foreign_gather_sms
from ep_plugin.transport.rails import CHUNK_BYTES

GATHER, SCATTER = "allgather", "reduce_scatter"
KIB, MIB = 1 << 10, 1 << 20
SIZES = {
    "cpu": (64 * KIB, MIB, 16 * MIB),
    "cuda": (64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB, 1024 * MIB),
}
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
WARMUP = 3
_seeds = itertools.count()  # of the data that is judged: the same on all ranks
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@dataclass(frozen=True, kw_only=True)
class CollectiveSuite:
    """What one run measures. what: GATHER or SCATTER. nodes: that the ranks of this machine stand for."""

    what: str
    backend: str
    ranks: int
    nodes: int
    sizes: tuple[int, ...]
    iterations: int

    def __post_init__(self) -> None:
        if self.ranks < 2:
            raise ValueError(f"ranks: expected at least 2, got {self.ranks}")
        if self.nodes < 1 or self.ranks % self.nodes:
            raise ValueError(f"nodes: expected a divisor of {self.ranks} ranks, got {self.nodes}")
        if self.iterations < 1:
            raise ValueError(f"iterations: expected at least 1, got {self.iterations}")
        unit = self.ranks * DTYPES[self.backend].itemsize
        for size in self.sizes:
            if size < unit or size % unit:
                raise ValueError(f"size: expected a multiple of {unit} bytes, an element for each rank, got {size}")

    @property
    def suite(self) -> str:
        return self.what if self.nodes == 1 else f"{self.what}_{self.nodes}_nodes"

    def bytes_wire(self, size: int) -> int:
        return size // self.ranks * (self.ranks - 1 if self.nodes == 1 else self.nodes - 1)

    def command(self) -> str:
        words = [f"--backend {self.backend}", f"--ranks {self.ranks}", f"--nodes {self.nodes}"]
        words += [f"--size {size}" for size in self.sizes] + [f"--iterations {self.iterations}"]
        return " ".join([f"ep-bench {self.what.replace('_', '-')}", *words])


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to do a case: `run` reads `source` and writes `out`, memory of its own where it needs that. sent: what
    each of its calls so far has sent over this rank's rail, where ep_plugin counts it."""

    impl: str
    run: Callable[[], object]
    source: torch.Tensor
    out: torch.Tensor
    sms: int | None = None
    sent: list[int] = field(default_factory=list)


def run(suite: CollectiveSuite) -> dict[str, Any]:
    """Runs the suite on ranks of its own. Raises WrongResult."""
    code_hash = provenance.hash_sources()
    with _emulated(suite):
        found = run_on_ranks(suite.ranks, suite.backend, measure, suite)
    return result(suite.suite, suite.backend, suite.ranks, suite.command(), found, code_hash)


def measure(device: torch.device, suite: CollectiveSuite) -> dict[str, Any]:
    """One rank's part: the rows, or what was wrong, the same on every rank. Collective."""
    with stream_of_its_own(device):
        return _measure(device, suite)


def _measure(device: torch.device, suite: CollectiveSuite) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    left_out: list[str] = []
    clock = clock_of(device)
    objects = _objects(suite, device)
    try:
        for made in objects.values():
            nodes = made.engine_on(device).node_map.num_nodes
            if nodes != suite.nodes:
                raise ValueError(f"nodes: expected {nodes}, which the ranks are on, got {suite.nodes}")
        for size in tqdm(suite.sizes, unit="size", disable=dist.get_rank() != 0, leave=False):
            ways = list(ways_of(suite, device, size, objects, left_out))
            wrong = everyones_wrong(judge(suite, size, ways))
            if not wrong:
                timings = time_in_turn(clock, {way.impl: way.run for way in ways}, suite.iterations, WARMUP)
                wrong = everyones_wrong(judge(suite, size, ways) + wrong_on_rails(suite, size, ways))
            if wrong:
                return {"rows": [], "wrong": wrong}
            for way in ways:
                wire = way.sent[-1] if way.sent and suite.nodes > 1 else suite.bytes_wire(size)
                rows.append(row(str(size), way.impl, timings[way.impl], wire, way.sms))
            del ways
    finally:
        for made in objects.values():
            made.close()
    return {"rows": rows, "wrong": [], "left_out": list(dict.fromkeys(left_out))}


def _objects(suite: CollectiveSuite, device: torch.device) -> dict[str, Any]:
    if suite.what == SCATTER:
        return {"ep_plugin": HierarchicalReduceScatter()}
    paths = {"ep_plugin": "auto"}
    if device.type == "cuda":
        paths |= {"ep_plugin copy_engine": "copy_engine", "ep_plugin sm": "sm"}
    return {impl: HierarchicalAllGather(path=path) for impl, path in paths.items()}


def ways_of(
    suite: CollectiveSuite, device: torch.device, size: int, objects: dict[str, Any], left_out: list[str]
) -> Iterator[Way]:
    """By each of `objects`, by the one called ep_plugin into memory that peers have not mapped, and by every peer that
    runs here; `left_out` is given a sentence for each that does not. Collective.
    """
    dtype, rank = DTYPES[suite.backend], dist.get_rank()
    whole, count = size // dtype.itemsize, size // dtype.itemsize // suite.ranks

    def empty(elements: int) -> torch.Tensor:
        return torch.empty(elements, dtype=dtype, device=device)

    for impl, made in objects.items():
        allocated = made.allocate(whole, dtype, device)
        if suite.what == GATHER:
            source, out = allocated.narrow(0, rank * count, count), allocated
        else:
            source, out = allocated, empty(count)
        yield _ours(suite, impl, made, source, out)
    ours = objects["ep_plugin"]
    if suite.what == GATHER or device.type not in HierarchicalReduceScatter.maps_nothing_on:
        source, out = (empty(count), empty(whole)) if suite.what == GATHER else (empty(whole), empty(count))
        impl = "ep_plugin, foreign output" if suite.what == GATHER else "ep_plugin, foreign input"
        yield _ours(suite, impl, ours, source, out, foreign=True)
    for name, make in PEERS[suite.what, suite.backend].items():
        if any(sentence.startswith(f"{name} is left out") for sentence in left_out):
            continue
        try:
            source, out, peer = make(whole, count, dtype, device)
            peer()
        except (AttributeError, ImportError, RuntimeError, TypeError, ValueError) as error:
            reason = str(error).splitlines()
            left_out.append(
                f"{name} is left out: {type(error).__name__}: {reason[0]} {reason[-1] if reason[1:] else ''}"
            )
            continue
        yield Way(impl=name, run=peer, source=source, out=out)


def _ours(
    suite: CollectiveSuite, impl: str, made: Any, source: torch.Tensor, out: torch.Tensor, foreign: bool = False
) -> Way:
    sent: list[int] = []

    def run() -> None:
        before = made.rail_bytes_sent
        made(out, source)
        sent.append(made.rail_bytes_sent - before)

    size = max(source.nbytes, out.nbytes)
    sms = most_sms(suite, size, made.path, foreign) if out.is_cuda else None
    return Way(impl=impl, run=run, source=source, out=out, sms=sms, sent=sent)


def wrong_on_rails(suite: CollectiveSuite, size: int, ways: list[Way]) -> list[str]:
    """Which of ep_plugin's ways has sent this rank's rail anything but its shard, once for each other node."""
    expected = suite.bytes_wire(size) if suite.nodes > 1 else 0
    return [
        f"{size} by {way.impl}: expected {expected} bytes over the rail in each call, got {sorted(set(way.sent))}"
        for way in ways
        if set(way.sent) - {expected}
    ]


def most_sms(suite: CollectiveSuite, size: int, path: str, foreign: bool = False) -> int:
    """SMs of the largest of ep_plugin's kernels for `size` bytes; foreign: not in memory from `allocate`."""
    per_node, shard = suite.ranks // suite.nodes, size // suite.ranks
    if per_node == 1:
        return 0  # all that there is goes over the rails
    chunk = min(shard, CHUNK_BYTES[suite.backend])
    if suite.what == SCATTER:
        return scatter_sms(path, shard if suite.nodes == 1 else chunk, per_node, _C.most_lanes)
    pieces = [shard] if suite.nodes == 1 else [shard, chunk]  # what the rails bring is gathered by chunks
    sms_of = foreign_gather_sms if foreign else gather_sms
    return max(sms_of(path, piece, per_node) for piece in pieces)


def judge(suite: CollectiveSuite, size: int, ways: list[Way]) -> list[str]:
    """What is wrong with any way on this rank, with data that none has moved before. Collective."""
    found, seed = [], next(_seeds)
    for way in ways:
        sources = [_random(seed * suite.ranks + rank, way.source) for rank in range(suite.ranks)]
        way.out.view(torch.uint8).fill_(0xA5)
        way.source.copy_(sources[dist.get_rank()])
        made = way.run()
        out = made if isinstance(made, torch.Tensor) else way.out
        if suite.what == GATHER:
            right = torch.equal(out, torch.cat(sources))
        else:
            mine = [source.view(suite.ranks, -1)[dist.get_rank()].float() for source in sources]
            tolerance = _TOLERANCE[out.dtype] * torch.stack(mine).abs().sum(0)
            right = bool(((out.float() - torch.stack(mine).sum(0)).abs() <= tolerance).all())
        if not right:
            found.append(f"{size} by {way.impl}: not what plain torch makes of the same inputs")
    return found


def _random(seed: int, like: torch.Tensor) -> torch.Tensor:
    """What some rank contributes: every rank can make it, on the kind of device that all of them have."""
    generator = torch.Generator(like.device).manual_seed(seed)
    return torch.randn(like.shape, generator=generator, dtype=torch.float32, device=like.device).to(like.dtype)


@contextmanager
def _emulated(suite: CollectiveSuite) -> Iterator[None]:
    """Ranks that are started inside stand for several nodes."""
    name = "EP_PLUGIN_RANKS_PER_NODE"
    before = os.environ.get(name)
    if suite.nodes > 1:
        os.environ[name] = str(suite.ranks // suite.nodes)
    try:
        yield
    finally:
        if suite.nodes > 1:
            os.environ.pop(name)
            if before is not None:
                os.environ[name] = before
