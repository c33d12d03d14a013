"""ep_plugin in the words of the benchmark."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist

import ep_plugin.moe.operators  # noqa: F401  imported here, so that no construction is charged with it
from ep_plugin import _C
from ep_plugin.bench.peers import Received
from ep_plugin.bench.specs import CACHED, COMBINE, DISPATCH, ROUNDTRIP, Sms
from ep_plugin.bench.workload import Batch, Workload
from ep_plugin.config import DispatchLayout, MoECommunicatorConfig
from ep_plugin.moe.communicator import MoECommunicator
from ep_plugin.moe.high_throughput.engine import COMBINE_POOL, DISPATCH_POOL
from ep_plugin.moe.layout import DispatchHandle, DispatchOutput

_MIB = 1 << 20
_State = tuple[DispatchHandle, torch.Tensor | None]


class EpPlugin:
    """Dispatch and combine of one communicator. Making it is collective; close it.

    capacity: rows of every dispatch's output, fixed, so that the host waits for nothing; None: as many as there are.
    construction_s: how long it took here, until the device had done it. The pools are made by the first operations.
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
        sms = sms or Sms()
        config = MoECommunicatorConfig(
            num_experts=workload.experts,
            hidden_size=workload.hidden,
            topk=workload.topk,
            max_tokens_per_rank=workload.tokens,
            layout=layout,
            dispatch_send_sms=sms.dispatch,
            dispatch_recv_sms=sms.expand,
            combine_send_sms=sms.combine,
            combine_recv_sms=sms.add,
        )
        dist.barrier()
        began = time.perf_counter()
        self.comm = MoECommunicator(None, config, device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self.construction_s = time.perf_counter() - began
        self._workload, self._capacity = workload, capacity

    def dispatch(self, batch: Batch, previous: object = None) -> Received:
        handle = None if previous is None else cast(_State, previous)[0]
        return _received(*self.comm.dispatch(*self._arguments(batch, handle)))

    def dispatch_async(self, batch: Batch) -> Received:
        """The same on the communicator's own stream, which the current one waits for. The routing is a new one."""
        return _received(*self.comm.dispatch_async(*self._arguments(batch)).wait())

    def _arguments(self, batch: Batch, handle: DispatchHandle | None = None) -> tuple[Any, ...]:
        quantize = "e4m3" if batch.quantize else None
        return batch.x, batch.ids, batch.weights, batch.scales, handle, self._capacity, quantize

    def combine(self, y: torch.Tensor, state: object) -> torch.Tensor:
        handle, weights = cast(_State, state)
        return self.comm.combine(y, handle, weights=weights)

    def sms(self, what: str, row_bytes: int, quantize: bool = False) -> int:
        return sms_of(self.comm, what, self._workload, row_bytes, quantize)

    def memory(self, row_bytes: int) -> dict[str, int]:
        """Bytes on this rank that are no tensor of the caller, and the limit: two pools of R * T rows, and 64 MiB.

        The pools are there after the first dispatch and combine.
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
    """SMs of all kernels that move rows, of so many bytes on the wire, at once; of a round trip, those of its larger
    half.

    Kernels that work out where rows go run before those, for some microseconds, on SMs that are not counted.
    """
    dispatch = sum(comm.engine.dispatch_sms(workload.tokens, row_bytes, workload.topk, quantize))
    combine = sum(comm.engine.combine_sms(workload.tokens, row_bytes, workload.topk))
    return {DISPATCH: dispatch, CACHED: dispatch, COMBINE: combine, ROUNDTRIP: max(dispatch, combine)}[what]


def _received(out: DispatchOutput, handle: DispatchHandle) -> Received:
    return Received(
        tokens=out.tokens,
        scales=out.scales,
        counts=out.num_tokens_per_expert,
        ids=out.topk_ids,
        weights=out.weights,
        row_experts=out.row_expert_ids,
        state=(handle, out.weights),
    )


class Recorded:
    """A CUDA graph of `step`, of a batch of its own that starts as a copy of `batch`; calling it replays the graph.

    What it returns is the same memory each time. Making it is collective when `step` is: it runs once before.
    """

    def __init__(self, step: Callable[[Batch], torch.Tensor], batch: Batch) -> None:
        self._batch = replace(batch, x=batch.x.clone(), ids=batch.ids.clone(), weights=batch.weights.clone())
        step(self._batch)
        self._capture(step)

    def _capture(self, step: Callable[[Batch], torch.Tensor]) -> None:
        self._graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        # Other threads (NCCL's watchdog) go on asking for events, which a capture of all threads would not bear.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._result = step(self._batch)

    def __call__(self) -> torch.Tensor:
        self._replay()
        return self._result

    def of(self, batch: Batch) -> torch.Tensor:
        """A replay with the rows, ids and weights of `batch`, which stay for later calls, into NaN."""
        self._batch.x.copy_(batch.x)
        self._batch.ids.copy_(batch.ids)
        self._batch.weights.copy_(batch.weights)
        self._result.fill_(torch.nan)
        return self()

    def _replay(self) -> None:
        self._graph.replay()
