"""What serving engines ask of ``deep_ep.Buffer``: a group for CPUs with tensors on the GPU, and their clean-up."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ep_plugin import deep_ep
from ep_plugin.deep_ep.low_latency import LowLatencyCalls
from ep_plugin.deep_ep.shared import device_of
from ep_plugin.errors import NotSupported
from tests.moe.moe_cases import on_ranks
from tests.moe.test_across_nodes import on_nodes

T_MAX, H, E = 128, 256, 4


@contextlib.contextmanager
def _gpu_in_use() -> Iterator[None]:
    """PyTorch says that this process uses GPU 1."""
    answers = {"is_initialized": True, "is_available": True, "current_device": 1, "device_count": 2}
    with mock.patch.multiple(torch.cuda, **{name: mock.Mock(return_value=value) for name, value in answers.items()}):
        yield


def _memory(rank: int, size: int) -> None:
    hint = deep_ep.Buffer.get_low_latency_rdma_size_hint(T_MAX, H, size, E)
    opened: list[Any] = []

    def open_none(self: Any, *sizes: Any) -> Any:
        opened.append(sizes)
        return mock.MagicMock()

    group = dist.group.WORLD
    with mock.patch.object(LowLatencyCalls, "_open", open_none), _gpu_in_use():
        assert device_of(group) == torch.device("cuda", 1)
        buffer = deep_ep.Buffer(group, num_rdma_bytes=hint, low_latency_mode=True)
        assert opened == [(T_MAX, H, E, torch.device("cuda", 1))]
        with pytest.raises((RuntimeError, AssertionError)):  # there is no GPU on which to make its tensors
            buffer.clean_low_latency_buffer(T_MAX, H, E)
        assert opened == [(T_MAX, H, E, torch.device("cuda", 1))] * 2
    opened.clear()
    with mock.patch.object(LowLatencyCalls, "_open", open_none):
        uses_gpu = _gpu_in_use() if rank == 0 else contextlib.nullcontext()
        with uses_gpu:
            deep_ep.Buffer(group, num_rdma_bytes=hint, low_latency_mode=True)
        assert not opened  # the ranks disagree on the device, so the first call makes the memory
        deep_ep.Buffer(group, num_rdma_bytes=hint, low_latency_mode=True)
        assert opened == [(T_MAX, H, E, torch.device("cpu"))]


@pytest.mark.skipif(torch.cuda.is_available(), reason="pretends that there is a GPU")
def test_a_group_for_cpus_means_the_gpu_that_the_process_uses() -> None:
    on_ranks(2, _memory)


def _over_nodes(rank: int, size: int) -> None:
    group: Any = dist.group.WORLD
    deep_ep.Buffer(group)  # for tensors on CPUs
    for kind in (deep_ep.Buffer, deep_ep.ElasticBuffer):
        with _gpu_in_use(), pytest.raises(NotSupported, match="a backend that sends GPU memory between nodes"):
            kind(group)


@pytest.mark.skipif(torch.cuda.is_available(), reason="pretends that there is a GPU")
def test_over_nodes_the_constructor_refuses_a_group_that_cannot_send_gpu_memory() -> None:
    on_nodes(2, 1, _over_nodes)


def _clean_up(rank: int, size: int) -> None:
    """As vLLM does after a fault."""
    buffer = deep_ep.Buffer(dist.group.WORLD, low_latency_mode=True, enable_shrink=True, explicitly_destroy=True)
    x = torch.full((3, H), float(rank + 1), dtype=torch.bfloat16)
    ids, weights = torch.arange(3).view(3, 1) % E, torch.ones((3, 1))
    for _ in range(3):
        rows, _, handle, _, _ = buffer.low_latency_dispatch(x, ids, T_MAX, E, use_fp8=False)
        sums, _, _ = buffer.low_latency_combine(rows, ids, weights, handle)
        assert torch.equal(sums, x)
        memory = buffer.get_local_buffer_tensor(dtype=torch.int8, use_rdma_buffer=True)
        assert memory.dtype is torch.int8 and memory.numel() == 0
        memory.zero_()
        buffer.low_latency_clean_mask_buffer()
    wrong: list[dict[str, Any]] = [
        {},
        {"use_rdma_buffer": True, "offset": 16},
        {"use_rdma_buffer": True, "size": torch.Size([1])},
    ]
    for given in wrong:
        with pytest.raises(NotSupported, match="get_local_buffer_tensor: expected use_rdma_buffer=True without size"):
            buffer.get_local_buffer_tensor(torch.uint8, **given)
    buffer.destroy()


def test_memory_that_an_engine_zeroes_after_a_fault_is_empty() -> None:
    on_ranks(2, _clean_up)
