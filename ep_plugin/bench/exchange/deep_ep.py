"""DeepEP's low-latency calls as a peer: `deep_ep` in `--peer`, where its package can be imported. BF16 and FP8 rows."""

from __future__ import annotations

import functools
from typing import Any

import deep_ep
import torch
import torch.distributed as dist

from ep_plugin.bench.exchange.peers import received
from ep_plugin.bench.exchange.workload import Batch, Workload
from ep_plugin.config import DispatchLayout
from ep_plugin.moe.layout import DispatchOutput

MOST_TOKENS = 256  # per rank, in the Buffer of all workloads
_MULTIPLE = 4  # DeepEP asks that the tokens of all ranks together are a multiple of it


@functools.cache
def _buffer(hidden: int, ranks: int, experts: int) -> Any:
    """One Buffer for all numbers of tokens, since making one takes seconds. Collective."""
    return deep_ep.Buffer(
        dist.group.WORLD,
        num_rdma_bytes=deep_ep.Buffer.get_low_latency_rdma_size_hint(MOST_TOKENS, hidden, ranks, experts),
        low_latency_mode=True,
        num_qps_per_rank=experts // ranks,
        explicitly_destroy=True,  # so that the end of the process waits for no other rank
    )


class DeepEp:
    """The members of peers.AllToAll, for rows in EXPERT_MAJOR, which come in any order within an expert."""

    layout, dedup, exact_fp8 = DispatchLayout.EXPERT_MAJOR, False, False

    def __init__(self, workload: Workload, device: torch.device) -> None:
        self._tokens, self._experts = -(-workload.tokens // _MULTIPLE) * _MULTIPLE, workload.experts
        if self._tokens > MOST_TOKENS:
            raise ValueError(f"tokens: expected at most {MOST_TOKENS} beside DeepEP, got {workload.tokens}")
        self._buffer = _buffer(workload.hidden, workload.ranks, workload.experts)
        _all_are_here(device)
        self._buffer.clean_low_latency_buffer(self._tokens, workload.hidden, workload.experts)
        _all_are_here(device)

    def dispatch(self, batch: Batch, previous: Any = None) -> tuple[DispatchOutput, Any]:
        rows, counts, handle, *_ = self._buffer.low_latency_dispatch(
            batch.x, batch.ids, self._tokens, self._experts, use_fp8=batch.quantize
        )
        tokens, scales = rows if batch.quantize else (rows, None)
        return received(tokens=tokens, scales=scales, num_tokens_per_expert=counts), (batch, handle)

    def in_order(self, out: DispatchOutput, state: Any) -> DispatchOutput:
        """By (source rank, source token), as the handle says: the token of each row, and each rank's first and number
        of rows, in the upper and the lower half of a word."""
        token, ranges, *_ = state[1]
        first, number = (part.unsqueeze(2) for part in (ranges >> 32, ranges & 0xFFFFFFFF))  # [E_l, R, 1]
        row = torch.arange(token.shape[1], device=token.device)
        of_rank = (row >= first) & (row < first + number)  # [E_l, R, N]
        source = of_rank.int().argmax(1) * self._tokens + token
        order = source.masked_fill(~of_rank.any(1), source.numel()).argsort(1)
        expert = torch.arange(len(order), device=order.device).unsqueeze(1)
        tokens = out.tokens.view(torch.uint8)[expert, order].view(out.tokens.dtype)
        return out._replace(tokens=tokens, scales=None if out.scales is None else out.scales[expert, order])

    def combine(self, y: torch.Tensor, state: Any) -> torch.Tensor:
        batch, handle = state
        return self._buffer.low_latency_combine(y, batch.ids, batch.weights, handle)[0]


def _all_are_here(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    dist.barrier()
