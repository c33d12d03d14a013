"""PyTorch's TokenSwitch over MoECommunicator, for scripts that take one in place of TokenSwitchNCCL.

    switch = EpPluginTokenSwitch(group, num_experts, max_dispatch_tokens, max_recv_tokens, max_token_bytes)

The interface is private (torch.distributed._token_switch, PyTorch 2.14 and newer). The import raises NotSupported where
PyTorch does not have it. Shapes: T tokens here, H hidden size, K experts per token, E experts in all, E_l = E / R on
this rank, R ranks, N = max_recv_tokens_per_rank rows of a result.
"""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ep_plugin import DispatchHandle, DispatchLayout, DispatchOutput, MoECommunicator, MoECommunicatorConfig
from ep_plugin.config import MAX_TOPK, ROW_ALIGNMENT_BYTES
from ep_plugin.errors import NotSupported

try:
    stock: Any = importlib.import_module("torch.distributed._token_switch")
except ImportError as error:
    raise NotSupported(
        f"token_switch: expected torch.distributed._token_switch, of PyTorch 2.14 or newer, got {torch.__version__}"
    ) from error

Results = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]
_LAYOUTS = {"flat": DispatchLayout.TOKEN_MAJOR, "expert_major": DispatchLayout.FLAT}


@dataclasses.dataclass
class _Handle:
    """The routing of our communicator, from the first dispatch on."""

    comm: MoECommunicator
    layout: str
    routing: DispatchHandle | None = None


class EpPluginTokenSwitch(stock.TokenSwitch):
    """Dispatch and combine for one group, with the arguments and results of PyTorch's TokenSwitchNCCL.

    Differentiable in tokens and, unlike PyTorch's, in topk_weights. Backward is collective. "flat" has a row for each
    token, however many of its experts are here, and "expert_major" one for each local expert. Rows are ordered by
    source rank, then source token, in "expert_major" within each expert. Rows that no token has are zero. Layouts have
    a communicator each, which switches with the same arguments share.

    Args:
        process_group, num_experts: the ranks, and E.
        max_dispatch_tokens_per_rank: the most tokens of any rank.
        max_recv_tokens_per_rank: N. If the most tokens of all ranks may need more rows, each dispatch waits on the host
            for the number of rows, and a ValueError says if N is too small.
        max_token_bytes: of the widest row.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup,
        num_experts: int,
        max_dispatch_tokens_per_rank: int,
        max_recv_tokens_per_rank: int,
        max_token_bytes: int,
    ) -> None:
        self._group, self._max_recv_tokens_per_rank = process_group, max_recv_tokens_per_rank
        row_bytes = -(-max_token_bytes // ROW_ALIGNMENT_BYTES) * ROW_ALIGNMENT_BYTES
        self._configs = {
            name: MoECommunicatorConfig(
                num_experts=num_experts,
                hidden_size=row_bytes,  # a limit, for elements of a byte
                topk=min(num_experts, MAX_TOPK),
                max_tokens_per_rank=max_dispatch_tokens_per_rank,
                max_rows_per_node=max_dispatch_tokens_per_rank,  # no row is left out
                layout=layout,
                max_row_bytes=row_bytes,
                ids_as_given=layout is DispatchLayout.TOKEN_MAJOR,
            )
            for name, layout in _LAYOUTS.items()
        }

    @property
    def max_recv_tokens_per_rank(self) -> int:
        """N."""
        return self._max_recv_tokens_per_rank

    def create_routing(
        self, topk_idx: torch.Tensor, per_expert_token_counts: torch.Tensor | None = None, *, layout: str = "flat"
    ) -> Any:
        """Return the routing of these tokens. Collective if it is the first of its layout, or counts are asked for.

        Args:
            topk_idx: int64 ``[T, K]``, -1: no expert.
            per_expert_token_counts: int32, at least E_l elements: where the number of pairs of a token and each local
                expert is written. A dispatch of rows of 16 bytes finds it.
            layout: "flat" or "expert_major". PyTorch 2.14 has "flat" alone, and no such argument.
        """
        if layout not in _LAYOUTS:
            raise ValueError(f"layout: expected one of {', '.join(_LAYOUTS)}, got {layout!r}")
        comm = MoECommunicator.shared(self._group, self._configs[layout], device=topk_idx.device)
        fields = {"handle": _Handle(comm, layout), "topk_idx": topk_idx, "layout": layout}
        routing = stock.Routing(**{field.name: fields[field.name] for field in dataclasses.fields(stock.Routing)})
        if per_expert_token_counts is not None:
            rows = topk_idx.new_zeros((len(topk_idx), ROW_ALIGNMENT_BYTES // 4), dtype=torch.float32)
            counts = self._send(routing, rows, None, self._max_recv_tokens_per_rank).num_tokens_per_expert
            per_expert_token_counts[: len(counts)].copy_(counts)
        return routing

    def dispatch(
        self,
        routing: Any,
        tokens: torch.Tensor,
        topk_weights: torch.Tensor,
        max_recv_tokens: int | None = None,
        *,
        out: Results | None = None,
    ) -> Results:
        """Send each token to the ranks of its experts. Collective. With `out`, results are copied into it.

        Args:
            tokens, topk_weights: ``[T, H]`` and float32 ``[T, K]``.
            max_recv_tokens: the rows of the result, at most N. They are checked as N is.

        Returns:
            The rows; their weights, "flat" ``[rows, K]``, "expert_major" ``[rows]``; in "flat" their local expert ids
            ``[rows, K]``, -1: elsewhere, with weight 0.
        """
        if out is not None or max_recv_tokens is None:
            written: Results = super().dispatch(routing, tokens, topk_weights, max_recv_tokens, out=out)
            return written
        got = self._send(routing, tokens, topk_weights, max_recv_tokens)
        weights, ids = (part if part is None else part[:max_recv_tokens] for part in (got.weights, got.topk_ids))
        return got.tokens[:max_recv_tokens], weights, ids

    def combine(self, routing: Any, expert_tokens: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """Sum each token's rows, without weights, as ``[T, H]``. Collective. With `out`, sums are copied into it.

        expert_tokens: a row for each row of the dispatch, or for the first ones; no token has the others.
        """
        if out is not None:
            out.copy_(self.combine(routing, expert_tokens.detach()))
            return out
        handle, missing = routing.handle, self._max_recv_tokens_per_rank - len(expert_tokens)
        if handle.routing is None:
            raise ValueError("combine: expected a routing that a dispatch has used, got a new one")
        rows = torch.nn.functional.pad(expert_tokens, (0, 0, 0, missing)) if missing > 0 else expert_tokens
        sums: torch.Tensor = handle.comm.combine(rows.contiguous(), handle.routing)
        return sums

    def _send(self, routing: Any, tokens: torch.Tensor, weights: torch.Tensor | None, rows: int) -> DispatchOutput:
        """Dispatch over the routing, which the first dispatch finds. rows: as many as the caller keeps."""
        handle, N = routing.handle, self._max_recv_tokens_per_rank
        if rows > N:
            raise ValueError(f"max_recv_tokens: expected at most max_recv_tokens_per_rank={N}, got {rows}")
        got, made = handle.comm.dispatch(tokens, routing.topk_idx, weights, None, handle.routing, N)
        handle.routing = handle.routing or made
        copies = 1 if handle.layout == "flat" else min(routing.topk_idx.shape[1], handle.comm.num_local_experts)
        if rows < handle.comm.size * handle.comm.config.max_tokens_per_rank * copies and int(got.required) > rows:
            raise ValueError(f"max_recv_tokens: expected at least {int(got.required)} rows, got {rows}")
        return got

    def _dispatch(self, routing: Any, tokens: torch.Tensor, topk_weights: torch.Tensor, *out: Any) -> None:
        results = self.dispatch(routing, tokens.detach(), topk_weights.detach(), len(out[0]))
        for to, found in zip(out, results, strict=True):
            if to is not None and found is not None:
                to.copy_(found)

    def _combine(self, routing: Any, expert_tokens: torch.Tensor, out_tokens: torch.Tensor) -> None:
        self.combine(routing, expert_tokens, out=out_tokens)

    def _alloc_dispatch_outputs(self, *_: Any) -> NoReturn:
        raise NotSupported("_alloc_dispatch_outputs: expected no call, since dispatch allocates its results")
