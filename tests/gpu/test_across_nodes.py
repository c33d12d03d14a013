"""Two nodes of two ranks over NCCL, all on one GPU if there is one. A start of four ranks has several cases."""

from __future__ import annotations

import importlib.util
import signal

import pytest

from tests.gpu import over_nodes
from tests.ranks import run_ranks, values

SIZE = 4


@pytest.mark.gpu(1)
def test_results_are_the_oracles() -> None:
    names = [*over_nodes.GRID, *over_nodes.WIDE]
    done = values(run_ranks(SIZE, over_nodes.on_nodes, over_nodes.everything, SIZE, names, timeout_s=280))
    assert done == [[*names, *over_nodes.CASES, "abort"]] * SIZE


@pytest.mark.gpu(1)
@pytest.mark.xdist_group("faults")
def test_survivors_on_both_nodes_name_the_dead_and_live_on() -> None:
    victim = SIZE - 1
    outcomes = run_ranks(SIZE, over_nodes.on_nodes, over_nodes.survive, SIZE, victim, timeout_s=120)
    assert outcomes[victim].exitcode == -signal.SIGKILL
    for message, blamed, took in values(outcomes[:victim]):
        assert blamed == victim and f"rank {victim}" in message
        assert took < over_nodes.LONGEST_S, message


@pytest.mark.gpu(1)
def test_a_model_of_transformers_has_the_losses_of_the_built_in_exchange() -> None:
    pytest.importorskip("transformers")
    for found in values(run_ranks(SIZE, over_nodes.on_nodes, over_nodes.losses, SIZE, timeout_s=280)):
        over_nodes.assert_same_losses(found)


@pytest.mark.gpu(1)
@pytest.mark.parametrize("tp", [1, 2])
def test_megatrons_layers_match_alltoall(tp: int) -> None:
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("needs megatron-core")
    from tests.gpu import megatron_layers, test_megatron

    found = values(run_ranks(SIZE, over_nodes.on_nodes, megatron_layers.parity, SIZE, tp, timeout_s=280))
    for rank, differences in enumerate(found):
        test_megatron.assert_within_limits(rank, differences)
