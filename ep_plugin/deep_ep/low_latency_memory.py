"""The communicators of a Buffer's low-latency calls, their masks, and the buffers of combines.

Shapes: T_max tokens at most on any rank in one call, H hidden size, E experts in all, E_l = E / R on this rank, R
ranks, N = R * T_max rows of each expert.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ep_plugin.config import MAX_TOPK, MoECommunicatorConfig
from ep_plugin.deep_ep import arguments
from ep_plugin.deep_ep.handles import LowLatencyHandle
from ep_plugin.deep_ep.shared import device_of, least_bound
from ep_plugin.moe.arguments import check_tensors
from ep_plugin.moe.communicator import MoECommunicator
from ep_plugin.moe.in_flight import untraced
from ep_plugin.moe.low_latency.engine import LowLatencyEngine
from ep_plugin.transport.exchange import Exchange
from ep_plugin.transport.groups import timeout_of

_SHRINK_TIMEOUT_S = 100.0  # DeepEP's, after which a rank is masked
# T_max, H and E of the last size hint of so many ranks and bytes. A Buffer that is given these bytes is for such calls.
hinted: dict[tuple[int, int], tuple[int, int, int]] = {}


@dataclasses.dataclass
class _CombineBuffers:
    """Two buffers that take turns, so that one may be filled while a combine sends the other."""

    combines: int = 0  # that have sent one of them
    pair: list[torch.Tensor] = dataclasses.field(default_factory=list)


class LowLatencyMemory:
    """What the low-latency calls of one Buffer use."""

    group: dist.ProcessGroup
    rank: int
    group_size: int
    low_latency_mode: bool
    enable_shrink: bool
    _check_open: Callable[[], None]
    _communicator: Callable[[MoECommunicatorConfig, torch.device], MoECommunicator]

    def __init__(self) -> None:
        self._low_latency: dict[tuple[int, int, int, torch.device], MoECommunicator] = {}
        self._combine_buffers: dict[tuple[int, int, int, torch.device], _CombineBuffers] = {}
        self._opened_for: dict[tuple[int, int, int, torch.device], MoECommunicator] = {}  # by the sizes of calls
        self._masked = [0] * self.group_size  # as set by calls, for communicators that are made later

    # -- masks ---------------------------------------------------------------------------------------------------

    @untraced
    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Mask a rank, which this rank then neither sends to nor waits for, or unmask it."""
        self._check_shrink("low_latency_update_mask_buffer")
        if type(rank_to_mask) is not int or not 0 <= rank_to_mask < self.group_size:
            raise ValueError(f"rank_to_mask: expected a rank from 0 to {self.group_size - 1}, got {rank_to_mask!r}")
        self._masked[rank_to_mask] = int(mask)
        for comm in self._low_latency.values():
            comm.rank_mask[rank_to_mask] = int(mask)

    @untraced
    def low_latency_query_mask_buffer(self, mask_status: torch.Tensor) -> None:
        """Write to `mask_status`, int32 ``[R]``: 1 for masked ranks, else 0."""
        self._check_shrink("low_latency_query_mask_buffer")
        check_tensors(mask_status=mask_status)
        arguments.check_tensor("mask_status", mask_status, (torch.int32,), self.group_size)
        mask_status.copy_(torch.tensor(self._masked, dtype=torch.int32, device="cpu"))
        for comm in self._low_latency.values():
            torch.maximum(mask_status, comm.rank_mask.to(mask_status.device), out=mask_status)

    @untraced
    def low_latency_clean_mask_buffer(self) -> None:
        """Unmask all ranks."""
        self._check_shrink("low_latency_clean_mask_buffer")
        self._masked = [0] * self.group_size
        for comm in self._low_latency.values():
            comm.rank_mask.zero_()

    # -- memory --------------------------------------------------------------------------------------------------

    def _reserve(self, num_rdma_bytes: int) -> None:
        """Make the memory of the sizes whose hint this is. Collective. A rank may then be late in every call."""
        sizes, device = hinted.get((self.group_size, num_rdma_bytes)), device_of(self.group)
        mine = [sizes and list(sizes), device.type]
        with contextlib.closing(Exchange(self.group)) as exchange:
            of_all = exchange.all_gather("low-latency sizes", mine)
        if sizes is not None and all(theirs == mine for theirs in of_all):
            engine = self._open(*sizes, device).engine
            engine.run("low-latency memory", LowLatencyEngine.ensure_memory)

    # -- what the calls share ------------------------------------------------------------------------------------

    def _check_low_latency(self, call: str) -> None:
        self._check_open()
        if not self.low_latency_mode:
            raise ValueError(f"{call}(): expected a Buffer made with low_latency_mode=True, got False")

    def _check_shrink(self, call: str) -> None:
        self._check_low_latency(call)
        if not self.enable_shrink:
            raise ValueError(f"{call}(): expected a Buffer made with enable_shrink=True, got False")

    def _open(self, max_tokens: int, hidden: int, num_experts: int, device: torch.device) -> MoECommunicator:
        """Return the communicator of calls of these sizes, or make it. It then knows of all masked ranks."""
        config = config_of(max_tokens, hidden, num_experts)
        assert config.max_tokens_per_rank is not None
        key = num_experts, hidden, config.max_tokens_per_rank, device
        comm = self._low_latency.get(key)
        if comm is None:
            if self.enable_shrink:
                seconds = min(_SHRINK_TIMEOUT_S, timeout_of(self.group))
                config = dataclasses.replace(config, shrink=True, timeout_s=seconds)
            comm = self._low_latency[key] = self._communicator(config, device)
            if any(self._masked):
                comm.rank_mask.copy_(torch.tensor(self._masked, dtype=torch.int32, device="cpu"))
        self._opened_for[max_tokens, hidden, num_experts, device] = comm
        if self.enable_shrink and len(self._low_latency) > 1:
            for other in self._low_latency.values():
                if other is not comm and other.engine.device == device:
                    torch.maximum(comm.rank_mask, other.rank_mask, out=comm.rank_mask)
        return comm

    def _opened(self, x: Any, max_tokens: Any, hidden: int | None, num_experts: Any) -> MoECommunicator | None:
        """Return the communicator of earlier calls of these sizes, for calls by C. hidden: None: x has it."""
        if self.enable_shrink and len(self._low_latency) > 1:  # `_open` exchanges masks
            return None
        if torch._C._len_torch_dispatch_stack():  # a mode may refuse the tensors: checks must find that first
            return None
        try:
            return self._opened_for.get((max_tokens, x.size(-1) if hidden is None else hidden, num_experts, x.device))
        except Exception:  # a wrong argument, as Python will say
            return None

    def _combine_buffer(self, handle: LowLatencyHandle, sends: bool) -> torch.Tensor:
        """Return the next buffer of a combine. sends: a combine sends it now, so the other one is the next."""
        src_info, _, max_tokens, hidden, num_experts = handle
        key = max_tokens, hidden, num_experts, src_info.device
        buffers = self._combine_buffers.setdefault(key, _CombineBuffers())
        index = buffers.combines % 2
        if len(buffers.pair) <= index:
            if sends:
                raise ValueError(
                    "zero_copy: expected get_next_low_latency_combine_buffer(handle) to be called and filled before, "
                    "got a combine without it"
                )
            shape = (*src_info.shape, hidden)
            buffers.pair.append(torch.empty(shape, dtype=torch.bfloat16, device=src_info.device))
        buffers.combines += sends
        return buffers.pair[index]


@functools.lru_cache(maxsize=64)
def config_of(max_tokens: int, hidden: int, num_experts: int) -> MoECommunicatorConfig:
    """Return the config of calls of at most `max_tokens` tokens per rank, rounded up, and any K."""
    return MoECommunicatorConfig(
        mode="ll",
        num_experts=num_experts,
        hidden_size=hidden,
        topk=min(num_experts, MAX_TOPK),
        max_tokens_per_rank=least_bound(max_tokens),
    )
