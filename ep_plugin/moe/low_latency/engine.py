"""The engine of low-latency communicators: peer memory made on first use, epochs and masks in device memory.

Shapes: R ranks, T_max tokens of a rank at most, E_l local experts, K experts per token.
"""

from __future__ import annotations

import ctypes
import dataclasses
import math
import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from ep_plugin import _C, counts
from ep_plugin.config import ROW_ALIGNMENT_BYTES, MoECommunicatorConfig
from ep_plugin.dtypes import DTYPES
from ep_plugin.errors import CaptureRefused, NotSupported
from ep_plugin.log import log
from ep_plugin.moe.across_nodes.tables import places_of_ranks
from ep_plugin.moe.arguments import MOST_ROWS, check_group, check_handle_words
from ep_plugin.moe.layout import NOTHING, DispatchHandle, DispatchOutput, Routing
from ep_plugin.moe.low_latency import sms
from ep_plugin.moe.low_latency.legs import Legs
from ep_plugin.moe.low_latency.load import LowLatencyLoad
from ep_plugin.moe.statistics import Sums
from ep_plugin.runtime.base import running
from ep_plugin.runtime.group import GroupEngine
from ep_plugin.runtime.streams import kernels_for, low_latency_streams
from ep_plugin.transport import open_memory
from ep_plugin.transport.exchange import Exchange
from ep_plugin.transport.peer import PeerMemory
from ep_plugin.transport.topology import NodeMap

_FIELD_NAMES = {"topk": "top-k", "max_tokens": "most tokens of a rank", "num_tokens": "number of tokens"}
_LARGE_BYTES = 2**20
_abandoned: list[Legs] = []  # of closed communicators, whose messages may still come


class Functions(NamedTuple):
    """Functions of C that run an operation or start it. Each returns None for a call that Python must take or check.

    - The first four take the arguments of MoECommunicator's methods.
    - The next four run the operators' calls: x, topk_ids, cumulative, wait_cost, capacity, quantize, topk_ids and plan
      of an earlier dispatch; and y, weights, bias, topk_ids, plan, out, wait_cost, logfmt.
    - The others take the arguments of deep_ep.Buffer's calls: x, topk_idx, cumulative_local_expert_recv_stats,
      dispatch_wait_recv_cost_stats, T_max, E, use_fp8, round_scale, use_ue8m0; and x, topk_weights, topk_idx, src_info,
      layout_range, out, combine_wait_recv_cost_stats, T_max, H, E, use_logfmt.

    Functions that start an operation return it as a _C.StartedOperation.
    """

    dispatch: Callable[..., Any]
    combine: Callable[..., Any]
    start_dispatch: Callable[..., Any]
    start_combine: Callable[..., Any]
    operator_dispatch: Callable[..., Any]
    operator_combine: Callable[..., Any]
    start_operator_dispatch: Callable[..., Any]
    start_operator_combine: Callable[..., Any]
    buffer_dispatch: Callable[..., Any]
    buffer_combine: Callable[..., Any]
    start_buffer_dispatch: Callable[..., Any]
    start_buffer_combine: Callable[..., Any]


def _leave(*given: Any) -> None:
    """Takes the place of a function of C."""


NO_FUNCTIONS = Functions(*(_leave,) * len(Functions._fields))


class LowLatencyEngine(GroupEngine):
    """The resources of one communicator.

    Construction is collective over `group`. So is the first operation, which makes the peer memory.

    Attributes:
        config: the communicator's configuration, with max_row_bytes set.
        mask: int32 ``[R]`` on the device, 1: masked. Kernels read and write it.
        functions: the functions of C that run operations.
        in_c: those that callers may call without `LowLatencyInFlight`, which opens ranges and checks ids on GPUs.
    """

    flat = False

    def __init__(self, group: dist.ProcessGroup, config: MoECommunicatorConfig, device: torch.device) -> None:
        super().__init__(Exchange(group, timeout_s=config.timeout_s), device, group, config)

    def _construct(self, group: dist.ProcessGroup, config: MoECommunicatorConfig) -> None:
        device = self.device
        self.kernels = kernels_for(device)
        self.config_hash = config.agreement_hash() & 0x7FFFFFFF
        self.streams = low_latency_streams(device)
        check_group(self.exchange, config, device)
        self.local_experts = config.num_experts // self.size
        assert config.max_tokens_per_rank is not None
        self.max_tokens: int = config.max_tokens_per_rank
        self._outputs: deque[torch.UntypedStorage] = deque(maxlen=2)  # the memory of the latest outputs
        self._resources.callback(self._outputs.clear)
        self.comm: Any = None  # until the first operation
        self._legs: list[Legs] = []  # one over several nodes, from the first operation on
        super()._construct(group, config)

    def _set_sizes(self, config: MoECommunicatorConfig) -> None:
        """Sets the bytes of the widest row, and the shape by which kernels find slots."""
        rows = self.local_experts * self.size * self.max_tokens
        if rows > MOST_ROWS:
            raise ValueError(
                f"max_tokens_per_rank: expected at most {MOST_ROWS} rows of all local experts, got {rows} "
                f"({self.local_experts} experts of {self.size} ranks' {self.max_tokens} tokens)"
            )
        widest, self.shape = slots_of(config, self.node_map.num_nodes)
        self.config = dataclasses.replace(config, max_row_bytes=widest)
        self.memory_bytes: int = _C.ll_block_bytes(self.node_size, self.shape)
        """Bytes of peer memory that this rank holds from its first operation on."""

    def _construct_node(self, config: MoECommunicatorConfig) -> None:
        check_nodes(self.node_map, self.device, config.shrink)
        self._set_sizes(config)
        self._make_boards(self._allocate_boards())
        self.num_sms = sms.for_device(self.device, self.sharing)
        self.memory = self._own(open_memory(self.within, self.device))
        self.places: torch.Tensor | None = None
        """int32 ``[2, R]``: node * G + local rank of each rank, then the rank at each such place. None on one node."""
        if self.rails.nodes:
            places = places_of_ranks(self.node_map, self.device)
            self.places = torch.cat([places, places.argsort().int()])
        self.ll_state = torch.zeros(_C.ll_state_bytes, dtype=torch.uint8, device=self.device)
        self.control = control_of(self, self.boards.address, running)
        self.load = LowLatencyLoad(self, self.local_experts, self.control)
        self._resources.callback(_close, self.control, self.memory, self._legs)
        self.functions = Functions(**self.control.functions())
        self.in_c = self.functions if self.is_direct else NO_FUNCTIONS
        begin = _C.ll_mask_offset
        self.mask = self.ll_state[begin : begin + 4 * self.node_size].view(torch.int32)

    def ensure_memory(self) -> None:
        """Makes the peer memory at the first operation. That call is collective."""
        if self.comm is not None:
            return
        if self.streams.capturing():
            raise CaptureRefused(
                f"{self.name}: its memory is made by its first operation, and a CUDA graph is being captured: run one "
                "step before capturing"
            )
        block = self.memory.allocate(self.memory_bytes, "low-latency memory")
        self.comm = self._comm_struct(block.ptrs, self.shape.node_experts)
        if self.rails.nodes:
            mapped = (ctypes.c_uint8 * block.nbytes).from_address(block.ptrs[self.index])
            legs = Legs(self, torch.frombuffer(mapped, dtype=torch.uint8))
            self.control.set_legs(legs, legs.pads)
            self._legs.append(legs)
        self.control.set_comm(self.comm)

    def rows_of(self, shape: tuple[int, int, int], dtype: torch.dtype) -> torch.Tensor:
        """Allocates output rows.

        A large output on a CPU reuses the memory of an earlier output that nobody holds any more, if there is one. New
        memory of that size comes from the system, and a page fault for each row takes longer than the row's copy.
        """
        if torch._C._len_torch_dispatch_stack():  # a mode may make fakes instead
            with _disable_current_modes():
                return self.rows_of(shape, dtype)
        nbytes = math.prod(shape) * dtype.itemsize
        if not self.reuses_rows(nbytes):
            return torch.empty(shape, dtype=dtype, device=self.device)
        for at in range(len(self._outputs)):
            if _is_unused(self._outputs, at) and self._outputs[at].nbytes() == nbytes:
                storage = self._outputs[at]
                break
        else:
            storage = torch.UntypedStorage(nbytes)
            self._outputs.append(storage)
        return torch.empty(0, dtype=dtype, device="cpu").set_(storage, 0, shape, (shape[1] * shape[2], shape[2], 1))

    def reuses_rows(self, nbytes: int) -> bool:
        """Whether `rows_of` reuses the memory of outputs of this size."""
        return self.device.type == "cpu" and nbytes >= _LARGE_BYTES

    def set_sms(self, counts: dict[str, int | None]) -> None:
        """Raises ValueError for any count, since the kernels choose their SMs."""
        if counts:
            raise ValueError(f'set_sms: expected no SM counts in mode="ll", got {", ".join(sorted(counts))}')

    asked_sms: dict[str, int | None] = {}  # noqa: RUF012 - never changed

    # -- handles -------------------------------------------------------------------------------------------------

    def plan_layout(self, max_tokens: int, topk: int) -> Any:
        """Returns the offsets of a plan's parts, in int32 words, for calls of at most `max_tokens` tokens per rank."""
        return _C.ll_plan_layout(self.size, self.node_map.num_nodes, self.local_experts, max_tokens, topk)

    def plan_words(self, num_tokens: int, topk: int, capacity: int | None = None) -> int:
        """Returns the int32 words of a plan. capacity: rows of an expert's block."""
        return self.plan_layout(self.tokens_of(capacity), topk).words

    def tokens_of(self, capacity: int | None) -> int:
        """Returns the most tokens that a rank may have in a dispatch whose experts' blocks have `capacity` rows."""
        return self.max_tokens if capacity is None else capacity // self.size

    def rows_of_plan(self, words: int, topk: int) -> int:
        """Returns the rows of an expert's block, which follow from the `words` of a plan."""
        fixed, each = self.plan_layout(0, topk).words, self.plan_layout(1, topk).words
        return self.size * ((words - fixed) // (each - fixed))

    def routing(self, name: str, topk_ids: torch.Tensor, plan: torch.Tensor) -> Routing:
        """Checks a handle's tensors and returns their routing.

        name: the argument's name, for errors. topk_ids: int32 or int64; -1 for pairs that a combine leaves out. Raises
        ValueError unless the tensors are as dispatch made them.
        """
        check_handle_words(self, name, (torch.int32, torch.int64), topk_ids=topk_ids, plan=plan)
        T, K = topk_ids.shape
        per_expert = self.rows_of_plan(plan.numel(), K)
        if (
            plan.dim() != 1
            or plan.numel() != self.plan_words(T, K, per_expert)
            or not (self.size <= per_expert <= self.size * self.max_tokens)
        ):
            raise ValueError(
                f"{name}.plan: expected one of {self.size} ranks, {self.local_experts} experts here and {K} for each "
                f"token, got shape {tuple(plan.shape)}"
            )
        if self.tokens_of(per_expert) < T:
            raise ValueError(
                f"{name}.topk_ids: expected at most {self.tokens_of(per_expert)} tokens, by its plan, got {T}"
            )
        handle = DispatchHandle(topk_ids, plan, NOTHING, NOTHING, 0)
        return Routing(handle, _C.Routing(num_tokens=T, topk=K), [self.local_experts * per_expert])

    def described(self, field: int, value: int) -> tuple[str, str]:
        name, said = _C.ll_header_fields[field], str(value)  # a peer may have garbled the value
        if name == "dtype" and 0 <= value < len(DTYPES):
            said = str(DTYPES[value])
        elif name == "format" and value in list(_C.LlFormat):
            said = _C.LlFormat(value).name.lower()
        return _FIELD_NAMES.get(name, name.replace("_", " ")), said


def _close(control: _C.LowLatency, memory: PeerMemory, legs: list[Legs]) -> None:
    """Closes the part in C. If legs are under way, their memory stays mapped."""
    control.close()
    if any(one.abandoned for one in legs):
        nbytes = sum(buffer.nbytes for buffer in memory.buffers())
        log().warning("closed with low-latency operations that nobody has received: %d bytes stay mapped", nbytes)
        for buffer in memory.buffers():
            buffer.abandon()
        _abandoned.extend(legs)


def control_of(engine: Any, board: int, running: dict[torch.device, Any]) -> _C.LowLatency:
    """Returns the part of an engine in C. board: the address of its board. running: of runtime/base.py."""
    device = engine.device
    return _C.LowLatency(
        engine,
        running,
        device,
        engine.call_log,
        engine.name,
        board,
        -1 if device.type == "cpu" else device.index,
        engine.kernels.table,
        engine.streams.order,
        engine.local_experts,
        engine.shape,
        engine.config.shrink,
        engine.num_sms,
        engine.ll_state.data_ptr(),
        engine.node,
        0 if engine.places is None else engine.places.data_ptr(),
    )


_C.set_python_objects(
    DispatchOutput,
    DispatchHandle,
    NOTHING,
    torch.int64,
    counts.num_served,
    counts.num_served_of_kind,
    Sums,
)


def _references(queue: Sequence[object], at: int) -> int:
    return sys.getrefcount(queue[at])


_OF_THE_QUEUE_ALONE = _references(deque([object()]), 0)  # the count depends on the version of Python


def _is_unused(outputs: Sequence[torch.UntypedStorage], at: int) -> bool:
    """Whether nobody but `outputs` holds the storage at index `at`.

    A tensor holds the storage through C++, so its use count shows it. A caller that holds only the storage shares this
    Python object, so its reference count shows it.
    """
    alone = _references(outputs, at) == _OF_THE_QUEUE_ALONE
    return alone and torch._C._storage_Use_Count(outputs[at]._cdata) == 1


def check_nodes(node_map: NodeMap, device: torch.device, shrink: bool = False) -> None:
    """Raises NotSupported if low latency does not serve a group over these nodes."""
    nodes, each = node_map.num_nodes, node_map.ranks_per_node
    if nodes == 1:
        return
    if not kernels_for(device).low_latency_over_nodes:
        raise NotSupported(
            f'mode="ll": expected all {nodes * each} ranks of GPUs on one node, got {nodes} nodes of {each}; use '
            'mode="ht" (EP_PLUGIN_RANKS_PER_NODE overrides how a host is split)'
        )
    if shrink:
        raise NotSupported(f'shrink: expected False in mode="ll" over several nodes, got True for {nodes} nodes')


def slots_of(config: MoECommunicatorConfig, num_nodes: int = 1) -> tuple[int, Any]:
    """Returns the bytes of the widest row, and the _C.LlShape by which kernels find slots and legs."""
    assert config.max_tokens_per_rank is not None
    row_bytes = config.max_row_bytes or 2 * config.hidden_size
    # Gradients of weights travel as rows of K values.
    most = max(row_bytes, 8 * config.topk) + ROW_ALIGNMENT_BYTES - 1
    widest = most - most % ROW_ALIGNMENT_BYTES
    slot_bytes = _C.ll_slot_bytes(widest, config.hidden_size, config.topk)
    return widest, _C.LlShape(
        max_tokens=config.max_tokens_per_rank,
        max_topk=config.topk,
        slot_bytes=slot_bytes,
        num_nodes=num_nodes,
        node_experts=config.num_experts // num_nodes,
    )
