"""What the peers exchange rows with: parts of rows that travel side by side, and what the host must know early.

A piece is some columns of every row, of one type of word, which travel together in one all-to-all; several pieces let
the gather of one, the exchange of another and the arranging of a third overlap. Words are 8 bytes wide, or 4 where rows
or scales are no multiple of 8: torch gathers either 16 bytes at a time where addresses allow it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

ALIGNMENT = 16  # bytes that columns are cut at
Piece = list[torch.Tensor]


def words(rows: torch.Tensor) -> torch.Tensor:
    """Rows `[n, H]` of any type as 8-byte words; they must be a multiple of 8 bytes long."""
    return rows.view(torch.int64)


def pieces_of(x: torch.Tensor, scales: torch.Tensor | None, count: int) -> list[Piece]:
    """Views of x `[T, H]` in `count` pieces of columns, the scales beside the last."""
    scale_bytes = 0 if scales is None else scales.shape[1] * scales.element_size()
    word = torch.int64 if scale_bytes % 8 == 0 else torch.int32
    rows = x.view(word)
    cuts = columns(rows, count)
    pieces = [[rows[:, first:last]] for first, last in itertools.pairwise(cuts)]
    return pieces if scales is None else [*pieces[:-1], [*pieces[-1], scales.view(word)]]


def columns(rows: torch.Tensor, count: int) -> list[int]:
    """Where `count` pieces of the columns begin, and where the last ends."""
    unit = max(1, ALIGNMENT // rows.element_size())
    width = rows.shape[1]
    return [*(width * piece // count // unit * unit for piece in range(count)), width]


def width_of(piece: Piece) -> int:
    return sum(part.shape[1] for part in piece)


def gather(piece: Piece, index: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """`out` `[n, width]` with the parts of the rows that `index` names, side by side."""
    at = 0
    for part in piece:
        torch.index_select(part, 0, index, out=out[:, at : at + part.shape[1]])
        at += part.shape[1]
    return out


def spread(arrived: torch.Tensor, index: torch.Tensor, into: Piece) -> None:
    """The inverse of `gather`'s packing: row `index[i]` of what arrived becomes row i of the parts of `into`."""
    at = 0
    for part in into:
        torch.index_select(arrived[:, at : at + part.shape[1]], 0, index, out=part)
        at += part.shape[1]


class Exchange:
    """Rows of words on their way: `sent` and `received` rows per rank."""

    def __init__(self, leaving: torch.Tensor, sent: list[int], received: list[int], arriving: torch.Tensor) -> None:
        self._leaving, self._arriving = leaving, arriving
        work = dist.all_to_all_single(arriving, leaving, received, sent, async_op=True)
        assert work is not None
        self._work = work

    def wait(self) -> torch.Tensor:
        self._work.wait()
        return self._arriving


class Early:
    """A small exchange whose numbers the host waits for, while the device gathers. One at a time.

    On GPUs all of it has a stream of its own, and runs beside what the caller enqueues between `start` and `read`.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._host = torch.empty(0)

    def start(
        self, begin: Callable[[], tuple[Any, Sequence[torch.Tensor]]], total: Callable[..., torch.Tensor]
    ) -> None:
        """begin: enqueues a collective and returns its work and tensors; total: the numbers, int64, from those."""
        self._total = total
        if self._stream is None:
            self._work, self._tensors = begin()
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            self._work, self._tensors = begin()
            self._work.wait()
            numbers = total(*self._tensors)
            if self._host.shape != numbers.shape or self._host.dtype is not numbers.dtype:
                self._host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._host.copy_(numbers, non_blocking=True)
            self._ready = self._stream.record_event()

    def read(self) -> tuple[Any, Sequence[torch.Tensor]]:
        """The numbers as lists, and the tensors, which stay here until the next `start`: they are of its stream."""
        if self._stream is None:
            self._work.wait()
            return self._total(*self._tensors).tolist(), self._tensors
        self._ready.synchronize()
        return self._host.tolist(), self._tensors
