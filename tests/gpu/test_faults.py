"""Ranks that die or fail while their GPUs work: the others say who and where, in time, and end cleanly."""

from __future__ import annotations

import os
import signal
import threading
import time
import unittest.mock
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ep_plugin import _C, PeerAborted, PeerTimeout
from ep_plugin.moe.low_latency import sms
from tests.faults import test_low_latency as faults
from tests.faults import test_low_latency_arguments as fault_arguments
from tests.faults import test_low_latency_hooks as hooks
from tests.faults import test_low_latency_masks as fault_masks
from tests.gpu import checks, low_latency
from tests.ranks import run_ranks, values

# Their deadlines are real time: at most one of these runs at a time, beside one of the hooks'.
pytestmark = pytest.mark.xdist_group("faults")

DEADLINE_S = 4.0
# Where survivors may give up. The kernels hold one warp or one CTA at a gate: with few tokens a victim in send or in
# combine may have sent everything, and is missed in the operation after.
STEPS = {
    "plan": ("notify",),
    "notify": ("notify",),
    "dispatch_send": ("dispatch_recv", "grow combine pool", "combine_send", "combine_recv", "notify"),
    "dispatch_recv": ("grow combine pool", "combine_recv", "dispatch_send", "notify"),
    "combine_send": ("combine_recv", "notify"),
}
VICTIM = 1


def die_at_gate(comm_board: int) -> None:
    """Kills this process, as a crash would, once its kernel is held at the gate."""

    def watch() -> None:
        while not _C.gate_reached(comm_board):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def survive(rank: int, size: int, gate: str) -> tuple[str, int | None, str, float]:
    """The victim dies at `gate`; returns what a survivor was told, and how long it took."""
    case = checks.Case(hidden=256, tokens=64)
    given = checks.make_inputs(case, size, 1)
    if rank == VICTIM:
        os.environ["EP_PLUGIN_TEST_GATE"] = gate
    # Bounded, so that rows of the first dispatch leave while notify waits for the dead.
    config = checks.config_of(case, size, timeout_s=DEADLINE_S, max_tokens_per_rank=case.tokens)
    comm = checks.MoECommunicator(None, config, checks.device_of(rank))
    if rank == VICTIM:
        die_at_gate(comm.engine.boards.address)
    parts = [part[rank].to(comm.engine.device) for part in (given.x, given.ids, given.weights)]
    began = checks.started(comm)
    try:
        for _ in range(3):
            out, handle = comm.dispatch(*parts)
            z = comm.combine(out.tokens, handle, weights=out.weights)
            torch.cuda.synchronize()
            comm.check()
    except PeerTimeout as error:
        took = time.monotonic() - began
        torch.cuda.synchronize()
        with pytest.raises(PeerTimeout):
            comm.dispatch(*parts)
        comm.close()
        return str(error), error.rank, error.step, took
    raise AssertionError(f"nothing was raised; the last result is {z.sum().item()}")


@pytest.mark.gpu(1)
@pytest.mark.parametrize("gate", ["plan", "notify", "dispatch_send", "dispatch_recv", "combine_send"])
def test_survivors_name_the_dead(gate: str) -> None:
    outcomes = run_ranks(3, survive, 3, gate, timeout_s=90)
    assert outcomes[VICTIM].exitcode == -signal.SIGKILL
    for rank in (0, 2):
        message, blamed, step, took = values([outcomes[rank]])[0]
        assert blamed == VICTIM and f"rank {VICTIM}" in message and step in message
        assert step in STEPS[gate], f"the victim died in {gate}, rank {rank} gave up in {step}"
        assert took < DEADLINE_S + 5, f"rank {rank} took {took:.1f} s"


def told_of_abort(rank: int, size: int) -> float:
    case = checks.Case(hidden=256, tokens=64)
    given = checks.make_inputs(case, size, 1)
    with checks.communicator(case, rank, size, timeout_s=60) as comm:
        parts = [part[rank].to(comm.engine.device) for part in (given.x, given.ids, given.weights)]
        comm.dispatch(*parts)
        began = checks.started(comm)  # nobody is still in the first dispatch
        if rank == VICTIM:
            comm.abort("out of luck")
            return 0.0
        with pytest.raises(PeerAborted, match="out of luck") as caught:
            comm.dispatch(*parts)
        assert caught.value.rank == VICTIM
        return time.monotonic() - began


@pytest.mark.gpu(1)
def test_an_abort_is_heard_at_once() -> None:
    seconds = values(run_ranks(3, told_of_abort, 3, timeout_s=90))
    assert max(seconds) < 1.0, seconds


def bad_ids(rank: int, size: int, tokens: int) -> None:
    """Without a check of ids, a bad one is found by the kernel and nothing is written out of bounds."""
    case = checks.Case(hidden=256, tokens=tokens)
    given = checks.make_inputs(case, size, 1)
    with checks.communicator(case, rank, size, timeout_s=60, max_tokens_per_rank=tokens) as comm:  # sends at once
        parts = [part[rank].to(comm.engine.device) for part in (given.x, given.ids, given.weights)]
        # Counting CTAs that see the fault write nothing: what lies where their counts would be is no index.
        for count in (1 << 10, 1 << 16, 1 << 22):
            torch.full((count,), 1 << 30, dtype=torch.int32, device=comm.engine.device)
        if rank == VICTIM:
            parts[1][5, 0] = 10_000
            with pytest.raises(ValueError, match="10000"):
                comm.dispatch(*parts)
        else:
            with pytest.raises(PeerAborted):
                comm.dispatch(*parts)


@pytest.mark.gpu(1)
@pytest.mark.parametrize("tokens", [64, 4096])
def test_bad_ids(tokens: int) -> None:
    values(run_ranks(2, bad_ids, 2, tokens, timeout_s=90))


# -- low latency: the CPU tests' cases -------------------------------------------------------------------------------


def on_gpu(rank: int, case: Callable[..., Any], *args: Any) -> Any:
    with unittest.mock.patch.multiple(faults, DEADLINE_S=DEADLINE_S):
        return low_latency.on_device(rank, case, *args)


@pytest.mark.gpu(1)
@pytest.mark.parametrize(("gate", "victim"), [(gate, number % faults.SIZE) for number, gate in enumerate(faults.GATES)])
def test_low_latency_names_the_dead(gate: str, victim: int) -> None:
    outcomes = run_ranks(faults.SIZE, on_gpu, faults._killed, gate, victim, timeout_s=90)
    assert outcomes.pop(victim).exitcode == -signal.SIGKILL
    for error in values(outcomes):
        assert error.rank == victim and error.step.startswith("ll_"), error


@pytest.mark.gpu(1)
@pytest.mark.parametrize("gate", faults.TWO)
def test_low_latency_names_one_of_two_dead(gate: str) -> None:
    victims = faults.TWO[gate]
    outcomes = run_ranks(4, on_gpu, faults._two_killed, gate, victims, timeout_s=90)
    for error in hooks.values_of_survivors(outcomes, victims):
        assert error.rank in victims and error.step.startswith("ll_"), error


@pytest.mark.gpu(1)
@pytest.mark.parametrize("gate", faults.TWO)
def test_low_latency_masks_two_dead_and_goes_on(gate: str) -> None:
    victims = faults.TWO[gate]
    outcomes = run_ranks(4, on_gpu, fault_masks._survive, gate, *victims, timeout_s=120)
    assert hooks.values_of_survivors(outcomes, victims) == [[int(rank in victims) for rank in range(4)]] * 2


def with_hooks(rank: int, case: Callable[..., Any], *args: Any) -> Any:
    with unittest.mock.patch.multiple(faults, DEADLINE_S=DEADLINE_S):
        return case(rank, *args, str(checks.device_of(rank)))


OF_HOOKS = [
    *((hooks.OF_THREE, place, (victim,)) for place, victim in hooks.PLACES.items()),
    *((hooks.OF_FOUR, place, (1, 2)) for place in hooks.BETWEEN),
]
NAMES_OF_HOOKS = [f"{place}, {len(victims)} of {len(case.tokens)}" for case, place, victims in OF_HOOKS]


@pytest.mark.gpu(1)
@pytest.mark.xdist_group("faults of hooks")
@pytest.mark.parametrize("given", OF_HOOKS, ids=NAMES_OF_HOOKS)
def test_hooks_name_the_dead(given: tuple[Any, str, tuple[int, ...]]) -> None:
    case, _, victims = given
    outcomes = run_ranks(len(case.tokens), with_hooks, hooks.killed, *given, timeout_s=90)
    for named, seconds in hooks.values_of_survivors(outcomes, victims):
        assert named in victims and seconds < DEADLINE_S + 5


@pytest.mark.gpu(1)
@pytest.mark.xdist_group("faults of hooks")
@pytest.mark.parametrize("given", OF_HOOKS, ids=NAMES_OF_HOOKS)
def test_hooks_mask_the_dead_and_go_on(given: tuple[Any, str, tuple[int, ...]]) -> None:
    case, _, victims = given
    size = len(case.tokens)
    outcomes = run_ranks(size, with_hooks, hooks.masked, *given, timeout_s=120)
    expected = [int(rank in victims) for rank in range(size)]
    assert hooks.values_of_survivors(outcomes, victims) == [expected] * (size - len(victims))


@pytest.mark.gpu(1)
@pytest.mark.parametrize(("gate", "victim"), [(gate, 3 - number) for number, gate in enumerate(faults.GATES)])
def test_low_latency_masks_the_dead_and_goes_on(gate: str, victim: int) -> None:
    outcomes = run_ranks(4, on_gpu, fault_masks._survive, gate, victim, timeout_s=120)
    assert outcomes.pop(victim).exitcode == -signal.SIGKILL
    assert values(outcomes) == [[int(rank == victim) for rank in range(4)]] * 3


def on_one_cta(rank: int, *case: Any) -> Any:
    """As `on_gpu`, with one CTA, whose gate holds all rows."""
    with unittest.mock.patch.object(sms, "for_device", lambda device, sharing: 1):
        return on_gpu(rank, *case)


@pytest.mark.gpu(1)
def test_a_masked_rank_that_goes_on_changes_no_later_sum(tmp_path: Path) -> None:
    outcomes = run_ranks(3, on_one_cta, fault_masks._late, tmp_path, timeout_s=90)
    assert values(outcomes) == [([3.0], [0, 0, 1]), None, None]


@pytest.mark.gpu(1)
def test_a_rank_that_has_waited_for_a_dead_one_is_not_masked() -> None:
    outcomes = run_ranks(3, on_gpu, fault_masks._slow_survivor, timeout_s=90)
    assert values(outcomes[:2]) == [[0, 0, 1]] * 2


@pytest.mark.gpu(1)
def test_masks_travel() -> None:
    values(run_ranks(3, on_gpu, fault_masks._masked_by_hand, 3, timeout_s=90))


@pytest.mark.gpu(1)
@pytest.mark.parametrize("gate", ["ll_dispatch_send", "ll_combine_send"])
def test_low_latency_leaves_no_results_after_a_fault(gate: str) -> None:
    outcomes = run_ranks(3, on_one_cta, faults._left_by_a_fault, gate, timeout_s=90)
    assert outcomes.pop(0).exitcode == -signal.SIGKILL
    values(outcomes)


@pytest.mark.gpu(1)
@pytest.mark.parametrize("gate", ["ll_dispatch_send", "ll_combine_send"])
def test_an_abort_ends_every_wait_of_low_latency(gate: str) -> None:
    assert values(run_ranks(3, on_gpu, faults._aborted, gate, timeout_s=90)) == ["0 the test says so"] * 3


@pytest.mark.gpu(1)
@pytest.mark.parametrize("change", ["row bytes", "dtype", "top-k", "most tokens of a rank"])
def test_calls_of_low_latency_that_differ_are_named(change: str) -> None:
    for said in values(run_ranks(2, on_gpu, fault_arguments._differ, change, timeout_s=90)):
        assert change in said and "rank 0" in said and "rank 1" in said
