"""The rail's own all-to-all: the bytes of the rows that must cross between nodes, and nothing else.

It shows the rate that the links and the backend allow. Nothing is packed, forwarded or added.

Shapes: R ranks, N nodes.
"""

from __future__ import annotations

import functools
import itertools

import torch
import torch.distributed as dist

from ep_plugin.bench.exchange.workload import random_bytes


class RailAllToAll:
    """Calls make one or two all-to-alls between the ranks of this rank's rail: there, or back, or there and back.

    rows: `[R, N]`, rows of each rank for each other node, see `rows_over_rails`. there, back: bytes of a row in each
    direction; 0: none goes. The constructor is collective over the default group.
    """

    def __init__(self, rows: torch.Tensor, there: int, back: int, device: torch.device) -> None:
        R, N = rows.shape
        self._rank, self._device = dist.get_rank(), device
        self._ranks = list(range(self._rank % (R // N), R, R // N))
        sent, received = rows[self._rank].tolist(), rows[self._ranks, self._rank // (R // N)].tolist()
        legs = [(sent, received, there), (received, sent, back)]
        self._legs = [_Leg(sent, received, size, _rails(R, N), device) for sent, received, size in legs if size]
        self._turns = itertools.count(1)

    def __call__(self) -> None:
        for leg in self._legs:
            leg()

    def check(self) -> str | None:
        """Sends bytes that no call has sent before. A sentence when others have come; collective."""
        turn = next(self._turns)
        for number, leg in enumerate(self._legs):
            seed = turn * 2 + number
            leg.fill(seed, self._rank)
        self()
        for number, leg in enumerate(self._legs):
            if not leg.is_right(turn * 2 + number, self._ranks, self._ranks.index(self._rank)):
                return "expected the bytes that the other nodes have sent, got others"
        return None


class _Leg:
    """One all-to-all. sent, received: rows of `size` bytes to and from the rail's rank on each node."""

    def __init__(
        self, sent: list[int], received: list[int], size: int, group: dist.ProcessGroup, device: torch.device
    ) -> None:
        self._sent, self._received = [n * size for n in sent], [n * size for n in received]
        self._group = group
        self._leaving = torch.empty(sum(self._sent), dtype=torch.uint8, device=device)
        self._arriving = torch.empty(sum(self._received), dtype=torch.uint8, device=device)

    def __call__(self) -> None:
        dist.all_to_all_single(self._arriving, self._leaving, self._received, self._sent, group=self._group)

    def fill(self, seed: int, rank: int) -> None:
        for node, part in enumerate(self._leaving.split(self._sent)):
            part.copy_(_bytes(seed, rank, node, part))
        self._arriving.fill_(0xA5)

    def is_right(self, seed: int, ranks: list[int], own: int) -> bool:
        parts = zip(ranks, self._arriving.split(self._received), strict=True)
        return all(torch.equal(part, _bytes(seed, rank, own, part)) for rank, part in parts)


def _bytes(seed: int, rank: int, node: int, like: torch.Tensor) -> torch.Tensor:
    """What a rank sends to a node."""
    return random_bytes((seed * 4096 + rank) * 4096 + node, like)


@functools.cache
def _rails(ranks: int, nodes: int) -> dist.ProcessGroup:
    """The group of this rank's rail. Collective when it is first called."""
    per_node = ranks // nodes
    made = [dist.new_group(list(range(local, ranks, per_node))) for local in range(per_node)]
    return made[dist.get_rank() % per_node]
