"""MoECommunicator.shared where threads, groups and failures meet."""

from __future__ import annotations

import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from ep_plugin import MoECommunicator
from ep_plugin.transport.exchange import Exchange
from tests.faults.fault_cases import nothing_left_behind
from tests.moe.moe_cases import FLAT, Case, Inputs, make_inputs, on_ranks, ragged, round_trip


def _inputs(size: int) -> Inputs:
    return make_inputs(Case(tokens=ragged(size, 9, 1), num_experts=2 * size, seed=1))


def _settings(inputs: Inputs) -> dict[str, Any]:
    case = inputs.case
    return {"num_experts": case.num_experts, "hidden_size": case.hidden, "topk": case.topk, "timeout_s": 20.0}


def _two_groups_in_different_orders(rank: int, size: int) -> None:
    """Each rank begins with another group, and starts on the second while the first waits for peers."""
    inputs = _inputs(size)
    groups = [dist.new_group(list(range(size))) for _ in range(2)]
    waits = threading.Event()
    plain = Exchange.all_gather

    def all_gather(self: Exchange, step: str, value: Any = None) -> list[Any]:
        waits.set()
        return plain(self, step, value)

    Exchange.all_gather = all_gather  # type: ignore[method-assign]
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(MoECommunicator.shared, groups[rank % 2], **_settings(inputs))
        assert waits.wait(20)
        second = threads.submit(MoECommunicator.shared, groups[1 - rank % 2], **_settings(inputs))
        made = [first.result(), second.result()]
    for comm in made if rank % 2 == 0 else reversed(made):
        round_trip(comm, inputs, inputs.expected(FLAT))
        comm.close()
    nothing_left_behind()


def test_threads_make_communicators_of_two_groups_in_any_order() -> None:
    on_ranks(2, _two_groups_in_different_orders)


def _orphan_that_does_not_close(rank: int, size: int) -> None:
    inputs = _inputs(size)
    part = dist.new_group(list(range(size)))
    orphan = MoECommunicator.shared(part, **_settings(inputs))
    close = orphan.engine.close

    def failing() -> None:
        raise OSError("the memory is not ours")

    orphan.engine.close = failing  # type: ignore[method-assign]
    dist.destroy_process_group(part)
    with pytest.warns(RuntimeWarning, match=f"{orphan.engine.name}: close.*OSError: the memory is not ours") as seen:
        comm = MoECommunicator.shared(None, **_settings(inputs))
    assert [warning.filename for warning in seen] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert MoECommunicator.shared(None, **_settings(inputs)) is comm
    round_trip(comm, inputs, inputs.expected(FLAT))
    comm.close()
    close()
    nothing_left_behind()


@pytest.mark.parametrize("size", [1, 2])
def test_an_orphan_that_does_not_close_is_a_warning_to_others(size: int) -> None:
    on_ranks(size, _orphan_that_does_not_close)
