"""Megatron's MoE layer on GPUs, which ranks may share: our dispatcher against its alltoall, outputs and gradients."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import run_ranks, values

if importlib.util.find_spec("megatron") is None:
    pytest.skip("needs megatron-core", allow_module_level=True)

from tests.examples import test_examples as examples
from tests.gpu import checks, megatron_layers
from tests.integrations import megatron_schedule

LIMITS = {"fp32": 1e-5, "bf16": 2e-2}
SCHEDULE_LIMIT = 5e-2  # BF16 through two or four layers, some of whose sums have no order
one_at_a_time = pytest.mark.xdist_group("over nodes")  # its ranks wait for each other on one GPU


@pytest.mark.gpu(1)
@one_at_a_time
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_matches_alltoall(tp: int) -> None:
    """Tensor by expert parallelism of 1 x 4, 2 x 2 and 4 x 1."""
    for rank, found in enumerate(values(run_ranks(4, megatron_layers.parity, 4, tp, timeout_s=280))):
        assert_within_limits(rank, found)


def assert_within_limits(rank: int, found: dict[str, dict[str, float]]) -> None:
    """found: what `megatron_layers.parity` returned."""
    assert found.keys() == {*megatron_layers.CASES, "bf16"}
    for name, difference in found.items():
        worst = max(difference, key=difference.get)
        limit = LIMITS["bf16" if name == "bf16" else "fp32"]
        assert difference[worst] <= limit, f"rank {rank}, {name}: {worst} differs by {difference[worst]}"


@pytest.mark.gpu(1)
@one_at_a_time
def test_the_overlapping_schedule_matches_alltoall() -> None:
    for rank, found in enumerate(values(run_ranks(2, megatron_layers.overlapped_schedule, 2, timeout_s=280))):
        assert found.keys() == megatron_schedule.ARMS.keys()
        for name, arm in found.items():
            worst = max(arm["difference"], key=arm["difference"].get)
            assert arm["difference"][worst] <= SCHEDULE_LIMIT, f"rank {rank}, {name}: {worst}: {arm['difference']}"
        megatron_schedule.every_exchange_is_as_named(found)


@pytest.mark.gpu(1)
@one_at_a_time
@pytest.mark.parametrize("env", [{}, checks.ONE_QUEUE], ids=["several queues", "one hardware queue"])
def test_layers_overlapped_over_a_pipeline_are_as_with_alltoall(env: dict[str, str]) -> None:
    ranks = megatron_schedule.PIPELINE**2
    by_rank = values(run_ranks(ranks, megatron_layers.overlapped_pipeline, ranks, timeout_s=280, env=env))
    megatron_schedule.pipelines_are_as_alltoall(by_rank, SCHEDULE_LIMIT)


@pytest.mark.gpu(1)
@one_at_a_time
def test_graphs_of_a_layers_parts_replay() -> None:
    for found in values(run_ranks(2, megatron_layers.graphs_of_parts, 2, timeout_s=200)):
        for parts, differences in found.items():
            assert len(differences) == megatron_layers.REPLAYS
            assert max(differences) <= LIMITS["fp32"], f"{parts}: {differences}"


@pytest.mark.gpu(1)
@one_at_a_time
@pytest.mark.parametrize("env", [{}, checks.ONE_QUEUE], ids=["several queues", "one hardware queue"])
def test_the_example_over_a_pipeline_has_the_losses_of_stock(tmp_path: Path, env: dict[str, str]) -> None:
    """With dispatcher, optimizer and messages together, on two stages of two ranks."""

    def run(*words: str, **variables: str) -> str:
        launcher = [sys.executable, "-m", "ep_plugin.testing.nodes", "--nodes", "1", "--ranks", "4"]
        command = [*launcher, "--", sys.executable, *words]
        inherited = {name: value for name, value in os.environ.items() if name != "EP_PLUGIN"}
        paths = [str(examples.ROOT), os.environ.get("PYTHONPATH")]
        inherited["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        inherited["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]  # ranks share it
        done = subprocess.run(command, env=inherited | variables | env, capture_output=True, text=True, timeout=140)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    examples.compare_megatron_with_stock(tmp_path, run)
