"""The suite `send-receive`: messages by SendReceive and by the backend's own batches of isend and irecv.

A case is a pattern and a message's size in bytes. `one_way`: every even rank sends to the rank after it. `both_ways`:
these two send to each other. `ring`: every rank sends to the rank after it and receives from the one before it. A call
ends when all messages of its rank are over. `bytes_wire` are the bytes that a rank sends.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
import torch.distributed as dist
import typer
from tqdm import tqdm

from ep_plugin.bench.exchange.workload import random_bytes, seeds
from ep_plugin.bench.suite import BY_BACKEND, CALLS_HELP, OURS, Row, Suite, Way, backend_of, check_names, time_ways
from ep_plugin.bench.suites.collectives import KIB, MIB
from ep_plugin.bench.timing import Run, clock_of
from ep_plugin.collectives.send_receive import Receive, Send, SendReceive

RING = "ring"
PATTERNS = ("one_way", "both_ways", RING)
_SMALL = [32, KIB, 16 * KIB, 64 * KIB]


@dataclass(frozen=True, kw_only=True)
class SendReceiveSuite(Suite):
    """Send and receive, by pattern and size in bytes."""

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

    def ways(
        self,
        device: torch.device,
        pattern: str,
        size: int,
        ours: SendReceive,
        wrap: Callable[[Run], Run] = lambda run: run,
    ) -> list[Way]:
        """By ep_plugin and by the backend. wrap: is applied to each call."""
        return [self._way(device, pattern, size, made, wrap) for made in (ours, None)]

    def _way(
        self, device: torch.device, pattern: str, size: int, ours: SendReceive | None, wrap: Callable[[Run], Run]
    ) -> Way:
        """ours: None is the backend's own."""
        rank = dist.get_rank()
        before, after = (rank - 1) % self.ranks, (rank + 1) % self.ranks
        if pattern != RING:
            before = after = rank ^ 1
        sends = pattern != "one_way" or rank % 2 == 0
        receives = pattern != "one_way" or rank % 2 == 1
        source, out = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
        if ours is None:
            ops = [dist.P2POp(dist.isend, source, after)] * sends + [dist.P2POp(dist.irecv, out, before)] * receives

            def call() -> object:
                return [work.wait() for work in dist.batch_isend_irecv(ops)]
        else:
            messages = [Send(source, after)] * sends + [Receive(out, before)] * receives

            def call() -> object:
                return ours.batch(messages).wait()

        run = wrap(call)

        def check() -> str | None:
            seed = next(seeds) * self.ranks
            source.copy_(random_bytes(seed + rank, source))
            out.fill_(0xA5)
            run()
            right = not receives or torch.equal(out, random_bytes(seed + before, out))
            return None if right else f"expected the bytes of rank {before}, got others"

        impl = OURS if ours else backend_of(device)
        return Way(case=f"{pattern}_{size}", impl=impl, run=run, check=check, bytes_wire=size)
