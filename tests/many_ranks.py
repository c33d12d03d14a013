"""The ranks of one large node as threads of one process, which call kernels with arguments made here.

There is no process group: every rank finds the memory of all others in this process. So a test can have as many ranks
as a node may have.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import pytest
import torch

from ep_plugin import _C
from ep_plugin.bench.suites import stand_in
from ep_plugin.transport.peer import AddressTable

_PAGE = 4096
TIMEOUT_S = 200.0  # threads of many ranks share few cores
LONG = pytest.mark.skipif("EP_TEST_LONG" not in os.environ, reason="takes minutes: EP_TEST_LONG=1 runs it")
# With 33 ranks a warp has too few lanes. The emulation's time grows with the square of the ranks.
SIZES = [20, pytest.param(33, marks=pytest.mark.slow), pytest.param(72, marks=LONG)]


def zeroed(nbytes: int) -> torch.Tensor:
    """Returns uint8 ``[nbytes]`` of zeros that begin on a page. Pages that nobody touches take no memory."""
    memory = torch.zeros(nbytes + _PAGE, dtype=torch.uint8)
    return memory.narrow(0, -memory.data_ptr() % _PAGE, nbytes)


class Block:
    """Memory of `nbytes` bytes on each rank, and the table of their addresses. None: a rank that has none."""

    def __init__(self, sizes: Sequence[int | None]) -> None:
        self.memory = [None if nbytes is None else zeroed(nbytes) for nbytes in sizes]
        self.ptrs = [0 if memory is None else memory.data_ptr() for memory in self.memory]
        self.table = AddressTable(self.ptrs)


def floats(memory: torch.Tensor | None) -> torch.Tensor:
    """Returns a rank's memory as float32."""
    assert memory is not None
    return memory.view(torch.float32)


class ManyRanks:
    """Ranks with a control block each.

    Args:
        ranks: their number.
        control_bytes: the size of a control block; 0 for ranks that take no part.
        experts: the experts of all ranks.
    """

    def __init__(self, ranks: int, control_bytes: int | Sequence[int], experts: int) -> None:
        self.size = ranks
        sizes = [control_bytes] * ranks if isinstance(control_bytes, int) else control_bytes
        self.control = Block(sizes)
        self._states = [zeroed(_C.state_bytes) for _ in range(ranks)]
        self._boards = [zeroed(_C.board_bytes(_C.num_totals + experts // ranks)) for _ in range(ranks)]
        self._threads = ThreadPoolExecutor(ranks)
        self.comms = [
            _C.Comm(
                rank=rank,
                num_ranks=ranks,
                num_experts=experts,
                gate=_C.Step.NONE,
                num_origins=1,
                timeout_ns=int(TIMEOUT_S * 1e9),
                control=self.control.table.address,
                own_control=self.control.ptrs[rank],
                state=self._states[rank].data_ptr(),
                board=self._boards[rank].data_ptr(),
            )
            for rank in range(ranks)
        ]

    def set_pool(self, pool: int, nbytes: int) -> None:
        block = Block([nbytes] * self.size)
        setattr(self, f"_pool_{pool}", block)
        for rank, comm in enumerate(self.comms):
            comm.set_pool(pool, block.table.address, block.ptrs[rank], nbytes)

    def at_once(self, does: Callable[[int], object], ranks: Sequence[int] | None = None) -> None:
        """Calls does(rank) in a thread for each rank, and raises the first fault of any."""
        list(self._threads.map(does, range(self.size) if ranks is None else ranks))
        for rank, board in enumerate(self._boards):
            fault = None if _C.board_quiet(board.data_ptr()) else _C.board_fault(board.data_ptr())
            assert fault is None, f"rank {rank}: (code, step, peer, field, expected, seen) = {fault}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self._threads.shutdown()


def kernels(simt: bool) -> Any:
    """Returns the kernels of GPUs in the emulation, or those of CPUs."""
    if not simt:
        return _C.cpu
    from tests import emulation

    return emulation.load()


@contextlib.contextmanager
def served(simt: bool, sms: int) -> Any:
    """Lets the ranks of ep_plugin.bench.suites.stand_in run these kernels on `sms` SMs each, with a long deadline."""
    stand_in.TIMEOUT_S = TIMEOUT_S
    if simt:
        from tests import emulation

        emulation.LOW_LATENCY_SMS = sms
        emulation.serve_cpus()
    yield
