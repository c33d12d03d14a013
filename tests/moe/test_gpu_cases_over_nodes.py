"""The cases that GPUs run over emulated nodes (tests/gpu/over_nodes.py), here on CPUs."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest

from tests.gpu import over_nodes
from tests.ranks import Outcome, run_ranks, values

SIZE = 4


def _run(function: Callable[..., Any], *args: Any) -> list[Outcome]:
    env = {"EP_TEST_DEVICE": "cpu"}
    return run_ranks(SIZE, over_nodes.on_nodes, function, SIZE, *args, timeout_s=250, env=env)


@pytest.mark.slow
def test_layouts_types_and_empty_ranks() -> None:
    assert values(_run(over_nodes.grid, over_nodes.GRID)) == [over_nodes.GRID] * SIZE


@pytest.mark.slow
@pytest.mark.parametrize("name", over_nodes.CASES)
def test_case(name: str) -> None:
    assert values(_run(over_nodes.cases, [name])) == [[name]] * SIZE


@pytest.mark.parametrize("function", [over_nodes.abort, over_nodes.graph_outlives])
def test_an_abort_and_a_close_leave_room_for_another(function: Callable[[int, int], None]) -> None:
    values(_run(function))


@pytest.mark.deadline
def test_survivors_name_the_dead() -> None:
    victim = SIZE - 1
    outcomes = _run(over_nodes.survive, victim)
    assert outcomes[victim].exitcode == -signal.SIGKILL
    for message, blamed, took in values(outcomes[:victim]):
        assert blamed == victim and f"rank {victim}" in message
        assert took < over_nodes.LONGEST_S


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_moe", "megatron"])
def test_a_model_has_the_losses_of_the_built_in_exchange(name: str) -> None:
    pytest.importorskip("megatron.core" if name == "megatron" else "transformers")
    for found in values(_run(over_nodes.losses, name)):
        over_nodes.assert_same_losses(found)
