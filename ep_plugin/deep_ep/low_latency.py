"""The low-latency calls of ``Buffer``, with the interface of DeepEP 1.2.1 and of the legacy Buffer in its 2.x.

Shapes: T tokens here, T_max at most on any rank in one call, H hidden size, K experts per token, E experts in all,
E_l = E / R on this rank, R ranks, N = R * T_max rows of each expert.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from ep_plugin import _C
from ep_plugin.deep_ep import arguments, handles
from ep_plugin.deep_ep.handles import LowLatencyHandle
from ep_plugin.deep_ep.low_latency_memory import LowLatencyMemory, config_of, hinted
from ep_plugin.deep_ep.shared import device_of
from ep_plugin.deep_ep.utils.event import EventOverlap, ordered
from ep_plugin.errors import NotSupported
from ep_plugin.moe.communicator import MoECommunicator
from ep_plugin.moe.in_flight import Work, untraced
from ep_plugin.moe.low_latency.engine import slots_of
from ep_plugin.moe.low_latency.in_flight import LowLatencyCall

Hook: TypeAlias = Callable[[], None]


class LowLatencyCalls(LowLatencyMemory):
    """The low-latency calls of a Buffer with ``low_latency_mode=True``.

    The constructor makes the memory for the sizes whose `get_low_latency_rdma_size_hint` is its `num_rdma_bytes`. Other
    memory is made by the first call with a new E, H or bound of T_max (a power of two, at least 128), which is then
    collective. It is kept until ``destroy()``. Two dispatches and two combines may be un-received; a third is a
    ValueError.
    """

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Return the bytes of peer memory that calls of these sizes use on each rank of one node. If all ranks have
        called this, a Buffer with these num_rdma_bytes makes the memory in its constructor, also over several nodes."""
        arguments.check_max_tokens(num_max_dispatch_tokens_per_rank)
        arguments.check_at_least(1, hidden=hidden, num_ranks=num_ranks)
        arguments.check_experts(num_experts, num_ranks)
        config = config_of(num_max_dispatch_tokens_per_rank, hidden, num_experts)
        hint = _C.ll_block_bytes(num_ranks, slots_of(config)[1])
        hinted[num_ranks, hint] = (num_max_dispatch_tokens_per_rank, hidden, num_experts)
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
        **of_forks: object,
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
            of_forks: NVFP4 arguments of DeepEP's forks, which are refused.

        Returns:
            recv_x ``[E_l, N, H]``, or with use_fp8 the rows and their scales: float32 ``[E_l, N, H / 128]`` or int32
            ``[E_l, N, ceil(H / 512)]``, with stride 1 along N. recv_count int32 ``[E_l]``: rows of each expert; those
            past it are undefined. The handle: src_info int32 ``[E_l, N]``, the token of each row; layout_range int64
            ``[E_l, R]``, the count (lower half) and the begin (upper half) of each rank's rows; T_max, H and E. The
            event. The hook, or None.
        """
        self._check_low_latency("low_latency_dispatch")
        if of_forks:
            arguments.check_of_forks("low_latency_dispatch", of_forks)
        _check_async(async_finish, return_recv_hook)
        given = x, topk_idx, cumulative_local_expert_recv_stats, dispatch_wait_recv_cost_stats
        settings = num_max_dispatch_tokens_per_rank, num_experts, use_fp8, round_scale, use_ue8m0
        comm = self._opened(x, num_max_dispatch_tokens_per_rank, None, num_experts)
        if comm is not None:
            c, call = comm.engine.in_c, (*given, *settings)
            made, *rest = _run_in_c(
                comm, c.buffer_dispatch, c.start_buffer_dispatch, call, async_finish, return_recv_hook
            )
            if made is not None:
                return (*made, *rest)
        return self._dispatch_low_latency(given, settings, async_finish, return_recv_hook)

    @torch.no_grad()
    def _dispatch_low_latency(
        self, given: tuple[Any, ...], settings: tuple[Any, ...], async_finish: bool, return_recv_hook: bool
    ) -> tuple[Any, torch.Tensor, LowLatencyHandle, EventOverlap, Hook | None]:
        """Run a dispatch after a check of its arguments."""
        x, topk_idx, cumulative, wait_cost = given
        max_tokens, num_experts, use_fp8, round_scale, use_ue8m0 = settings
        arguments.check_max_tokens(max_tokens)
        arguments.check_experts(num_experts, self.group_size)
        arguments.check_low_latency_dispatch(x, topk_idx, max_tokens, num_experts, use_fp8)
        self._check_stats(
            num_experts, cumulative_local_expert_recv_stats=cumulative, dispatch_wait_recv_cost_stats=wait_cost
        )
        arguments.check_ids(topk_idx, num_experts)
        quantize = arguments.quantized_as(use_fp8, round_scale, use_ue8m0)
        hidden = x.shape[1]
        comm = self._open(max_tokens, hidden, num_experts, x.device)
        rows = self.group_size * max_tokens

        def make() -> LowLatencyCall:
            ids = topk_idx.contiguous()
            call: LowLatencyCall = comm.new_dispatch(
                x, ids, None, None, rows, quantize, [], comm.number, cumulative=cumulative, wait_cost=wait_cost
            )
            flags = map(bool, settings[2:])
            call.buffer_rest = ids, cumulative, wait_cost, int(max_tokens), int(num_experts), *flags
            return call

        made, event, hook = _run(comm, make, given, async_finish, return_recv_hook)
        return *made, event, hook

    @untraced
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
        **of_forks: object,
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
            of_forks: ``overlap`` of DeepEP's forks, which is refused unless False, and what it reads.

        Returns:
            bfloat16 ``[T, H]``, the event, and the hook or None.
        """
        self._check_low_latency("low_latency_combine")
        if of_forks:
            arguments.check_of_forks("low_latency_combine", of_forks)
        _check_async(async_finish, return_recv_hook)
        if use_logfmt and zero_copy:
            raise ValueError("zero_copy: expected False with use_logfmt=True, got True")
        src_info, layout_range, *sizes = handles.parts_of(handle)
        given = x, topk_weights, topk_idx, src_info, layout_range, out, combine_wait_recv_cost_stats
        settings = *sizes, use_logfmt
        comm = None if zero_copy else self._opened(x, *sizes)
        if comm is not None:
            c, call = comm.engine.in_c, (*given, *settings)
            made, *rest = _run_in_c(
                comm, c.buffer_combine, c.start_buffer_combine, call, async_finish, return_recv_hook
            )
            if made is not None:
                return (made, *rest)
        return self._combine_low_latency(given, settings, zero_copy, async_finish, return_recv_hook)

    @torch.no_grad()
    def _combine_low_latency(
        self,
        given: tuple[Any, ...],
        settings: tuple[Any, ...],
        zero_copy: bool,
        async_finish: bool,
        return_recv_hook: bool,
    ) -> tuple[torch.Tensor, EventOverlap, Hook | None]:
        """Run a combine after a check of its arguments."""
        x, topk_weights, topk_idx, src_info, layout_range, out, wait_cost = given
        max_tokens, hidden, num_experts, use_logfmt = settings
        handle = src_info, layout_range, max_tokens, hidden, num_experts
        handles.check_low_latency(handle, self.group_size)
        arguments.check_low_latency_combine(x, topk_idx, topk_weights, out, handle, use_logfmt)
        self._check_stats(num_experts, combine_wait_recv_cost_stats=wait_cost)
        arguments.check_ids(topk_idx, num_experts)
        comm = self._open(max_tokens, hidden, num_experts, x.device)
        plan = handles.plan_behind(src_info, comm.engine.plan_layout(max_tokens, topk_idx.shape[1]))
        rows = self._combine_buffer(handle, sends=True) if zero_copy else x

        def make() -> LowLatencyCall:
            weights, ids = topk_weights.contiguous(), topk_idx.contiguous()
            sent = rows, weights, None, None, False, (ids, plan), comm.number
            call: LowLatencyCall = comm.new_combine(*sent, out=out, logfmt=use_logfmt, wait_cost=wait_cost)
            sizes = int(max_tokens), int(hidden), int(num_experts), bool(use_logfmt)
            call.buffer_rest = weights, ids, src_info, layout_range, out, wait_cost, *sizes
            return call

        reads = (rows, topk_idx, topk_weights, plan, out, wait_cost)
        return _run(comm, make, reads, async_finish, return_recv_hook)

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

    def _check_stats(self, num_experts: int, **stats: torch.Tensor | None) -> None:
        arguments.check_kind(torch.Tensor, **stats)
        for name, given in stats.items():
            if given is not None and name.startswith("cumulative"):
                arguments.check_tensor(name, given, (torch.int32,), num_experts // self.group_size)
            elif given is not None:
                arguments.check_tensor(name, given, (torch.int64,), self.group_size)
            if given is not None and not given.is_contiguous():
                raise ValueError(f"{name}: expected a contiguous tensor, got strides {given.stride()}")


def _run_in_c(
    comm: MoECommunicator,
    run: Callable[..., Any],
    start: Callable[..., Any],
    given: tuple[Any, ...],
    async_finish: bool,
    halves: bool,
) -> tuple[Any, EventOverlap, Hook | None]:
    """Run an operation like an earlier one by `run` or `start` of C. Return as `_run`; no results if C leaves it."""
    if halves:
        started = comm.in_flight.start_in_c(start, *given)
        return (None, EventOverlap(), None) if started is None else _started(comm, started)
    if not async_finish:
        return run(*given), EventOverlap(), None
    made, event = ordered(lambda: (run(*given),), comm.engine.device, given, None, True, False)
    return made, event, None


def _run(
    comm: MoECommunicator,
    make: Callable[[], LowLatencyCall],
    reads: tuple[Any, ...],
    async_finish: bool,
    halves: bool,
) -> tuple[Any, EventOverlap, Hook | None]:
    """Run the operation that `make` makes, with `halves` only its send half.

    Returns what C makes, the event, and with `halves` the hook of the receive half.
    """
    if halves:
        return _started(comm, comm.in_flight.start(make()))
    made, event = ordered(lambda: (comm.in_flight.run(make()),), comm.engine.device, reads, None, async_finish, False)
    return made, event, None


def _started(comm: MoECommunicator, started: _C.StartedOperation) -> tuple[Any, EventOverlap, Hook]:
    """Return what C has made, an event, and a function whose first call receives `started` on the current stream.

    Several threads may call the function.
    """
    collect = functools.partial(comm.in_flight.collect, started.number)
    work = Work[object](started, functools.partial(comm.in_flight.receive, started, collect))

    def hook() -> None:
        work.wait()

    return started.made(), EventOverlap(), hook


def _check_async(async_finish: bool, return_recv_hook: bool) -> None:
    if async_finish and return_recv_hook:
        raise ValueError("async_finish: expected False with return_recv_hook=True, got True")
