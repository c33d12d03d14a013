"""``EPHandle``: the routing that ElasticBuffer's dispatch returns, how it is made, and its checks.

Shapes as in elastic.py.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

from ep_plugin.deep_ep import arguments, handles
from ep_plugin.deep_ep.shared import refuse
from ep_plugin.deep_ep.utils.math import align
from ep_plugin.moe.communicator import MoECommunicator
from ep_plugin.moe.layout import DispatchHandle, DispatchOutput
from ep_plugin.moe.registry import communicator

STATS = "cumulative_local_expert_recv_stats"
_PRIVATE = ("token_metadata_at_forward", "channel_linked_list")
_LEAST_WORDS = 4  # int32 of a row that can be sent
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
    psum_num_recv_tokens_per_scaleup_rank: int32 ``[R]``, the tokens received from ranks 0 to i. On several nodes
        int32 ``[ranks of a node]``: the tokens received from all ranks whose local rank is at most i.
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
    pairs: DispatchHandle | None = field(default=None, repr=False)
    """The routing of one_reduction.py, from the first combine that needs it on."""

    @property
    def dst_buffer_slot_idx(self) -> torch.Tensor:
        """Return the plan of the routing. Its contents are private."""
        return self.routing.plan

    @functools.cached_property
    def recv_src_metadata(self) -> torch.Tensor:
        """Tell where each received token comes from: int32 ``[num_recv_tokens, 2 + K]``. Collective at its first use.

        Column 0 is ``source rank * num_max_tokens_per_rank + source token``. Column 1 has no meaning. Column 2 + k is
        the row of the result for the token's choice k, -1: not here. Rows are in the order of the result or, with
        do_expand, of column 0. Without do_cpu_sync, rows after the last received token are undefined.
        """
        return _sources(self)

    def tensors(self) -> tuple[Any, ...]:
        """Return the handle's tensors. The tensors of the routing are nested in a tuple."""
        return tuple(value for value in vars(self).values() if isinstance(value, (torch.Tensor, tuple)))

    def __getattr__(self, name: str) -> NoReturn:
        refuse(type(self).__name__, name, NOT_SERVED)


@dataclass(frozen=True)
class DispatchSettings:
    """The settings of a dispatch without a handle. most: T_max. sync: do_cpu_sync."""

    num_experts: int
    most: int
    alignment: int
    expand: bool
    sync: bool
    num_sms: int
    copy: bool

    def capacity(self, size: int, topk: int) -> int:
        """Return the most rows that T_max tokens of every rank may need here."""
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
            psum_num_recv_tokens_per_scaleup_rank=handles.received_by_local_rank(comm, routing),
            psum_num_recv_tokens_per_expert=ends,
            num_unaligned_recv_tokens_per_expert=counts if self.expand else None,
            routing=routing,
        )


def _sources(handle: EPHandle) -> torch.Tensor:
    """Send the tokens' numbers along the handle's routing, with the number of each choice in place of its weight."""
    comm, ids = communicator(handle.routing.comm), handle.routing.topk_ids
    T, K = ids.shape
    first = comm.rank * handle.num_max_tokens_per_rank
    numbers = torch.arange(first, first + T, dtype=torch.int32, device=ids.device)
    choices = torch.arange(K, dtype=torch.float32, device=ids.device).repeat(T, 1)
    capacity = handles.worst_tokens_of(handle.routing) or None
    x = numbers.unsqueeze(1).repeat(1, _LEAST_WORDS)
    out, _ = comm.dispatch(x, ids, choices, None, handle.routing, capacity)
    rows = torch.arange(len(out.tokens), dtype=torch.int32, device=ids.device)
    found = ids.new_full((handle.num_recv_tokens, 2 + K), -1)
    if out.topk_ids is not None:
        found[:, 0] = out.tokens[:, 0]
        found[:, 2:] = torch.where(out.topk_ids < 0, -1, rows.unsqueeze(1))
        return found
    assert out.row_expert_ids is not None and out.weights is not None
    is_used = out.row_expert_ids >= 0
    tokens, places = out.tokens[is_used, 0].unique(return_inverse=True)
    found[: len(tokens), 0] = tokens
    found[places, 2 + out.weights[is_used].long()] = rows[is_used]
    return found


def check_handle(handle: object) -> None:
    if not isinstance(handle, EPHandle):
        raise ValueError(f"handle: expected the EPHandle that dispatch returned, got {type(handle).__name__}")


def check_cached(handle: EPHandle, given: tuple[Any, ...], weights: Any, stats: Any) -> None:
    """ValueError unless each argument beside a handle is None or equals the handle's own value."""
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
