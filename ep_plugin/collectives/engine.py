"""The engine of one all-gather or reduce-scatter object: node map, peer memory, blocks, boards and rails.

Shapes: R ranks in the group, N nodes of G ranks each, R = N * G. `rank` is the rank in the group, `index` the local
rank in the node. Errors name ranks of the group.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ep_plugin import _C, env
from ep_plugin.collectives.backends import cpu, cuda
from ep_plugin.collectives.backends.cpu import CallLanes, CpuNode
from ep_plugin.collectives.backends.cuda import CudaSumNode, StreamLanes
from ep_plugin.collectives.backends.cuda_gather import CudaGatherNode
from ep_plugin.collectives.blocks import Blocks
from ep_plugin.collectives.failures import GroupBoards, GroupFailure, RailStatus
from ep_plugin.errors import DisagreementError, EpPluginError, NotSupported, PeerTimeout
from ep_plugin.runtime.base import BaseEngine, kernels_for
from ep_plugin.runtime.board import Boards
from ep_plugin.runtime.faults import GRACE_S, aborted_error, error_of
from ep_plugin.transport.exchange import Exchange
from ep_plugin.transport.peer import open_memory_of, transport_for
from ep_plugin.transport.rails import Rails
from ep_plugin.transport.shm import ShmMemory
from ep_plugin.transport.topology import RankReport, discover

_OPERATIONS = {int(op): op.name.lower().replace("_", "-") for op in _C.CollectiveOp}
_FIELDS = {"op": "operation", "bytes": "bytes of a shard", "place": "place in peer memory"}
_ELEMENTS = {int(element): element.name.lower() for element in _C.Element}


class CollectiveEngine(BaseEngine):
    """Construction is collective over `group`; so is making another block."""

    lanes: CallLanes | StreamLanes
    status: RailStatus
    """Only where the group spans nodes."""
    inside: Any
    """The operations between the ranks of the node; absent where it has only one."""

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, num_buffers: int, path: str, sum_sms: int | None
    ) -> None:
        """sum_sms: SMs for sums; None: gathers."""
        self.num_buffers, self.path, self.sum_sms = num_buffers, path, sum_sms or 0
        self.gathers = sum_sms is None
        if device.type == "cuda":
            self.sum_sms = cuda.sum_sms_of(device, self.sum_sms)
        super().__init__(Exchange(group), device, group)

    def _construct(self, group: dist.ProcessGroup) -> None:
        device = self.device
        self.kernels = kernels_for(device)
        lanes = self.lanes = CallLanes() if device.type == "cpu" else StreamLanes(device)
        self._agree()
        self.node_map, reports = discover(self.exchange, device)
        _check_hosts(reports)
        self.node = self.node_map.node_of(self.rank)
        self.index = self.node_map.local_rank_of(self.rank)
        self.node_ranks = self.node_map.node_ranks(self.node)
        self.node_size = len(self.node_ranks)
        if self.node_size > _C.max_ranks:
            raise NotSupported(f"group: expected at most {_C.max_ranks} ranks on one node, got {self.node_size}")
        self.rails = Rails(self.exchange, group, self.node_map, device)
        self._resources.callback(self.rails.close)
        host, peers = (Exchange(group, ranks=self.node_ranks) for _ in range(2))
        for exchange in (host, peers):
            self._resources.callback(exchange.close)
        try:
            self._construct_node(host, peers, lanes)
        except BaseException as error:
            for exchange in (host, peers):
                exchange.abort(f"{type(error).__name__}: {error}")
            raise
        self.exchange.barrier("construct communicator")
        if self.gathers:
            self.rails.connect(self.exchange)
        if isinstance(self.boards, GroupBoards):
            self.boards.failure = GroupFailure(self.exchange.store("failure"), self.rank, _found_by(self))
            self._resources.callback(self.boards.failure.close)
        watch = _watch_of(self)
        for exchange in (self.exchange, host, peers):
            exchange.watch = watch

    def _construct_node(self, host: Exchange, peers: Exchange, lanes: CallLanes | StreamLanes) -> None:
        device = self.device
        self.boards = GroupBoards(host, 0, device) if self.rails.nodes else Boards(host, 0, device)
        self._resources.callback(self.boards.close)
        self.memory = open_memory_of(peers, device)
        self._resources.callback(self.memory.close)
        control_bytes = cpu.CONTROL_BYTES if device.type == "cpu" else cuda.CONTROL_BYTES
        self._control = self.memory.allocate(control_bytes, "control")
        self.control_address = self._control.ptrs[self.index]
        self.posts = ShmMemory(host)
        self._resources.callback(self.posts.close)
        self.blocks = Blocks(self, self.memory, self.posts, self.num_buffers)
        self._resources.callback(self.blocks.close)
        self.state = torch.zeros(_C.state_bytes, dtype=torch.uint8, device=device)
        if isinstance(self.boards, GroupBoards):
            self.status = self.boards.status = RailStatus(self.state, self.node_map.num_nodes)
        self.comm = _C.Comm(
            rank=self.index,
            num_ranks=self.node_size,
            num_experts=self.node_size,
            gate=_C.Step[(env.settings().test_gate or "none").upper()],
            timeout_ns=int(self.timeout_s * 1e9),
            state=self.state.data_ptr(),
            board=self.boards.device_address,
        )
        self.comm.set_control(list(self._control.ptrs))
        if self.node_size > 1:
            self.inside = _node_of(self, lanes, host)
            self._resources.callback(self.inside.close)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def _agree(self) -> None:
        """Refuses, before anything is allocated, what ranks do not agree on."""
        transport_for(self.device)
        mine = [self.device.type, self.num_buffers, self.path, self.sum_sms]
        for rank, theirs in enumerate(self.exchange.all_gather("agree on the device", mine)):
            if theirs != mine:
                raise DisagreementError(
                    f"ranks disagree on the device, num_buffers, path and sms: {', '.join(map(str, mine))} on rank "
                    f"{self.rank}, {', '.join(map(str, theirs))} on rank {rank}"
                )

    @contextlib.contextmanager
    def on_rail(self) -> Iterator[None]:
        """Around calls of the rails. Backends do not say who is at fault, and fail for whatever has ended a peer: what
        the peers publish in a moment is raised in place of the backend's error."""
        try:
            yield
        except PeerTimeout:
            assert isinstance(self.boards, GroupBoards)
            failure = self.boards.failure
            if self.boards.quiet():
                failure.wait(GRACE_S)
            self.check()
            if failure.first is not None:
                raise aborted_error(self, *failure.first) from None
            raise

    def found_error(self) -> EpPluginError | ValueError | None:
        error = error_of(self)
        if error is not None or not isinstance(self.boards, GroupBoards):
            return error
        node = self.boards.status.bad_node()
        if node is None:
            return None
        self.boards.failure.wait(GRACE_S)
        peer = self.node_map.node_ranks(node)[self.index]
        first = self.boards.failure.first or (peer, "a sum inside its node has failed")
        return aborted_error(self, *first)

    def described(self, field: int, value: int) -> tuple[str, str]:
        name = _C.offer_fields[field] if field < len(_C.offer_fields) else "place"
        known = {"op": _OPERATIONS, "element": _ELEMENTS}.get(name, {})
        text = _place(value) if name == "place" else str(value)
        return _FIELDS.get(name, name), known.get(value, text)

    def _remember(self, error: EpPluginError | ValueError) -> None:
        """Peers that wait for another rank than this one find out by themselves, but not those on other nodes, nor
        that this rank's rail is broken."""
        super()._remember(error)
        if isinstance(error, PeerTimeout) and isinstance(self.boards, GroupBoards):
            if error.step == "rail":
                self.boards.tell_abort(str(error))
            else:
                self.boards.failure.post(str(error))

    def _drained(self) -> Exception | None:
        if self._error is not None or not self.boards.quiet():
            self.rails.abort()  # a leg of a rank that is gone ends no other way
        return super()._drained()

    @property
    def rail_bytes_sent(self) -> int:
        """Bytes of shards; status words do not count."""
        return self.rails.bytes_sent - (self.status.bytes_sent if self.rails.nodes else 0)

    def group_rank(self, index: int) -> int:
        if not 0 <= index < self.node_size + self.size:
            raise IndexError(f"expected an index below {self.node_size + self.size}, got {index}")
        return self.node_ranks[index] if index < self.node_size else index - self.node_size


def _node_of(engine: CollectiveEngine, lanes: CallLanes | StreamLanes, host: Exchange) -> Any:
    if not isinstance(lanes, StreamLanes):
        return CpuNode(engine)
    return CudaGatherNode(engine, lanes, host) if engine.gathers else CudaSumNode(engine, lanes)


def _place(word: int) -> str:
    block, offset = divmod(word, _C.place_word(1, 0))
    return "none (not from allocate)" if block == _C.staging_block else f"byte {offset} of block {block}"


def _found_by(engine: CollectiveEngine) -> Callable[[int, str], None]:
    """What ends the waits of this node when a rank of another one has failed."""
    owner = weakref.ref(engine)

    def found(rank: int, reason: str) -> None:
        engine = owner()
        if engine is not None and isinstance(engine.boards, GroupBoards):
            engine.boards.pass_on(rank, reason)
            engine.rails.abort()

    return found


def _watch_of(engine: CollectiveEngine) -> Any:
    """What ends an exchange early: an abort."""
    found = weakref.ref(engine)

    def watch() -> None:
        engine = found()
        if engine is not None:
            engine.check()

    return watch


def _check_hosts(reports: Sequence[RankReport]) -> None:
    """Ranks that cannot say where they run might be taken for ranks of one host, or of several."""
    for report in reports:
        if report.ranks_per_node is None and "/" not in report.host.strip("/"):
            raise ValueError(
                f"group: expected ranks that know their host, got rank {report.rank} on {report.host!r}, which has "
                "neither a boot id nor a machine id; set EP_PLUGIN_RANKS_PER_NODE on every rank"
            )
