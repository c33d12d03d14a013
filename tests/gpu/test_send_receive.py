"""SendReceive on GPUs: what arrives, CUDA graphs, and how failures end. Ranks share GPUs where there are fewer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.collectives import test_send_receive as cases
from tests.gpu import checks, large, messages
from tests.ranks import Outcome, run_ranks, values


def _run(size: int, case: Callable[..., Any], *args: Any, plain: bool = False) -> list[Outcome]:
    env = {"EP_PLUGIN_PLAIN_KERNELS": "1"} if plain else {}
    return run_ranks(size, messages.on_device, case, *args, timeout_s=200, env=env)


@pytest.mark.gpu(1)
@pytest.mark.parametrize(("size", "rounds", "plain"), [(2, 300, False), (4, 40, False), (2, 60, True)])
def test_random_operations_arrive_bit_for_bit(size: int, rounds: int, plain: bool) -> None:
    found = _run(size, cases._random_operations, size, 11 + size, rounds, 64 * cases.MIB, plain=plain)
    for count, wrong in values(found):
        assert count > rounds and wrong == 0


@pytest.mark.gpu(1)
@pytest.mark.parametrize("case", [cases._both_ways, cases._moves_alone, cases._moves_by_its_thread])
def test_messages_move_without_each_other(case: Callable[..., Any]) -> None:
    assert values(_run(2, case)) == [True, True]


@pytest.mark.gpu(1)
def test_everyone_sends_to_everyone_before_it_receives() -> None:
    """An H100 has room for the kernels of 16 messages, and each rank sends 18."""
    values(_run(4, cases._everyone_to_everyone, 4, 6))


@pytest.mark.gpu(1)
@pytest.mark.xdist_group("much memory")
@pytest.mark.parametrize("words", [large.WORDS, large.WORDS + 1])
def test_messages_above_two_gigabytes(words: int) -> None:
    """By bulk copies, and by ordinary ones where the size is no multiple of 16 bytes."""
    values(run_ranks(2, large.exchange, words, timeout_s=200))


@pytest.mark.gpu(1)
def test_messages_of_a_channel_keep_their_order() -> None:
    assert values(_run(2, cases._in_order))[1] == [*range(1, 100, 2), *range(0, 100, 2)]


@pytest.mark.gpu(1)
@pytest.mark.parametrize(("size", "dtype"), [(2, torch.bfloat16), (3, torch.float32), (4, torch.uint8)])
def test_a_ring_all_gather_is_bit_exact(size: int, dtype: torch.dtype) -> None:
    values(_run(size, cases._ring, size, dtype))


@pytest.mark.gpu(1)
@pytest.mark.parametrize("case", [cases._to_itself, cases._two_objects])
def test_objects_and_ranks(case: Callable[..., Any]) -> None:
    values(_run(3, case))


@pytest.mark.gpu(1)
@pytest.mark.parametrize("size", [2, 3])
def test_graphs_are_right_in_every_replay(size: int) -> None:
    assert values(run_ranks(size, messages.captured, size, 50, timeout_s=200)) == [50] * size


@pytest.mark.gpu(1)
@pytest.mark.parametrize(("what", "count"), [("bytes of the message", 11), ("bytes of the message", 9), ("dtype", 10)])
def test_ends_that_disagree(what: str, count: int) -> None:
    first, second = values(_run(2, cases._disagrees, what, count))
    assert first == second and what in second and "on rank 0" in second and "on rank 1" in second


@pytest.mark.gpu(1)
@pytest.mark.parametrize("what", ["send", "receive"])
def test_a_dead_peer_is_named_within_the_deadline(what: str) -> None:
    outcomes = _run(3, cases._loses_a_peer, what)
    for peer, seconds in values([outcomes[0], outcomes[2]]):
        assert peer == 1 and seconds < cases.DEADLINE_S + cases.GRACE_S


@pytest.mark.gpu(1)
def test_an_abort_ends_the_waits_of_peers() -> None:
    assert max(values(_run(3, cases._aborts))) < 3


@pytest.mark.gpu(1)
def test_a_timeout_of_the_caller_is_no_fault() -> None:
    values(_run(2, cases._times_out_softly))


@pytest.mark.gpu(1)
def test_close_waits_for_sends() -> None:
    assert values(_run(2, cases._closes_early)) == [True, True]


@pytest.mark.gpu(1)
@pytest.mark.parametrize(
    ("size", "names", "env"),
    [
        (2, ["Schedule1F1B", "ScheduleInterleaved1F1B", "ScheduleZBVZeroBubble"], {}),
        (2, ["ScheduleInterleaved1F1B", "ScheduleZBVZeroBubble"], checks.ONE_QUEUE),
        (3, ["ScheduleZBVZeroBubble"], {}),
        (4, ["Schedule1F1B", "ScheduleInterleaved1F1B"], {}),
    ],
)
def test_pipelines_have_the_losses_and_parameters_of_pytorch(size: int, names: list[str], env: dict[str, str]) -> None:
    for found in values(run_ranks(size, messages.pipelines, size, names, timeout_s=250, env=env)):
        assert len(found) == len(names)
        for calls, different in found:
            assert not different and calls > 0


@pytest.mark.gpu(1)
@pytest.mark.parametrize(
    ("size", "names", "env"),
    [
        (2, ["1f1b", "1f1b, one by one", "interleaved"], {}),
        (2, ["1f1b", "interleaved"], checks.ONE_QUEUE),
        (4, ["interleaved", "interleaved, batched", "lengths that vary"], {}),
    ],
)
def test_pipelines_have_the_losses_and_gradients_of_megatron(size: int, names: list[str], env: dict[str, str]) -> None:
    pytest.importorskip("megatron.core")
    for found in values(run_ranks(size, messages.megatron_pipelines, size, names, timeout_s=250, env=env)):
        assert list(found) == names
        for name, (calls, different) in found.items():
            assert different == 0 and calls > 0, name


@pytest.mark.gpu(1)
@pytest.mark.parametrize("framework", ["pytorch", "megatron"])
def test_a_dead_stage_is_named(framework: str) -> None:
    if framework == "megatron":
        pytest.importorskip("megatron.core")
    peer, seconds = values(run_ranks(2, messages.loses_a_stage, framework, timeout_s=120)[:1])[0]
    assert peer == 1 and seconds < cases.DEADLINE_S + cases.GRACE_S


@pytest.mark.gpu(2)
@pytest.mark.parametrize("beside", ["messages", "gathers", "sums"])
def test_products_wait_no_longer_than_beside_nccl(beside: str) -> None:
    """Where all streams share one hardware queue."""
    for found in values(run_ranks(2, messages.gaps_between_products, 2, beside, timeout_s=120, env=checks.ONE_QUEUE)):
        long = {arm: sum(gap > messages.GAP_US for gap in gaps) for arm, gaps in found.items()}
        assert long["ours"] <= long["NCCL"], found
