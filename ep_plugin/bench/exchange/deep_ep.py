"""DeepEP as a peer: `--peer deep_ep`, if its package can be imported. It serves BF16 and FP8 rows.

`DeepEp` makes its low-latency calls, `DeepEpThroughput` its throughput calls inside a node.
"""

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

MOST_TOKENS = 256  # most tokens per rank, in the Buffer of all workloads
_DTYPES = "bfloat16", "float8"
_MULTIPLE = 4  # DeepEP needs the tokens of all ranks together to be a multiple of it


@functools.cache
def _buffer(hidden: int, ranks: int, experts: int) -> Any:
    """Returns one Buffer for all numbers of tokens, since making a Buffer takes seconds. Collective."""
    return deep_ep.Buffer(
        dist.group.WORLD,
        num_rdma_bytes=deep_ep.Buffer.get_low_latency_rdma_size_hint(MOST_TOKENS, hidden, ranks, experts),
        low_latency_mode=True,
        num_qps_per_rank=experts // ranks,
        explicitly_destroy=True,  # so that the end of the process waits for no other rank
    )


class DeepEp:
    """DeepEP's low-latency calls, with the members of peers.AllToAll. Rows are EXPERT_MAJOR, and come in any order
    within an expert."""

    layout, dedup, exact_fp8, dtypes = DispatchLayout.EXPERT_MAJOR, False, False, _DTYPES

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
        """Returns the output with its rows ordered by (source rank, source token).

        The handle has the token of each row, and a word for each rank: the rank's first row in the upper half, and its
        number of rows in the lower half.
        """
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


@functools.cache
def _throughput_buffer(nbytes: int) -> Any:
    """Returns one Buffer for all cases of a shape. Collective."""
    return deep_ep.Buffer(dist.group.WORLD, nbytes, 0, explicitly_destroy=True)


class DeepEpThroughput:
    """DeepEP's throughput calls, with the members of peers.AllToAll. Rows are TOKEN_MAJOR. The SMs and chunks are
    DeepEP's defaults."""

    layout, dedup, dtypes = DispatchLayout.TOKEN_MAJOR, True, _DTYPES

    def __init__(self, workload: Workload, device: torch.device) -> None:
        self._experts = workload.experts
        row_bytes = workload.hidden * torch.bfloat16.itemsize
        kind, ranks = deep_ep.Buffer, workload.ranks
        configs = kind.get_dispatch_config(ranks), kind.get_combine_config(ranks)
        sizes = [config.get_nvl_buffer_size_hint(row_bytes, ranks) for config in configs]
        self._buffer = _throughput_buffer(max(sizes))
        _all_are_here(device)

    def dispatch(self, batch: Batch, previous: Any = None) -> tuple[DispatchOutput, Any]:
        x = batch.x if batch.scales is None else (batch.x, batch.scales)
        if previous is not None:
            rows, *_ = self._buffer.dispatch(x, handle=previous[1])
            return previous[0]._replace(**_rows(rows), weights=None), previous  # no weights travel
        per_rank, per_node, per_expert, in_rank, _ = self._buffer.get_dispatch_layout(batch.ids, self._experts)
        rows, ids, weights, counts, handle, _ = self._buffer.dispatch(
            x,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=batch.ids,
            topk_weights=batch.weights,
        )
        out = received(**_rows(rows), topk_ids=ids, weights=weights, num_tokens_per_expert=torch.tensor(counts))
        return out, (out, handle)

    def combine(self, y: torch.Tensor, state: Any) -> torch.Tensor:
        """Returns the sum of each token's rows, `[T, H]`. y: `[N, H]`, rows that experts have weighted."""
        return self._buffer.combine(y, state[1])[0]


def _rows(rows: Any) -> dict[str, torch.Tensor]:
    """Returns the fields of an output that hold its rows, and the scales of FP8 rows."""
    return {"tokens": rows[0], "scales": rows[1]} if isinstance(rows, tuple) else {"tokens": rows}


def _all_are_here(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    dist.barrier()
