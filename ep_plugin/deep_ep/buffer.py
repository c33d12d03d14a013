"""``Buffer``: dispatch and combine, with the interface of DeepEP 1.x's Buffer. Its low-latency calls: low_latency.py.

Shapes: T tokens here, H hidden size, K experts per token, E experts in all, E_l = E / R on this rank, R ranks, N rows
received, ordered by (source rank, source token).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from ep_plugin import _C, env
from ep_plugin.deep_ep import arguments, handles, layout
from ep_plugin.deep_ep.arguments import Rows
from ep_plugin.deep_ep.handles import Handle
from ep_plugin.deep_ep.low_latency import LowLatencyCalls
from ep_plugin.deep_ep.shared import SharedCommunicators, device_of, eager, sms_of
from ep_plugin.deep_ep.tuning import Config
from ep_plugin.deep_ep.utils.event import EventHandle, EventOverlap, ordered
from ep_plugin.errors import NotSupported
from ep_plugin.moe.arguments import check_tensors
from ep_plugin.moe.communicator import MoECommunicator
from ep_plugin.moe.low_latency.engine import check_nodes
from ep_plugin.moe.registry import communicator
from ep_plugin.runtime.tensors import keep_form
from ep_plugin.transport.groups import Group, is_alive

_Order: TypeAlias = tuple[EventOverlap | None, bool, bool]
"""previous_event, async_finish and allocate_on_comm_stream of a call."""


class Buffer(LowLatencyCalls, SharedCommunicators):
    """Dispatch and combine for one group, with DeepEP's names.

    Construction is collective. Buffers of one group share their communicators, so another one costs nothing.
    `num_nvl_bytes` reserves no memory: pools grow when an operation needs them. `num_rdma_bytes` reserves the memory of
    low-latency calls, see `LowLatencyCalls`. As in DeepEP, nothing is differentiable.

    Args:
        group: the ranks; None: the default group.
        low_latency_mode: whether it has the low-latency calls, too. On GPUs all ranks must then be on one node.
        explicitly_destroy: whether `destroy` will be called.
        enable_shrink: whether low-latency calls mask a rank for which another one waits 100 s, or the group's timeout
            if that is less, and go on without it. Needs low_latency_mode.
        comm (MPI): not supported. The other arguments are DeepEP's and have no effect.

    Raises:
        NotSupported: an argument that is not supported; nodes with different numbers of ranks; on several nodes
            enable_shrink, low latency on GPUs, or a group whose backend cannot send the memory of the process's GPU.
        ValueError: a wrong argument, before anything is launched.
        PeerTimeout, PeerAborted: as MoECommunicator.
    """

    num_sms: int = 20
    """DeepEP's default, for callers that compute with it. Until `set_num_sms`, calls use as many as fill the links."""
    _asked_sms: int | None = None

    def __init__(
        self,
        group: Group = None,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: object = None,
        use_fabric: bool = False,
    ) -> None:
        if comm is not None:
            raise NotSupported("Buffer(comm=...): expected the default, got comm set; use a torch.distributed group")
        if enable_shrink and not low_latency_mode:
            raise ValueError("enable_shrink: expected False without low_latency_mode=True, got True")
        self._join(group, explicitly_destroy)
        self.rank, self.group_size = self.group.rank(), self.group.size()
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode, self.enable_shrink = low_latency_mode, enable_shrink
        if low_latency_mode:
            check_nodes(self._nodes, device_of(self.group), enable_shrink)
        super().__init__()
        self._checked: set[bytes] = set()  # forms of topk_idx for get_dispatch_layout
        self._in_c: list[tuple[Any, Callable[..., Any], Callable[..., Any]]] = []
        """Of each communicator on one node: its engine, and the functions of C for dispatch and combine."""
        if low_latency_mode:
            self._reserve(num_rdma_bytes)

    def destroy(self) -> None:
        """Free the memory of communicators that no other buffer uses. Needs explicitly_destroy=True."""
        super().destroy()
        self._in_c = []
        self._combine_buffers.clear()

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Set the SMs of later calls of all Buffers, an even number. One kernel sends and receives on them."""
        if not isinstance(new_num_sms, int) or new_num_sms < 2 or new_num_sms % 2:
            raise ValueError(f"new_num_sms: expected an even number of at least 2, got {new_num_sms!r}")
        Buffer.num_sms = Buffer._asked_sms = new_num_sms

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """Return the default config of a dispatch or a combine. It does not depend on the number of ranks."""
        return Config(Buffer._asked_sms)

    get_combine_config = get_dispatch_config

    @staticmethod
    def is_sm90_compiled() -> bool:
        """Return whether this build has CUDA kernels. They include kernels for compute capability 9.0."""
        return hasattr(_C, "cuda")

    @staticmethod
    def capture() -> EventOverlap:
        """Record an event on the current stream."""
        return EventOverlap(EventHandle())

    @eager
    def get_dispatch_layout(
        self,
        topk_idx: torch.Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor, EventOverlap]:
        """Count the tokens of each rank, node and expert. Not collective.

        Args:
            topk_idx: int64 ``[T, K]``, -1: no expert.

        Returns:
            num_tokens_per_rank int32 ``[R]``; num_tokens_per_rdma_rank int32 ``[nodes]``, the tokens with an expert on
            each node, this one included, or None on one node; num_tokens_per_expert int32 ``[E]``; is_token_in_rank
            bool ``[T, R]``; the event.
        """
        self._check_open()
        form = _C.form_of(topk_idx)
        if form not in self._checked:
            check_tensors(topk_idx=topk_idx)
            arguments.check_topk(topk_idx)
            if form is not None:
                keep_form(self._checked, form)
        arguments.check_experts(num_experts, self.group_size)
        count = functools.partial(layout.count_tokens, topk_idx, num_experts, self._nodes)
        device = topk_idx.device
        return ordered(count, device, topk_idx, previous_event, async_finish, allocate_on_comm_stream)

    def dispatch(
        self,
        x: Rows,
        handle: Handle | None = None,
        num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Rows, torch.Tensor | None, torch.Tensor | None, list[int] | None, Handle | None, EventOverlap]:
        """Send each token once to every rank that holds one of its experts. Collective.

        Args:
            x: ``[T, H]``, or a pair of FP8 rows ``[T, H]`` and float32 scales ``[T, S]``.
            handle: repeats the routing of an earlier dispatch; topk_idx and topk_weights must be None, and only the
                rows and the event are returned. A tuple of its parts serves, too. Without it the results of
                `get_dispatch_layout` are needed; num_tokens_per_rdma_rank only on several nodes.
            topk_idx, topk_weights: int64 and float32 ``[T, K]``, sent with the rows. Without topk_idx, is_token_in_rank
                alone routes the tokens.
            num_worst_tokens: the number of rows of the result, at least R times the T of any rank; the host then waits
                for nothing. num_worst_tokens / R, rounded up to a power of two of at least 128, must be the same on all
                ranks.

        Returns:
            The rows ``[N, H]`` (or the pair); topk_idx int64 ``[N, K]`` as local ids, -1: not here, or an unused row
            under num_worst_tokens; topk_weights float32 ``[N, K]``, 0 where -1; a list of each local expert's rows,
            rounded up to expert_alignment (empty with num_worst_tokens); the handle; the event.
        """
        call = (
            x,
            handle,
            num_tokens_per_rank,
            is_token_in_rank,
            num_tokens_per_expert,
            topk_idx,
            topk_weights,
            expert_alignment,
            num_worst_tokens,
            Buffer._asked_sms if config is None else _num_sms(config),
        )
        in_order = previous_event, async_finish, allocate_on_comm_stream
        may_learn = not torch.compiler.is_compiling()
        if may_learn and (handle is not None or is_alive(self.group)):
            made = self._run_in_c(1, call, in_order)
            if made is not None:
                return made
        return self._dispatch(call, num_tokens_per_rdma_rank, in_order, may_learn)

    def combine(
        self,
        x: torch.Tensor,
        handle: Handle,
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Sum each token's rows over the ranks it went to, in float32, without weights. Collective.

        Args:
            x: ``[N, H]``, one row for each row that dispatch returned.
            topk_weights: float32 ``[N, K]``, or ``[N, R]`` after a dispatch without topk_idx, summed over the same
                ranks. A rank without them sends zeros.
            bias: ``[T, H]`` or two of them, of x's dtype. Sums start from the bias, and are rounded once.

        Returns:
            ``[T, H]`` of x's dtype, the weights float32 ``[T, K]`` or None, and the event.
        """
        call = x, handle, topk_weights, bias, Buffer._asked_sms if config is None else _num_sms(config)
        in_order = previous_event, async_finish, allocate_on_comm_stream
        may_learn = not torch.compiler.is_compiling()
        made = self._run_in_c(2, call, in_order) if may_learn else None
        return self._combine(call, in_order, may_learn) if made is None else made

    # DeepEP's dispatch and combine call these on several nodes. Here they are the same functions.
    internode_dispatch, internode_combine = dispatch, combine

    def _run_in_c(self, which: int, call: tuple[Any, ...], in_order: _Order) -> Any:
        """Run a call like an earlier one by C. Returns its results and the event; None if C leaves the call.

        which: the place of the function in the entries of _in_c.
        """
        if not self._in_c:
            return None
        run = functools.partial(self._first_in_c, which, call)
        if in_order == (None, False, False):
            results = run()
            return (*results, EventOverlap()) if results else None
        *results, event = ordered(run, self._in_c[0][0].device, call, *in_order)
        return (*results, event) if results else None

    def _first_in_c(self, which: int, call: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the results of the first communicator whose C knows the call; none if C leaves it."""
        for known in self._in_c:
            made: tuple[Any, ...] | None = known[which](*call)
            if made is not None:
                return made
        return ()

    @eager
    def _combine(
        self, call: tuple[Any, ...], in_order: _Order, may_learn: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Check a combine and run it. may_learn: C may run the next one that is like it."""
        self._check_open()
        x, handle, topk_weights, bias, num_sms = call
        check_tensors({"topk_weights": topk_weights}, x=x)
        rows, _ = arguments.rows_of(x)
        routing = handles.routing_of(handle)
        if topk_weights is not None:
            K = routing.topk_ids.shape[1]
            arguments.check_tensor("topk_weights", topk_weights, (torch.float32,), rows.shape[0], K)
        biases = arguments.biases_of(bias, rows)

        def add() -> tuple[torch.Tensor, torch.Tensor | None]:
            comm = communicator(routing.comm)
            comm.set_sms(**sms_of(num_sms))
            out, weights = comm.combine_with_values(rows.contiguous(), routing, topk_weights, arguments.sum_of(biases))
            if may_learn:
                self._learn(comm, "learn_buffer_combine", call, rows, None, bias, topk_weights, True, [*routing[:-1]])
            return out, arguments.as_floats(weights)

        return ordered(add, rows.device, (rows, routing, topk_weights, biases), *in_order)

    @eager
    def _dispatch(
        self, call: tuple[Any, ...], per_node: torch.Tensor | None, in_order: _Order, may_learn: bool
    ) -> tuple[Rows, torch.Tensor | None, torch.Tensor | None, list[int] | None, Handle | None, EventOverlap]:
        """Do for a dispatch what `_combine` does for a combine. per_node: num_tokens_per_rdma_rank."""
        self._check_open()
        x, handle, per_rank, in_rank, per_expert, topk_idx, topk_weights, expert_alignment, num_worst_tokens, _ = call
        rows, scales = arguments.rows_of(x)
        routing = None if handle is None else handles.routing_of(handle)
        if routing is None:
            T = rows.shape[0]
            arguments.check_layout(per_rank, per_node, in_rank, per_expert, T, self._nodes)
            arguments.check_topk(topk_idx, topk_weights)
            arguments.check_sizes(num_worst_tokens, expert_alignment, T, self.group_size)
        elif topk_idx is not None or topk_weights is not None:
            raise ValueError("topk_idx: expected None with a handle, which has the routing, got a tensor")
        reads = (rows, scales, routing, topk_idx, topk_weights, in_rank, per_expert)
        run = functools.partial(self._send, reads, call, may_learn)
        return ordered(run, rows.device, reads, *in_order)

    def _send(
        self, reads: tuple[Any, ...], call: tuple[Any, ...], may_learn: bool
    ) -> tuple[Rows, torch.Tensor | None, torch.Tensor | None, list[int] | None, Handle | None]:
        rows, scales, previous, topk_idx, topk_weights, in_rank, per_expert = reads
        *_, expert_alignment, num_worst_tokens, num_sms = call
        if previous is None:
            comm, ids = self._route(topk_idx, in_rank, per_expert, num_worst_tokens, rows.device)
        else:
            num_worst_tokens = handles.worst_tokens_of(previous)
            comm, ids = communicator(previous.comm), previous.topk_ids
        comm.set_sms(**sms_of(num_sms))
        sent_scales, capacity = None if scales is None else scales.contiguous(), num_worst_tokens or None
        out, made = comm.dispatch(rows, ids, topk_weights, sent_scales, previous, capacity)
        if may_learn:
            given_ids, routing = (topk_idx, []) if previous is None else (ids, [*previous[:-1]])
            given = rows, given_ids, topk_weights, scales, capacity, None, routing
            self._learn(comm, "learn_buffer_dispatch", call, *given)
        received = out.tokens if out.scales is None else (out.tokens, out.scales)
        if previous is not None:
            return received, None, None, None, None
        counts: list[int] = []
        if out.num_tokens_per_expert_cpu is not None:
            local = out.num_tokens_per_expert_cpu
            if topk_idx is None:
                local = arguments.received_per_expert(per_expert, self.group)
            counts = [-(-count // expert_alignment) * expert_alignment for count in local.tolist()]
        recv_idx = None if topk_idx is None else out.topk_ids
        weights, kept = arguments.as_floats(out.weights), handles.handle_of(comm, made, in_rank)
        return received, recv_idx, weights, counts, kept

    def _learn(self, comm: MoECommunicator, learn: str, call: tuple[Any, ...], *given: Any) -> None:
        """Let C run the next call like `call`, which has passed all checks and has run.

        given: the call's own tensors, as `comm`'s operator takes them. If the operator was given copies, it does not
        know the form of these, and C does not learn the call.
        """
        engine, num_sms = comm.engine, call[-1]
        if comm.nodes is not None or not engine.is_direct:
            return
        with engine.lock:
            if engine.asked_sms == sms_of(num_sms):  # else another thread has changed them
                getattr(engine.control, learn)(call, *given)
            if all(known is not engine for known, *_ in self._in_c):
                is_open = [known for known in self._in_c if not known[0].closed]
                self._in_c = [*is_open, (engine, *engine.control.buffer_functions(Handle))]

    def _route(
        self,
        topk_idx: torch.Tensor | None,
        in_rank: torch.Tensor,
        per_expert: torch.Tensor,
        num_worst_tokens: int,
        device: torch.device,
    ) -> tuple[MoECommunicator, torch.Tensor]:
        """Return the communicator, and the ids to dispatch by.

        Without `topk_idx` each rank counts as one expert, and the ids are ranks.
        """
        num_experts = per_expert.numel()
        if topk_idx is None:
            ids, num_experts = arguments.ranks_as_experts(in_rank), self.group_size
        else:
            ids = topk_idx.contiguous()
            if device.type == "cpu" or env.check_ids():
                layout.check_agreement(ids, in_rank, num_experts, self._nodes)
        bound = num_worst_tokens // self.group_size if num_worst_tokens else None
        return self._throughput_communicator(device, num_experts, bound), ids


def _num_sms(config: Config) -> int | None:
    """Return the SMs of a call. None: as many as fill the links."""
    arguments.check_kind(Config, config=config)
    return config.num_sms
