"""``ElasticBuffer``: dispatch and combine, with the interface of DeepEP 2.x's buffer.

Shapes: T tokens here, T_max tokens of any rank at most, H hidden size, K experts per token, E experts in all, E_l of
them on this rank, R ranks, N rows received: one per token, or with do_expand one per (token, local expert).
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any, cast

import torch
import torch.distributed as dist

from ep_plugin.config import DispatchLayout
from ep_plugin.deep_ep import arguments, handles
from ep_plugin.deep_ep.arguments import Rows
from ep_plugin.deep_ep.elastic_handles import (
    NOT_SERVED,
    STATS,
    DispatchSettings,
    EPHandle,
    check_cached,
    check_handle,
)
from ep_plugin.deep_ep.elastic_messages import SIZE_ALIGNMENT, ElasticMessages
from ep_plugin.deep_ep.one_reduction import reduce_once
from ep_plugin.deep_ep.shared import SharedCommunicators, column_major, eager, least_bound, sms_of
from ep_plugin.deep_ep.tuning import sms_that_fill
from ep_plugin.deep_ep.utils.event import EventHandle, EventOverlap, ordered
from ep_plugin.deep_ep.utils.math import align
from ep_plugin.errors import NotSupported
from ep_plugin.moe.arguments import check_tensors
from ep_plugin.moe.communicator import MoECommunicator
from ep_plugin.moe.high_throughput.sms import usable_sms
from ep_plugin.moe.registry import communicator
from ep_plugin.transport.groups import Group


class ElasticBuffer(ElasticMessages, SharedCommunicators):
    """Dispatch and combine for one group, with the names of DeepEP 2.x.

    Construction is collective. Buffers of one group share their communicators. Rows are always ordered by source rank,
    then source token, with do_expand inside each expert. As in DeepEP, nothing is differentiable.

    Args:
        group: the ranks, a process group or a DeviceMesh of one dimension; None: the default group.
        num_bytes, hidden, num_topk, use_fp8_dispatch: `num_bytes` is kept, or computed by `get_buffer_size_hint`. It
            reserves nothing: pools grow when an operation needs them.
        num_max_tokens_per_rank: the default of dispatch.
        num_cpu_bytes: Engram's; expected 0.
        allow_multiple_reduction: whether combine may round a sum also on the ranks that hold several of the token's
            experts, and on each node. If False, every expert's row returns by itself. This takes more traffic and, in a
            handle's first combine, a dispatch of rows without contents.
        explicitly_destroy: whether `destroy` will be called.
        The other arguments are DeepEP's and have no effect.

    Raises:
        NotSupported: num_cpu_bytes, or nodes with different numbers of ranks.
        ValueError: a wrong argument, before anything is launched.
        PeerTimeout, PeerAborted: as MoECommunicator.
    """

    not_served = NOT_SERVED

    def __init__(
        self,
        group: Group = None,
        num_bytes: int | None = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = 3,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
    ) -> None:
        if num_cpu_bytes:
            raise NotSupported(
                f"ElasticBuffer(num_cpu_bytes=...): expected 0, got {num_cpu_bytes}; Engram is not served"
            )
        arguments.check_at_least(0, num_max_tokens_per_rank=num_max_tokens_per_rank)
        self._join(group, explicitly_destroy)
        self.rank_idx, self.num_ranks = self.group.rank(), self.group.size()
        if num_bytes is None:
            sizes = num_max_tokens_per_rank, hidden, num_topk, use_fp8_dispatch
            num_bytes = self.get_buffer_size_hint(self.group, *sizes)
        self.num_bytes, self.num_max_tokens_per_rank = num_bytes, num_max_tokens_per_rank
        self.deterministic, self.num_allocated_qps = deterministic, num_allocated_qps
        self.allow_hybrid_mode, self.allow_multiple_reduction = allow_hybrid_mode, allow_multiple_reduction
        self.prefer_overlap_with_compute = prefer_overlap_with_compute
        self.num_scaleout_ranks, self.num_scaleup_ranks = self.get_logical_domain_size()
        self.scaleout_rank_idx = self._nodes.node_of(self.rank_idx)
        self.scaleup_rank_idx = self._nodes.local_rank_of(self.rank_idx)
        self.num_rdma_ranks, self.num_nvlink_ranks = self.get_physical_domain_size()

    def destroy(self) -> None:
        """Free the memory that no other buffer uses. Needs explicitly_destroy=True."""
        super().destroy()
        self._close_messages()

    @staticmethod
    def get_buffer_size_hint(
        group: dist.ProcessGroup,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
    ) -> int:
        """Return the most bytes of the rows, ids and weights of R * T_max tokens, rounded up to 2 MiB.

        Combine counts 2 bytes per element.
        """
        arguments.check_at_least(0, num_max_tokens_per_rank=num_max_tokens_per_rank, hidden=hidden, num_topk=num_topk)
        row = hidden * (3 if use_fp8_dispatch else 4) + num_topk * 12  # a row of dispatch, one of combine
        return align(group.size() * num_max_tokens_per_rank * row, SIZE_ALIGNMENT)

    def get_theoretical_num_sms(
        self,
        num_experts: int,
        num_topk: int,
        num_scaleout_topk: int = 0,
        rdma_gbs: float = 0,
        nvlink_gbs: float = 0,
        sm_read_gbs: float = 0,
        sm_write_gbs: float = 0,
    ) -> int:
        """Return the number of SMs on which one kernel that sends and receives fills the links of a node's GPUs.

        Experts are taken as drawn at random. As `num_sms`, 0 is a choice of its own: then sending and receiving run on
        SMs of their own, as many as the rows' shape asks for.

        Args:
            num_experts, num_topk: E and K.
            nvlink_gbs, sm_read_gbs, sm_write_gbs: GB/s of a GPU's links in one direction, and of an SM's loads and
                stores. 0: as measured (docs/where-time-goes.md).
            num_scaleout_topk, rdma_gbs: no effect, since no SM carries rows between nodes.

        Returns:
            An even number from 4 to the SMs that an operation may hold. 0 without GPUs, where there are no SMs.
        """
        arguments.check_experts(num_experts, self.num_ranks)
        if not 1 <= num_topk <= num_experts:
            raise ValueError(f"num_topk: expected 1 to num_experts={num_experts}, got {num_topk}")
        if not torch.cuda.is_available():
            return 0
        most = usable_sms(torch.device("cuda", torch.cuda.current_device()))
        rates = nvlink_gbs, sm_read_gbs, sm_write_gbs
        return sms_that_fill(self.num_nvlink_ranks, num_experts, num_topk, rates, most)

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        """Return 0, since there are no queue pairs to choose."""
        return 0

    def get_logical_domain_size(self) -> tuple[int, int]:
        """Return how `combine` adds up: over the ranks of each node, then over nodes. Always the physical size."""
        return self.get_physical_domain_size()

    def get_physical_domain_size(self) -> tuple[int, int]:
        """Return the number of nodes, and the number of ranks on each."""
        return self._nodes.num_nodes, self._nodes.ranks_per_node

    @staticmethod
    def capture() -> EventHandle:
        """Record an event on the current stream."""
        return EventHandle()

    def barrier(self, use_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = True) -> None:
        """Run the group's own barrier, on the current stream or the communication stream. Collective."""
        self._check_open()
        on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
        stream = torch.cuda.stream(self.get_comm_stream()) if on_gpu and use_comm_stream else contextlib.nullcontext()
        if with_cpu_sync and on_gpu:
            torch.cuda.synchronize()
        with stream:
            dist.barrier(self.group)
        if with_cpu_sync and on_gpu:
            torch.cuda.synchronize()

    @eager
    def dispatch(
        self,
        x: Rows,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | EventOverlap | None = None,
        previous_event_before_epilogue: EventHandle | EventOverlap | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = True,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
    ) -> tuple[Rows, torch.Tensor | None, torch.Tensor | None, EPHandle, EventOverlap]:
        """Send each token once to every rank that holds one of its experts. Collective.

        Args:
            x: ``[T, H]``, or a pair of FP8 rows ``[T, H]`` and scales ``[T, S]``, float32 or packed in int32.
            topk_idx, topk_weights: int64 and float32 ``[T, K]``; id -1: no expert.
            cumulative_local_expert_recv_stats: int32 ``[E_l]``, to which the pairs received are added. Not with handle.
            num_max_tokens_per_rank: T_max, the same on all ranks. None: the constructor's.
            num_sms: an even number; 0: as many as fill the links.
            previous_event: the call runs after it and, with async_with_compute_stream, not after the current stream.
            previous_event_before_epilogue: the whole call runs after it, too, since its halves overlap.
            handle: repeats the routing of an earlier dispatch. topk_idx must then be None, and do_expand as it was.
            do_cpu_sync: False: the host waits for nothing, and the result has room for all rows that T_max tokens of
                every rank may need. The rows after the last valid one are undefined. None: True without a handle.
            do_expand: one row per (token, local expert), grouped by expert, each group padded with zero rows to
                expert_alignment, whether or not do_zero_padding is set.
            use_tma_aligned_col_major_sf: whether scales are stored column by column, each column padded to a multiple
                of 16 bytes.
            allocate_on_comm_stream, num_qps: no effect.

        Returns:
            The rows ``[N, H]`` (or the pair); topk_idx ``[N, K]`` as local ids, -1: not here, None with do_expand;
            topk_weights float32 ``[N, K]``, with do_expand ``[N]``; the handle; the event.
        """
        self._check_open()
        before, later = _overlaps(previous_event, previous_event_before_epilogue)
        rows, scales = arguments.rows_of(x)
        stats = cumulative_local_expert_recv_stats
        if do_zero_padding and not do_expand:
            raise ValueError("do_zero_padding: expected False without do_expand=True, got True")
        arguments.check_topk(topk_idx, topk_weights if handle is None else None)
        sms = sms_of(_checked_sms(num_sms))
        if handle is None:
            call = self._fresh(rows, topk_idx, num_experts, num_max_tokens_per_rank, expert_alignment, stats)
            made = DispatchSettings(*call, do_expand, do_cpu_sync is not False, num_sms, do_handle_copy)
        else:
            given = (topk_idx, num_experts, num_max_tokens_per_rank, expert_alignment, do_cpu_sync, do_expand)
            check_cached(handle, given, topk_weights, stats)
            made = None
        reads = (rows, scales, topk_idx, topk_weights, stats, None if handle is None else handle.routing)

        def send() -> tuple[Any, ...]:
            later.current_stream_wait()
            flat = None if scales is None else scales.contiguous()
            if handle is None:
                assert made is not None and topk_idx is not None
                comm, ids, routing, capacity = self._comm_of(made, rows.device), topk_idx.contiguous(), None, None
                if not made.sync:
                    capacity = made.capacity(self.num_ranks, topk_idx.shape[1])
            else:
                routing = handle.routing
                comm, ids, capacity = (
                    communicator(routing.comm),
                    routing.topk_ids,
                    handles.worst_tokens_of(routing) or None,
                )
            comm.set_sms(**sms)
            out, new = comm.dispatch(rows, ids, topk_weights, flat, routing, capacity)
            if stats is not None:
                stats.add_(out.num_tokens_per_expert)
            result = cast(EPHandle, handle) if made is None else made.handle_of(comm, out, new, topk_idx)
            dtype = result.topk_idx.dtype
            recv_idx = None if out.topk_ids is None else out.topk_ids.to(dtype)
            received: Rows = out.tokens
            if out.scales is not None:
                received = out.tokens, column_major(out.scales) if use_tma_aligned_col_major_sf else out.scales
            return received, recv_idx, arguments.as_floats(out.weights), result, result.tensors()

        *results, _, event = ordered(send, rows.device, reads, before, async_with_compute_stream, False)
        return (*results, event)

    @eager
    def combine(
        self,
        x: torch.Tensor,
        handle: EPHandle,
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | EventOverlap | None = None,
        previous_event_before_epilogue: EventHandle | EventOverlap | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Sum each token's rows in float32, without weights. Collective.

        Args:
            x: ``[N, H]``, one row for each row that dispatch returned.
            topk_weights: float32 ``[N, K]``, with do_expand ``[N]``. They are summed like the rows. A rank without
                them sends zeros.
            bias: ``[T, H]`` or two of them, of x's dtype. Sums start from the bias, and are rounded once.
            num_sms: 0: as in the dispatch.
            previous_event, previous_event_before_epilogue: as in `dispatch`.
            allocate_on_comm_stream, num_qps: no effect.

        Returns:
            ``[T, H]`` of x's dtype, the weights float32 ``[T, K]`` or None, and the event.
        """
        self._check_open()
        before, later = _overlaps(previous_event, previous_event_before_epilogue)
        check_handle(handle)
        check_tensors({"topk_weights": topk_weights}, x=x)
        rows, _ = arguments.rows_of(x)
        K = handle.topk_idx.shape[1]
        if topk_weights is not None:
            shape = (rows.shape[0],) if handle.do_expand else (rows.shape[0], K)
            arguments.check_tensor("topk_weights", topk_weights, (torch.float32,), *shape)
        biases = arguments.biases_of(bias, rows)
        sms = sms_of(_checked_sms(num_sms or handle.num_sms))

        def add() -> tuple[Any, ...]:
            later.current_stream_wait()
            comm, bias = communicator(handle.routing.comm), arguments.sum_of(biases)
            comm.set_sms(**sms)
            if self.allow_multiple_reduction or (not handle.do_expand and self._nodes.num_nodes == 1):
                out, weights = comm.combine_with_values(rows.contiguous(), handle.routing, topk_weights, bias)
            else:
                by_pair = self._comm_of_pairs(handle, rows.device)
                by_pair.set_sms(**sms)
                out, weights = reduce_once(by_pair, rows.contiguous(), handle, topk_weights, bias)
            return out, arguments.as_floats(weights), handle.pairs

        reads = (rows, handle.routing, handle.pairs, topk_weights, biases)
        *results, _, event = ordered(add, rows.device, reads, before, async_with_compute_stream, False)
        return (*results, event)

    def _fresh(
        self,
        rows: torch.Tensor,
        topk_idx: torch.Tensor | None,
        num_experts: int | None,
        most: int | None,
        alignment: int | None,
        stats: torch.Tensor | None,
    ) -> tuple[int, int, int]:
        """Check a dispatch without a handle. Returns E, T_max and the alignment."""
        most = self.num_max_tokens_per_rank if most is None else most
        alignment = 1 if alignment is None else alignment
        if num_experts is None:
            raise ValueError("num_experts: expected an integer without a handle, got None")
        arguments.check_experts(num_experts, self.num_ranks)
        arguments.check_at_least(1, expert_alignment=alignment, num_max_tokens_per_rank=most)
        if topk_idx is None:
            raise ValueError("topk_idx: expected a tensor without a handle, got None")
        arguments.check_tensor("topk_idx", topk_idx, (topk_idx.dtype,), rows.shape[0], "K")
        if rows.shape[0] > most:
            raise ValueError(f"x: expected at most num_max_tokens_per_rank={most} tokens, got {rows.shape[0]}")
        if stats is not None:
            arguments.check_tensor(STATS, stats, (torch.int32,), num_experts // self.num_ranks)
        return num_experts, most, alignment

    def _comm_of(self, call: DispatchSettings, device: torch.device) -> MoECommunicator:
        bound = None if call.sync else call.most
        shape = (DispatchLayout.FLAT, call.alignment) if call.expand else (DispatchLayout.TOKEN_MAJOR, 1)
        return self._throughput_communicator(device, call.num_experts, bound, *shape)

    def _comm_of_pairs(self, handle: EPHandle, device: torch.device) -> MoECommunicator:
        """Return the communicator of a combine in which each pair of a token and an expert counts as a token."""
        config = communicator(handle.routing.comm).config
        if config.max_tokens_per_rank is not None:
            most = least_bound(handle.num_max_tokens_per_rank * handle.topk_idx.shape[1])
            config = dataclasses.replace(config, max_tokens_per_rank=most, max_rows_per_node=most)
        return self._communicator(config, device)


def _checked_sms(num_sms: int) -> int | None:
    if type(num_sms) is not int or num_sms < 0 or num_sms % 2:
        raise ValueError(f"num_sms: expected 0 or an even number of at least 2, got {num_sms!r}")
    return num_sms or None


def _overlaps(
    previous: EventHandle | EventOverlap | None, later: EventHandle | EventOverlap | None
) -> tuple[EventOverlap | None, EventOverlap]:
    """Check `previous_event` and `previous_event_before_epilogue`. Both of DeepEP's event classes are served."""
    first, second = (EventOverlap(event) if isinstance(event, EventHandle) else event for event in (previous, later))
    arguments.check_kind(EventOverlap, previous_event=first, previous_event_before_epilogue=second)
    return first, second or EventOverlap()
