"""Copies between the ranks' memory without any exchange around them: what the links and the SMs give.

Every rank copies at the same time, `nbytes` to (or from) each other rank. Blocks: each rank has one of R parts, and
rank r reads and writes part r of its peers' blocks, so nobody writes where another does.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ep_plugin import _C
from ep_plugin.bench.results import everyones_wrong
from ep_plugin.bench.timing import Timing, clock_of, time_in_turn
from ep_plugin.transport.peer import open_memory

CHUNKS = (1024, 4096, 8192, 14336)
SMS = (4, 8, 12, 16, 24, 48, 132)
PIECE = 4096  # of the 16-byte kinds
_KINDS = {
    "store": 0,
    "load": 1,
    "tma_store": 2,
    "tma_load": 3,
    "tma_send": 4,
    "tma_local": 4,
    "ce_push": 5,
    "ce_pull": 5,
}
_PULLS = ("load", "tma_load", "ce_pull")
_UNIT = 57344  # a multiple of all chunks
CUDA_BYTES = 4096 * _UNIT
CPU_CHUNKS = (4096, 65536, 1 << 20)
CPU_BYTES = 4 << 20


@dataclass(frozen=True, kw_only=True)
class Copy:
    """One way to copy. tma_send: own memory through shared memory to the peers; tma_local: the same within one GPU."""

    kind: str
    sms: int | None = None
    chunk: int | None = None

    @property
    def name(self) -> str:
        words = [f"c{self.chunk}" if self.chunk else "", f"sm{self.sms}" if self.sms else ""]
        return "_".join([self.kind, *filter(None, words)])


def copies_on_gpus(present: int) -> list[Copy]:
    """Everything that is measured on GPUs of `present` SMs."""
    counts = [sms for sms in SMS if sms <= present]
    found = [Copy(kind=kind, sms=sms) for kind in ("store", "load") for sms in counts]
    bulk = ("tma_store", "tma_load", "tma_local")
    found += [Copy(kind=kind, chunk=chunk, sms=sms) for kind in bulk for chunk in CHUNKS for sms in counts]
    found += [Copy(kind="tma_send", chunk=CHUNKS[-1], sms=sms) for sms in counts]
    return [*found, Copy(kind="ce_push"), Copy(kind="ce_pull")]


class GpuWire:
    """The peer-mapped blocks of the GPUs of the default group, and copies between them. Collective; close it."""

    def __init__(self, device: torch.device, nbytes: int = CUDA_BYTES) -> None:
        self.device, self.nbytes = device, nbytes
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._memory = open_memory(None, device)
        self._block = self._memory.allocate(self.size * nbytes, "wire")
        self.present = torch.cuda.get_device_properties(device).multi_processor_count
        random = torch.Generator(device).manual_seed(self.rank)
        words = torch.randint(-(2**61), 2**61, (nbytes // 8,), generator=random, device=device)
        self.source = words.view(torch.uint8)
        self.sink = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._failed = torch.zeros(2, dtype=torch.int32, device=device)
        self._others = [(self.rank + step) % self.size for step in range(1, self.size)]  # each rank starts elsewhere

    def run(self, copy: Copy, keep: bool = False) -> None:
        """Enqueues the copy on the current stream. keep: what is loaded is written to `sink`, of the last peer."""
        pulls = copy.kind in _PULLS
        parts = [self._block.ptrs[other] + self.rank * self.nbytes for other in self._others]
        here = [self.source.data_ptr()] * len(parts)
        pairs = (parts, [self.sink.data_ptr()] * len(parts)) if pulls else (here, parts)
        if copy.kind == "tma_local":
            pairs = ([self.source.data_ptr()], [self.sink.data_ptr()])
        if keep:  # one pair, or each would write to the same sink
            pairs = (pairs[0][-1:], pairs[1][-1:])
        self._enqueue(copy, pairs, keep)

    def _enqueue(self, copy: Copy, pairs: tuple[list[int], list[int]], keep: bool = False) -> None:
        args = _C.WireArgs(
            kind=_KINDS[copy.kind],
            num_sms=copy.sms or 1,
            keep=int(keep),
            seed=self.rank,
            chunk_bytes=copy.chunk or PIECE,
            bytes=self.nbytes,
            failed=self._failed.data_ptr(),
            stream=torch.cuda.current_stream(self.device).cuda_stream,
        )
        args.set_pairs(*pairs)
        _C.wire(args)

    def moved(self, copy: Copy) -> int:
        """Bytes that one rank copies in one direction."""
        return self.nbytes * (1 if copy.kind == "tma_local" else len(self._others))

    def wrong(self, copy: Copy) -> str | None:
        """Copies into poisoned memory and looks at every byte: what is wrong, None when nothing is. Collective."""
        self._poison(copy)
        torch.cuda.synchronize(self.device)
        dist.barrier()
        self.run(copy, keep=copy.kind in _PULLS)
        torch.cuda.synchronize(self.device)
        dist.barrier()
        problem = self._find_wrong(copy)
        torch.cuda.synchronize(self.device)
        dist.barrier()
        return problem or self.gave_up()

    def gave_up(self) -> str | None:
        count = int(self._failed[0])
        return f"{count} warps gave up waiting for a load" if count else None

    def _poison(self, copy: Copy) -> None:
        """The sink, and the own block: for loads it holds what peers will read, by part."""
        self.sink.fill_(0xFF)
        for part in range(self.size):
            content = self._content(self.rank, part) if copy.kind in _PULLS else self.sink
            self._enqueue(Copy(kind="ce_push"), ([content.data_ptr()], [self._own_part(part)]))

    def _find_wrong(self, copy: Copy) -> str | None:
        if copy.kind in _PULLS:
            return self._compare(self.sink, self._content(self._others[-1], self.rank), "what was loaded")
        if copy.kind == "tma_local":
            return self._compare(self.sink, self.source, "the copy")
        got = torch.empty_like(self.sink)
        for sender in self._others:
            self._enqueue(Copy(kind="ce_push"), ([self._own_part(sender)], [got.data_ptr()]))
            problem = self._compare(got, self._stored(copy, sender), f"what rank {sender} stored")
            if problem:
                return problem
        return None

    def _stored(self, copy: Copy, sender: int) -> torch.Tensor:
        """What `sender` writes into its part of each peer's block."""
        if copy.kind == "store":
            unit = torch.arange(self.nbytes // PIECE, dtype=torch.int32, device=self.device)
            words = torch.stack((unit, torch.full_like(unit, sender), ~unit, torch.zeros_like(unit)), 1)
            return words.repeat_interleave(PIECE // 16, 0).view(torch.uint8).view(-1)
        source = self._content(sender)
        return source[: copy.chunk].repeat(self.nbytes // (copy.chunk or 1)) if copy.kind == "tma_store" else source

    def _content(self, rank: int, part: int | None = None) -> torch.Tensor:
        """`source` of a rank; with `part`, something that differs from part to part."""
        random = torch.Generator(self.device).manual_seed(rank if part is None else self.size * (rank + 1) + part)
        words = torch.randint(-(2**61), 2**61, (self.nbytes // 8,), generator=random, device=self.device)
        return words.view(torch.uint8)

    def _own_part(self, part: int) -> int:
        return self._block.ptrs[self.rank] + part * self.nbytes

    @staticmethod
    def _compare(got: torch.Tensor, expected: torch.Tensor, what: str) -> str | None:
        differing = int((got.view(torch.int64) != expected.view(torch.int64)).sum())
        if differing == 0:
            return None
        return f"{what}: expected the sender's bytes, got others in {differing} of {len(got) // 8} words"

    def close(self) -> None:
        self._memory.close()


class CpuWire:
    """The same between processes: copies into the peers' shared memory, chunk by chunk."""

    def __init__(self, nbytes: int = CPU_BYTES) -> None:
        self.nbytes, self.rank, self.size = nbytes, dist.get_rank(), dist.get_world_size()
        self._memory = open_memory(None, "cpu")
        self._block = self._memory.allocate(self.size * nbytes, "wire")
        self.source = torch.full((nbytes,), self.rank + 1, dtype=torch.uint8)
        self._others = [(self.rank + step) % self.size for step in range(1, self.size)]

    def run(self, copy: Copy) -> None:
        assert copy.chunk is not None
        source = self.source.data_ptr()
        for start in range(0, self.nbytes, copy.chunk):
            for other in self._others:
                ctypes.memmove(self._block.ptrs[other] + self.rank * self.nbytes + start, source + start, copy.chunk)

    def moved(self, copy: Copy) -> int:
        return self.nbytes * len(self._others)

    def wrong(self, copy: Copy) -> str | None:
        """As GpuWire's. Collective."""
        block = (ctypes.c_uint8 * (self.size * self.nbytes)).from_address(self._block.ptrs[self.rank])
        own = torch.frombuffer(block, dtype=torch.uint8)
        own.fill_(0)
        dist.barrier()
        self.run(copy)
        dist.barrier()
        expected = torch.arange(1, self.size + 1, dtype=torch.uint8)
        expected[self.rank] = 0
        found = bool((own.view(self.size, -1) == expected.unsqueeze(1)).all())
        dist.barrier()
        return None if found else "expected every peer's bytes in its part, got others"

    def gave_up(self) -> str | None:
        return None

    def close(self) -> None:
        self._memory.close()


Wire = GpuWire | CpuWire


def measure_copies(
    wire: Wire, device: torch.device, copies: list[Copy], iterations: int, progress: Callable[[str], None]
) -> dict[str, Timing]:
    """Times copies one after the other, by name. Collective."""
    clock = clock_of(device)
    found: dict[str, Timing] = {}
    for copy in copies:
        progress(copy.name)

        def run(copy: Copy = copy) -> None:
            wire.run(copy)

        found |= time_in_turn(clock, {copy.name: run}, iterations, warmup=2)
    return found


@dataclass(frozen=True, kw_only=True)
class StoreRate:
    """GB/s per GPU and direction of the best way, and its name. wrong: what was wrong with any, on any rank."""

    gb_s: float
    case: str
    wrong: list[str]


def best_sm_store_rate(device: torch.device, iterations: int = 30) -> StoreRate:
    """The best way to store to all peers by SMs: from registers or shared memory, nothing is read. Collective, CUDA.

    Every way is judged before any is timed.
    """
    wire = GpuWire(device)
    try:
        wanted = [Copy(kind="tma_store", chunk=CHUNKS[-1], sms=sms) for sms in (16, 48, 132) if sms <= wire.present]
        wanted.append(Copy(kind="store", sms=min(132, wire.present)))
        judged = [(copy.name, wire.wrong(copy)) for copy in wanted]
        wrong = everyones_wrong([f"{name}: {problem}" for name, problem in judged if problem])
        if wrong:
            return StoreRate(gb_s=0.0, case="", wrong=wrong)
        timings = measure_copies(wire, device, wanted, iterations, lambda _: None)
        rates = {copy.name: wire.moved(copy) / timings[copy.name].median_us / 1e3 for copy in wanted}
    finally:
        wire.close()
    best = max(rates, key=lambda name: rates[name])
    return StoreRate(gb_s=rates[best], case=best, wrong=[])
