"""The kernels of SendReceive on CPUs, with the checks of tests/gpu."""

from __future__ import annotations

import unittest.mock
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ep_plugin.collectives import send_receive
from tests.collectives import test_send_receive as cases
from tests.collectives.collective_cases import await_close_of_a_peer, tell_when_it_closes
from tests.gpu import messages
from tests.ranks import Outcome, run_ranks, values


def _run(size: int, case: Callable[..., Any], *args: Any, plain: bool = False) -> list[Outcome]:
    env = {"EP_TEST_KERNELS": "simt"} | ({"EP_PLUGIN_PLAIN_KERNELS": "1"} if plain else {})
    return run_ranks(size, messages.on_device, case, *args, timeout_s=120, env=env)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "rounds", "plain"), [(2, 8, False), (3, 4, False), (2, 3, True)])
def test_random_operations_arrive_bit_for_bit(size: int, rounds: int, plain: bool) -> None:
    for count, wrong in values(_run(size, cases._random_operations, size, 3 + size, rounds, 100, plain=plain)):
        assert count > rounds and wrong == 0


def test_two_ranks_that_send_first_do_not_block_each_other() -> None:
    assert values(_run(2, cases._both_ways)) == [True, True]


@pytest.mark.slow
def test_everyone_sends_to_everyone_before_it_receives() -> None:
    values(_run(3, cases._everyone_to_everyone, 3, 1))


def test_messages_of_a_channel_keep_their_order() -> None:
    assert values(_run(2, cases._in_order))[1] == [*range(1, 100, 2), *range(0, 100, 2)]


@pytest.mark.parametrize(("what", "count"), [("bytes of the message", 11), ("bytes of the message", 9), ("dtype", 10)])
def test_ends_that_disagree(what: str, count: int) -> None:
    first, second = values(_run(2, cases._disagrees, what, count))
    assert first == second and what in second and "on rank 0" in second and "on rank 1" in second


@pytest.mark.deadline
@pytest.mark.parametrize("what", ["send", "receive"])
def test_a_dead_peer_is_named_within_the_deadline(what: str) -> None:
    outcomes = _run(3, cases._loses_a_peer, what)
    for peer, seconds in values([outcomes[0], outcomes[2]]):
        assert peer == 1 and seconds < cases.DEADLINE_S + cases.GRACE_S


def test_an_abort_ends_the_waits_of_peers() -> None:
    assert max(values(_run(3, cases._aborts))) < 3


@pytest.mark.deadline
def test_a_timeout_of_the_caller_is_no_fault() -> None:
    values(_run(2, cases._times_out_softly))


def _closes_ahead_of_the_device(rank: int) -> bool:
    """The host closes while the message that a stream of its waits for is still to come, as it may on GPUs."""
    p2p, got = cases.SendReceive(), torch.zeros(100_000)
    if rank == 0:
        await_close_of_a_peer()
        p2p.send(torch.ones_like(got), 1)
    else:
        work = p2p.receive(got, 0)
        with unittest.mock.patch.object(p2p._engine.streams, "order_after", lambda *_: None):  # type: ignore[union-attr]
            send_receive.MessageWork.wait(work, None)
        assert not work.is_completed()
        tell_when_it_closes(p2p._engine)
    p2p.close()
    return rank == 0 or bool((got == 1).all())


def test_close_lets_a_message_end_that_a_stream_waits_for() -> None:
    outcomes = run_ranks(2, _closes_ahead_of_the_device, env={"EP_TEST_KERNELS": "simt"}, timeout_s=60)
    assert values(outcomes) == [True, True]


@pytest.mark.slow
def test_a_pipeline_has_the_losses_and_parameters_of_pytorch() -> None:
    names = ["ScheduleInterleaved1F1B"]
    outcomes = run_ranks(2, messages.pipelines, 2, names, env={"EP_TEST_KERNELS": "simt"}, timeout_s=120)
    for [(calls, different)] in values(outcomes):
        assert not different and calls > 0


def test_close_waits_for_sends() -> None:
    assert values(_run(2, cases._closes_early)) == [True, True]
