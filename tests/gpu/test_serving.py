"""CUDA graphs of several batch sizes over one buffer, as vLLM captures decoding, with a group for CPUs.

With EP_TEST_DEVICE=cpu steps run in place of graphs.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from ep_plugin import deep_ep
from tests.gpu.checks import device_of, synchronize
from tests.integrations import serving_cases as cases
from tests.integrations.serving_cases import EXPERTS_PER_RANK, TOKENS_MAX, Batch, H
from tests.integrations.test_serving_calls import Layer, VllmElastic, VllmLowLatency
from tests.ranks import run_ranks, values

SIZES = (16, 8, 4, 2, 1)  # the largest first, as engines capture them
REPLAYS = 60


def replayed(rank: int, size: int, fp8: bool) -> None:
    """Replays in a random order, each with new tokens and routing, of the graphs of both kinds of buffer."""
    device, group, num_experts = device_of(rank), dist.new_group(backend="gloo"), EXPERTS_PER_RANK * size
    static = Batch(*(part.to(device) for part in cases.batch_of(TOKENS_MAX, num_experts, rank)))
    hint = deep_ep.Buffer.get_low_latency_rdma_size_hint(TOKENS_MAX, H, size, num_experts)
    buffer = deep_ep.Buffer(group, num_rdma_bytes=hint, low_latency_mode=True, explicitly_destroy=True)
    elastic = deep_ep.ElasticBuffer(group, num_max_tokens_per_rank=TOKENS_MAX, hidden=H, explicitly_destroy=True)
    with torch.inference_mode():
        replays = [
            captured(layer, static, device) for layer in (VllmLowLatency(buffer, fp8), VllmElastic(elastic, fp8))
        ]
        order, wrong = random.Random(size), torch.zeros(REPLAYS, dtype=torch.bool, device=device)
        for turn in range(REPLAYS):
            for to, source in zip(static, cases.batch_of(TOKENS_MAX, num_experts, 97 * turn + rank), strict=True):
                to.copy_(source)
            tokens = order.choice(SIZES)
            sums = order.choice(replays)[tokens]()
            wrong[turn] = cases.is_wrong(Batch(*(part[:tokens] for part in static)), sums, fp8)
        assert not wrong.any(), wrong.nonzero().flatten().tolist()
    synchronize(device)
    buffer.destroy()
    elastic.destroy()


def captured(layer: Layer, static: Batch, device: torch.device) -> dict[int, Callable[[], torch.Tensor]]:
    """A graph of the layer for the first tokens of `static`, by their number. All of them share a pool."""
    pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
    replays = {}
    for tokens in SIZES:
        step = functools.partial(run, layer, Batch(*(part[:tokens] for part in static)))
        step()  # makes the memory
        replays[tokens] = step
        if pool is not None:
            synchronize(device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                sums = step()
            replays[tokens] = functools.partial(replay, graph, sums)
    return replays


def run(layer: Layer, batch: Batch) -> torch.Tensor:
    layer.most_tokens = len(batch.x)
    sums = torch.empty_like(batch.x)
    for _ in layer.run(batch, sums, 0):
        pass
    return sums


def replay(graph: torch.cuda.CUDAGraph, sums: torch.Tensor) -> torch.Tensor:
    graph.replay()
    return sums


@pytest.mark.gpu(1)
@pytest.mark.parametrize("fp8", [False, True])
def test_graphs_of_several_batch_sizes_are_right_in_every_replay(fp8: bool) -> None:
    values(run_ranks(2, replayed, 2, fp8, timeout_s=200))
