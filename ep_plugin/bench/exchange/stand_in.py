"""Several low-latency ranks in one process, which share one device: each has a stream and a share of the SMs.

They run the operations and the kernels of ranks that have processes of their own. Only the group is missing: peers'
memory is memory of the same device, so nothing crosses a link. On CPUs each rank has a thread.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import torch

from ep_plugin import _C
from ep_plugin.bench.timing import Run
from ep_plugin.config import MoECommunicatorConfig
from ep_plugin.errors import EpPluginError
from ep_plugin.moe.low_latency import sms
from ep_plugin.moe.low_latency.engine import LowLatencyEngine
from ep_plugin.moe.low_latency.in_flight import RECEIVE, SEND, LowLatencyOperation
from ep_plugin.moe.low_latency.load import LowLatencyLoad
from ep_plugin.runtime.streams import CallerStreams, Streams, kernels_for
from ep_plugin.runtime.tensors import KnownCalls

TIMEOUT_S = 20.0


class Share(LowLatencyEngine):
    """The engine of one of `ranks` ranks, without a group and boards. `connect` makes it ready."""

    def __init__(self, rank: int, ranks: int, config: MoECommunicatorConfig, device: torch.device) -> None:
        assert config.max_tokens_per_rank is not None
        self.device, self.timeout_s = device, TIMEOUT_S
        self.rank = self.index = rank
        self.size = self.node_size = ranks
        self.local_experts, self.max_tokens = config.num_experts // ranks, config.max_tokens_per_rank
        self.config_hash = config.agreement_hash() & 0x7FFFFFFF
        self._set_sizes(config)
        self.kernels, self.num_sms = kernels_for(device), sms.for_device(device, ranks)
        self.streams = Streams() if device.type == "cpu" else CallerStreams(device)
        self._issued, self._outputs, self.known = [0, 0], deque(maxlen=2), KnownCalls()
        zeros = functools.partial(torch.zeros, dtype=torch.uint8)
        self.state, self.ll_state = zeros(_C.state_bytes, device=device), zeros(_C.ll_state_bytes, device=device)
        self.block = zeros(self.memory_bytes, device=device)
        self._board = zeros(_C.board_bytes(self.local_experts), pin_memory=device.type == "cuda")
        self.boards: Any = SimpleNamespace(device_address=self._board.data_ptr())
        self.load = LowLatencyLoad(self, self.local_experts)

    @property
    def name(self) -> str:
        return f"rank {self.rank} of the stand-in"

    def connect(self, shares: Sequence[Share]) -> None:
        """Gives the kernels the memory of all ranks."""
        self.comm = self._comm_struct([share.block.data_ptr() for share in shares], self.config.num_experts)

    def check(self) -> None:
        if not _C.board_quiet(self._board.data_ptr()):
            fault = _C.board_fault(self._board.data_ptr())
            raise EpPluginError(f"{self.name}: (code, step, peer, field, expected, seen) = {fault}")


class StandIn:
    """The ranks, and how they do something at the same time."""

    def __init__(self, ranks: int, config: MoECommunicatorConfig, device: torch.device) -> None:
        self.device = device
        self.ranks = [Share(rank, ranks, config, device) for rank in range(ranks)]
        for rank in self.ranks:
            rank.connect(self.ranks)
        if device.type == "cuda":
            self._streams = [torch.cuda.Stream(device) for _ in self.ranks]
        else:
            self._threads = ThreadPoolExecutor(ranks)

    def at_once(self, does: Callable[[int], object]) -> None:
        """does(rank) for every rank, each on its stream, or in its thread. The caller's stream waits for all."""
        if self.device.type == "cpu":
            list(self._threads.map(does, range(len(self.ranks))))
            return
        caller = torch.cuda.current_stream(self.device)
        for stream in self._streams:
            stream.wait_stream(caller)
        for rank, stream in enumerate(self._streams):
            with torch.cuda.stream(stream):
                does(rank)
        for stream in self._streams:
            caller.wait_stream(stream)

    def recorded(self, does: Callable[[], object], pool: Any = None) -> Callable[[], object]:
        """`does` as the replay of a CUDA graph, whose memory comes from `pool`; on CPUs itself."""
        if self.device.type == "cpu":
            return does
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            does()
        return graph.replay

    def check(self) -> None:
        """Raises EpPluginError for a fault of any rank, after what is enqueued."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        for rank in self.ranks:
            rank.check()


class Together:
    """An operation of all ranks at a time, with fixed inputs and outputs.

    make: the operation of a rank. apart: its halves are launched one after the other. Each launch has a graph of its
    own on GPUs.
    """

    def __init__(self, ranks: StandIn, make: Callable[[Share], LowLatencyOperation], apart: bool = False) -> None:
        self._ranks, phases = ranks, [SEND, RECEIVE] if apart else [SEND | RECEIVE]
        self.operations = [make(rank) for rank in ranks.ranks]
        for operation in self.operations:
            operation.check()
        self._prepare()
        for each in phases:  # loads the kernels: none may be loaded while another one waits for it
            self._launch(each)
        ranks.check()
        on_gpu = ranks.device.type == "cuda"
        pool = torch.cuda.graph_pool_handle() if on_gpu else None
        self._runs = [
            ranks.recorded(functools.partial(self._launch, each, on_gpu and index == 0), pool)
            for index, each in enumerate(phases)
        ]

    def run(self) -> None:
        for part in self._runs:
            part()

    def start(self) -> Run:
        """Launches the first half and returns the launch of the second."""
        send, receive = self._runs
        send()
        return receive

    def results(self) -> list[Any]:
        """The operations' results, which each run writes anew."""
        return [operation.results() for operation in self.operations]

    def _prepare(self) -> None:
        for operation in self.operations:
            operation.prepare()

    def _launch(self, phases: int, anew: bool = False) -> None:
        """anew: into new memory, that of a graph."""
        if anew:
            self._prepare()
        self._ranks.at_once(lambda rank: self.operations[rank].launch(phases))
