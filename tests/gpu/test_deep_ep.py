"""ep_plugin.deep_ep on GPUs, against the oracles of the CPU tests; ranks share GPUs where there are fewer of them.

With EP_TEST_DEVICE=cpu the functions that ranks run use the CPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ep_plugin import deep_ep
from tests.faults.fault_cases import on_cuda
from tests.gpu import checks, over_nodes
from tests.integrations import (
    test_deep_ep,
    test_deep_ep_elastic,
    test_deep_ep_low_latency,
    test_deep_ep_messages,
    test_deep_ep_nodes,
    test_deep_ep_own_test,
)
from tests.moe import test_layout
from tests.ranks import run_ranks, values


def every_call(rank: int, size: int, cases: list[Any]) -> None:
    device = checks.device_of(rank)
    test_deep_ep._all_calls(rank, size, cases, str(device))
    checks.synchronize(device)


@pytest.mark.gpu(1)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_call_gives_what_the_oracle_says(size: int) -> None:
    values(run_ranks(size, every_call, size, test_deep_ep.CASES[size], timeout_s=280))


@pytest.mark.gpu(1)
@pytest.mark.parametrize("check", [*test_layout.CHECKS, test_layout.refuses_arguments])
def test_layout_kernel(check: Callable[..., None]) -> None:
    values(run_ranks(1, on_cuda, check, 1, timeout_s=120))


def layout_kernels(rank: int, size: int) -> list[str]:
    """The names of all that a GPU does in two calls of get_dispatch_layout."""
    with checks.device_of(rank):
        buffer, ids = deep_ep.Buffer(dist.group.WORLD), torch.rand((64, 8)).topk(4).indices
        buffer.get_dispatch_layout(ids, 8)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(2):
                buffer.get_dispatch_layout(ids, 8)
            torch.cuda.synchronize()
    return [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]


@pytest.mark.gpu(1)
def test_a_layout_is_one_kernel() -> None:
    (names,) = values(run_ranks(1, layout_kernels, 1, timeout_s=120))
    assert len(names) == 2 and all("ep_layout" in name for name in names), names


def every_elastic_call(rank: int, size: int) -> None:
    test_deep_ep_elastic._all_calls(rank, size, test_deep_ep_elastic.CASES[size], str(checks.device_of(rank)))


@pytest.mark.gpu(1)
@pytest.mark.parametrize("size", test_deep_ep_elastic.CASES)
def test_elastic_buffer_gives_what_the_oracle_says(size: int) -> None:
    values(run_ranks(size, every_elastic_call, size, timeout_s=280))


def every_elastic_message(rank: int, size: int) -> None:
    device = checks.device_of(rank)
    group = dist.new_group(backend="cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")  # says which tensors
    test_deep_ep_messages.every_message(rank, size, str(device), group)
    test_deep_ep_messages.every_session(rank, size, str(device), group)


@pytest.mark.gpu(1)
@pytest.mark.parametrize("size", [2, 3])
def test_elastic_buffer_sends_to_neighbours_and_gathers(size: int) -> None:
    values(run_ranks(size, every_elastic_message, size, timeout_s=280))


# -- over nodes ------------------------------------------------------------------------------------------------------


def over_two_nodes(rank: int, size: int) -> None:
    """Every call, then what DeepEP's own test of several nodes checks, with tokens for one node and for both."""
    os.environ["EP_PLUGIN_RANKS_PER_NODE"] = str(size // over_nodes.NODES)  # the oracle reads it
    shape = over_nodes.NODES, size // over_nodes.NODES
    every_call(rank, size, test_deep_ep_nodes.SHAPES[shape])
    with checks.device_of(rank):
        for topk_nodes in (1, over_nodes.NODES):
            test_deep_ep_nodes._as_deep_ep_checks(rank, size, over_nodes.NODES, topk_nodes)


@pytest.mark.gpu(1)
def test_every_call_over_two_nodes() -> None:
    values(run_ranks(4, over_nodes.on_nodes, over_two_nodes, 4, timeout_s=280))


# -- low latency -----------------------------------------------------------------------------------------------------


def every_low_latency_call(rank: int, size: int) -> None:
    device = checks.device_of(rank)
    test_deep_ep_low_latency._all_calls(rank, size, test_deep_ep_low_latency.CASES[size], str(device))
    checks.synchronize(device)


@pytest.mark.gpu(1)
@pytest.mark.parametrize("size", test_deep_ep_low_latency.CASES)
def test_every_low_latency_call_gives_what_the_oracle_says(size: int) -> None:
    values(run_ranks(size, every_low_latency_call, size, timeout_s=280))


def waits(rank: int, size: int, tokens: tuple[int, ...]) -> None:
    test_deep_ep_low_latency._waits(rank, size, tokens, str(checks.device_of(rank)))


@pytest.mark.gpu(1)
@pytest.mark.parametrize("tokens", test_deep_ep_low_latency.WAITED_TOKENS)
def test_statistics_of_waiting_name_the_late_rank(tokens: str) -> None:
    values(run_ranks(3, waits, 3, test_deep_ep_low_latency.WAITED_TOKENS[tokens], timeout_s=120))


def own_checks(rank: int, size: int, use_logfmt: bool) -> None:
    with checks.device_of(rank):
        test_deep_ep_own_test._all_checks(rank, size, use_logfmt)


@pytest.mark.gpu(1)
@pytest.mark.parametrize("use_logfmt", [False, True])
def test_checks_of_deepeps_own_test(use_logfmt: bool) -> None:
    values(run_ranks(2, own_checks, 2, use_logfmt, timeout_s=280))


def kernel_names(rank: int, size: int) -> set[str]:
    """The kernels of a dispatch and a combine, whole and in halves, that a profiler shows."""
    T, H, E = 16, 256, 4 * size
    with checks.device_of(rank):
        buffer = deep_ep.Buffer(dist.group.WORLD, low_latency_mode=True)
        x, (weights, ids) = torch.ones((T, H), dtype=torch.bfloat16), torch.rand((T, E)).topk(4)

        def round_trip(halves: bool) -> None:
            *_, handle, _, hook = buffer.low_latency_dispatch(x, ids, T, E, return_recv_hook=halves)
            hook() if halves else None
            y = torch.zeros((4, size * T, H), dtype=torch.bfloat16)
            *_, hook = buffer.low_latency_combine(y, ids, weights, handle, return_recv_hook=halves)
            hook() if halves else None

        round_trip(False)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            round_trip(False)
            round_trip(True)
            torch.cuda.synchronize()
    return {event.key for event in profile.key_averages()}


@pytest.mark.gpu(1)
def test_profilers_show_one_kernel_for_a_whole_call_and_its_halves() -> None:
    for names in values(run_ranks(2, kernel_names, 2, timeout_s=120)):
        for word in ("dispatch", "combine"):
            (name,) = (name for name in names if word in name)
            assert f"::{word}" in name, name  # by which DeepEP's bench_kineto finds each launch
