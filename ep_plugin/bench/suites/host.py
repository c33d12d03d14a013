"""The suite `host`: the host's time of eager calls, many in a row.

A sample is the host's time of `calls` calls in a row, divided by their number. The slowest rank counts. The device is
idle before a row. The row begins with calls that are not timed, since the first ones after a wait find cold caches. The
time of a call that waits for totals includes the device's time. In a round trip the device is idle before the dispatch,
and the host waits for the end of the combine. Other suites compare the results of these calls with plain torch; this
suite compares nothing.

`a + b` and `empty` show the cost of a launch and of an allocation on this host. All calls take turns, since the speed
of a host changes. If DeepEP's package can be imported, its calls stand beside the calls of ep_plugin.deep_ep. Over
several nodes there are no low-latency calls and no buffers.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
import torch.distributed as dist
import typer

import ep_plugin.moe.operators  # noqa: F401  imported here, so that no timed call imports it
from ep_plugin.bench.exchange import workload
from ep_plugin.bench.exchange.peers import DEEP_EP
from ep_plugin.bench.exchange.workload import DTYPES, Batch, ExchangeSuite, batches
from ep_plugin.bench.suite import BY_BACKEND, OURS, OverNodes, Way, backend_of, check_names, time_ways
from ep_plugin.bench.suites.collectives import all_gather, reduce_scatter
from ep_plugin.bench.timing import Clock, Run, Sample
from ep_plugin.collectives import HierarchicalAllGather, HierarchicalReduceScatter
from ep_plugin.config import MoECommunicatorConfig
from ep_plugin.moe.communicator import MoECommunicator

_ROW_SIZES: dict[str, Any] = {"tokens": 8, "dtype": "bfloat16"}
_SHARD_BYTES = 1 << 20
_ROUND_TRIP_TOKENS = 128
_UNTIMED = 10  # calls at the begin of a row


@dataclass(frozen=True, kw_only=True)
class HostSuite(OverNodes, ExchangeSuite):
    """The host's time of eager calls: dispatch, combine, collectives, DeepEP's interface, and the backend's own."""

    command_name = "host"
    defaults: ClassVar = {
        "cpu": workload.CPU_SIZES | {"ranks": 2, "calls": 8} | _ROW_SIZES,
        "cuda": workload.CUDA_SIZES | {"calls": 60} | _ROW_SIZES,
    }
    least: ClassVar = {"ranks": 1, "nodes": 1, "iterations": 1, "calls": 1}

    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16. DeepEP takes bfloat16.")] = BY_BACKEND
    calls: Annotated[int, typer.Option(help="Calls in a row in a timed iteration.")] = BY_BACKEND

    def __post_init__(self) -> None:
        super().__post_init__()
        check_names("dtype", workload.SUMMABLE, [self.dtype])

    @property
    def name(self) -> str:
        return self.named("host")

    def measure(self, device: torch.device) -> dict[str, Any]:
        batch = batches(self.workload, DTYPES[self.dtype], device)[dist.get_rank()]
        parts = [_torch_and_backend, _collectives, _communicators, _round_trips, _buffers]
        if self.nodes > 1:
            parts.remove(_buffers)
        with contextlib.ExitStack() as opened:
            calls = itertools.chain.from_iterable(part(self, batch, opened) for part in parts)
            ways = [Way(case=case, impl=impl, run=run) for case, impl, run in calls]
            rows = time_ways(_clock(device, self.calls), ways, self.iterations)
        return {"rows": rows, "notes": [f"microseconds of the host, the mean of {self.calls} calls in a row"]}


Calls = Iterator[tuple[str, str, Run]]
"""Yields (case, implementation, call)."""


def _clock(device: torch.device, calls: int) -> Clock:
    def clock(run: Run) -> Sample:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        dist.barrier()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        for _ in range(_UNTIMED):
            run()
        began = time.perf_counter()
        for _ in range(calls):
            run()
        return 0.0, (time.perf_counter() - began) * 1e6 / calls, math.nan

    return clock


def _torch_and_backend(suite: HostSuite, batch: Batch, opened: contextlib.ExitStack) -> Calls:
    a, like = torch.ones(1024, device=batch.x.device), batch.x
    yield "a + b", "torch", lambda: a + a
    yield "empty", "torch", lambda: torch.empty_like(like)
    rows = like.repeat(suite.ranks, 1)
    arriving = torch.empty_like(rows)
    yield "all_to_all", backend_of(like.device), lambda: dist.all_to_all_single(arriving, rows)


def _collectives(suite: HostSuite, batch: Batch, opened: contextlib.ExitStack) -> Calls:
    device, backend = batch.x.device, backend_of(batch.x.device)
    gather = opened.enter_context(contextlib.closing(HierarchicalAllGather()))
    scatter = opened.enter_context(contextlib.closing(HierarchicalReduceScatter()))
    elements = _SHARD_BYTES // batch.x.element_size()
    for case, ours, theirs, gathers in (
        ("all_gather", gather, all_gather, True),
        ("reduce_scatter", scatter, reduce_scatter, False),
    ):
        mapped = ours.allocate((suite.ranks * elements,), dtype=batch.x.dtype, device=device)
        large = torch.empty_like(mapped)
        small = torch.empty(elements, dtype=batch.x.dtype, device=device)
        yield case, OURS, _collective(ours, mapped, small, gathers)
        yield case, backend, _collective(theirs, large, small, gathers)


def _collective(call: Any, large: torch.Tensor, small: torch.Tensor, gathers: bool) -> Run:
    out, source = (large, small) if gathers else (small, large)
    return lambda: call(out, source)


def _communicators(suite: HostSuite, batch: Batch, opened: contextlib.ExitStack) -> Calls:
    x, ids, weights = batch.x, batch.ids, batch.weights
    sizes: dict[str, Any] = {"num_experts": suite.experts, "hidden_size": suite.hidden, "topk": suite.topk}
    sizes["max_tokens_per_rank"] = suite.tokens
    if suite.nodes == 1:
        config = MoECommunicatorConfig(**sizes, mode="ll", max_row_bytes=suite.hidden * x.element_size())
        ll = opened.enter_context(contextlib.closing(MoECommunicator(None, config, x.device)))
        rows, ll_handle = ll.dispatch(x, ids)
        yield "low-latency dispatch", OURS, lambda: ll.dispatch(x, ids)
        yield "low-latency combine", OURS, lambda: ll.combine(rows.tokens, ll_handle, weights=weights)
    ht = opened.enter_context(contextlib.closing(MoECommunicator(None, MoECommunicatorConfig(**sizes), x.device)))
    suite.check_nodes(ht.engine.node_map.num_nodes)
    capacity = suite.ranks * suite.tokens * suite.topk
    out, handle = ht.dispatch(x, ids, weights)
    yield "dispatch, the host waits", OURS, lambda: ht.dispatch(x, ids, weights)
    yield "dispatch, capacity", OURS, lambda: ht.dispatch(x, ids, weights, capacity=capacity)
    yield "dispatch, known routing", OURS, lambda: ht.dispatch(x, ids, weights, previous_handle=handle)
    yield "combine", OURS, lambda: ht.combine(out.tokens, handle, weights=out.weights)


def _round_trips(suite: HostSuite, batch: Batch, opened: contextlib.ExitStack) -> Calls:
    """Yields dispatch and combine of an idle device, with a known capacity and with totals for which the host waits."""
    device, tokens = batch.x.device, _ROUND_TRIP_TOKENS
    more = batches(suite.workload_of(suite.ranks, tokens), batch.x.dtype, device)[dist.get_rank()]
    sizes: dict[str, Any] = {"num_experts": suite.experts, "hidden_size": suite.hidden, "topk": suite.topk}
    config = MoECommunicatorConfig(**sizes, max_tokens_per_rank=tokens)
    comm = opened.enter_context(contextlib.closing(MoECommunicator(None, config, device)))

    def round_trip(capacity: int | None = None) -> None:
        out, handle = comm.dispatch(more.x, more.ids, more.weights, capacity=capacity)
        comm.combine(out.tokens, handle, weights=out.weights)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    yield f"round trip, capacity, {tokens} tokens", OURS, lambda: round_trip(capacity=suite.ranks * tokens * suite.topk)
    yield f"round trip, the host waits, {tokens} tokens", OURS, round_trip


def _buffers(suite: HostSuite, batch: Batch, opened: contextlib.ExitStack) -> Calls:
    """Yields the calls of ep_plugin.deep_ep, and the same calls of DeepEP if it is installed.

    DeepEP needs GPUs and several ranks.
    """
    if batch.x.dtype is not torch.bfloat16:
        return
    yield from _throughput_calls(importlib.import_module("ep_plugin.deep_ep"), OURS, suite, batch, opened)
    yield from _low_latency_calls(suite, batch, opened)
    if batch.x.is_cuda and suite.ranks > 1 and importlib.util.find_spec(DEEP_EP) is not None:
        yield from _throughput_calls(importlib.import_module(DEEP_EP), DEEP_EP, suite, batch, opened)


def _throughput_calls(module: Any, impl: str, suite: HostSuite, batch: Batch, opened: contextlib.ExitStack) -> Calls:
    kind, ranks = module.Buffer, suite.ranks
    row_bytes = suite.hidden * batch.x.element_size()
    configs = kind.get_dispatch_config(ranks), kind.get_combine_config(ranks)
    nbytes = max(config.get_nvl_buffer_size_hint(row_bytes, ranks) for config in configs)
    buffer = kind(dist.group.WORLD, nbytes, 0, explicitly_destroy=True)
    opened.callback(buffer.destroy)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(batch.ids, suite.experts)
    routing = {"num_tokens_per_rank": per_rank, "is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert}
    routing |= {"topk_idx": batch.ids, "topk_weights": batch.weights}
    rows, *_, handle, _ = buffer.dispatch(batch.x, **routing)
    worst = ranks * suite.tokens
    yield "Buffer.get_dispatch_layout", impl, lambda: buffer.get_dispatch_layout(batch.ids, suite.experts)
    yield "Buffer.dispatch, the host waits", impl, lambda: buffer.dispatch(batch.x, **routing)
    yield "Buffer.dispatch, num_worst_tokens", impl, lambda: buffer.dispatch(batch.x, **routing, num_worst_tokens=worst)
    yield "Buffer.dispatch, known routing", impl, lambda: buffer.dispatch(batch.x, handle=handle)
    yield "Buffer.combine", impl, lambda: buffer.combine(rows, handle)
    yield (
        "Buffer.dispatch, known routing, async_finish",
        impl,
        lambda: buffer.dispatch(batch.x, handle=handle, async_finish=True),
    )
    yield "Buffer.combine, async_finish", impl, lambda: buffer.combine(rows, handle, async_finish=True)


def _low_latency_calls(suite: HostSuite, batch: Batch, opened: contextlib.ExitStack) -> Calls:
    """Yields the low-latency calls of ep_plugin. DeepEP's own calls need InfiniBand queue pairs, even inside a node."""
    kind = importlib.import_module("ep_plugin.deep_ep").Buffer
    sizes = suite.tokens, suite.hidden, suite.ranks, suite.experts
    hint = kind.get_low_latency_rdma_size_hint(*sizes)
    per_rank = suite.experts // suite.ranks
    buffer = kind(dist.group.WORLD, 0, hint, low_latency_mode=True, num_qps_per_rank=per_rank, explicitly_destroy=True)
    opened.callback(buffer.destroy)

    def dispatch() -> Any:
        return buffer.low_latency_dispatch(batch.x, batch.ids, suite.tokens, suite.experts, use_fp8=False)

    rows, _, handle, *_ = dispatch()
    yield "Buffer.low_latency_dispatch", OURS, dispatch
    yield "Buffer.low_latency_combine", OURS, lambda: buffer.low_latency_combine(rows, batch.ids, batch.weights, handle)
