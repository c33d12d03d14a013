"""The calls that vLLM 0.33 and SGLang 0.5.23 make of deep_ep, in their order and with their arguments, on CPU ranks.

test_serving_classes.py runs the engines' own classes. Names and shapes: serving_cases.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ep_plugin import deep_ep
from ep_plugin.errors import NotSupported
from ep_plugin.moe.reference import reference_quantize
from tests.integrations import serving_cases as cases
from tests.integrations.serving_cases import EXPERTS_PER_RANK, TOKENS_MAX, Batch, H, K
from tests.ranks import run_ranks, values

BATCHES = [(4, 4), (16, 1), (1, 0), (0, 7)]  # tokens of each rank


class Layer:
    """The exchange of one engine with one Buffer. `run` makes the calls of a layer, and yields where a micro-batch
    leaves the host to the other one. It writes to `out`, whose values are those at the end of all micro-batches."""

    def __init__(self, buffer: Any, fp8: bool = False, overlaps: bool = False) -> None:
        group = buffer.group
        self.buffer, self.fp8, self.overlaps = buffer, fp8, overlaps
        self.rank, self.num_experts = group.rank(), EXPERTS_PER_RANK * group.size()
        self.hooks: list[Callable[[], None] | None] = [None, None]  # for each micro-batch, what it calls next
        self.most_tokens = TOKENS_MAX  # of any rank

    def x(self, batch: Batch) -> Any:
        return reference_quantize(batch.x) if self.fp8 else batch.x

    def run(self, batch: Batch, out: torch.Tensor, number: int) -> Iterator[None]:
        raise NotImplementedError


class VllmThroughput(Layer):
    """deepep_ht.py."""

    def run(self, batch: Batch, out: torch.Tensor, number: int) -> Iterator[None]:
        buffer, size = self.buffer, self.buffer.group.size()
        before = buffer.capture() if self.overlaps else None
        yield
        per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(
            topk_idx=batch.ids,
            num_experts=self.num_experts,
            previous_event=before,
            async_finish=False,
            allocate_on_comm_stream=False,
        )
        rows, ids, weights, counts, handle, event = buffer.dispatch(
            x=self.x(batch),
            handle=None,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=batch.ids,
            topk_weights=batch.weights,
            expert_alignment=1,
            config=deep_ep.Buffer.get_dispatch_config(size),
            previous_event=before,
            async_finish=not self.overlaps,
            allocate_on_comm_stream=False,
        )
        if event.event is not None:
            event.current_stream_wait()
        assert counts == [int((ids == expert).sum()) for expert in range(EXPERTS_PER_RANK)]
        y = cases.rows_by_token(rows, ids, weights, self.rank)
        before = buffer.capture() if self.overlaps else None
        yield
        sums, _, event = buffer.combine(
            x=y,
            handle=handle,
            topk_weights=None,
            config=deep_ep.Buffer.get_combine_config(size),
            previous_event=before,
            async_finish=not self.overlaps,
            allocate_on_comm_stream=False,
        )
        if event.event is not None:
            event.current_stream_wait()
        out.copy_(sums, non_blocking=True)
        yield


class VllmLowLatency(Layer):
    """deepep_ll.py. The hook of a call is called by the other micro-batch, before its own next call."""

    def run(self, batch: Batch, out: torch.Tensor, number: int) -> Iterator[None]:
        self._call_hook(number)
        received, counts, handle, _, hook = self.buffer.low_latency_dispatch(
            batch.x,
            batch.ids,
            TOKENS_MAX,
            self.num_experts,
            use_fp8=self.fp8,
            round_scale=False,
            use_ue8m0=False,
            async_finish=False,
            return_recv_hook=True,
        )
        yield from self._leave(hook, number)
        y = cases.rows_by_expert(received, counts, self.rank)
        self._call_hook(number)
        _, _, hook = self.buffer.low_latency_combine(
            y, batch.ids, batch.weights, handle, async_finish=False, zero_copy=False, return_recv_hook=True, out=out
        )
        yield from self._leave(hook, number)
        self._call_hook(number)

    def _leave(self, hook: Callable[[], None], number: int) -> Iterator[None]:
        if self.overlaps:
            self.hooks[1 - number] = hook
            yield
        else:
            hook()

    def _call_hook(self, number: int) -> None:
        hook, self.hooks[number] = self.hooks[number], None
        if hook is not None:
            hook()


class VllmElastic(Layer):
    """deepep_v2.py: decoding in graphs, with room for all rows; `overlaps`: prefill, in the experts' order.

    Scales travel as int32, which has four of MXFP8's.
    """

    def x(self, batch: Batch) -> Any:
        return self._with_scales(super().x(batch), torch.int32)

    def _with_scales(self, received: Any, dtype: torch.dtype) -> Any:
        return (received[0], received[1].view(dtype)) if self.fp8 else received

    def run(self, batch: Batch, out: torch.Tensor, number: int) -> Iterator[None]:
        expands = self.overlaps
        rows, ids, weights, handle, event = self.buffer.dispatch(
            x=self.x(batch),
            topk_idx=batch.ids,
            topk_weights=batch.weights,
            num_experts=self.num_experts,
            num_max_tokens_per_rank=None if expands else 1 << (self.most_tokens - 1).bit_length(),
            do_expand=expands,
            do_cpu_sync=expands,
            async_with_compute_stream=False,
        )
        if event.event is not None:
            event.current_stream_wait()
        if expands:
            counts = torch.tensor(handle.num_recv_tokens_per_expert_list)
            ids, weights = torch.arange(EXPERTS_PER_RANK).repeat_interleave(counts)[:, None], weights[:, None]
        else:
            received = handle.psum_num_recv_tokens_per_scaleup_rank[-1]
            ids = ids.masked_fill((torch.arange(len(ids), device=ids.device) >= received)[:, None], -1)
            weights = torch.where(ids < 0, 0.0, weights)
        y = cases.rows_by_token(self._with_scales(rows, torch.float32), ids, weights, self.rank)
        sums, _, event = self.buffer.combine(
            x=y, handle=handle, topk_weights=None, async_with_compute_stream=True, allocate_on_comm_stream=True
        )
        if event.event is not None:
            event.current_stream_wait()
        out.copy_(sums, non_blocking=True)
        yield


class SglangNormal(Layer):
    """deepep.py, mode normal, with an event before and after each call."""

    def run(self, batch: Batch, out: torch.Tensor, number: int) -> Iterator[None]:
        buffer, before = self.buffer, deep_ep.Buffer.capture()
        yield
        per_rank, per_node, per_expert, in_rank, before = buffer.get_dispatch_layout(
            batch.ids, self.num_experts, previous_event=before, async_finish=True, allocate_on_comm_stream=True
        )
        rows, ids, weights, counts, handle, event = buffer.dispatch(
            self.x(batch),
            topk_idx=batch.ids,
            topk_weights=batch.weights,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            previous_event=before,
            async_finish=True,
            allocate_on_comm_stream=True,
            expert_alignment=128,
            config=None,
        )
        event.current_stream_wait()
        assert all(count % 128 == 0 for count in counts)
        y, before = cases.rows_by_token(rows, ids, weights, self.rank), deep_ep.Buffer.capture()
        yield
        sums, _, event = buffer.combine(
            y, handle, async_finish=True, previous_event=before, allocate_on_comm_stream=True, config=None
        )
        event.current_stream_wait()
        out.copy_(sums)
        yield


class SglangLowLatency(Layer):
    """deepep.py, mode low_latency. Each micro-batch calls its own hooks. Without `overlaps` there are events."""

    def run(self, batch: Batch, out: torch.Tensor, number: int) -> Iterator[None]:
        how = {"async_finish": not self.overlaps, "return_recv_hook": self.overlaps}
        received, counts, handle, event, hook = self.buffer.low_latency_dispatch(
            batch.x, batch.ids, TOKENS_MAX, self.num_experts, use_fp8=self.fp8, **how
        )
        yield
        hook() if self.overlaps else event.current_stream_wait()
        y = cases.rows_by_expert(received, counts, self.rank)
        sums, event, hook = self.buffer.low_latency_combine(
            x=y, topk_idx=batch.ids, topk_weights=batch.weights, handle=handle, **how
        )
        yield
        hook() if self.overlaps else event.current_stream_wait()
        out.copy_(sums)
        yield


def check(layer: Layer, drop: float = 0.0) -> None:
    """Batches of several sizes, each by itself or as two micro-batches in flight."""
    for turn, tokens in enumerate(BATCHES):
        layer.most_tokens = max(tokens)
        seeds = [1000 * turn + 2 * layer.rank, 1000 * turn + 2 * layer.rank + 1]
        batches = [cases.batch_of(tokens[layer.rank], layer.num_experts, seed, drop) for seed in seeds]
        for together in [batches] if layer.overlaps else [[batches[0]], [batches[1]]]:
            outs = [torch.full_like(batch.x, torch.nan) for batch in together]
            cases.in_turns(layer.run(*given, number) for number, given in enumerate(zip(together, outs, strict=True)))
            for batch, out in zip(together, outs, strict=True):
                assert not cases.is_wrong(batch, out, layer.fp8), (type(layer).__name__, layer.fp8, tokens)


def vllm(rank: int, size: int) -> None:
    import deep_ep as imported

    assert imported is deep_ep, imported
    cpu_group = dist.new_group(backend="gloo")
    throughput = imported.Buffer(
        group=cpu_group,
        num_nvl_bytes=1024 << 20,
        num_rdma_bytes=0,
        low_latency_mode=False,
        num_qps_per_rank=1,
        explicitly_destroy=True,
    )
    num_experts = EXPERTS_PER_RANK * size
    hint = imported.Buffer.get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank=TOKENS_MAX, hidden=H, num_ranks=size, num_experts=num_experts
    )
    low_latency = imported.Buffer(
        group=cpu_group,
        num_nvl_bytes=1024 << 20,
        num_rdma_bytes=hint,
        low_latency_mode=True,
        num_qps_per_rank=EXPERTS_PER_RANK,
        allow_nvlink_for_low_latency_mode=True,
        allow_mnnvl=False,
        explicitly_destroy=True,
        enable_shrink=False,
    )
    elastic = imported.ElasticBuffer(
        group=cpu_group,
        num_max_tokens_per_rank=TOKENS_MAX,
        hidden=H,
        num_topk=K,
        use_fp8_dispatch=True,
        allow_hybrid_mode=True,
        prefer_overlap_with_compute=False,
        allow_multiple_reduction=False,
        explicitly_destroy=True,
    )
    elastic.get_theoretical_num_sms(num_experts=num_experts, num_topk=K)
    for fp8 in (False, True):
        for overlaps in (False, True):
            check(VllmThroughput(throughput, fp8, overlaps))
            check(VllmLowLatency(low_latency, fp8, overlaps))
            check(VllmElastic(elastic, fp8, overlaps))
    for buffer in (throughput, low_latency, elastic):
        buffer.destroy()


def sglang(rank: int, size: int) -> None:
    from deep_ep import Buffer

    num_experts, hidden_bytes = EXPERTS_PER_RANK * size, H * 2
    configs = Buffer.get_dispatch_config(size), Buffer.get_combine_config(size)
    nvl = max(config.get_nvl_buffer_size_hint(hidden_bytes, size) for config in configs)
    rdma = max(config.get_rdma_buffer_size_hint(hidden_bytes, size) for config in configs)
    rdma = max(Buffer.get_low_latency_rdma_size_hint(TOKENS_MAX, H, size, num_experts), rdma)
    num_qps = max(Buffer.num_sms, EXPERTS_PER_RANK)
    buffer = Buffer(dist.group.WORLD, nvl, rdma, low_latency_mode=True, num_qps_per_rank=num_qps, allow_mnnvl=False)
    for fp8 in (False, True):
        for overlaps in (False, True):
            check(SglangNormal(buffer, fp8, overlaps), drop=0.2)
            buffer.clean_low_latency_buffer(TOKENS_MAX, H, num_experts)
            check(SglangLowLatency(buffer, fp8, overlaps), drop=0.2)
    refuses_what_forks_have(SglangLowLatency(buffer))


def refuses_what_forks_have(layer: Layer) -> None:
    buffer, batch = layer.buffer, cases.batch_of(4, layer.num_experts, 7)
    given = batch.x, batch.ids, TOKENS_MAX, layer.num_experts
    for wrong in ({"use_nvfp4": True}, {"use_nvfp4": False, "x_global_scale": torch.ones(1)}):
        with pytest.raises(NotSupported, match=r"low_latency_dispatch\(.*unset VLLM_DEEPEPLL_NVFP4_DISPATCH"):
            buffer.low_latency_dispatch(*given, **wrong)
    received, counts, handle, *_ = buffer.low_latency_dispatch(*given, use_fp8=False, use_nvfp4=False)
    given = cases.rows_by_expert(received, counts, buffer.rank), batch.ids, batch.weights, handle
    with pytest.raises(NotSupported, match=r"low_latency_combine\(overlap=...\): .*without --enable-single-batch-over"):
        buffer.low_latency_combine(*given, overlap=True, src_signals=None)
    with pytest.raises(TypeError, match=r"low_latency_combine\(\) got an unexpected keyword argument 'threshhold'"):
        buffer.low_latency_combine(*given, threshhold=1)
    sums, _, _ = buffer.low_latency_combine(*given, overlap=False, src_signals=None, src_signal_expect_value=0)
    assert not cases.is_wrong(batch, sums)


@pytest.mark.parametrize("engine", [vllm, sglang])
def test_an_engines_calls_in_workers_of_multiprocessing(
    engine: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EP_PLUGIN", "deep_ep")  # which workers inherit, and read when they import torch
    values(run_ranks(2, engine, 2, timeout_s=200, start="spawn"))


@pytest.mark.slow
def test_an_engines_calls_over_two_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EP_PLUGIN", "deep_ep")
    monkeypatch.setenv("EP_PLUGIN_RANKS_PER_NODE", "1")
    values(run_ranks(2, vllm, 2, timeout_s=200, start="spawn"))
