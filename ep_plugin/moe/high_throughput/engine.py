"""The engine of high-throughput communicators: peer memory, pools, board, kernels, failure and closing."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ep_plugin import _C, env
from ep_plugin.config import SMS_FIELDS, DispatchLayout, MoECommunicatorConfig
from ep_plugin.dtypes import DTYPES
from ep_plugin.errors import CaptureRefused, DisagreementError, EpPluginError
from ep_plugin.moe.arguments import check_group, check_routing
from ep_plugin.moe.high_throughput import sms
from ep_plugin.moe.high_throughput.load import HighThroughputLoad
from ep_plugin.moe.layout import DispatchHandle, Routing
from ep_plugin.moe.legs import num_origins, num_segments
from ep_plugin.runtime.base import running
from ep_plugin.runtime.faults import DISAGREE_ON
from ep_plugin.runtime.group import GroupEngine, weakly
from ep_plugin.runtime.streams import CudaStreams, Streams, high_throughput_streams, kernels_for
from ep_plugin.transport import open_memory
from ep_plugin.transport.exchange import Exchange
from ep_plugin.transport.nccl import MOST_CTAS
from ep_plugin.transport.peer import AddressTable, PeerBuffer

# These are plain ints: they are looked up at every operation, and hashing an enum calls Python code.
DISPATCH_POOL, COMBINE_POOL = int(_C.Pool.DISPATCH), int(_C.Pool.COMBINE)
_WORD_BYTES = 4
_FIELD_NAMES = {"op": "operation", "topk": "top-k", "config_hash": "config", "num_tokens": "number of tokens"}

_HEADER_WORDS = ("op", "row_bytes", "scale_bytes", "weight_bytes", "topk", "dtype", "num_tokens")


@functools.lru_cache(maxsize=1024)  # by position: keywords would double the time of a hit
def _header(layout: int, config_hash: int, *words: int) -> Any:
    """Makes a header, or returns an earlier one of the same words: most calls resemble an earlier call. Do not change
    it."""
    return _C.Header(layout=layout, config_hash=config_hash, **dict(zip(_HEADER_WORDS, words, strict=True)))


class HighThroughputEngine(GroupEngine):
    """The resources of one communicator. Construction is collective over `group`; so is every growth of a pool.

    Kernels, boards and pools serve the ranks of this node: G of the group's R ranks.
    """

    control: _C.HighThroughput | Any = None  # until it is constructed

    def __init__(self, group: dist.ProcessGroup, config: MoECommunicatorConfig, device: torch.device) -> None:
        super().__init__(Exchange(group, timeout_s=config.timeout_s), device, group, config)

    def _construct(self, group: dist.ProcessGroup, config: MoECommunicatorConfig) -> None:
        self.config, device = config, self.device
        self.kernels = kernels_for(device)
        self.config_hash = config.agreement_hash()
        self.flat = config.resolved_layout is DispatchLayout.FLAT
        self.layout = int(_C.Layout[config.resolved_layout.name])
        self._usable_sms = sms.usable_sms(device)
        self.asked_sms: dict[str, int | None] = {}
        self._sms = sms.asked_of(config, self._usable_sms)
        self.streams = high_throughput_streams(device)
        check_group(self.exchange, config, device)
        self.local_experts = config.num_experts // self.size
        self.num_totals = _C.num_totals + self.local_experts
        self._pools: dict[int, PeerBuffer] = {}
        super()._construct(group)

    def _construct_node(self) -> None:
        device = self.device
        if device.type == "cuda" and self.rails.nodes:
            self._usable_sms = max(2, self._usable_sms - MOST_CTAS)
            self._sms = sms.asked_of(self.config, self._usable_sms)
        self.node_experts = self.local_experts * self.node_size
        if device.type == "cuda" and self.node_experts + self.node_size > _C.max_keys:
            raise ValueError(
                f"num_experts: expected at most {_C.max_keys - self.node_size} on cuda for {self.node_size} ranks of a "
                f"node, got {self.node_experts}"
            )
        origins = num_origins(self.node_map.num_nodes)
        self.meta_layout = _C.meta_layout(self.node_size, self.node_experts, origins)
        self.meta_words = self.meta_layout.words
        self.load = HighThroughputLoad(self, self.meta_layout, self.local_experts)
        num_totals = self.num_totals * num_segments(self.node_map.num_nodes, self.config, device.type)
        self._make_boards(self._allocate_boards(num_totals), num_totals)
        self.memory = self._own(open_memory(self.within, device))
        self._control = self.memory.allocate(_C.control_bytes(self.node_size, self.node_experts, origins), "control")
        plain = env.settings().plain_kernels
        self.comm = self._comm_struct(self._control.ptrs, self.node_experts, plain, origins)
        self._no_pools = AddressTable([0] * self.node_size, device)  # kernels read a table even if no row goes there
        for pool in (DISPATCH_POOL, COMBINE_POOL):
            self.comm.set_pool(pool, self._no_pools.address, 0, 0)
        self.control = self._make_control()

    def _make_control(self) -> _C.HighThroughput:
        """Makes the object that runs operations on this node."""
        device, config, name = self.device, self.config, self.name
        index = -1 if device.type == "cpu" else device.index
        control = _C.HighThroughput(self, running, device, self.call_log, name, self.boards.address, index)
        most = -1 if config.max_tokens_per_rank is None else config.max_tokens_per_rank
        sizes = self.node_size, self.node_experts, most, int(self._totals_s * 1e9)
        control.set_facts(self.layout, config.expert_alignment, *sizes)
        control.set_comm(self.comm)
        control.set_kernels(self._kernels)
        control.set_streams(*_in_c(self.streams))
        return control

    @property
    def kernels(self) -> Any:
        """The kernel table: `_C.cpu`, `_C.cuda`, or an object with functions of these names."""
        return self._kernels

    @kernels.setter
    def kernels(self, table: Any) -> None:
        self._kernels = table
        if self.control is not None:
            self.control.set_kernels(table)

    def use(self, streams: Streams) -> None:
        """Runs later operations on these streams."""
        self.streams = streams
        self.control.set_streams(*_in_c(streams))

    # -- SMs -----------------------------------------------------------------------------------------------------

    def set_sms(self, counts: dict[str, int | None]) -> None:
        """Sets the SM counts of later operations. Counts that `counts` does not have come from the configuration."""
        unknown = set(counts) - set(SMS_FIELDS)
        if unknown:
            raise ValueError(f"set_sms: expected names among {', '.join(SMS_FIELDS)}, got {', '.join(sorted(unknown))}")
        given = {name: count for name, count in counts.items() if count is not None}
        asked = sms.asked_of(dataclasses.replace(self.config, **given), self._usable_sms)  # type: ignore[arg-type]
        self._sms, self.asked_sms = asked, counts
        self.control.forget_plans()

    def dispatch_sms(
        self, num_tokens: int, row_bytes: int, topk: int, quantize: bool, in_two: bool = False
    ) -> sms.KernelSms:
        """Returns the SMs of a dispatch of T = num_tokens. Ranks may differ.

        row_bytes: bytes of a row on the wire, with scales. in_two: the sending kernel never receives, as between nodes.
        """
        small = num_tokens <= sms.SMALL_BATCH_TOKENS
        wanted = sms.for_dispatch(self.node_size, small, row_bytes, topk, quantize)
        return sms.fitted(self._sms[0], self._usable_sms, wanted, in_two)

    def combine_sms(self, num_tokens: int, row_bytes: int, topk: int, in_two: bool = False) -> sms.KernelSms:
        """Returns the SMs of a combine to T = num_tokens.

        row_bytes: bytes of a partial row. in_two: the sending kernel never receives, as between nodes.
        """
        small, terms_of = num_tokens <= sms.SMALL_BATCH_TOKENS, topk if self.flat else 1  # TOKEN_MAJOR rows are sums
        wanted = sms.for_combine(self.node_size, small, row_bytes, terms_of)
        return sms.fitted(self._sms[1], self._usable_sms, wanted, in_two)

    def enter(self, chosen: sms.KernelSms) -> None:
        """Orders the own stream for the kernels of an operation over nodes, so that they fit beside other kernels that
        wait."""
        self.control.enter(self.streams.own, chosen)

    # -- pools ---------------------------------------------------------------------------------------------------

    def pool_bytes(self, pool: int) -> int:
        """Returns the size of this rank's `pool`; 0 if it is not allocated yet."""
        return self._pools[pool].nbytes if pool in self._pools else 0

    def room_for(self, pool: int, needed: int) -> int:
        """Returns `needed` if `pool` has as many bytes, else a quarter more, so that slow growth replaces pools
        rarely."""
        return self.control.room_for(pool, needed)

    def reserve(self, pool: int, nbytes: int) -> None:
        """Makes every rank's pool at least `nbytes` large. All ranks call it once for each operation, before its send.

        Growing is collective. If one rank has to grow its pool and a peer has not, their rows differ in size, and the
        rank that grows raises DisagreementError.
        """
        self.control.reserve(pool, nbytes)

    def grow(self, pool: int, nbytes: int) -> None:
        """Replaces a pool. Closes the old one only after every rank has finished everything that reads or writes it."""
        name = f"{_C.Pool(pool).name.lower()} pool"
        if self.streams.capturing():
            raise CaptureRefused(
                f"{self.name}: the {name} has {self.pool_bytes(pool)} bytes where {nbytes} are needed, "
                "and a CUDA graph is being captured: run one step of this shape before capturing"
            )
        self.streams.wait()
        self.within.watch = _watch_of(self, (name, nbytes))
        sizes = self.within.all_gather(f"grow {name}", nbytes)
        self.within.watch = weakly(self.check)
        for rank, theirs in zip(self.node_ranks, sizes, strict=True):
            if theirs != nbytes:
                raise self.disagreement_on_pool(name, nbytes, rank, f"{theirs}")
        old = self._pools.pop(pool, None)
        if old is not None and not self._captured:  # a captured graph goes on writing to the pool it was captured with
            old.close()
        block = self._pools[pool] = self.memory.allocate(nbytes, name)
        self.comm.set_pool(pool, block.table.address, block.ptrs[self.index], block.nbytes)

    def disagreement_on_pool(self, pool: str, nbytes: int, rank: int, theirs: str) -> DisagreementError:
        """Returns the error for two ranks that need pools of different sizes for one operation."""
        return DisagreementError(
            f"{DISAGREE_ON} one call of {self.name}: the {pool} needs {nbytes} bytes on rank {self.rank}, "
            f"{theirs} on rank {rank}: the shapes or dtypes of their rows differ"
        )

    # -- routings ------------------------------------------------------------------------------------------------

    def plan_words(self, num_tokens: int, topk: int, capacity: int | None = None) -> int:
        """Returns the int32 words of a plan on this node: meta, then send_pos ``[T, G]``, then pair_pos ``[T, K]``."""
        return self.meta_words + num_tokens * (self.node_size + topk)

    def slots(self, capacity: int | None) -> int | None:
        """Returns the rows of a handle's recv_rows; None if they are known only when dispatch has run."""
        most = self.config.max_tokens_per_rank
        return None if capacity is None or most is None else self.node_size * most

    def routing(self, name: str, handle: DispatchHandle) -> Routing:
        """Checks a handle and returns its routing. Raises ValueError, with the argument's `name`, unless its tensors
        are as dispatch made them."""
        check_routing(self, name, handle, self.num_totals)
        return Routing(handle, self.routing_struct(*handle[:3]), handle.totals.tolist())

    def header(self, *words: int) -> Any:
        """Returns the words that ranks compare at an operation: `words`, as in _HEADER_WORDS, and the communicator's
        own words."""
        return _header(self.layout, self.config_hash, *words)

    def routing_struct(self, topk_ids: torch.Tensor, plan: torch.Tensor, recv_rows: torch.Tensor | None) -> Any:
        """Returns the routing as kernels read it. recv_rows is None before dispatch has made it."""
        T, K = topk_ids.shape
        meta = plan.data_ptr()
        send_pos = meta + _WORD_BYTES * self.meta_words
        return _C.Routing(
            num_tokens=T,
            topk=K,
            layout=self.layout,
            alignment=self.config.expert_alignment,
            topk_ids=topk_ids.data_ptr(),
            send_pos=send_pos,
            pair_pos=send_pos + _WORD_BYTES * T * self.node_size,
            meta=meta,
            recv_rows=_C.address(recv_rows),
            slots=0 if recv_rows is None else recv_rows.shape[0],
        )

    # -- waiting -------------------------------------------------------------------------------------------------

    def wait_totals(self, ticket: int, segments: int) -> torch.Tensor:
        """Waits for notify `ticket`, and returns the totals of so many segments, see Boards.totals. Raises the
        communicator's first error, or PeerTimeout at the deadline."""
        self.control.wait_totals(ticket)
        return self.boards.totals(segments, self.local_experts)

    @property
    def _totals_s(self) -> float:
        """The longest wait for totals. The kernel's deadline starts later, passes first, and says more."""
        return 2 * self.timeout_s + 5.0

    def totals_are_overdue(self) -> None:
        """Raises the error for totals that have not come."""
        self.check()
        raise EpPluginError(f"{self.name}: the device did not finish step notify in {self._totals_s:g} s")

    # -- errors --------------------------------------------------------------------------------------------------

    def described(self, field: int, value: int) -> tuple[str, str]:
        name, said = _C.header_fields[field], str(value)  # a peer may have garbled the value
        if name == "dtype" and 0 <= value < len(DTYPES):
            said = str(DTYPES[value])
        elif name == "op" and value in list(_C.Op):
            said = _C.Op(value).name.replace("_", " ").lower()
        return _FIELD_NAMES.get(name, name.replace("_", " ")), said


def _in_c(streams: Streams) -> tuple[int, Streams | None, _C.StreamOrder | None]:
    """Returns the own stream, an object that orders streams if C cannot, and their order if it can."""
    return streams.own, None if type(streams) in (Streams, CudaStreams) else streams, streams.order


def _watch_of(engine: HighThroughputEngine, growing: tuple[str, int]) -> Callable[[], None]:
    """Returns the check that ends an exchange early: after an abort, or if a peer does not grow the pool `growing`
    (name, bytes) with this rank."""
    found = weakref.ref(engine)

    def watch() -> None:
        engine = found()
        if engine is None:
            return
        engine.check()
        for index, rank in enumerate(engine.node_ranks):
            if index != engine.index and engine.boards.reserved_pools_of(index) > engine.control.reserved:
                raise engine.disagreement_on_pool(*growing, rank, "no more than there are")

    return watch
