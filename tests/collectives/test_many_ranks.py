"""All-gather, reduce-scatter and messages in nodes of 20 and of 72 ranks: every kernel against plain torch.

The ranks are threads of one process (tests/many_ranks.py). Copy engines run on GPUs only.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ep_plugin import _C
from tests import many_ranks
from tests.kernel_arguments import (
    AllGatherArgs,
    CollectiveKernels,
    CpuAllGatherArgs,
    CpuReduceScatterArgs,
    Piece,
    ReduceScatterArgs,
    SmallExchangeArgs,
    addresses,
)
from tests.many_ranks import SIZES, Block, ManyRanks
from tests.ranks import run_ranks, values

FLOAT32 = int(_C.Element.FLOAT32)
COUNT = 12  # elements of a shard


def _in_a_process(function: Callable[..., None], *args: Any) -> None:
    values(run_ranks(1, function, *args, timeout_s=240, env={"EP_TEST_KERNELS": "simt"}))


def _inputs(ranks: int, count: int, seed: int) -> torch.Tensor:
    """float32 ``[rank, for rank, count]`` of small integers, whose sums are exact."""
    return torch.randint(-8, 8, (ranks, ranks, count), generator=torch.Generator().manual_seed(seed)).float()


class GpuNode(ManyRanks):
    """Ranks whose kernels are those of GPUs, with the memory of gathers and sums."""

    def __init__(self, ranks: int) -> None:
        super().__init__(ranks, _C.device_control_bytes, ranks)
        self.kernels = CollectiveKernels.from_address(many_ranks.kernels(True).collectives)
        self.blocks = Block([ranks * 4 * COUNT] * ranks)
        self.words = Block([_C.small_words_bytes(ranks)] * ranks)
        self.cells = Block([_C.channel_cells_bytes(ranks, 1)] * ranks)

    def exchange_words(self, rank: int, own: torch.Tensor, shards: torch.Tensor, element: int) -> None:
        args = SmallExchangeArgs(
            comm=self.comms[rank],
            words=self.words.table.address,
            own_words=self.words.ptrs[rank],
            own=own.data_ptr(),
            bytes=own.nbytes,
            scale=0.5,
            element=element,
            num_ctas=self.size - 1,
            shards=addresses(shards),
        )
        self.kernels.small_exchange(args.address)

    def push(self, rank: int, shard: torch.Tensor, outputs: torch.Tensor, staged: bool) -> None:
        args = AllGatherArgs(
            comm=self.comms[rank],
            input=shard.data_ptr(),
            bytes=shard.nbytes,
            blocks=self.blocks.table.address,
            host_blocks=self.blocks.table.host_address,
            offset=rank * shard.nbytes,
            staging=self.blocks.ptrs[rank] if staged else 0,
            num_ctas=2,
            outputs=addresses(outputs),
        )
        self.kernels.all_gather(args.address)

    def sum_in_cells(self, rank: int, out: torch.Tensor, shards: torch.Tensor) -> None:
        args = ReduceScatterArgs(
            comm=self.comms[rank],
            bytes=out.nbytes,
            scale=0.5,
            element=FLOAT32,
            cells=self.cells.table.address,
            own_cells=self.cells.ptrs[rank],
            output=out.data_ptr(),
            num_ctas=1,
            inputs=addresses(shards),
        )
        self.kernels.reduce_scatter(args.address)


def _gather(node: GpuNode, way: str, seed: int) -> None:
    ranks = node.size
    shards = _inputs(ranks, COUNT, seed)[:, 0].contiguous()
    outputs = torch.full((ranks, ranks, COUNT), float("nan"))
    if way == "mapped":  # into the blocks that peers map
        mapped = [many_ranks.floats(memory).view(ranks, COUNT) for memory in node.blocks.memory]
        node.at_once(lambda rank: node.push(rank, shards[rank], mapped[rank], False))
        outputs = torch.stack(mapped)
    elif way == "staged":
        node.at_once(lambda rank: node.push(rank, shards[rank], outputs[rank], True))
    else:
        node.at_once(lambda rank: node.exchange_words(rank, shards[rank], outputs[rank], -1))
    for rank in range(ranks):
        others = [other for other in range(ranks) if other != rank]
        assert torch.equal(outputs[rank, others], shards[others]), f"rank {rank}, {way}"


def _gathers(rank: int, ranks: int, ways: tuple[str, ...]) -> None:
    with GpuNode(ranks) as node:
        for seed, way in enumerate(ways):
            _gather(node, way, seed)


PUSHES, WORDS = ("mapped", "staged", "mapped", "staged"), ("words", "words")


@pytest.mark.parametrize(
    ("ranks", "ways"),
    [
        (20, WORDS + PUSHES),
        pytest.param(33, WORDS, marks=pytest.mark.slow),
        pytest.param(72, PUSHES, marks=pytest.mark.slow),
    ],  # words take R * R CTAs
)
def test_gathers(ranks: int, ways: tuple[str, ...]) -> None:
    _in_a_process(_gathers, ranks, ways)


def _sum(node: GpuNode, small: bool, seed: int) -> None:
    count = COUNT if small else 4 * 512 * 6 + 4  # more chunks than a source has cells
    inputs, out = _inputs(node.size, count, seed), torch.full((node.size, count), float("nan"))
    if small:
        node.at_once(lambda rank: node.exchange_words(rank, out[rank], inputs[rank], FLOAT32))
    else:
        node.at_once(lambda rank: node.sum_in_cells(rank, out[rank], inputs[rank]))
    assert torch.equal(out, inputs.sum(dim=0) * 0.5)


def _sums(rank: int, ranks: int) -> None:
    with GpuNode(ranks) as node:
        for seed in range(4):
            _sum(node, seed >= 2, seed)


@pytest.mark.parametrize("ranks", SIZES)
def test_sums(ranks: int) -> None:
    _in_a_process(_sums, ranks)


class CpuNode(ManyRanks):
    """Ranks whose kernels are those of CPUs. in_blocks: whether shards lie in memory that peers map."""

    def __init__(self, ranks: int, in_blocks: bool) -> None:
        super().__init__(ranks, _C.collective_control_bytes, ranks)
        self.count, self.in_blocks = 300, in_blocks
        self.blocks = Block([ranks * 4 * self.count] * ranks)
        self._table = (ctypes.c_uint64 * _C.max_ranks)(*self.blocks.ptrs)
        self._sizes = (ctypes.c_int64 * 1)(ranks * 4 * self.count)

    def _piece(self, *offsets: int) -> Piece:
        return Piece(
            bytes=4 * self.count,
            block=0 if self.in_blocks else -1,
            num_blocks=1,
            blocks=ctypes.addressof(self._table),
            block_bytes=ctypes.addressof(self._sizes),
            offset=offsets,
        )

    def gather_and_sum(self, rank: int, inputs: torch.Tensor, gathered: torch.Tensor, out: torch.Tensor) -> None:
        comm = self.comms[rank]
        gathers = CpuAllGatherArgs(
            comm=comm, piece=self._piece(0), input=inputs[0].data_ptr(), outputs=addresses(gathered)
        )
        _C.cpu.all_gather(gathers.address)
        sums = CpuReduceScatterArgs(
            comm=comm,
            piece=self._piece(*(to * 4 * self.count for to in range(self.size))),
            inputs=addresses(inputs),
            output=out.data_ptr(),
            scale=0.5,
            element=FLOAT32,
        )
        _C.cpu.reduce_scatter(sums.address)


def _gather_and_sum(node: CpuNode, seed: int) -> None:
    ranks, count = node.size, node.count
    inputs, out = _inputs(ranks, count, seed), torch.full((ranks, count), float("nan"))
    gathered = torch.full((ranks, ranks, count), float("nan"))
    for rank, memory in enumerate(node.blocks.memory):
        many_ranks.floats(memory).copy_(inputs[rank].flatten())
    node.at_once(lambda rank: node.gather_and_sum(rank, inputs[rank], gathered[rank], out[rank]))
    assert all(torch.equal(found, inputs[:, 0]) for found in gathered)
    assert torch.equal(out, inputs.sum(dim=0) * 0.5)


def _on_cpus(rank: int, ranks: int, in_blocks: bool) -> None:
    with CpuNode(ranks, in_blocks) as node:
        for seed in range(3):
            _gather_and_sum(node, seed)


@pytest.mark.parametrize("in_blocks", [False, True])
def test_kernels_of_cpus(in_blocks: bool) -> None:
    _in_a_process(_on_cpus, 72, in_blocks)


ENDS = (0, 33, 71)  # the ranks that send and receive: the lanes of one take up to 600 MB


class MessageNode(ManyRanks):
    """72 ranks, of which ENDS have memory for messages."""

    def __init__(self, simt: bool) -> None:
        memory_bytes = (_C.device_message_memory_bytes if simt else _C.message_memory_bytes)(72, 1)
        super().__init__(72, [memory_bytes if rank in ENDS else 128 for rank in range(72)], 72)
        self.kernels = many_ranks.kernels(True) if simt else None
        self.queues = {} if simt else {me: _C.CpuMessages(self.comms[me], self.control.ptrs, 1) for me in ENDS}

    def exchange(self, me: int, messages: list[Any]) -> None:
        if self.kernels is None:
            posted, limit = [self.queues[me].post(message) for message in messages], int(many_ranks.TIMEOUT_S * 1e9)
            assert self.queues[me].wait(posted, limit, limit) == 0
            return
        streams = range(1 + 10 * me, 1 + 10 * me + len(messages))
        for stream, message in zip(streams, messages, strict=True):
            run = self.kernels.receive_message if message.receives else self.kernels.send_message
            run(_C.DeviceMessageArgs(comm=self.comms[me], message=message, stream=stream))
        for stream in streams:
            self.kernels.synchronize(stream)


def _send_to_both(node: MessageNode, count: int) -> None:
    sent, received = _inputs(72, count, count), torch.full((72, 72, count), float("nan"))

    def messages(me: int) -> list[Any]:
        return [
            _C.Message(
                peer=peer, channel=0, receives=receives, data=data[me, peer].data_ptr(), bytes=4 * count, dtype=1
            )
            for peer in ENDS
            if peer != me
            for receives, data in enumerate((sent, received))
        ]

    node.at_once(lambda me: node.exchange(me, messages(me)), ENDS)
    for me in ENDS:
        for peer in ENDS:
            assert me == peer or torch.equal(received[me, peer], sent[peer, me]), f"{peer} to {me}"


def _messages(rank: int, simt: bool) -> None:
    """Each of ENDS sends to both others."""
    with MessageNode(simt) as node:
        for count in (1, 5000):
            _send_to_both(node, count)
        for queue in node.queues.values():
            queue.close()


@pytest.mark.parametrize("simt", [False, True], ids=["kernels of CPUs", "kernels of GPUs"])
def test_messages(simt: bool) -> None:
    _in_a_process(_messages, simt)
