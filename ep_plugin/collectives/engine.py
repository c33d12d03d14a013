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
from ep_plugin.collectives.backends import cpu, cuda, paths
from ep_plugin.collectives.blocks import Blocks
from ep_plugin.collectives.failures import GroupBoards
from ep_plugin.errors import EpPluginError, NotSupported, PeerTimeout, reason_of
from ep_plugin.runtime.base import BaseEngine
from ep_plugin.runtime.board import Boards
from ep_plugin.runtime.faults import GRACE_S, aborted_error, error_of, gave_up
from ep_plugin.runtime.streams import CallerStreams, Streams, kernels_for
from ep_plugin.transport import open_memory, transport_for
from ep_plugin.transport.exchange import Exchange
from ep_plugin.transport.rails import Rails
from ep_plugin.transport.shm import ShmMemory
from ep_plugin.transport.topology import RankReport, discover

_FIELDS = {"op": "operation", "bytes": "bytes of a shard", "place": "place in peer memory"}
_VALUES = {
    "op": {int(op): op.name.lower().replace("_", "-") for op in _C.CollectiveOp},
    "element": {int(element): element.name.lower() for element in _C.Element},
}


class CollectiveEngine(BaseEngine):
    """Construction is collective over `group`; so is making another block."""

    group_boards: GroupBoards | None = None
    """`boards` if the group spans nodes."""
    inside: Any
    """The operations between the ranks of the node; absent if it has only one."""

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, num_buffers: int, path: str, sum_sms: int | None
    ) -> None:
        """sum_sms: the most SMs for sums; None: the object gathers."""
        self.num_buffers, self.path, self.sum_sms = num_buffers, path, sum_sms or 0
        self.gathers = sum_sms is None
        if device.type == "cuda":
            self.sum_sms = paths.most_sum_sms(device, self.sum_sms)
        super().__init__(Exchange(group), device, group)

    def _construct(self, group: dist.ProcessGroup) -> None:
        device = self.device
        self.kernels = kernels_for(device)
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
        within = Exchange(group, ranks=self.node_ranks)
        self._resources.callback(within.close)
        try:
            self._construct_node(within)
        except BaseException as error:
            within.abort(reason_of(error))
            raise
        self.exchange.barrier("construct communicator")
        if self.gathers:
            self.rails.connect(self.exchange)
        self.exchange.watch = within.watch = _weakly(self.check)

    def _construct_node(self, within: Exchange) -> None:
        device = self.device
        streams = self.streams = Streams() if device.type == "cpu" else CallerStreams(device)
        self.state = torch.zeros(_C.state_bytes, dtype=torch.uint8, device=device)
        if self.rails.nodes:
            store, found = self.exchange.store("failure"), _weakly(self._fail_with_another_node)
            num_nodes = self.node_map.num_nodes
            self.boards = self.group_boards = GroupBoards(
                within, self.state, num_nodes, store, self.rank, self.size, found
            )
        else:
            self.boards = Boards(within, 0, device)
        self._resources.callback(self.boards.close)
        self.memory = open_memory(within, device)
        self._resources.callback(self.memory.close)
        control_bytes = cpu.CONTROL_BYTES if device.type == "cpu" else cuda.CONTROL_BYTES
        control = self.memory.allocate(control_bytes, "control")
        self.posts = ShmMemory(within)
        self._resources.callback(self.posts.close)
        self.blocks = Blocks(self, self.num_buffers)
        self._resources.callback(self.blocks.close)
        self.comm = _C.Comm(
            rank=self.index,
            num_ranks=self.node_size,
            num_experts=self.node_size,
            gate=_C.Step[(env.settings().test_gate or "none").upper()],
            timeout_ns=int(self.timeout_s * 1e9),
            state=self.state.data_ptr(),
            board=self.boards.device_address,
        )
        self.comm.set_control(list(control.ptrs))
        if self.node_size > 1:
            if not isinstance(streams, CallerStreams):
                self.inside = cpu.CpuNode(self)
            elif self.gathers:
                self.inside = cuda.CudaGatherNode(self, streams, within)
            else:
                self.inside = cuda.CudaSumNode(self, streams)
            self._resources.callback(self.inside.close)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def _agree(self) -> None:
        """Refuses, before anything is allocated, settings on which ranks disagree."""
        transport_for(self.device)
        mine = [self.device.type, self.num_buffers, self.path, self.sum_sms]
        self.exchange.agree("the device, num_buffers, path and sms", ", ".join(map(str, mine)))

    @contextlib.contextmanager
    def on_rail(self) -> Iterator[None]:
        """Wraps calls of the rails. A backend fails whatever has ended a peer, and does not say which peer. So a
        failure that another rank publishes within a moment is raised in place of the backend's error."""
        try:
            yield
        except PeerTimeout as error:
            found = self._blamed(error) if self.boards.quiet() else error
            self.check()
            if found is error:
                raise
            raise found from None

    def found_error(self) -> EpPluginError | ValueError | None:
        error, boards = error_of(self), self.group_boards
        if boards is None:
            return error
        if isinstance(error, PeerTimeout):
            return self._blamed(error)
        bad_node = boards.bad_node()
        if error is not None or bad_node is None:
            return error
        peer = self.node_map.node_ranks(bad_node)[self.index]
        first = boards.wait_for_first(GRACE_S) or (peer, "a sum inside its node has failed")
        return aborted_error(self, *first)

    def _blamed(self, error: PeerTimeout) -> EpPluginError:
        """`error`, or the one that names the rank at fault, as far as the ranks of all nodes publish in a moment."""
        boards = self.group_boards
        assert boards is not None
        at_fault = boards.culprit(error.rank)
        if boards.first is not None:
            return aborted_error(self, *boards.first)
        if at_fault == error.rank:
            return error
        return PeerTimeout(f"{error} {gave_up(error.rank, at_fault)}", at_fault, error.step)

    def described(self, field: int, value: int) -> tuple[str, str]:
        name = _C.piece_fields[field] if field < len(_C.piece_fields) else "place"
        text = _VALUES.get(name, {}).get(value, str(value))
        if name == "place":
            block, offset = divmod(value, _C.place_word(1, 0))
            text = "none (not from allocate)" if block == _C.staging_block else f"byte {offset} of block {block}"
        return _FIELDS.get(name, name), text

    def _remember(self, error: EpPluginError | ValueError) -> None:
        """Peers on this node see by themselves that another rank is late. Peers on other nodes do not, and no peer sees
        that this rank's rail is broken."""
        super()._remember(error)
        if isinstance(error, PeerTimeout) and self.group_boards is not None:
            if error.step == "rail":
                self.boards.tell_abort(reason_of(error))
            else:
                self.group_boards.post(reason_of(error))

    def _fail_with_another_node(self, rank: int, reason: str) -> None:
        """Ends the waits of this node, since `rank` of another one has failed."""
        assert self.group_boards is not None
        self.group_boards.mark(rank, reason)
        self.rails.abort()

    def _drained(self) -> Exception | None:
        if self._error is not None or not self.boards.quiet():
            self.rails.abort()  # nothing else ends a wait for a rank that is gone
        return super()._drained()

    @property
    def rail_bytes_sent(self) -> int:
        """Bytes of shards, without status words."""
        return self.rails.bytes_sent - (0 if self.group_boards is None else self.group_boards.status_bytes_sent)

    def group_rank(self, index: int) -> int:
        """As in the base. Boards also name ranks of other nodes: those come after the ranks of the node."""
        if not 0 <= index < self.node_size + self.size:
            raise IndexError(f"expected an index below {self.node_size + self.size}, got {index}")
        return self.node_ranks[index] if index < self.node_size else index - self.node_size


def _weakly(method: Callable[..., None]) -> Callable[..., None]:
    """`method` without keeping its object alive: does nothing when the object is gone."""
    found = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        bound = found()
        if bound is not None:
            bound(*args)

    return call


def _check_hosts(reports: Sequence[RankReport]) -> None:
    """Ranks that do not know where they run could be counted on one host or on several."""
    for report in reports:
        if report.ranks_per_node is None and "/" not in report.host.strip("/"):
            raise ValueError(
                f"group: expected ranks that know their host, got rank {report.rank} on {report.host!r}, which has "
                "neither a boot id nor a machine id; set EP_PLUGIN_RANKS_PER_NODE on every rank"
            )
