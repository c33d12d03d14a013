"""Megatron's DistributedOptimizer on GPUs: gathers and sums to the bit, and a forward pass that copy engines serve."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import pytest

from tests.ranks import run_ranks, values

if importlib.util.find_spec("megatron") is None:
    pytest.skip("needs megatron-core", allow_module_level=True)

from tests.gpu import checks, megatron_optimizer
from tests.integrations import test_megatron_optimizer as cpu

SIZE = 4
HALVES = list(cpu.CASES)[:6], list(cpu.CASES)[6:]
one_at_a_time = pytest.mark.xdist_group("over nodes")  # its ranks wait for each other on one GPU


def _run(names: list[str], **environment: str) -> None:
    found: list[dict[str, Any]] = values(
        run_ranks(SIZE, megatron_optimizer.cases, SIZE, names, timeout_s=280, env=environment)
    )
    for name in names:
        cpu.test_gathers_and_sums_are_the_references_to_the_bit(found, name)
        cpu.test_every_gather_and_sum_is_ours(found, name)


@pytest.mark.gpu(1)
@one_at_a_time
@pytest.mark.parametrize("names", HALVES, ids=["plain, FP32", "average, instances, accumulation"])
def test_gathers_and_sums_are_the_references_to_the_bit(names: list[str]) -> None:
    _run(names)


@pytest.mark.gpu(1)
@one_at_a_time
def test_one_hardware_queue_is_enough() -> None:
    _run(["both overlap"], **checks.ONE_QUEUE)


@pytest.mark.gpu(1)
@one_at_a_time
def test_copy_engines_gather_under_the_forward_pass() -> None:
    for found in values(run_ranks(SIZE, megatron_optimizer.forward_trace, SIZE, timeout_s=200)):
        assert found["served"] >= megatron_optimizer.LAYERS, found
        assert not [name for name in found["kernels"] if "ep_all_gather" in name], found
        assert found["copies"] >= megatron_optimizer.LAYERS * (SIZE - 1), found
        if os.environ.get("CUDA_LAUNCH_BLOCKING") != "1":
            assert found["copies between products"] > 0, found
