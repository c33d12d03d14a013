"""``Buffer``: DeepEP's high-throughput dispatch and combine. Source of the interface: DeepEP 1.x's Buffer.

Shapes: T tokens here, H hidden size, K experts per token, E experts in all, E_l = E / R on this rank, R ranks, N rows
received, ordered by (source rank, source token).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable
from typing import Any, NoReturn, TypeAlias

import torch
import torch.distributed as dist

from ep_plugin import env
from ep_plugin.config import MAX_TOPK, DispatchLayout, MoECommunicatorConfig
from ep_plugin.deep_ep import routing
from ep_plugin.deep_ep.arguments import (
    biases_of,
    check_floats,
    check_kind,
    check_options,
    check_with_topk,
    layout_given,
    rows_of,
    sum_of,
    whole,
)
from ep_plugin.deep_ep.config import Config
from ep_plugin.deep_ep.routing import Handle
from ep_plugin.deep_ep.streams import comm_stream, ordered
from ep_plugin.deep_ep.utils import EventHandle, EventOverlap
from ep_plugin.errors import CommunicatorClosed, NotSupported
from ep_plugin.moe.arguments import check_tensors
from ep_plugin.moe.communicator import MoECommunicator
from ep_plugin.moe.registry import communicator
from ep_plugin.transport.exchange import checked_group

Rows: TypeAlias = "torch.Tensor | tuple[torch.Tensor, torch.Tensor]"

# Limits of the communicators, not sizes: what is allocated follows from the rows that are sent.
_MOST_HIDDEN = 1 << 24
# Tokens per rank that the pools of calls with num_worst_tokens have room for, at least: a power of two, so that callers
# who name another number at every call, or at every rank, share a few communicators.
_LEAST_BOUND = 128

# Buffers that use a communicator, by its number. Counted, not looked for: ranks collect garbage at different times, and
# must close alike. One that is never destroyed keeps its communicators open.
_users: dict[int, set[int]] = {}
_tokens = itertools.count()


class _LowLatencyByName(type):
    """Refuses low-latency functions by name on the class too, before there is a Buffer."""

    def __getattr__(cls, name: str) -> Any:
        return _absent(cls, name)


class Buffer(metaclass=_LowLatencyByName):
    """Dispatch and combine for one group, in DeepEP's words.

    Buffers of one group share their communicators, so making one again costs nothing. No memory is set aside for
    `num_nvl_bytes`: pools grow when an operation needs it. Nothing here is differentiable, as in DeepEP. Low-latency
    calls raise NotSupported; wrong arguments ValueError, before anything is launched; what peers do wrong is what
    MoECommunicator raises.
    """

    num_sms: int = 20
    """DeepEP's default, for callers that compute with it; calls take what fills the links until `set_num_sms`."""
    _asked_sms: int | None = None

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        use_fabric: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: object = None,
    ) -> None:
        """group: None is the default group. low_latency_mode, enable_shrink, comm (MPI): refused by name."""
        if low_latency_mode:
            _refuse("Buffer(low_latency_mode=True)")
        if enable_shrink or comm is not None:
            name = "enable_shrink" if enable_shrink else "comm"
            raise NotSupported(f"Buffer({name}=...) is not served; use a torch.distributed group, got {name} set")
        self.group = checked_group(group)
        self.rank, self.group_size = self.group.rank(), self.group.size()
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode, self.explicitly_destroy = low_latency_mode, explicitly_destroy
        self._token = next(_tokens)
        self._destroyed = False

    def destroy(self) -> None:
        """Gives back the memory of the communicators that no other Buffer has used. Needs explicitly_destroy=True."""
        if not self.explicitly_destroy:
            raise ValueError("destroy(): expected a Buffer made with explicitly_destroy=True, got False")
        self._destroyed = True
        for number in [number for number, users in _users.items() if self._token in users]:
            _users[number].discard(self._token)
            if not _users[number]:
                del _users[number]
                with contextlib.suppress(CommunicatorClosed):  # with its group
                    communicator(number).close()

    # -- tuning --------------------------------------------------------------------------------------------------

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """SMs of later calls of all Buffers: those that send also receive, in one kernel. An even number."""
        if not isinstance(new_num_sms, int) or new_num_sms < 2 or new_num_sms % 2:
            raise ValueError(f"new_num_sms: expected an even number of at least 2, got {new_num_sms!r}")
        Buffer.num_sms = Buffer._asked_sms = new_num_sms

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """The config of a dispatch that is given none, for any number of ranks."""
        return Config(Buffer._asked_sms)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        """The config of a combine that is given none, for any number of ranks."""
        return Config(Buffer._asked_sms)

    @staticmethod
    def is_sm90_compiled() -> bool:
        """Whether this build has CUDA kernels; they include those for compute capability 9.0."""
        from ep_plugin import _C

        return hasattr(_C, "cuda")

    @staticmethod
    def capture() -> EventOverlap:
        """An event on the current stream."""
        return EventOverlap(EventHandle())

    def get_comm_stream(self) -> torch.cuda.Stream:
        """The stream on which calls with async_finish run, on the current GPU."""
        if not torch.cuda.is_available():
            raise ValueError("get_comm_stream(): expected a GPU, got a machine without one, where calls have no stream")
        return comm_stream(torch.device("cuda", torch.cuda.current_device()))

    # -- operations ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def get_dispatch_layout(
        self,
        topk_idx: torch.Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor, EventOverlap]:
        """topk_idx: int64 ``[T, K]``, -1: no expert. Collective: no.

        Returns num_tokens_per_rank int32 ``[R]``, None (there are no RDMA ranks), num_tokens_per_expert int32 ``[E]``,
        is_token_in_rank bool ``[T, R]``, and the event.
        """
        self._check_open()
        check_tensors(topk_idx=topk_idx)
        check_kind(EventOverlap, previous_event=previous_event)
        results, event = ordered(
            lambda: routing.layout_of(topk_idx, num_experts, self.group_size),
            topk_idx.device,
            topk_idx,
            previous_event,
            async_finish,
            allocate_on_comm_stream,
        )
        return *results, event

    @torch.no_grad()
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
        """Sends each token once to every rank that holds one of its experts. Collective.

        x: ``[T, H]``, or a pair of rows ``[T, H]`` (FP8) and float32 scales ``[T, S]``. handle: repeats an earlier
        dispatch's routing; topk_idx and topk_weights must be None, and only the rows and the event are returned. Else
        the first, the third and the fourth result of `get_dispatch_layout` are needed; topk_idx int64 ``[T, K]`` and
        topk_weights float32 ``[T, K]`` travel with the rows, and without topk_idx is_token_in_rank decides.
        num_worst_tokens: rows of the result, at least R times any rank's T; the host then waits for nothing. A share of
        num_worst_tokens / R is rounded up to a power of two from 128 on, which must be the same on all ranks.

        Returns the rows ``[N, H]`` (or the pair); topk_idx int64 ``[N, K]``, local ids, -1: not here (also where
        num_worst_tokens leaves rows over); topk_weights float32 ``[N, K]``, 0 where -1; the rows of each local expert
        as a list, each rounded up to expert_alignment (empty with num_worst_tokens); the handle; the event.
        """
        rows, scales = rows_of(x)
        check_kind(Handle, handle=handle)
        check_options(config, previous_event)
        if handle is not None:
            if topk_idx is not None or topk_weights is not None:
                raise ValueError("topk_idx: expected None with a handle, which knows the routing, got a tensor")
            call: Callable[[], tuple[Any, ...]] = functools.partial(self._dispatch_again, rows, scales, handle, config)
        else:
            in_rank, per_expert = layout_given(num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert)
            check_with_topk(topk_idx, topk_weights, expert_alignment)
            sizes = expert_alignment, num_worst_tokens
            call = functools.partial(
                self._dispatch, rows, scales, topk_idx, topk_weights, in_rank, per_expert, *sizes, config
            )
        reads = (rows, scales, topk_idx, topk_weights, is_token_in_rank, num_tokens_per_expert, handle)
        result, event = self._ordered(call, rows, reads, previous_event, async_finish, allocate_on_comm_stream)
        return *result, event

    @torch.no_grad()
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
        """Sums each token's rows over the ranks it went to, in float32, without weights. Collective.

        x: ``[N, H]``, one row for each row that dispatch returned. topk_weights: float32 ``[N, K]``, summed over the
        same ranks. bias: ``[T, H]`` or two of them, added to the result (two are added up and rounded first).
        Returns ``[T, H]`` of x's dtype, the weights float32 ``[T, K]`` or None, and the event.
        """
        check_tensors({"topk_weights": topk_weights}, x=x)
        if not isinstance(handle, Handle):
            raise ValueError(f"handle: expected what dispatch returned, got {type(handle).__name__}")
        check_options(config, previous_event)
        biases = biases_of(bias, x)
        call = functools.partial(self._combine, x, handle, topk_weights, biases, config)
        reads = (x, handle, topk_weights, biases)
        result, event = self._ordered(call, x, reads, previous_event, async_finish, allocate_on_comm_stream)
        return *result, event

    # -- not there -----------------------------------------------------------------------------------------------

    @staticmethod
    def get_low_latency_rdma_size_hint(*args: Any, **kwargs: Any) -> NoReturn:
        _refuse("Buffer.get_low_latency_rdma_size_hint")

    def get_local_buffer_tensor(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotSupported("Buffer.get_local_buffer_tensor is not served: communication memory belongs to no caller")

    def __getattr__(self, name: str) -> Any:
        return _absent(type(self), name)

    # -- inside --------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._destroyed:
            raise CommunicatorClosed("Buffer: expected one that is in use, got one after destroy()")

    def _ordered(self, call: Any, rows: torch.Tensor, *how: Any) -> tuple[Any, EventOverlap]:
        self._check_open()
        return ordered(call, rows.device, *how)

    def _communicator(self, num_experts: int, num_worst_tokens: int, device: torch.device) -> MoECommunicator:
        config = MoECommunicatorConfig(
            num_experts=num_experts,
            hidden_size=_MOST_HIDDEN,
            topk=min(num_experts, MAX_TOPK),
            layout=DispatchLayout.TOKEN_MAJOR,
            max_tokens_per_rank=_bound_of(num_worst_tokens // self.group_size) if num_worst_tokens else None,
        )
        comm = MoECommunicator.shared(self.group, config, device=device)
        _users.setdefault(comm.number, set()).add(self._token)
        return comm

    def _dispatch(
        self,
        x: torch.Tensor,
        scales: torch.Tensor | None,
        topk_idx: torch.Tensor | None,
        topk_weights: torch.Tensor | None,
        is_token_in_rank: torch.Tensor,
        num_tokens_per_expert: torch.Tensor,
        expert_alignment: int,
        num_worst_tokens: int,
        config: Config | None,
    ) -> tuple[Rows, torch.Tensor | None, torch.Tensor | None, list[int], Handle]:
        num_experts, size = num_tokens_per_expert.numel(), self.group_size
        routing.check_experts(num_experts, size)
        routing.check_in_rank(is_token_in_rank, x.shape[0], size)
        if num_worst_tokens and num_worst_tokens < size * max(x.shape[0], 1):
            raise ValueError(
                f"num_worst_tokens: expected at least {size * max(x.shape[0], 1)}, {size} ranks times "
                f"{x.shape[0]} tokens here, got {num_worst_tokens}"
            )
        if topk_idx is None:
            ids, num_targets = routing.ranks_as_experts(is_token_in_rank), size
        else:
            ids, num_targets = topk_idx.contiguous(), num_experts
            if x.device.type == "cpu" or env.check_ids():
                routing.check_agreement(topk_idx, is_token_in_rank, num_experts, size)
        comm = self._communicator(num_targets, num_worst_tokens, x.device)
        _use_sms(comm, config or self.get_dispatch_config(size))
        out, inner = comm.dispatch(
            x, ids, topk_weights, scales=whole(scales), capacity=num_worst_tokens if num_worst_tokens else None
        )
        counts: list[int] = []
        if out.num_tokens_per_expert_cpu is not None:
            counts = (
                routing.received_per_expert(num_tokens_per_expert, self.group)
                if topk_idx is None
                else out.num_tokens_per_expert_cpu.tolist()
            )
        rows = out.tokens if out.scales is None else (out.tokens, out.scales)
        assert out.topk_ids is not None
        recv_idx = None if topk_idx is None else out.topk_ids.to(topk_idx.dtype)
        weights = None if out.weights is None else out.weights.float()  # beside float64 rows they travel as such
        return rows, recv_idx, weights, routing.aligned(counts, expert_alignment), Handle(inner, num_worst_tokens)

    def _dispatch_again(
        self, x: torch.Tensor, scales: torch.Tensor | None, handle: Handle, config: Config | None
    ) -> tuple[Rows, None, None, None, None]:
        comm = communicator(handle.routing.comm)
        _use_sms(comm, config or self.get_dispatch_config(self.group_size))
        out, _ = comm.dispatch(
            x,
            handle.routing.topk_ids,
            scales=whole(scales),
            previous_handle=handle.routing,
            capacity=handle.num_worst_tokens or None,
        )
        return (out.tokens if out.scales is None else (out.tokens, out.scales)), None, None, None, None

    def _combine(
        self,
        x: torch.Tensor,
        handle: Handle,
        topk_weights: torch.Tensor | None,
        biases: tuple[torch.Tensor, ...],
        config: Config | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        comm = communicator(handle.routing.comm)
        if topk_weights is not None:
            check_floats("topk_weights", topk_weights, x.shape[0])
        _use_sms(comm, config or self.get_combine_config(self.group_size))
        bias = sum_of(biases)
        out = comm.combine(x.contiguous(), handle.routing, bias=bias)
        if topk_weights is None:
            return out, None
        # Their own rows, since every rank's values count, also those of experts that are elsewhere.
        K = topk_weights.shape[1]
        padded = torch.nn.functional.pad(topk_weights, (0, -K % 4)).contiguous()
        return out, comm.combine(padded, handle.routing)[:, :K].contiguous()


def _bound_of(tokens: int) -> int:
    """Tokens per rank that a communicator is made for where `tokens` are the most."""
    return max(_LEAST_BOUND, 1 << (tokens - 1).bit_length())


def _use_sms(comm: MoECommunicator, config: Config) -> None:
    """A number of SMs is all that the call may use: the same ones send and receive."""
    if config.num_sms is None:
        comm.set_sms()
    else:
        comm.set_sms(
            dispatch_send_sms=config.num_sms, dispatch_recv_sms=0, combine_send_sms=config.num_sms, combine_recv_sms=0
        )


_LOW_LATENCY = '{}: low-latency calls need mode="ll", which is not there yet; use dispatch and combine'


class _NoLowLatency(NotSupported, AttributeError):
    """Also for hasattr(), by which callers find out what there is."""


def _absent(cls: type, name: str) -> NoReturn:
    if "low_latency" in name:
        raise _NoLowLatency(_LOW_LATENCY.format(f"Buffer.{name}"))
    raise AttributeError(f"{cls.__name__!r} has no attribute {name!r}")


def _refuse(name: str) -> NoReturn:
    raise NotSupported(_LOW_LATENCY.format(name))
