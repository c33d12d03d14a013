"""Copies between the ranks' memory without any exchange around them: the rates of the links and of the SMs.

Every rank copies at the same time, `nbytes` to (or from) each other rank. A block has one part for each rank: rank r
reads and writes part r of its peers' blocks, so no two ranks write to one place.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from tqdm import tqdm

from ep_plugin import _C
from ep_plugin.bench.suite import require_right
from ep_plugin.bench.timing import Timing, clock_of, time_in_turn
from ep_plugin.transport.peer import open_memory

CHUNKS = (1024, 4096, 14336)
SMS = (4, 8, 12, 16, 24, 48, 132)
PIECE = 4096  # the chunk of 16-byte stores and loads
KINDS = {"store": 0, "load": 1, "tma_store": 2, "tma_load": 3, "ce_push": 5, "ce_pull": 5}  # csrc/common/wire.h
_PULLS = ("load", "tma_load", "ce_pull")
_UNIT = 57344  # a multiple of all chunks
CUDA_BYTES = 4096 * _UNIT
CPU_CHUNKS = (4096, 65536, 1 << 20)
CPU_BYTES = 4 << 20


@dataclass(frozen=True, kw_only=True)
class Copy:
    """One way to copy."""

    kind: str
    sms: int | None = None
    chunk: int | None = None

    @property
    def name(self) -> str:
        words = [f"c{self.chunk}" if self.chunk else "", f"sm{self.sms}" if self.sms else ""]
        return "_".join([self.kind, *filter(None, words)])


def copies_on_gpus(present: int) -> list[Copy]:
    """All copies that are measured on GPUs of `present` SMs."""
    counts = [sms for sms in SMS if sms <= present]
    found = [Copy(kind=kind, sms=sms) for kind in ("store", "load") for sms in counts]
    bulk = ("tma_store", "tma_load")
    found += [Copy(kind=kind, chunk=chunk, sms=sms) for kind in bulk for chunk in CHUNKS for sms in counts]
    return [*found, Copy(kind="ce_push"), Copy(kind="ce_pull")]


class GpuWire:
    """Peer-mapped blocks of the default group's GPUs, and copies between them. Collective; the caller closes it."""

    def __init__(self, device: torch.device, nbytes: int = CUDA_BYTES) -> None:
        self.device, self.nbytes = device, nbytes
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._memory = open_memory(None, device)
        self._block = self._memory.allocate(self.size * nbytes, "wire")
        self.present = torch.cuda.get_device_properties(device).multi_processor_count
        self.source = self._content(self.rank)
        self.sink = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._failed = torch.zeros(2, dtype=torch.int32, device=device)
        self._others = [(self.rank + step) % self.size for step in range(1, self.size)]  # each rank starts elsewhere

    def run(self, copy: Copy, keep: bool = False) -> None:
        """Enqueues the copy on the current stream. keep: bytes that are loaded from the last peer go to `sink`."""
        parts = [self._block.ptrs[other] + self.rank * self.nbytes for other in self._others]
        here = [(self.sink if copy.kind in _PULLS else self.source).data_ptr()] * len(parts)
        sources, destinations = (parts, here) if copy.kind in _PULLS else (here, parts)
        if keep:  # one pair, or each would write to the same sink
            sources, destinations = sources[-1:], destinations[-1:]
        self._enqueue(copy, sources, destinations, keep)

    def _enqueue(self, copy: Copy, sources: list[int], destinations: list[int], keep: bool = False) -> None:
        args = _C.WireArgs(
            kind=KINDS[copy.kind],
            num_sms=copy.sms or 1,
            keep=int(keep),
            seed=self.rank,
            chunk_bytes=copy.chunk or PIECE,
            bytes=self.nbytes,
            failed=self._failed.data_ptr(),
            stream=torch.cuda.current_stream(self.device).cuda_stream,
        )
        args.set_pairs(sources, destinations)
        _C.wire(args)

    def moved(self) -> int:
        """Bytes that one rank copies in one direction."""
        return self.nbytes * len(self._others)

    def wrong(self, copy: Copy) -> str | None:
        """Copies into poisoned memory and compares every byte: a sentence on what is wrong, or None. Collective."""
        pulls = copy.kind in _PULLS
        self.sink.fill_(0xFF)
        for part in range(self.size):
            content = self._content(self.rank, part) if pulls else self.sink  # for loads, different in each part
            self._enqueue(Copy(kind="ce_push"), [content.data_ptr()], [self._own_part(part)])
        self._together()
        self.run(copy, keep=pulls)
        self._together()
        problem = self._find_wrong(copy)
        self._together()
        return problem or self.gave_up()

    def _together(self) -> None:
        torch.cuda.synchronize(self.device)
        dist.barrier()

    def gave_up(self) -> str | None:
        """A sentence when warps stopped waiting for a load."""
        count = int(self._failed[0])
        return f"{count} warps gave up waiting for a load" if count else None

    def _find_wrong(self, copy: Copy) -> str | None:
        if copy.kind in _PULLS:
            return self._compare(self.sink, self._content(self._others[-1], self.rank), "what was loaded")
        got = torch.empty_like(self.sink)
        for sender in self._others:
            self._enqueue(Copy(kind="ce_push"), [self._own_part(sender)], [got.data_ptr()])
            problem = self._compare(got, self._stored(copy, sender), f"what rank {sender} stored")
            if problem:
                return problem
        return None

    def _stored(self, copy: Copy, sender: int) -> torch.Tensor:
        """The bytes that `sender` writes into its part of each peer's block."""
        if copy.kind == "store":
            unit = torch.arange(self.nbytes // PIECE, dtype=torch.int32, device=self.device)
            words = torch.stack((unit, torch.full_like(unit, sender), ~unit, torch.zeros_like(unit)), 1)
            return words.repeat_interleave(PIECE // 16, 0).view(torch.uint8).view(-1)
        source = self._content(sender)
        return source[: copy.chunk].repeat(self.nbytes // (copy.chunk or 1)) if copy.kind == "tma_store" else source

    def _content(self, rank: int, part: int | None = None) -> torch.Tensor:
        """`source` of a rank, or, with `part`, bytes that differ from part to part."""
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
    """Copies between processes: into the peers' shared memory, chunk by chunk. Collective; the caller closes it."""

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

    def moved(self) -> int:
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


def time_copies(
    wire: GpuWire | CpuWire, device: torch.device, copies: Iterable[Copy], iterations: int
) -> dict[Copy, Timing]:
    """Times the copies one after the other. Raises WrongResult when a copy moves wrong bytes. Collective."""
    found = [(copy.name, wire.wrong(copy)) for copy in copies]
    require_right([f"{name}: {problem}" for name, problem in found if problem])
    clock, timings = clock_of(device), dict[Copy, Timing]()
    progress = tqdm(copies, unit="copy", disable=dist.get_rank() != 0, leave=False)
    for copy in progress:
        progress.set_description(copy.name)
        timings |= time_in_turn(clock, {copy: functools.partial(wire.run, copy)}, iterations, warmup=2)
    late = wire.gave_up()
    require_right([late] if late else [])
    return timings


def best_sm_store_rate(device: torch.device, iterations: int = 30) -> tuple[float, str]:
    """GB/s per GPU and direction of the best way to store to all peers by SMs, and the way's name. Collective, CUDA.

    Raises WrongResult when any way stores wrong bytes.
    """
    wire = GpuWire(device)
    try:
        wanted = [Copy(kind="tma_store", chunk=CHUNKS[-1], sms=sms) for sms in (16, 48, 132) if sms <= wire.present]
        wanted.append(Copy(kind="store", sms=min(132, wire.present)))
        timings = time_copies(wire, device, wanted, iterations)
        rates = {copy.name: wire.moved() / timing.median_us / 1e3 for copy, timing in timings.items()}
    finally:
        wire.close()
    best = max(rates, key=lambda name: rates[name])
    return rates[best], best
