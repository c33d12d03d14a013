"""Two nodes of two ranks over NCCL, all on one GPU if there is one. A start of four ranks has several cases."""

from __future__ import annotations

import importlib.util
import signal
from collections.abc import Callable
from typing import Any

import pytest

from tests.gpu import messages, over_nodes
from tests.ranks import Outcome, run_ranks, values

SIZE = 4
EAGER = [name for name in over_nodes.CASES if name != "replayed"]
one_at_a_time = pytest.mark.xdist_group("over nodes")  # its ranks wait for each other on one GPU


def _run(function: Callable[..., Any], *args: Any, timeout_s: float = 280) -> list[Outcome]:
    return run_ranks(SIZE, over_nodes.on_nodes, function, SIZE, *args, timeout_s=timeout_s)


@pytest.mark.gpu(1)
@one_at_a_time
@pytest.mark.parametrize("names", [over_nodes.GRID, over_nodes.WIDE], ids=["grid", "wide"])
def test_rows_are_the_oracles(names: list[str]) -> None:
    assert values(_run(over_nodes.grid, names)) == [names] * SIZE


@pytest.mark.gpu(1)
@one_at_a_time
@pytest.mark.parametrize("names", [EAGER, ["replayed"]], ids=["eager", "replayed"])
def test_cases(names: list[str]) -> None:
    assert values(_run(over_nodes.cases, names)) == [names] * SIZE


@pytest.mark.gpu(1)
@one_at_a_time
def test_an_abort_reaches_the_other_node() -> None:
    values(_run(over_nodes.abort, timeout_s=120))


@pytest.mark.gpu(1)
@one_at_a_time
def test_a_graph_outlives_its_communicator_and_its_process_ends() -> None:
    # Spawned processes end as scripts do.
    values(run_ranks(SIZE, over_nodes.on_nodes, over_nodes.graph_outlives, SIZE, timeout_s=200, start="spawn"))


@pytest.mark.gpu(1)
@one_at_a_time
@pytest.mark.parametrize("case", [messages.across_nodes, messages.over_nodes_is_left])
def test_messages_cross_nodes(case: Callable[..., Any]) -> None:
    assert values(_run(case)) in ([None] * SIZE, [True] * SIZE)


@pytest.mark.gpu(1)
@pytest.mark.xdist_group("faults")
def test_survivors_on_both_nodes_name_the_dead_and_live_on() -> None:
    victim = SIZE - 1
    outcomes = _run(over_nodes.survive, victim, timeout_s=120)
    assert outcomes[victim].exitcode == -signal.SIGKILL
    for message, blamed, took in values(outcomes[:victim]):
        assert blamed == victim and f"rank {victim}" in message
        assert took < over_nodes.LONGEST_S, message


@pytest.mark.gpu(1)
@one_at_a_time
@pytest.mark.parametrize("name", ["qwen3_moe", "megatron"])
def test_a_model_has_the_losses_of_the_built_in_exchange(name: str) -> None:
    pytest.importorskip("megatron.core" if name == "megatron" else "transformers")
    for found in values(_run(over_nodes.losses, name)):
        over_nodes.assert_same_losses(found)


@pytest.mark.gpu(1)
@one_at_a_time
@pytest.mark.parametrize("tp", [1, 2])
def test_megatrons_layers_match_alltoall(tp: int) -> None:
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("needs megatron-core")
    from tests.gpu import megatron_layers, test_megatron

    found = values(_run(megatron_layers.parity, tp))
    for rank, differences in enumerate(found):
        test_megatron.assert_within_limits(rank, differences)
