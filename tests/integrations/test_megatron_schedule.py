"""Megatron's schedule that overlaps exchanges, through our dispatcher and its alltoall, on 2 CPU ranks.

Streams are not there, and so nothing runs at the same time; the order of calls, what is detached and what is freed are
Megatron's own. tests/gpu/test_megatron.py does the same on GPUs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.integrations.on_cpus import make_distributed_optimizer_run_here, make_megatron_run_here
from tests.ranks import run_ranks, values

pytest.importorskip("megatron.core", reason="needs megatron-core")

from tests.integrations import megatron_schedule
from tests.integrations.megatron_layers import initialise

WORLD, LIMIT = 2, 1e-3  # the same bits where tried


@pytest.mark.slow
def test_micro_batches_overlapped_are_as_in_turn_with_alltoall() -> None:
    for rank, found in enumerate(values(run_ranks(WORLD, _run_rank, timeout_s=200, framework="megatron"))):
        assert found.keys() == megatron_schedule.ARMS.keys()
        for name, arm in found.items():
            assert len(set(arm["losses"])) == megatron_schedule.MICRO_BATCHES
            worst = max(arm["difference"], key=arm["difference"].get)
            assert arm["difference"][worst] <= LIMIT, f"rank {rank}, {name}: {worst} differs: {arm['difference']}"
        megatron_schedule.every_exchange_is_as_named(found)


def _run_rank(rank: int) -> dict[str, Any]:
    make_megatron_run_here()
    import ep_plugin.integrations.megatron

    ep_plugin.integrations.megatron.enable()
    initialise(1, WORLD)
    return megatron_schedule.run(rank, WORLD, torch.device("cpu"))


@pytest.mark.slow
def test_layers_overlapped_over_a_pipeline_are_as_with_alltoall() -> None:
    """Our dispatcher and our messages, under the schedule of two stages with two chunks each."""
    ranks = megatron_schedule.PIPELINE**2
    by_rank = values(run_ranks(ranks, _run_pipeline, timeout_s=200, framework="megatron"))
    megatron_schedule.pipelines_are_as_alltoall(by_rank, LIMIT)


def _run_pipeline(rank: int) -> dict[str, Any]:
    make_distributed_optimizer_run_here()
    import ep_plugin.integrations.megatron

    megatron_schedule.initialise_pipeline()
    return megatron_schedule.over_a_pipeline(torch.device("cpu"), ep_plugin.integrations.megatron.enable)
