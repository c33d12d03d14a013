"""The suites `allgather`, `reduce-scatter` and `send-receive` time our collectives beside those of the backend.

Every implementation is compared with plain torch before the timing and again after it, each time with new data and into
poisoned memory.

A case of the first two suites is a size in bytes. It is the size of the gathered output, or of the input that is
scattered. `bytes_wire` counts the bytes that must reach a rank. On one node they come from its peers. With several
nodes they come over its rail, and must equal what ep_plugin says it has sent. `sms` counts the SMs of ep_plugin's
largest kernel, without the backend's kernels for the rails. One object of ep_plugin serves all sizes, so `peer_bytes`
includes the buffers of earlier sizes.

A case of `send-receive` is a pattern and a message's size in bytes. `one_way`: every even rank sends to the next rank.
`both_ways`: these two ranks send to each other. `ring`: every rank sends to the next rank and receives from the
previous one. A call ends when all messages of its rank are over. `bytes_wire` counts the bytes that a rank sends.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
import torch.distributed as dist
import typer
from tqdm import tqdm

from ep_plugin import _C
from ep_plugin.bench.exchange.workload import DTYPES, SHORT_NAMES, random_like, seeds
from ep_plugin.bench.suite import (
    BY_BACKEND,
    CALLS_HELP,
    OURS,
    OverNodes,
    Row,
    Suite,
    Through,
    Way,
    backend_of,
    check_names,
    time_ways,
)
from ep_plugin.bench.timing import clock_of
from ep_plugin.collectives import HierarchicalAllGather, HierarchicalReduceScatter
from ep_plugin.collectives.backends.paths import gather_sms, scatter_sms
from ep_plugin.collectives.send_receive import Receive, Send, SendReceive
from ep_plugin.transport.rails import CHUNK_BYTES

KIB, MIB = 1 << 10, 1 << 20
_TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 3e-3}
RING = "ring"
PATTERNS = ("one_way", "both_ways", RING)
_SMALL = [32, KIB, 16 * KIB, 64 * KIB]  # sizes of messages in bytes
# PyTorch 2.13 has new names for these functions.
all_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


@dataclass(frozen=True, kw_only=True)
class CollectiveSuite(OverNodes):
    """The suite of the all-gather if it `gathers`, else of the reduce-scatter."""

    gathers: ClassVar[bool]
    defaults: ClassVar = {
        "cpu": {"ranks": 4, "size": [64 * KIB, MIB, 16 * MIB], "dtype": "float32"},
        "cuda": {"ranks": None, "size": [KIB * 4**power for power in range(3, 11)], "dtype": "bfloat16"},
    }

    size: Annotated[list[int], typer.Option(help="Bytes; repeatable. Default: 64 KiB and more.")] = BY_BACKEND
    dtype: Annotated[
        str, typer.Option(help="float32, bfloat16, float16. Default: float32 on cpu, bfloat16 on cuda.")
    ] = BY_BACKEND

    def __post_init__(self) -> None:
        super().__post_init__()
        check_names("dtype", _TOLERANCE, [self.dtype])
        unit = self.ranks * DTYPES[self.dtype].itemsize
        for size in self.size:
            if size < unit or size % unit:
                raise ValueError(f"size: expected a multiple of {unit} bytes, an element for each rank, got {size}")

    @property
    def name(self) -> str:
        """The name has the dtype if it is not the backend's default."""
        is_default = self.dtype == self.defaults[self.backend]["dtype"]
        return self.named(super().name if is_default else f"{super().name}_{SHORT_NAMES[self.dtype]}")

    def measure(self, device: torch.device) -> dict[str, Any]:
        clock, rows = clock_of(device), list[Row]()
        with ExitStack() as opened:
            ours = {impl: opened.enter_context(closing(made)) for impl, made in self.ours().items()}
            self.check_nodes(ours[OURS].engine_on(device).node_map.num_nodes)
            for size in tqdm(self.size, unit="size", disable=dist.get_rank() != 0, leave=False):
                rows += time_ways(clock, self.ways(device, size, ours), self.iterations)
        return {"rows": rows, "notes": []}

    def ours(self) -> dict[str, Any]:
        """Makes ep_plugin's collectives, by their names in results."""
        if not self.gathers:
            return {OURS: HierarchicalReduceScatter()}
        forced = {"ep_plugin copy_engine": "copy_engine", "ep_plugin sm": "sm"} if self.backend == "cuda" else {}
        return {impl: HierarchicalAllGather(path=path) for impl, path in ({OURS: "auto"} | forced).items()}

    def ways(self, device: torch.device, size: int, ours: dict[str, Any]) -> list[Way]:
        """Makes a way for each of `ours`, one with memory that peers have not mapped, and the backend's. Collective."""
        found = [self._way(device, size, impl, made) for impl, made in ours.items()]
        if device.type not in ours[OURS].maps_nothing_on:
            foreign = f"ep_plugin, foreign {'output' if self.gathers else 'input'}"
            found.append(self._way(device, size, foreign, ours[OURS], foreign=True))
        return [*found, self._way(device, size, backend_of(device), None)]

    def _way(self, device: torch.device, size: int, impl: str, made: Any, foreign: bool = False) -> Way:
        """Makes a way of ep_plugin's collective `made`, or of the backend's (None). A foreign tensor is not mapped."""
        large = self._empty(device, size, None if foreign else made)
        # As in FSDP2, the small tensor is a part of the large one. Not with gloo: its tensors would overlap.
        in_place = self.gathers and not foreign and (made is not None or device.type == "cuda")
        small = large.chunk(self.ranks)[dist.get_rank()] if in_place else self._empty(device, size // self.ranks)
        source, out = (small, large) if self.gathers else (large, small)
        call = (all_gather if self.gathers else reduce_scatter) if made is None else made

        def run() -> object:
            return call(out, source)

        def check(through: Through) -> str | None:
            seed = next(seeds)
            sources = [random_like(seed * self.ranks + rank, source) for rank in range(self.ranks)]
            out.view(torch.uint8).fill_(0xA5)
            source.copy_(sources[dist.get_rank()])
            before = 0 if made is None else made.rail_bytes_sent
            through(run)
            if not self._is_right(out, sources):
                return "expected plain torch's result for the same inputs, got another"
            sent = 0 if made is None else made.rail_bytes_sent - before
            expected = 0 if made is None or self.nodes == 1 else self.bytes_wire(size)
            return None if sent == expected else f"expected {expected} bytes over the rail in a call, got {sent}"

        sms = None if made is None or not out.is_cuda else self.most_sms(size, made.path, foreign)
        wire, holders = self.bytes_wire(size), [] if made is None else [made]
        return Way(case=str(size), impl=impl, run=run, check=check, bytes_wire=wire, sms=sms, holders=holders)

    def bytes_wire(self, size: int) -> int:
        return size // self.ranks * (self.ranks - 1 if self.nodes == 1 else self.nodes - 1)

    def most_sms(self, size: int, path: str, foreign: bool = False) -> int:
        """Returns the SMs of ep_plugin's largest kernel for `size` bytes. A foreign tensor is not from `allocate`."""
        per_node, shard = self.ranks // self.nodes, size // self.ranks
        if per_node == 1:
            return 0  # all bytes go over the rails
        # Kernels move this many bytes of a shard at a time from or to the rails.
        chunk = shard if self.nodes == 1 else min(shard, CHUNK_BYTES[self.backend])
        if self.gathers:
            return max(gather_sms(path, piece, per_node, mapped=not foreign) for piece in (shard, chunk))
        return scatter_sms(path, chunk, per_node, _C.max_channels)

    def _empty(self, device: torch.device, size: int, made: Any = None) -> torch.Tensor:
        dtype = DTYPES[self.dtype]
        if made is None:
            return torch.empty(size // dtype.itemsize, dtype=dtype, device=device)
        return made.allocate(size // dtype.itemsize, dtype, device)

    def _is_right(self, out: torch.Tensor, sources: list[torch.Tensor]) -> bool:
        if self.gathers:
            return torch.equal(out, torch.cat(sources))
        mine = torch.stack([source.view(self.ranks, -1)[dist.get_rank()].float() for source in sources])
        return bool(((out.float() - mine.sum(0)).abs() <= _TOLERANCE[self.dtype] * mine.abs().sum(0)).all())


@dataclass(frozen=True, kw_only=True)
class AllGatherSuite(CollectiveSuite):
    """Times the all-gather, by size in bytes of the gathered output."""

    command_name = "allgather"
    gathers = True


@dataclass(frozen=True, kw_only=True)
class ReduceScatterSuite(CollectiveSuite):
    """Times the reduce-scatter, by size in bytes of each rank's input."""

    command_name = "reduce-scatter"
    gathers = False


@dataclass(frozen=True, kw_only=True)
class SendReceiveSuite(Suite):
    """Times send and receive, by pattern and size in bytes."""

    command_name = "send-receive"
    least: ClassVar = Suite.least | {"calls": 1}
    defaults: ClassVar = {
        "cpu": {"ranks": 2, "calls": 8, "size": [*_SMALL, MIB, 16 * MIB, 64 * MIB]},
        "cuda": {"ranks": None, "calls": 1, "size": [*_SMALL, MIB, 8 * MIB, 64 * MIB, 256 * MIB, 1024 * MIB]},
    }

    size: Annotated[list[int], typer.Option(help="Bytes of a message; repeatable. Default: from 32.")] = BY_BACKEND
    pattern: Annotated[list[str], typer.Option(help=f"{', '.join(PATTERNS)}; repeatable. Default: all.")] = BY_BACKEND
    calls: Annotated[int, typer.Option(help=CALLS_HELP)] = BY_BACKEND

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "pattern", list(self.pattern or PATTERNS))
        check_names("pattern", PATTERNS, self.pattern)
        if self.ranks % 2 and self.pattern != [RING]:
            raise ValueError(f"ranks: expected an even number, for pairs of ranks, got {self.ranks}")
        for size in self.size:
            if size < 1:
                raise ValueError(f"size: expected at least 1 byte, got {size}")

    def measure(self, device: torch.device) -> dict[str, Any]:
        clock, rows = clock_of(device, self.calls), list[Row]()
        with closing(SendReceive(device=device)) as ours:
            cases = list(itertools.product(self.pattern, self.size))
            for pattern, size in tqdm(cases, unit="case", disable=dist.get_rank() != 0, leave=False):
                rows += time_ways(clock, self.ways(device, pattern, size, ours), self.iterations)
        return {"rows": rows, "notes": []}

    def ways(self, device: torch.device, pattern: str, size: int, ours: SendReceive) -> list[Way]:
        """Makes the way of ep_plugin and the way of the backend."""
        rank = dist.get_rank()
        before, after = (rank - 1) % self.ranks, (rank + 1) % self.ranks
        if pattern != RING:
            before = after = rank ^ 1
        sends, receives = (pattern != "one_way" or rank % 2 == receiver for receiver in (0, 1))

        def way(impl: str, send: Callable[..., Any], receive: Callable[..., Any], batch: Callable[..., Any]) -> Way:
            source, out = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
            messages = [send(source, after)] * sends + [receive(out, before)] * receives

            def run() -> object:
                return batch(messages)

            def check(through: Through) -> str | None:
                seed = next(seeds) * self.ranks
                source.copy_(random_like(seed + rank, source))
                out.fill_(0xA5)
                through(run)
                right = not receives or torch.equal(out, random_like(seed + before, out))
                return None if right else f"expected the bytes of rank {before}, got others"

            holders = [ours] if impl == OURS else []
            return Way(case=f"{pattern}_{size}", impl=impl, run=run, check=check, bytes_wire=size, holders=holders)

        return [
            way(OURS, Send, Receive, lambda messages: ours.batch(messages).wait()),
            way(
                backend_of(device),
                functools.partial(dist.P2POp, dist.isend),
                functools.partial(dist.P2POp, dist.irecv),
                lambda messages: [work.wait() for work in dist.batch_isend_irecv(messages)],
            ),
        ]
