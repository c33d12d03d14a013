"""``EPHandle``: the routing that ElasticBuffer's dispatch returns, how it is made, and its checks.

Shapes as in elastic.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

from ep_plugin.deep_ep import arguments, handles
from ep_plugin.deep_ep.shared import refuse
from ep_plugin.deep_ep.utils.math import align
from ep_plugin.moe.communicator import MoECommunicator
from ep_plugin.moe.layout import DispatchHandle, DispatchOutput

STATS = "cumulative_local_expert_recv_stats"
_PRIVATE = ("recv_src_metadata", "dst_buffer_slot_idx", "token_metadata_at_forward", "channel_linked_list")
NOT_SERVED = dict.fromkeys(("engram_", "get_engram_"), "Engram is not served")
NOT_SERVED |= dict.fromkeys(_PRIVATE, "it is the state of DeepEP's kernels")


@dataclass(eq=False, kw_only=True)
class EPHandle:
    """The routing of a dispatch, for `combine` and a cached `dispatch`. The caller owns it.

    do_expand, num_experts, expert_alignment, num_max_tokens_per_rank, num_sms: as given to dispatch.
    topk_idx: ``[T, K]``, a copy unless do_handle_copy=False.
    num_recv_tokens: tokens received, each counted once. Without do_cpu_sync: R * T_max.
    num_expanded_tokens: the rows of the result.
    num_recv_tokens_per_expert_list: each local expert's rows, rounded up. Empty without do_cpu_sync.
    psum_num_recv_tokens_per_scaleup_rank: int32 ``[R]``, the tokens received from ranks 0 to i.
    psum_num_recv_tokens_per_expert: int32 ``[E_l]``, the end of each expert's rows: with do_expand without its own
        padding, else of counts rounded up.
    num_unaligned_recv_tokens_per_expert: int32 ``[E_l]``, rows without padding; None without do_expand.
    """

    do_expand: bool
    num_experts: int
    expert_alignment: int
    num_max_tokens_per_rank: int
    num_sms: int
    topk_idx: torch.Tensor
    num_recv_tokens: int
    num_expanded_tokens: int
    num_recv_tokens_per_expert_list: list[int]
    psum_num_recv_tokens_per_scaleup_rank: torch.Tensor
    psum_num_recv_tokens_per_expert: torch.Tensor
    num_unaligned_recv_tokens_per_expert: torch.Tensor | None
    routing: DispatchHandle = field(repr=False)

    def tensors(self) -> tuple[Any, ...]:
        """Its tensors; those of the routing are in a tuple."""
        return tuple(value for value in vars(self).values() if isinstance(value, (torch.Tensor, tuple)))

    def __getattr__(self, name: str) -> NoReturn:
        refuse(type(self).__name__, name, NOT_SERVED)


@dataclass(frozen=True)
class Call:
    """The settings of a dispatch without a handle. most: T_max. sync: do_cpu_sync."""

    num_experts: int
    most: int
    alignment: int
    expand: bool
    sync: bool
    num_sms: int
    copy: bool

    def capacity(self, size: int, topk: int) -> int:
        """Rows that T_max tokens of every rank may need here."""
        if not self.expand:
            return size * self.most
        local = self.num_experts // size
        return align(size * self.most * min(topk, local) + local * (self.alignment - 1), self.alignment)

    def handle_of(
        self, comm: MoECommunicator, out: DispatchOutput, routing: DispatchHandle, topk_idx: torch.Tensor | None
    ) -> EPHandle:
        assert topk_idx is not None
        counts, cpu = out.num_tokens_per_expert, out.num_tokens_per_expert_cpu
        aligned = -(-counts // self.alignment) * self.alignment
        ends = out.expert_offsets[:-1] + counts if self.expand else aligned.cumsum(0, dtype=torch.int32)
        return EPHandle(
            do_expand=self.expand,
            num_experts=self.num_experts,
            expert_alignment=self.alignment,
            num_max_tokens_per_rank=self.most,
            num_sms=self.num_sms,
            topk_idx=topk_idx.clone() if self.copy else topk_idx,
            num_recv_tokens=comm.size * self.most if cpu is None else int(routing.totals[0]),
            num_expanded_tokens=out.tokens.shape[0],
            num_recv_tokens_per_expert_list=[]
            if cpu is None
            else [align(count, self.alignment) for count in cpu.tolist()],
            psum_num_recv_tokens_per_scaleup_rank=handles.received_from(comm, routing),
            psum_num_recv_tokens_per_expert=ends,
            num_unaligned_recv_tokens_per_expert=counts if self.expand else None,
            routing=routing,
        )


def check_handle(handle: object) -> None:
    if not isinstance(handle, EPHandle):
        raise ValueError(f"handle: expected the EPHandle that dispatch returned, got {type(handle).__name__}")


def check_cached(handle: EPHandle, given: tuple[Any, ...], weights: Any, stats: Any) -> None:
    """What is given beside a handle must be None, or as it was."""
    check_handle(handle)
    topk_idx, num_experts, most, alignment, sync, expand = given
    for name, value in {"topk_idx": topk_idx, STATS: stats}.items():
        if value is not None:
            raise ValueError(f"{name}: expected None with a handle, got {type(value).__name__}")
    if sync:
        raise ValueError("do_cpu_sync: expected None or False with a handle, got True")
    same = {"num_experts": num_experts, "num_max_tokens_per_rank": most, "expert_alignment": alignment}
    for name, value in (same | {"do_expand": expand}).items():
        if value is not None and value != getattr(handle, name):
            raise ValueError(f"{name}: expected {getattr(handle, name)}, as in the handle, got {value}")
    if weights is not None:
        arguments.check_tensor("topk_weights", weights, (torch.float32,), *handle.topk_idx.shape)
