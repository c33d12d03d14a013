"""The base of communicators whose group may span nodes: the node map, the ranks of this node, rails, and failures.

Shapes: R ranks in the group, N nodes of G ranks each, R = N * G. `rank` is the rank in the group, `index` the local
rank in the node. Errors name ranks of the group.
"""

from __future__ import annotations

import functools
import weakref
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ep_plugin import _C, env
from ep_plugin.errors import EpPluginError, NotSupported, PeerTimeout, reason_of
from ep_plugin.runtime.base import BaseEngine
from ep_plugin.runtime.board import Boards
from ep_plugin.runtime.failures import GroupBoards
from ep_plugin.runtime.faults import GRACE_S, aborted_error, error_of, gave_up
from ep_plugin.runtime.poller import Poller
from ep_plugin.runtime.sms import budget_of
from ep_plugin.transport.exchange import Exchange
from ep_plugin.transport.nccl import MOST_CTAS
from ep_plugin.transport.peer import AddressTable, PeerBuffer, PeerMemory
from ep_plugin.transport.rails import Rails, check_backend
from ep_plugin.transport.shm import ShmMemory
from ep_plugin.transport.topology import NodeMap, RankReport, check_hosts, check_peer_access, discover

_rail_poller = Poller("ep_plugin rails", pause_s=0.01, idle_s=0.05)


def find_nodes(exchange: Exchange, group: dist.ProcessGroup, device: torch.device) -> tuple[NodeMap, list[RankReport]]:
    """Returns the node map of the group and the report of each rank. Collective.

    Args:
        exchange: an exchange between all ranks of `group`.
        device: the device of this rank.

    Raises:
        NotSupported: communicators cannot serve the group. All ranks raise it.
    """
    node_map, reports = discover(exchange, device)
    check_hosts(reports)
    if node_map.ranks_per_node > _C.max_ranks:
        raise NotSupported(f"group: expected at most {_C.max_ranks} ranks on one node, got {node_map.ranks_per_node}")
    check_peer_access(reports, node_map, exchange.ranks)
    if node_map.num_nodes > 1:
        check_backend(group, device)
    return node_map, reports


class RailWatch:
    """The object through which the polling thread watches the rail of one communicator."""

    def __init__(self, look: Callable[[], None]) -> None:
        self._look = look

    def poll(self) -> bool:
        self._look()
        return False


class GroupEngine(BaseEngine):
    """A communicator over the nodes of a group. Subclasses add what the ranks of a node share.

    Attributes:
        node_map: which ranks of the group are on which node.
        node, index: this rank's node, and its local rank there.
        node_ranks: the ranks of the group on this node.
        node_size: their number, G.
        within: the exchange between the ranks of this node.
        rails: this rank's connections to other nodes.
        sharing: the number of ranks in the group that use this rank's device, itself included.
        checks_ids: whether dispatches check expert ids.
        state: the device memory of this communicator's kernels, uint8.
        kernels: the kernel table of the device.
        group_boards: `boards` if the group spans nodes.
    """

    kernels: Any
    group_boards: GroupBoards | None = None
    shared: Sequence[PeerBuffer] = ()
    """Blocks that this communicator shares with others of its group."""

    def _construct(self, group: dist.ProcessGroup, *given: Any) -> None:
        self._memories: list[PeerMemory] = []
        self.node_map, reports = find_nodes(self.exchange, group, self.device)
        mine = reports[self.rank]
        self.sharing = sum((one.host, one.device_id) == (mine.host, mine.device_id) for one in reports)
        self.node = self.node_map.node_of(self.rank)
        self.index = self.node_map.local_rank_of(self.rank)
        self.node_ranks = self.node_map.node_ranks(self.node)
        self.node_size = len(self.node_ranks)
        self.rails = Rails(self.exchange, group, self.node_map, self.device, weakly(self._fail_with_rail))
        self._resources.callback(self.rails.close)
        within = self.within = self.exchange
        if self.rails.nodes:
            within = self.within = Exchange(group, self.timeout_s, ranks=self.node_ranks)
            self._resources.callback(within.close)
        self.state = torch.zeros(_C.state_bytes, dtype=torch.uint8, device=self.device)
        self.checks_ids = self.device.type == "cpu" or env.check_ids()
        try:
            self._construct_node(*given)
        except BaseException as error:
            within.abort(reason_of(error))
            raise
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.rails.open(self.exchange, self.exchange.all_gather("construct communicator", self.rails.offer()))
        self.exchange.watch = within.watch = weakly(self.check)
        if self.device.type == "cuda" and self.rails.nodes:
            budget_of(self.device).reserve(MOST_CTAS)
            self._rail_watch = RailWatch(weakly(self._watch_rail))
            self._resources.callback(_rail_poller.discard, self._rail_watch)
            _rail_poller.add(self._rail_watch)

    @abstractmethod
    def _construct_node(self, *given: Any) -> None:
        """Makes the memory that the ranks of this node share. Collective among them."""

    def _own(self, memory: PeerMemory) -> PeerMemory:
        """Keeps `memory` until `close`, which closes it, and returns it."""
        self._resources.callback(memory.close)
        self._memories.append(memory)
        return memory

    def peer_buffers(self) -> list[PeerBuffer]:
        """Returns this rank's open blocks that the communicator holds, also the blocks that it shares."""
        own = [buffer for memory in self._memories for buffer in memory.buffers()]
        return own if self.closed else [*own, *self.shared]

    def _allocate_boards(self, num_totals: int = 0) -> tuple[int, ...]:
        """Allocates the boards of this communicator in host memory, with room for `num_totals` totals. Collective.

        Returns the address of each rank's board, by local rank. This object frees the memory.
        """
        return self._own(ShmMemory(self.within)).allocate(_C.board_bytes(num_totals), "board").ptrs

    def _make_boards(self, boards: Sequence[int], num_totals: int = 0) -> None:
        """Makes `boards` from the address of each rank's board. The caller frees their memory after `close`."""
        if self.rails.nodes:
            store, found = self.exchange.polled_store("failure"), weakly(self._fail_with_another_node)
            self.boards = self.group_boards = GroupBoards(
                boards,
                self.index,
                num_totals,
                self.state,
                self.node_map.num_nodes,
                store,
                self.rank,
                self.size,
                found,
            )
        else:
            self.boards = Boards(boards, self.index, num_totals, self.device)
        self._resources.callback(self.boards.close)

    @functools.cached_property
    def checks_gpu_ids(self) -> bool:
        """Whether Python reads the ids of every dispatch back from a GPU."""
        return self.checks_ids and self.device.type != "cpu"

    @functools.cached_property
    def is_direct(self) -> bool:
        """Whether C may run operations before Python sees them: it opens no ranges and checks no ids on GPUs."""
        return not (self.checks_gpu_ids or self.has_ranges)

    def _comm_struct(self, control: Sequence[int], num_experts: int, plain: bool = False, num_origins: int = 1) -> Any:
        """Returns the communicator as kernels of this node see it.

        Args:
            control: the address of each rank's control block, as mapped here.
            num_experts: the number of experts on the node.
            plain: whether kernels use no bulk copies.
            num_origins: the most origins of one dispatch's tokens (csrc/common/layout.h).
        """
        table = self._control_table = AddressTable(control, self.device)
        return _C.Comm(
            rank=self.index,
            num_ranks=self.node_size,
            num_experts=num_experts,
            gate=_C.Step[(env.settings().test_gate or "none").upper()],
            plain=int(plain),
            num_origins=num_origins,
            timeout_ns=int(self.timeout_s * 1e9),
            control=table.address,
            own_control=control[self.index],
            state=self.state.data_ptr(),
            board=self.boards.device_address,
        )

    def raise_of_rail(self, error: PeerTimeout) -> NoReturn:
        """Raises an error of the rails, or in its place the failure that another rank publishes.

        A backend raises the same error whatever has ended a peer, and does not say which peer that is. So this waits a
        moment for a failure in the store.
        """
        found = self._blamed(error) if self.boards.quiet() else error
        self.check()
        raise found from (error.__cause__ if found is error else None)

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
        """Returns `error`, or an error that names the rank at fault, if the ranks of all nodes show it in a moment."""
        boards = self.group_boards
        assert boards is not None
        at_fault = boards.culprit(error.rank)
        if boards.first is not None:
            return aborted_error(self, *boards.first)
        if at_fault == error.rank:
            return error
        return PeerTimeout(f"{error} {gave_up(error.rank, at_fault)}", at_fault, error.step)

    def _publish(self, error: EpPluginError | ValueError) -> None:
        """Publishes timeouts as well, as far as peers cannot see them.

        Peers on this node see by themselves that another rank is late. Peers on other nodes do not. No peer sees that
        this rank's rail is broken.
        """
        super()._publish(error)
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

    def _fail_with_rail(self, reason: str) -> None:
        """Fails because another communicator has failed and ends the rail of both. Messages then end without data."""
        if not self.closed and self._error is None and self.boards.quiet():
            self._error = aborted_error(self, self.rank, reason)
            self.boards.tell_abort(reason)
            self._dump(self._error)

    def settle(self) -> None:
        try:
            with self.streams.on_own():  # memory was made on it, too
                self.rails.settle()
        finally:
            super().settle()

    def record(self, *tensors: torch.Tensor | None) -> None:
        super().record(*tensors)
        self.rails.record(*tensors)

    def _watch_rail(self) -> None:
        """Aborts the rail on GPUs if its messages are overdue, or still cross after this communicator has failed.

        Streams that wait for the messages then continue. No later result is returned as good.
        """
        late = self.rails.overdue()
        failed = self._error is not None or not self.boards.quiet()
        if late is not None and not failed:
            self._remember(self._blamed(late))
        if late is not None or (failed and self.rails.running()):
            self.rails.abort()

    def _drained(self) -> Exception | None:
        if self._error is not None or not self.boards.quiet():
            self.rails.abort()  # nothing else ends a wait for a rank that is gone
        return super()._drained()

    def group_rank(self, index: int) -> int:
        """Returns the rank as the base does. Indices behind the ranks of the node name ranks of the whole group."""
        if not 0 <= index < self.node_size + self.size:
            raise IndexError(f"expected an index below {self.node_size + self.size}, got {index}")
        return self.node_ranks[index] if index < self.node_size else index - self.node_size


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """Returns a function that calls `method` without keeping its object alive. It does nothing once that is gone."""
    found = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        bound = found()
        if bound is not None:
            bound(*args)

    return call
