"""The low-latency calls of ``Buffer``, with the interface of DeepEP 1.2.1 and of the legacy Buffer in its 2.x.

Shapes: T tokens here, T_max at most on any rank in one call, H hidden size, K experts per token, E experts in all,
E_l = E / R on this rank, R ranks, N = R * T_max rows of each expert.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from ep_plugin import _C
from ep_plugin.config import MAX_TOPK, MoECommunicatorConfig
from ep_plugin.deep_ep import arguments, handles
from ep_plugin.deep_ep.handles import LowLatencyHandle
from ep_plugin.deep_ep.shared import device_of, least_bound
from ep_plugin.deep_ep.utils.event import EventOverlap, ordered
from ep_plugin.errors import NotSupported
from ep_plugin.moe.arguments import check_tensors
from ep_plugin.moe.communicator import MoECommunicator
from ep_plugin.moe.in_flight import Operation, Work, untraced
from ep_plugin.moe.layout import DispatchResult
from ep_plugin.moe.low_latency.engine import LowLatencyEngine, slots_of
from ep_plugin.runtime.tensors import KnownCalls, call_of
from ep_plugin.transport.exchange import Exchange
from ep_plugin.transport.groups import timeout_of

Hook: TypeAlias = Callable[[], None]

_SHRINK_TIMEOUT_S = 100.0  # DeepEP's, after which a rank is masked
_NUM_RESULTS = len(DispatchResult._fields)
# T_max, H and E of the last size hint of so many ranks and bytes. A Buffer that is given these bytes is for such calls.
_hinted: dict[tuple[int, int], tuple[int, int, int]] = {}


@dataclasses.dataclass
class _CombineBuffers:
    """Two buffers that take turns, so that one may be filled while a combine sends the other."""

    combines: int = 0  # that have sent one of them
    pair: list[torch.Tensor] = dataclasses.field(default_factory=list)


class LowLatencyCalls:
    """The low-latency calls of a Buffer with ``low_latency_mode=True``.

    The constructor makes the memory for the sizes whose `get_low_latency_rdma_size_hint` is its `num_rdma_bytes`. Other
    memory is made by the first call with a new E, H or bound of T_max (a power of two, at least 128), which is then
    collective. It is kept until ``destroy()``. Two dispatches and two combines may be un-received; a third is a
    ValueError.
    """

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
        self._known = KnownCalls()
        self._masked = [0] * self.group_size  # as set by calls, for communicators that are made later

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Return the bytes of peer memory that calls of these sizes use on each rank. If all ranks have called this, a
        Buffer with these num_rdma_bytes makes the memory in its constructor."""
        arguments.check_max_tokens(num_max_dispatch_tokens_per_rank)
        arguments.check_at_least(1, hidden=hidden, num_ranks=num_ranks)
        arguments.check_experts(num_experts, num_ranks)
        config = _config_of(num_max_dispatch_tokens_per_rank, hidden, num_experts)
        hint = _C.ll_block_bytes(num_ranks, slots_of(config)[1])
        _hinted[num_ranks, hint] = (num_max_dispatch_tokens_per_rank, hidden, num_experts)
        return hint

    @untraced
    @torch.no_grad()
    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        """Exchange a dispatch without tokens. Collective. Nothing needs cleaning here.

        It makes the memory for calls of these sizes, which a CUDA graph cannot do. With enable_shrink it masks ranks
        that do not take part.
        """
        self._check_low_latency("clean_low_latency_buffer")
        arguments.check_max_tokens(num_max_dispatch_tokens_per_rank)
        made = next(iter(self._low_latency.values()), None)
        device = device_of(self.group) if made is None else made.engine.device
        comm = self._open(num_max_dispatch_tokens_per_rank, hidden, num_experts, device)
        x = torch.empty((0, hidden), dtype=torch.bfloat16, device=device)
        ids = torch.empty((0, 1), dtype=torch.int64, device=device)
        comm.in_flight.run(comm.new_dispatch(x, ids, None, None, self.group_size, None, [], comm.number))

    @untraced
    @torch.no_grad()
    def low_latency_dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        dispatch_wait_recv_cost_stats: torch.Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[Any, torch.Tensor, LowLatencyHandle, EventOverlap, Hook | None]:
        """Send each token to its experts. Collective. The host waits for nothing, and a CUDA graph may capture it.

        Args:
            x: bfloat16 ``[T, H]``, T at most T_max; H a multiple of 8, with use_fp8 of 128.
            topk_idx: int64 or int32 ``[T, K]``, -1: no expert.
            num_max_dispatch_tokens_per_rank: T_max, equal on all ranks, at most 4096.
            cumulative_local_expert_recv_stats: int32 ``[E_l]``, to which received rows are added.
            dispatch_wait_recv_cost_stats: int64 ``[R]``, to which nanoseconds of waiting for each rank are added.
            use_fp8: whether rows are quantised to e4m3, with a scale for each 128 elements.
            round_scale: whether scales are rounded up to powers of two. use_ue8m0: whether they are returned as
                exponent bytes, four in an int32; needs round_scale.
            async_finish: whether it runs on the communication stream, for which the current stream does not wait.
            return_recv_hook: whether only the send half runs, on the current stream. The hook then runs the receive
                half on the stream that is current when it is called. Results have their values after it.

        Returns:
            recv_x ``[E_l, N, H]``, or with use_fp8 the rows and their scales: float32 ``[E_l, N, H / 128]`` or int32
            ``[E_l, N, ceil(H / 512)]``, with stride 1 along N. recv_count int32 ``[E_l]``: rows of each expert; those
            past it are undefined. The handle: src_info int32 ``[E_l, N]``, the token of each row; layout_range int64
            ``[E_l, R]``, the count (lower half) and the begin (upper half) of each rank's rows; T_max, H and E. The
            event. The hook, or None.
        """
        self._check_low_latency("low_latency_dispatch")
        _check_async(async_finish, return_recv_hook)
        max_tokens = num_max_dispatch_tokens_per_rank
        stats = {"cumulative": cumulative_local_expert_recv_stats, "wait_cost": dispatch_wait_recv_cost_stats}
        form = _C.form_of(x, topk_idx, *stats.values())
        call = call_of(form, "dispatch", max_tokens, num_experts, use_fp8, round_scale, use_ue8m0)
        if not self._known.find(call):
            arguments.check_max_tokens(max_tokens)
            arguments.check_experts(num_experts, self.group_size)
            arguments.check_low_latency_dispatch(x, topk_idx, max_tokens, num_experts, use_fp8)
            self._check_stats(
                num_experts,
                cumulative_local_expert_recv_stats=cumulative_local_expert_recv_stats,
                dispatch_wait_recv_cost_stats=dispatch_wait_recv_cost_stats,
            )
            self._known.remember(call)
        arguments.check_ids(topk_idx, num_experts)
        quantize = arguments.quantized_as(use_fp8, round_scale, use_ue8m0)
        hidden = x.shape[1]
        comm = self._open(max_tokens, hidden, num_experts, x.device)
        rows = self.group_size * max_tokens

        def make() -> Operation:
            return comm.new_dispatch(x, topk_idx.contiguous(), None, None, rows, quantize, [], comm.number, **stats)

        results, event, hook = _run(comm, make, (x, topk_idx, *stats.values()), async_finish, return_recv_hook)
        out = DispatchResult(*results[:_NUM_RESULTS])
        plan = results[_NUM_RESULTS + 1]
        parts = handles.low_latency_parts(comm.engine.plan_layout(max_tokens, topk_idx.shape[1]), plan, rows)
        received = out.tokens if out.scales is None else (out.tokens, out.scales)
        return received, out.expert_counts, (*parts, max_tokens, hidden, num_experts), event, hook

    @untraced
    @torch.no_grad()
    def low_latency_combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: LowLatencyHandle,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: torch.Tensor | None = None,
        combine_wait_recv_cost_stats: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, EventOverlap, Hook | None]:
        """Sum the experts' rows of each token, times its weights, in float32. Collective; see low_latency_dispatch.

        Args:
            x: bfloat16 ``[E_l, N, H]``, the experts' results.
            topk_idx: int64 or int32 ``[T, K]``, the dispatch's, with -1 also for experts that are left out now.
            topk_weights: float32 ``[T, K]``.
            handle: what low_latency_dispatch returned, or a tuple of its parts. It may be used again.
            use_logfmt: whether sums travel as 10-bit codes where they are below 1; H a multiple of 128.
            zero_copy: whether the rows are in ``get_next_low_latency_combine_buffer(handle)``; x is then not read.
            async_finish, return_recv_hook: as in low_latency_dispatch.
            out: bfloat16 ``[T, H]``, where the sums go.
            combine_wait_recv_cost_stats: int64 ``[R]``, to which nanoseconds of waiting for each rank are added.

        Returns:
            bfloat16 ``[T, H]``, the event, and the hook or None.
        """
        self._check_low_latency("low_latency_combine")
        _check_async(async_finish, return_recv_hook)
        if use_logfmt and zero_copy:
            raise ValueError("zero_copy: expected False with use_logfmt=True, got True")
        src_info, layout_range, *sizes = handles.parts_of(handle)
        form = _C.form_of(x, topk_idx, topk_weights, src_info, layout_range, out, combine_wait_recv_cost_stats)
        call = call_of(form, "combine", *sizes, use_logfmt)
        max_tokens, hidden, num_experts = sizes
        if not self._known.find(call):
            handles.check_low_latency(handle, self.group_size)
            arguments.check_low_latency_combine(x, topk_idx, topk_weights, out, handle, use_logfmt)
            self._check_stats(num_experts, combine_wait_recv_cost_stats=combine_wait_recv_cost_stats)
            self._known.remember(call)
        arguments.check_ids(topk_idx, num_experts)
        comm = self._open(max_tokens, hidden, num_experts, x.device)
        plan = handles.plan_behind(src_info, comm.engine.plan_layout(max_tokens, topk_idx.shape[1]))
        rows = self._combine_buffer(handle, sends=True) if zero_copy else x

        def make() -> Operation:
            weights, routing = topk_weights.contiguous(), (topk_idx.contiguous(), plan)
            given = rows, weights, None, None, False, routing, comm.number
            return comm.new_combine(*given, out=out, logfmt=use_logfmt, wait_cost=combine_wait_recv_cost_stats)

        reads = (rows, topk_idx, topk_weights, plan, out, combine_wait_recv_cost_stats)
        results, event, hook = _run(comm, make, reads, async_finish, return_recv_hook)
        return results[0], event, hook

    @untraced
    def get_next_low_latency_combine_buffer(self, handle: LowLatencyHandle) -> torch.Tensor:
        """Return bfloat16 ``[E_l, N, H]`` for the rows of the next combine with ``zero_copy=True``. Two tensors take
        turns, which this Buffer keeps."""
        self._check_low_latency("get_next_low_latency_combine_buffer")
        handles.check_low_latency(handles.parts_of(handle), self.group_size)
        return self._combine_buffer(handle, sends=False)

    def get_local_buffer_tensor(
        self, dtype: torch.dtype, size: torch.Size | None = None, offset: int = 0, use_rdma_buffer: bool = False
    ) -> torch.Tensor:
        """Return an empty tensor, for engines that zero DeepEP's low-latency memory after a fault.

        Nothing needs to be zeroed here. NotSupported for any other memory: callers get no communication memory.
        """
        self._check_low_latency("get_local_buffer_tensor")
        if not use_rdma_buffer or size is not None or offset:
            raise NotSupported(
                "get_local_buffer_tensor: expected use_rdma_buffer=True without size and offset, got "
                f"use_rdma_buffer={use_rdma_buffer}, size={size}, offset={offset}; callers get no communication memory"
            )
        return torch.empty(0, dtype=dtype, device=device_of(self.group))

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
        sizes, device = _hinted.get((self.group_size, num_rdma_bytes)), device_of(self.group)
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

    def _check_stats(self, num_experts: int, **stats: torch.Tensor | None) -> None:
        arguments.check_kind(torch.Tensor, **stats)
        for name, given in stats.items():
            if given is not None and name.startswith("cumulative"):
                arguments.check_tensor(name, given, (torch.int32,), num_experts // self.group_size)
            elif given is not None:
                arguments.check_tensor(name, given, (torch.int64,), self.group_size)
            if given is not None and not given.is_contiguous():
                raise ValueError(f"{name}: expected a contiguous tensor, got strides {given.stride()}")

    def _open(self, max_tokens: int, hidden: int, num_experts: int, device: torch.device) -> MoECommunicator:
        """Return the communicator of calls of these sizes, or make it. It then knows of all masked ranks."""
        config = _config_of(max_tokens, hidden, num_experts)
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
        if self.enable_shrink and len(self._low_latency) > 1:
            for other in self._low_latency.values():
                if other is not comm and other.engine.device == device:
                    torch.maximum(comm.rank_mask, other.rank_mask, out=comm.rank_mask)
        return comm

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
def _config_of(max_tokens: int, hidden: int, num_experts: int) -> MoECommunicatorConfig:
    """Return the config of calls of at most `max_tokens` tokens per rank, rounded up, and any K."""
    return MoECommunicatorConfig(
        mode="ll",
        num_experts=num_experts,
        hidden_size=hidden,
        topk=min(num_experts, MAX_TOPK),
        max_tokens_per_rank=least_bound(max_tokens),
    )


def _run(
    comm: MoECommunicator, make: Callable[[], Operation], reads: tuple[Any, ...], async_finish: bool, halves: bool
) -> tuple[Any, EventOverlap, Hook | None]:
    """Run the operation that `make` makes, with `halves` only its send half.

    Returns its results, the event, and with `halves` the hook of the receive half.
    """
    device: torch.device = comm.engine.device
    if not halves:
        *results, event = ordered(lambda: comm.in_flight.run(make()), device, reads, None, async_finish, False)
        return tuple(results), event, None
    started = comm.in_flight.start(make())
    return started.results(), EventOverlap(), _hook(comm, started)


def _hook(comm: MoECommunicator, started: Operation) -> Hook:
    """Return a function whose first call receives `started` on the current stream. Several threads may call it."""

    def receive() -> bool:
        comm.in_flight.collect(started.number)
        return True

    work = Work(started, receive)

    def hook() -> None:
        work.wait()

    return hook


def _check_async(async_finish: bool, return_recv_hook: bool) -> None:
    if async_finish and return_recv_hook:
        raise ValueError("async_finish: expected False with return_recv_hook=True, got True")
