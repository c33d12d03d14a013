"""The records of dispatch: its results, and the records that argument checks, operators and kernels exchange.

Shapes: T tokens here, H hidden size, K experts per token, S scales per row, R ranks, E experts in all, E_l = E / R on
this rank, N rows of the output. Rows are ordered by (source rank, source token), in FLAT within each expert.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch

from ep_plugin import _C
from ep_plugin.config import MoECommunicatorConfig
from ep_plugin.runtime.streams import Streams


class DispatchOutput(NamedTuple):
    """The rows this rank received. Every tensor is the caller's own; no field refers to communication memory.

    Without ``capacity`` the memory behind a tensor may have room for more rows than N: up to the most rows of the last
    16 dispatches, plus a 64th of that, plus 256. Clone before storing.

    tokens: ``[N, H]``, of the dtype of ``x``, or of the quantised dtype. FLAT: one row per (token, local
        expert), grouped by local expert, each group padded with zero rows to ``expert_alignment``. TOKEN_MAJOR: one row
        per token. EXPERT_MAJOR: ``[E_l, R * T_max, H]``, one row per (token, local expert), at the beginning of the
        expert's block; the rows after them are undefined.
    scales: ``[N, S]``, the scales of the rows, given or made by ``quantize``; None without scales. Gradients into them
        are dropped. EXPERT_MAJOR: ``[E_l, R * T_max, S]``, stored transposed; S is H / 128 or, with "e4m3_ue8m0", the
        number of int32 words that hold H / 128 exponents.
    weights: FLAT ``[N]``, TOKEN_MAJOR ``[N, K]``; float32 (float64 for float64 rows), 0 where there is no pair; None
        when no weights were dispatched. Carries gradients back to ``topk_weights``.
    topk_ids: TOKEN_MAJOR: ``[N, K]``, local expert ids, -1 where the expert is elsewhere; else None. They are int32 or,
        with ``ids_as_given=True``, of the dtype of the given ids.
    row_expert_ids: FLAT: int32 ``[N]``, the local expert of each row, -1 for padding; else None.
    num_tokens_per_expert: int32 ``[E_l]`` on the device, without padding. If ``capacity`` was too small, FLAT counts
        the rows that are present, and TOKEN_MAJOR counts the dropped tokens, too.
    num_tokens_per_expert_cpu: int64 ``[E_l]`` in host memory; None when ``capacity`` was given, and in EXPERT_MAJOR.
    expert_offsets: int32 ``[E_l + 1]`` on the device: the first FLAT row of each expert, padding included.
        EXPERT_MAJOR: the first row of each expert's block.
    overflow: int32 ``[]``: 1 when rows were dropped because ``capacity`` was too small; None without ``capacity``, and
        in EXPERT_MAJOR, which drops none.
    required: int32 ``[]``: the number of rows that all tokens need, without those of `left_out`; None if `overflow` is
        None.
    left_out: int32 ``[]``, the same on all ranks: how many rows all ranks together have not sent to another node,
        because ``max_rows_per_node`` was too small. The experts there did not get these tokens, and combine adds
        nothing for them. None if `overflow` is None, and on one node, where no row is left out.
    required_per_node: int32 ``[]``, the same on all ranks: the ``max_rows_per_node`` that leaves no row out. 0 if no
        row crosses, and with a ``previous_handle`` that was made without ``capacity``. None if `left_out` is None.
    """

    tokens: torch.Tensor
    scales: torch.Tensor | None
    weights: torch.Tensor | None
    topk_ids: torch.Tensor | None
    row_expert_ids: torch.Tensor | None
    num_tokens_per_expert: torch.Tensor
    num_tokens_per_expert_cpu: torch.Tensor | None
    expert_offsets: torch.Tensor
    overflow: torch.Tensor | None
    required: torch.Tensor | None
    left_out: torch.Tensor | None = None
    required_per_node: torch.Tensor | None = None


NUM_LIMITS = 2 + _C.rail_overflow_words
"""The words that say what a dispatch with a capacity has dropped and left out."""

with torch.inference_mode(False):  # callers may save it for a backward
    NOTHING = torch.empty(0, dtype=torch.int32, device="cpu")
"""An empty tensor, in the place of a handle's tensor that its layout does not need."""


class DispatchHandle(NamedTuple):
    """The routing of one dispatch, for combine and for ``previous_handle=``: ordinary tensors and a number.

    The caller owns it, may use it several times, and may keep it beyond later dispatches. Its tensors are private;
    ``csrc/common/layout.h`` describes them.
    """

    topk_ids: torch.Tensor
    """int32 ``[T, K]``, global expert ids, -1: dropped."""
    plan: torch.Tensor
    """int32, one part after the other: (1) ``[R, R]``, at [a][b] the number of rows that ranks 0 to a have for rank b;
    (2) bases and counts; (3) ``[T, R]``, each token's position among this rank's rows for each rank, -1: it has none;
    (4) ``[T, K]``, each pair's position among this rank's pairs for the expert, -1: dropped. EXPERT_MAJOR:
    LlPlanLayout of ``csrc/common/low_latency.h``."""
    recv_rows: torch.Tensor
    """int32 ``[slots, K]``, the output row of each received pair, -1: none. In EXPERT_MAJOR the plan has the whole
    routing: `recv_rows` and `totals` are empty, and nobody reads them."""
    totals: torch.Tensor
    """int64 on the host, one after the other: slots; output rows; the most rows from any rank to any rank; the most
    rows from any rank to all ranks; rows of each local expert. With ``capacity``: the capacity alone."""
    comm: int
    """The number of the communicator that made the handle."""


class Routing(NamedTuple):
    """A handle whose tensors have been checked."""

    tensors: DispatchHandle
    struct: Any
    """_C.Routing: the addresses and sizes that kernels read."""
    totals: list[int]
    """The handle's totals."""


class DispatchCall(NamedTuple):
    """The arguments of one dispatch."""

    x: torch.Tensor
    topk_ids: torch.Tensor
    weights: torch.Tensor | None
    scales: torch.Tensor | None
    previous: Routing | None
    capacity: int | None
    quantize: str | None


class DispatchResult(NamedTuple):
    """The results of a dispatch without its handle, in the operator's order. A result that the call lacks is None.

    ids: row_expert_ids of DispatchOutput in FLAT, its topk_ids in TOKEN_MAJOR. limits: its (overflow, required,
    left_out, required_per_node), int32 ``[4]``. host_counts: its num_tokens_per_expert_cpu.
    """

    tokens: torch.Tensor
    scales: torch.Tensor | None
    weights: torch.Tensor | None
    ids: torch.Tensor | None
    expert_counts: torch.Tensor
    expert_offsets: torch.Tensor
    limits: torch.Tensor | None
    host_counts: torch.Tensor | None


class HandleSizes(Protocol):
    """The sizes of a handle's tensors, for a dispatch of T tokens with K experts each. A size is None if it is known
    only when the dispatch has run."""

    num_totals: int

    def plan_words(self, num_tokens: int, topk: int, capacity: int | None) -> int | None:
        """Returns the int32 words of the plan."""

    def slots(self, capacity: int | None) -> int | None:
        """Returns the rows of recv_rows."""


class Engine(Protocol):
    """The facts about a communicator that argument checks need."""

    config: MoECommunicatorConfig
    device: torch.device
    streams: Streams
    checks_ids: bool
    size: int
    local_experts: int
    flat: bool

    def plan_words(self, num_tokens: int, topk: int, capacity: int | None = None) -> int:
        """Returns the int32 words of a plan on this node."""
