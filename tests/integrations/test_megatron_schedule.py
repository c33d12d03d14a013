"""Megatron's schedule that overlaps exchanges, through our dispatcher and its alltoall, on 2 CPU ranks.

Streams are not there, and so nothing runs at the same time; the order of calls, what is detached and what is freed are
Megatron's own. tests/gpu/test_megatron.py does the same on GPUs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.integrations.on_cpus import make_megatron_run_here
from tests.ranks import run_ranks, values

pytest.importorskip("megatron.core", reason="needs megatron-core")

from tests.integrations import megatron_schedule
from tests.integrations.megatron_layers import initialise

WORLD, LIMIT = 2, 1e-3  # the same bits where tried


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
