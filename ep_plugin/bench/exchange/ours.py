"""ep_plugin as an implementation of the benchmark's exchanges."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

import ep_plugin.moe.operators  # noqa: F401  imported here, so that the time of a construction leaves it out
from ep_plugin import _C
from ep_plugin.bench.exchange.peers import Received
from ep_plugin.bench.exchange.specs import CACHED, COMBINE, DISPATCH, ROUNDTRIP, Sms
from ep_plugin.bench.exchange.workload import Batch, Workload
from ep_plugin.config import DispatchLayout, MoECommunicatorConfig
from ep_plugin.moe.communicator import MoECommunicator
from ep_plugin.moe.high_throughput.engine import COMBINE_POOL, DISPATCH_POOL

_MIB = 1 << 20


class EpPlugin:
    """Dispatch and combine of one communicator. The constructor is collective; the caller closes it.

    capacity: rows of every dispatch's output, so that the host does not wait; None: as many as arrive. construction_s:
    seconds of the construction, until the device had finished. The first operations allocate the pools.
    """

    dedup = True

    def __init__(
        self,
        workload: Workload,
        device: torch.device,
        layout: DispatchLayout,
        sms: Sms | None = None,
        capacity: int | None = None,
    ) -> None:
        config = MoECommunicatorConfig(
            num_experts=workload.experts,
            hidden_size=workload.hidden,
            topk=workload.topk,
            max_tokens_per_rank=workload.tokens,
            layout=layout,
            **(sms or {}),
        )
        dist.barrier()
        began = time.perf_counter()
        self.comm = MoECommunicator(None, config, device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self.construction_s = time.perf_counter() - began
        self._workload, self._capacity = workload, capacity

    def dispatch(self, batch: Batch, previous: Any = None) -> Received:
        out, handle = self.comm.dispatch(
            batch.x,
            batch.ids,
            batch.weights,
            batch.scales,
            previous_handle=None if previous is None else previous[0],
            capacity=self._capacity,
            quantize="e4m3" if batch.quantize else None,
        )
        return Received(
            tokens=out.tokens,
            scales=out.scales,
            counts=out.num_tokens_per_expert,
            ids=out.topk_ids,
            weights=out.weights,
            row_experts=out.row_expert_ids,
            state=(handle, out.weights),
        )

    def combine(self, y: torch.Tensor, state: Any) -> torch.Tensor:
        handle, weights = state
        return self.comm.combine(y, handle, weights=weights)

    def sms(self, what: str, row_bytes: int, quantize: bool = False) -> int:
        return sms_of(self.comm, what, self._workload, row_bytes, quantize)

    def memory(self, row_bytes: int) -> dict[str, int]:
        """Bytes on this rank beyond the caller's tensors, after a dispatch and a combine have allocated the pools.

        The limit is two pools of R * T rows, and 64 MiB.
        """
        engine = self.comm.engine
        pools = engine.pool_bytes(DISPATCH_POOL) + engine.pool_bytes(COMBINE_POOL)
        control = _C.control_bytes(engine.size, engine.config.num_experts) + _C.state_bytes
        rows = 2 * self._workload.ranks * self._workload.tokens
        return {
            "pool_bytes": pools,
            "control_bytes": control,
            "beyond_tensors_bytes": pools + control,
            "limit_bytes": rows * row_bytes + 64 * _MIB,
        }

    def close(self) -> None:
        self.comm.close()


def sms_of(comm: MoECommunicator, what: str, workload: Workload, row_bytes: int, quantize: bool = False) -> int:
    """SMs of an operation's kernels that move rows of `row_bytes`; of a round trip, those of its larger half.

    The kernels of plan and notify run before, for some microseconds, and are not counted.
    """
    dispatch = sum(comm.engine.dispatch_sms(workload.tokens, row_bytes, workload.topk, quantize))
    combine = sum(comm.engine.combine_sms(workload.tokens, row_bytes, workload.topk))
    return {DISPATCH: dispatch, CACHED: dispatch, COMBINE: combine, ROUNDTRIP: max(dispatch, combine)}[what]


class Recorded:
    """A CUDA graph of `step`, with a batch of its own that starts as a copy of `batch`. A call replays the graph.

    Every call returns the same memory. The constructor runs `step` once, so it is collective when `step` is.
    """

    def __init__(self, step: Callable[[Batch], torch.Tensor], batch: Batch) -> None:
        self._batch = replace(batch, x=batch.x.clone(), ids=batch.ids.clone(), weights=batch.weights.clone())
        step(self._batch)
        self._capture(step)

    def _capture(self, step: Callable[[Batch], torch.Tensor]) -> None:
        self._graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        # NCCL's watchdog thread queries events meanwhile, which would end a capture of all threads.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._result = step(self._batch)

    def __call__(self) -> torch.Tensor:
        self._replay()
        return self._result

    def of(self, batch: Batch) -> torch.Tensor:
        """Replays the graph with the rows, ids and weights of `batch`, which stay for later calls, into NaN."""
        self._batch.x.copy_(batch.x)
        self._batch.ids.copy_(batch.ids)
        self._batch.weights.copy_(batch.weights)
        self._result.fill_(torch.nan)
        return self()

    def _replay(self) -> None:
        self._graph.replay()
