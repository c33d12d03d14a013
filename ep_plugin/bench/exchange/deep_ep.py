"""DeepEP's low-latency calls as a peer: `deep_ep` in `--peer`, where its package can be imported. BF16 and FP8 rows."""

from __future__ import annotations

from typing import Any

import deep_ep
import torch
import torch.distributed as dist

from ep_plugin.bench.exchange.peers import received
from ep_plugin.bench.exchange.workload import Batch, Workload
from ep_plugin.config import DispatchLayout
from ep_plugin.moe.layout import DispatchOutput


class DeepEp:
    """The members of peers.AllToAll, for rows in EXPERT_MAJOR."""

    layout, dedup = DispatchLayout.EXPERT_MAJOR, False

    def __init__(self, workload: Workload, device: torch.device) -> None:
        sizes = workload.tokens, workload.hidden, workload.ranks, workload.experts
        self._tokens, self._experts = workload.tokens, workload.experts
        self._buffer = deep_ep.Buffer(
            dist.group.WORLD,
            num_rdma_bytes=deep_ep.Buffer.get_low_latency_rdma_size_hint(*sizes),
            low_latency_mode=True,
            num_qps_per_rank=workload.local_experts,
        )

    def dispatch(self, batch: Batch, previous: Any = None) -> tuple[DispatchOutput, Any]:
        rows, counts, handle, *_ = self._buffer.low_latency_dispatch(
            batch.x, batch.ids, self._tokens, self._experts, use_fp8=batch.quantize
        )
        tokens, scales = rows if batch.quantize else (rows, None)
        return received(tokens=tokens, scales=scales, num_tokens_per_expert=counts), (batch, handle)

    def combine(self, y: torch.Tensor, state: Any) -> torch.Tensor:
        batch, handle = state
        sums: torch.Tensor = self._buffer.low_latency_combine(y, batch.ids, batch.weights, handle)[0]
        return sums
