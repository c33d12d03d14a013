"""The node that serves GPUs, put into collectives of CPU ranks; its kernels do what the arguments say, in copies."""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from typing import Any

import torch
import torch.distributed as dist

from ep_plugin import _C
from ep_plugin.collectives.backends import paths
from ep_plugin.collectives.backends.watchdog import StreamWaits
from ep_plugin.collectives.base import Collective
from ep_plugin.transport.peer import AddressTable
from tests.collectives.collective_cases import BF16, FP32
from tests.kernel_arguments import AllGatherArgs, Comm, ReduceScatterArgs, SmallExchangeArgs, table_of

STAGING_BYTES = 20_000 * 16
DTYPES = {_C.Element.FLOAT32: FP32, _C.Element.BFLOAT16: BF16}


class Kernels:
    """What the three kernels do, between barriers of the node in place of handshakes and flags."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.pushed: list[AllGatherArgs] = []
        self.most_summed_by = self.small_calls = 0

    def all_gather(self, args: AllGatherArgs) -> None:
        self.pushed.append(AllGatherArgs.from_buffer_copy(args))  # they last as long as the call
        dist.barrier(self._group)
        for rank, block in enumerate(_table(args.blocks, args.comm)):
            if rank != args.comm.rank:
                ctypes.memmove(block + args.offset, args.input, args.bytes)
        dist.barrier(self._group)
        if args.staging:
            for rank in range(args.comm.num_ranks):
                if rank != args.comm.rank:
                    ctypes.memmove(args.outputs[rank], args.staging + rank * args.bytes, args.bytes)

    def reduce_scatter(self, args: ReduceScatterArgs) -> None:
        self.most_summed_by = max(self.most_summed_by, args.num_ctas)
        rank, ranks = args.comm.rank, range(args.comm.num_ranks)
        step = _C.channel_cells_bytes(len(ranks), 1) // len(ranks) // 16 * 16  # of each rank
        cells = _table(args.cells, args.comm)
        for begin in range(0, args.bytes, step):
            nbytes = min(step, args.bytes - begin)
            dist.barrier(self._group)
            for peer in ranks:
                ctypes.memmove(cells[peer] + rank * step, args.inputs[peer] + begin, nbytes)
            dist.barrier(self._group)
            self._sum([cells[rank] + source * step for source in ranks], args.output + begin, nbytes, args)

    def small_exchange(self, args: SmallExchangeArgs) -> None:
        self.small_calls += 1
        rank, ranks, words = args.comm.rank, range(args.comm.num_ranks), _table(args.words, args.comm)
        dist.barrier(self._group)
        for peer in ranks:
            sent = args.own if args.element < 0 else args.shards[peer]
            ctypes.memmove(words[peer] + rank * args.bytes, sent, args.bytes)
        dist.barrier(self._group)
        landed = [words[rank] + source * args.bytes for source in ranks]
        if args.element >= 0:
            self._sum(landed, args.own, args.bytes, args)
            return
        for source in ranks:
            if source != rank:
                ctypes.memmove(args.shards[source], landed[source], args.bytes)

    def _sum(self, sources: list[int], output: int, nbytes: int, args: ReduceScatterArgs | SmallExchangeArgs) -> None:
        dtype = DTYPES[args.element]
        parts = [_memory(source, nbytes).view(dtype) for source in sources]
        total = parts[0].to(FP32)
        for part in parts[1:]:
            total = total + part
        _memory(output, nbytes).view(dtype).copy_(total * args.scale if args.scale != 1 else total)


def _table(address: int, comm: Comm) -> list[int]:
    return list((ctypes.c_uint64 * comm.num_ranks).from_address(address))


def _memory(address: int, nbytes: int, _: Any = None) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_ubyte * nbytes).from_address(address), dtype=torch.uint8)


def as_on_gpus(made: Collective, path: str, per_node: int) -> Kernels:
    """Gives the object's engine the node that serves GPUs, with kernels that do the same in copies."""
    groups = [
        dist.new_group(list(range(first, first + per_node))) for first in range(0, dist.get_world_size(), per_node)
    ]
    paths.STAGING_BYTES = STAGING_BYTES
    kernels = Kernels(groups[dist.get_rank() // per_node])
    serve_with(made, path, kernels)
    return kernels


class _Waits(StreamWaits):
    """Gathers by copy engines that are only counted."""

    def __init__(self) -> None:
        self.table, self.number, self.pending = AddressTable([]), 0, deque()
        self.progress = torch.zeros(2, dtype=torch.int64, device="cpu")
        self._guard, self._open = threading.RLock(), False

    def close(self) -> None: ...


def serve_with(made: Collective, path: str, kernels: Any) -> None:
    """The node that serves GPUs, with the emulation's kernels or any others that take these arguments."""
    engine = made.engine_on(torch.device("cpu"))
    engine.path, engine.sum_sms = path, max(1, engine.sum_sms)
    if not hasattr(kernels, "collectives"):
        kernels.table = table_of(kernels)
        kernels.collectives = ctypes.addressof(kernels.table)
    engine.kernels = kernels  # kept alive
    engine.serve_gpus(kernels.collectives)
    engine.inside.set_streams(engine.streams)
    engine.watch(_Waits())
