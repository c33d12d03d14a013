"""The suites `allgather` and `reduce-scatter`: ours, and the backend's own.

A case is a size in bytes: of the gathered output, or of the input that is scattered. Every implementation is compared
with plain torch before any is timed, and once more after, each time with new data and into poisoned memory.
`bytes_wire` are the bytes that must reach a rank: from its peers, or with several nodes over its rail, where ep_plugin
counts them. `sms` are of the largest of ep_plugin's kernels; the backend's own for the rails are not in it.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import torch
import torch.distributed as dist
import typer
from tqdm import tqdm

from ep_plugin import _C
from ep_plugin.bench.suite import BY_BACKEND, WARMUP, Row, Suite, require_right, row
from ep_plugin.bench.timing import clock_of, time_in_turn
from ep_plugin.collectives import HierarchicalAllGather, HierarchicalReduceScatter
from ep_plugin.collectives.backends.cuda import gather_sms, scatter_sms
from ep_plugin.collectives.backends.cuda_gather import foreign_gather_sms
from ep_plugin.transport.rails import CHUNK_BYTES

KIB, MIB = 1 << 10, 1 << 20
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
_seeds = itertools.count()  # of the data of comparisons: the same on all ranks
# The names of PyTorch 2.13 and later, or those of before.
_all_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


@dataclass(frozen=True, kw_only=True)
class Way:
    """One implementation of a case: `run` reads `source` and writes `out`.

    sent: the bytes that each call so far has sent over this rank's rail, where ep_plugin counts them.
    """

    impl: str
    run: Callable[[], object]
    source: torch.Tensor
    out: torch.Tensor
    sms: int | None = None
    sent: list[int] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class CollectiveSuite(Suite):
    """All-gather or reduce-scatter."""

    foreign: ClassVar[str]  # the name of the tensor that peers may not have mapped
    defaults: ClassVar[dict[str, dict[str, Any]]] = {
        "cpu": {"ranks": 4, "size": [64 * KIB, MIB, 16 * MIB]},
        "cuda": {"ranks": None, "size": [KIB * 4**power for power in range(3, 11)]},
    }
    least: ClassVar[dict[str, int]] = Suite.least | {"nodes": 1}

    nodes: Annotated[int, typer.Option(help="Nodes that the ranks of this machine stand for.")] = 1
    size: Annotated[list[int], typer.Option(help="Bytes; repeatable. Default: 64 KiB and more.")] = BY_BACKEND

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ranks % self.nodes:
            raise ValueError(f"nodes: expected a divisor of {self.ranks} ranks, got {self.nodes}")
        unit = self.ranks * DTYPES[self.backend].itemsize
        for size in self.size:
            if size < unit or size % unit:
                raise ValueError(f"size: expected a multiple of {unit} bytes, an element for each rank, got {size}")

    @property
    def name(self) -> str:
        return super().name if self.nodes == 1 else f"{super().name}_{self.nodes}_nodes"

    def run(self) -> dict[str, Any]:
        with emulated_nodes(self.ranks, self.nodes):
            return super().run()

    def measure(self, device: torch.device) -> dict[str, Any]:
        clock, rows = clock_of(device), list[Row]()
        with ExitStack() as opened:
            objects = {impl: opened.enter_context(closing(made)) for impl, made in self.objects(device).items()}
            for made in objects.values():
                nodes = made.engine_on(device).node_map.num_nodes
                if nodes != self.nodes:
                    raise ValueError(f"nodes: expected {nodes}, which the ranks are on, got {self.nodes}")
            for size in tqdm(self.size, unit="size", disable=dist.get_rank() != 0, leave=False):
                ways = self.ways(device, size, objects)
                require_right(self.wrong(size, ways))
                timings = time_in_turn(clock, {way.impl: way.run for way in ways}, self.iterations, WARMUP)
                require_right(self.wrong(size, ways) + self.wrong_on_rails(size, ways))
                for way in ways:
                    wire = way.sent[-1] if way.sent and self.nodes > 1 else self.bytes_wire(size)
                    rows.append(row(str(size), way.impl, timings[way.impl], wire, way.sms))
                del ways
        return {"rows": rows, "notes": []}

    def bytes_wire(self, size: int) -> int:
        return size // self.ranks * (self.ranks - 1 if self.nodes == 1 else self.nodes - 1)

    def ways(self, device: torch.device, size: int, objects: dict[str, Any]) -> list[Way]:
        """By each of `objects`, by ep_plugin with memory that peers have not mapped, and by the backend. Collective."""
        ours = objects["ep_plugin"]
        found = [self._ours(impl, made, *self.tensors(device, size, made)) for impl, made in objects.items()]
        if device.type not in ours.maps_nothing_on:
            impl = f"ep_plugin, foreign {self.foreign}"
            found.append(self._ours(impl, ours, *self.tensors(device, size), foreign=True))
        source, out = self.tensors(device, size, in_place=device.type == "cuda")  # gloo's would overlap
        backend = "nccl" if device.type == "cuda" else "gloo"
        return [*found, Way(impl=backend, run=lambda: self.by_backend(out, source), source=source, out=out)]

    def _ours(self, impl: str, made: Any, source: torch.Tensor, out: torch.Tensor, foreign: bool = False) -> Way:
        sent: list[int] = []

        def run() -> None:
            before = made.rail_bytes_sent
            made(out, source)
            sent.append(made.rail_bytes_sent - before)

        sms = self.most_sms(max(source.nbytes, out.nbytes), made.path, foreign) if out.is_cuda else None
        return Way(impl=impl, run=run, source=source, out=out, sms=sms, sent=sent)

    def wrong(self, size: int, ways: list[Way]) -> list[str]:
        """A sentence for each way that is wrong on this rank, with data that no call has moved before. Collective."""
        found, seed = [], next(_seeds)
        for way in ways:
            sources = [_random(seed * self.ranks + rank, way.source) for rank in range(self.ranks)]
            way.out.view(torch.uint8).fill_(0xA5)
            way.source.copy_(sources[dist.get_rank()])
            way.run()
            if not self.is_right(way.out, sources):
                found.append(f"{size} by {way.impl}: not what plain torch makes of the same inputs")
        return found

    def wrong_on_rails(self, size: int, ways: list[Way]) -> list[str]:
        """A sentence for each way that sends anything but this rank's shard to each other node."""
        expected = self.bytes_wire(size) if self.nodes > 1 else 0
        return [
            f"{size} by {way.impl}: expected {expected} bytes over the rail in each call, got {sorted(set(way.sent))}"
            for way in ways
            if set(way.sent) - {expected}
        ]

    def most_sms(self, size: int, path: str, foreign: bool = False) -> int:
        """SMs of the largest of ep_plugin's kernels for `size` bytes. foreign: not in memory from `allocate`."""
        per_node, shard = self.ranks // self.nodes, size // self.ranks
        if per_node == 1:
            return 0  # all bytes go over the rails
        chunk = min(shard, CHUNK_BYTES[self.backend])
        return self.kernel_sms(path, shard, chunk, per_node, foreign)

    def objects(self, device: torch.device) -> dict[str, Any]:
        """The collectives of ep_plugin by their names in results. Collective."""
        raise NotImplementedError

    def tensors(
        self, device: torch.device, size: int, made: Any = None, in_place: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Input and output, the larger one of `size` bytes and from `made.allocate`, if `made` is given.

        in_place: a gather's input is part of its output, as FSDP2 calls it; so it is where `made` is given.
        """
        raise NotImplementedError

    def by_backend(self, out: torch.Tensor, source: torch.Tensor) -> object:
        raise NotImplementedError

    def is_right(self, out: torch.Tensor, sources: list[torch.Tensor]) -> bool:
        raise NotImplementedError

    def kernel_sms(self, path: str, shard: int, chunk: int, per_node: int, foreign: bool) -> int:
        raise NotImplementedError

    def _empty(self, device: torch.device, size: int, made: Any = None) -> torch.Tensor:
        dtype = DTYPES[self.backend]
        if made is None:
            return torch.empty(size // dtype.itemsize, dtype=dtype, device=device)
        allocated: torch.Tensor = made.allocate(size // dtype.itemsize, dtype, device)
        return allocated


@dataclass(frozen=True, kw_only=True)
class AllGatherSuite(CollectiveSuite):
    """All-gather, by size in bytes of the gathered output."""

    command_name: ClassVar[str] = "allgather"
    foreign: ClassVar[str] = "output"

    def objects(self, device: torch.device) -> dict[str, Any]:
        paths = {"ep_plugin": "auto"}
        if device.type == "cuda":
            paths |= {"ep_plugin copy_engine": "copy_engine", "ep_plugin sm": "sm"}
        return {impl: HierarchicalAllGather(path=path) for impl, path in paths.items()}

    def tensors(
        self, device: torch.device, size: int, made: Any = None, in_place: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out = self._empty(device, size, made)
        if made is None and not in_place:
            return self._empty(device, size // self.ranks), out
        return out.chunk(self.ranks)[dist.get_rank()], out

    def by_backend(self, out: torch.Tensor, source: torch.Tensor) -> object:
        return _all_gather(out, source)

    def is_right(self, out: torch.Tensor, sources: list[torch.Tensor]) -> bool:
        return torch.equal(out, torch.cat(sources))

    def kernel_sms(self, path: str, shard: int, chunk: int, per_node: int, foreign: bool) -> int:
        pieces = [shard] if self.nodes == 1 else [shard, chunk]  # bytes from the rails are gathered by chunks
        sms_of = foreign_gather_sms if foreign else gather_sms
        return max(sms_of(path, piece, per_node) for piece in pieces)


@dataclass(frozen=True, kw_only=True)
class ReduceScatterSuite(CollectiveSuite):
    """Reduce-scatter, by size in bytes of each rank's input."""

    command_name: ClassVar[str] = "reduce-scatter"
    foreign: ClassVar[str] = "input"

    def objects(self, device: torch.device) -> dict[str, Any]:
        return {"ep_plugin": HierarchicalReduceScatter()}

    def tensors(
        self, device: torch.device, size: int, made: Any = None, in_place: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._empty(device, size, made), self._empty(device, size // self.ranks)

    def by_backend(self, out: torch.Tensor, source: torch.Tensor) -> object:
        return _reduce_scatter(out, source)

    def is_right(self, out: torch.Tensor, sources: list[torch.Tensor]) -> bool:
        mine = torch.stack([source.view(self.ranks, -1)[dist.get_rank()].float() for source in sources])
        return bool(((out.float() - mine.sum(0)).abs() <= _TOLERANCE[out.dtype] * mine.abs().sum(0)).all())

    def kernel_sms(self, path: str, shard: int, chunk: int, per_node: int, foreign: bool) -> int:
        return scatter_sms(path, shard if self.nodes == 1 else chunk, per_node, _C.most_lanes)


@contextmanager
def emulated_nodes(ranks: int, nodes: int) -> Iterator[None]:
    """Ranks that are started inside stand for several nodes."""
    name = "EP_PLUGIN_RANKS_PER_NODE"
    before = os.environ.get(name)
    if nodes > 1:
        os.environ[name] = str(ranks // nodes)
    try:
        yield
    finally:
        if nodes > 1:
            os.environ.pop(name)
            if before is not None:
                os.environ[name] = before


def _random(seed: int, like: torch.Tensor) -> torch.Tensor:
    """A rank's input, which every rank can make on its own device."""
    generator = torch.Generator(like.device).manual_seed(seed)
    return torch.randn(like.shape, generator=generator, dtype=torch.float32, device=like.device).to(like.dtype)
