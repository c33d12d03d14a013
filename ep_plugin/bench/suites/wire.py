"""The suite `wire` measures the rates of the links and of the SMs, without any exchange around them. GPUs only.

All ranks copy at the same time, `nbytes` to (or from) each other rank. A block has one part for each rank. Rank r reads
and writes part r of its peers' blocks, so no two ranks write to the same part.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from ep_plugin import _C
from ep_plugin.bench.suite import Row, Suite, Way, time_ways
from ep_plugin.bench.timing import clock_of
from ep_plugin.collectives.blocks import tensor_at
from ep_plugin.transport import open_memory
from ep_plugin.transport.exchange import Exchange

CHUNKS = (1024, 4096, 14336)
SMS = (4, 8, 12, 16, 24, 48, 132)
PIECE = 4096  # bytes of a chunk of 16-byte stores and loads
KINDS = {"store": 0, "load": 1, "tma_store": 2, "tma_load": 3, "ce_push": 4, "ce_pull": 4}  # csrc/common/wire.h
_PULLS = ("load", "tma_load", "ce_pull")
CUDA_BYTES = 4096 * 57344  # a multiple of all chunks


@dataclass(frozen=True, kw_only=True)
class Copy:
    """One way to copy: its kind, its SMs, and the bytes of a chunk. None where the kind has no choice."""

    kind: str
    sms: int | None = None
    chunk: int | None = None

    @property
    def name(self) -> str:
        words = [f"c{self.chunk}" if self.chunk else "", f"sm{self.sms}" if self.sms else ""]
        return "_".join([self.kind, *filter(None, words)])


def all_copies(present: int) -> list[Copy]:
    """Returns all copies that are measured on GPUs of `present` SMs."""
    counts = [sms for sms in SMS if sms <= present]
    found = [Copy(kind=kind, sms=sms) for kind in ("store", "load") for sms in counts]
    bulk = ("tma_store", "tma_load")
    found += [Copy(kind=kind, chunk=chunk, sms=sms) for kind in bulk for chunk in CHUNKS for sms in counts]
    return [*found, Copy(kind="ce_push"), Copy(kind="ce_pull")]


@dataclass(frozen=True, kw_only=True)
class WireSuite(Suite):
    """Measures rates of links and SMs: stores, loads, TMA and copy engines, by SMs and chunk. GPUs only."""

    command_name = "wire"
    defaults: ClassVar = {"cuda": {"ranks": None}}

    def measure(self, device: torch.device) -> dict[str, Any]:
        with contextlib.closing(Wire(device)) as wire:
            return {"rows": time_copies(wire, all_copies(wire.present), self.iterations), "notes": []}


class Wire:
    """Copies between blocks that the GPUs of a group map. Construction is collective. The caller closes it."""

    def __init__(self, device: torch.device, nbytes: int = CUDA_BYTES) -> None:
        self.device, self.nbytes = device, nbytes
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._memory = open_memory(Exchange(), device)
        self._ptrs = self._memory.allocate(self.size * nbytes, "wire").ptrs
        self._parts = tensor_at(self._ptrs[self.rank], self.size * nbytes, device).view(self.size, nbytes)
        self.present = torch.cuda.get_device_properties(device).multi_processor_count
        self._source = self._content(self.rank)
        self._sink = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._failed = torch.zeros(2, dtype=torch.int32, device=device)
        self._others = [(self.rank + step) % self.size for step in range(1, self.size)]  # ranks start apart
        self.moved = nbytes * len(self._others)  # bytes that one rank copies in one direction

    def run(self, copy: Copy, keep: bool = False) -> None:
        """Enqueues the copy on the current stream. With `keep`, `_sink` gets the bytes of the last peer."""
        pulls = copy.kind in _PULLS
        theirs = [self._ptrs[other] + self.rank * self.nbytes for other in self._others]
        if keep:  # copies only one pair, since all pairs would write to the same sink
            theirs = theirs[-1:]
        here = [(self._sink if pulls else self._source).data_ptr()] * len(theirs)
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
        args.set_pairs(*((theirs, here) if pulls else (here, theirs)))
        _C.wire(args)

    def wrong(self, copy: Copy, _: object = None) -> str | None:
        """Copies into poisoned memory. Returns a sentence if any byte is wrong, else None. Collective."""
        pulls = copy.kind in _PULLS
        self._sink.fill_(0xFF)
        self._parts.fill_(0xFF)
        for part in range(self.size if pulls else 0):
            self._parts[part] = self._content(self.rank, part)
        self._synchronize()
        self.run(copy, keep=pulls)
        self._synchronize()
        if pulls:
            problem = _compare(self._sink, self._content(self._others[-1], self.rank), "the loaded bytes")
        else:
            found = (
                _compare(self._parts[sender], self._stored(copy, sender), f"the bytes from rank {sender}")
                for sender in self._others
            )
            problem = next(filter(None, found), None)
        self._synchronize()
        gave_up = int(self._failed[0])
        return problem or (f"{gave_up} warps gave up waiting for a load" if gave_up else None)

    def _synchronize(self) -> None:
        torch.cuda.synchronize(self.device)
        dist.barrier()

    def _stored(self, copy: Copy, sender: int) -> torch.Tensor:
        """Returns the bytes that `sender` writes into its part of each peer's block."""
        if copy.kind == "store":
            unit = torch.arange(self.nbytes // PIECE, dtype=torch.int32, device=self.device)
            words = torch.stack((unit, torch.full_like(unit, sender), ~unit, torch.zeros_like(unit)), 1)
            return words.repeat_interleave(PIECE // 16, 0).view(torch.uint8).view(-1)
        source = self._content(sender)
        return source[: copy.chunk].repeat(self.nbytes // (copy.chunk or 1)) if copy.kind == "tma_store" else source

    def _content(self, rank: int, part: int | None = None) -> torch.Tensor:
        """Returns the `_source` of a rank, or, with `part`, bytes that differ from part to part."""
        random = torch.Generator(self.device).manual_seed(rank if part is None else self.size * (rank + 1) + part)
        words = torch.randint(-(2**61), 2**61, (self.nbytes // 8,), generator=random, device=self.device)
        return words.view(torch.uint8)

    def close(self) -> None:
        self._memory.close()


def _compare(got: torch.Tensor, expected: torch.Tensor, what: str) -> str | None:
    differing = int((got.view(torch.int64) != expected.view(torch.int64)).sum())
    found = f"{what}: expected the sender's bytes, got others in {differing} of {len(got) // 8} words"
    return found if differing else None


def time_copies(wire: Wire, copies: list[Copy], iterations: int) -> list[Row]:
    """Times the copies in turn. Raises WrongResult if a copy moves wrong bytes. Collective."""
    ways = [
        Way(case=copy.name, impl="wire", run=partial(wire.run, copy), check=partial(wire.wrong, copy),
            bytes_wire=wire.moved, sms=copy.sms)
        for copy in copies
    ]  # fmt: skip
    return time_ways(clock_of(wire.device), ways, iterations)


def best_sm_store_rate(device: torch.device, iterations: int = 30) -> tuple[float, str]:
    """Returns the GB/s per GPU and direction of the best way to store to all peers by SMs, and its name. Collective.

    It runs on GPUs. Raises WrongResult if any way stores wrong bytes.
    """
    with contextlib.closing(Wire(device)) as wire:
        wanted = [Copy(kind="tma_store", chunk=CHUNKS[-1], sms=sms) for sms in (16, 48, 132) if sms <= wire.present]
        wanted.append(Copy(kind="store", sms=min(132, wire.present)))
        best = min(time_copies(wire, wanted, iterations), key=lambda row: row["median_us"])
    return wire.moved / best["median_us"] / 1e3, best["case"]
