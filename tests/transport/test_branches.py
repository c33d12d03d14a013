"""Branches of an exchange: how much a rank reads, and that errors and retries are those of an exchange without them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ep_plugin import MoECommunicator, MoECommunicatorConfig
from ep_plugin.errors import DisagreementError, EpPluginError, PeerTimeout
from ep_plugin.testing.counted_store import counted
from ep_plugin.transport import branches
from ep_plugin.transport.agreement import Attempt
from ep_plugin.transport.branches import Branches
from ep_plugin.transport.exchange import Exchange
from tests.ranks import run_ranks, values
from tests.transport import test_exchange as flat
from tests.transport.memory_ranks import die, run


@pytest.mark.parametrize("size", [1, 2, 8, 9, 16, 63, 64, 65, 1000, 1024])
def test_every_rank_is_read_once_on_its_way_to_rank_0(size: int) -> None:
    every = [Branches(rank, size) for rank in range(size)]
    brought = list(every[0].own)
    for leader in every[0].leaders:
        assert every[leader].passes_on
        brought += every[leader].own
    assert brought == list(range(size))
    assert sum(one.passes_on for one in every) == len(every[0].leaders)
    for rank in range(size):
        source = every[0].source(rank)
        assert (source == rank) if rank in every[0].own else rank in every[source].own


@pytest.mark.parametrize("size", [9, 16, 25, 64, 100, 1024, 10_000])
def test_no_rank_reads_more_than_nodes_and_ranks_per_node(size: int) -> None:
    every = [Branches(rank, size) for rank in range(size)]
    reads = [len(one.own) + len(one.leaders) for one in every]
    least = min(nodes + size // nodes for nodes in range(1, size + 1) if size % nodes == 0)
    assert max(reads) <= max(least, 11)


def _agree(rank: int, size: int) -> int:
    """The keys that a rank looks for in an agreement and one exchange."""
    with counted() as store:
        exchange = Exchange()
        exchange.barrier("together")
        return len(store.keys_read)


@pytest.mark.parametrize("size", [16, pytest.param(64, marks=pytest.mark.slow)])
def test_reads_of_an_exchange_grow_with_nodes_and_ranks_per_node(size: int) -> None:
    least = 2 * int(size**0.5)  # nodes + ranks per node, where both are the same
    assert max(run(size, _agree)) <= 3 * least + 8  # tokens, answers and posts; keys that do not depend on the size


def _construct(rank: int, size: int) -> list[int]:
    """The keys that a rank looks for in the construction of a first communicator, and of a second one."""
    config = MoECommunicatorConfig(num_experts=size, hidden_size=8, topk=1, timeout_s=60)
    reads, comms = [], []
    for _ in range(2):
        with counted() as store:
            comms.append(MoECommunicator(None, config))
            reads.append(len(store.keys_read))
    for comm in comms:
        comm.close()
    return reads


@pytest.mark.slow
@pytest.mark.parametrize(("nodes", "per_node"), [(2, 2), (2, 8), (4, 4), (8, 2), (16, 1), (8, 8)])
def test_reads_of_a_construction_grow_with_nodes_and_ranks_per_node(nodes: int, per_node: int) -> None:
    size = nodes * per_node
    found = values(run_ranks(size, _construct, size, env={"EP_PLUGIN_RANKS_PER_NODE": str(per_node)}, timeout_s=200))
    for first, second in found:
        # Of all ranks: tokens, answers, 3 posts. Of a node: tokens, answers, 10 posts. Connections: one for each node.
        assert second <= 5 * (nodes + per_node) + 12 * per_node + 26
        assert first <= second + nodes + 2


def _in_pairs(rank: int, size: int, function: Callable[..., Any], *args: Any) -> Any:
    """Calls `function` where even three ranks have branches, of two ranks each."""
    branches._LEAST = 2
    return function(rank, size, *args)


CASES: dict[str, tuple[int, Callable[..., Any], Any]] = {
    "values": (3, flat._everything_that_works, ()),
    "keys": (4, flat._keys_stay_few, ()),
    "refusals": (3, flat._refusals, ()),
    "leader is late": (3, flat._leader_is_late, ()),
    "interrupt": (3, flat._leader_is_interrupted, ()),
    "groups made again": (4, flat._made_again, ()),
    "early failures": (4, flat._fails_before_others_have_joined, ()),
    "keys after close": (4, flat._closed, ()),
}


@pytest.mark.parametrize("case", CASES)
def test_as_without_branches(case: str) -> None:
    size, function, args = CASES[case]
    found = run(size, _in_pairs, function, *args)
    if case == "keys":
        assert max(found) <= 2 * size
    if case == "keys after close":
        assert found == [0] * size


@pytest.mark.slow
@pytest.mark.parametrize("missing", [0, 1, 2, 3])
def test_a_retry_works_after_one_rank_has_missed_constructions(missing: int) -> None:
    run(4, _in_pairs, flat._one_misses, missing)


@pytest.mark.deadline
def test_a_dead_leader_is_named() -> None:
    run(4, _in_pairs, flat._rank_two_is_missing, killed=(2,))


def _member_dies(rank: int, size: int) -> None:
    exchange = Exchange(timeout_s=1.0)
    exchange.barrier("together")
    if rank == 3:
        die()
    with pytest.raises(PeerTimeout, match=r"for rank 3"):
        exchange.barrier("after")


@pytest.mark.deadline
def test_a_missing_rank_behind_a_leader_is_named() -> None:
    run(4, _in_pairs, _member_dies, killed=(3,))


def _leader_dies_before_it_passes_on(rank: int, size: int) -> None:
    exchange = Exchange(timeout_s=1.0)
    exchange.barrier("together")
    if rank == 2:
        exchange._post(1, {"step": "after", "value": None})
        die()
    with pytest.raises(PeerTimeout, match="for rank 2") as caught:
        exchange.barrier("after")
    assert caught.value.rank == 2


@pytest.mark.deadline
def test_a_leader_that_dies_before_it_passes_posts_on_is_named() -> None:
    run(4, _in_pairs, _leader_dies_before_it_passes_on, killed=(2,))


def _agreement_stops_at_a_leader(rank: int, size: int, with_tokens: bool) -> None:
    """Rank 2 passes on no tokens, or no answers."""
    pass_on = Attempt._pass_on

    def stop(self: Attempt) -> None:
        if with_tokens and not self._accepted:
            pass_on(self)

    if rank == 2:
        Attempt._pass_on = stop  # type: ignore[method-assign]
    exchange = Exchange(timeout_s=1.0)
    with pytest.raises(EpPluginError, match=r"rank 0 waited 1 s at step 'start' of 0\.1 for rank 2"):
        exchange.barrier("start")
    Attempt._pass_on = pass_on  # type: ignore[method-assign]
    again = Exchange(timeout_s=20.0)
    assert again.all_gather("again", rank) == list(range(size))


@pytest.mark.deadline
@pytest.mark.parametrize("with_tokens", [False, True])
def test_a_leader_that_passes_on_nothing_is_named(with_tokens: bool) -> None:
    run(4, _in_pairs, _agreement_stops_at_a_leader, with_tokens)


def _steps_differ(rank: int, size: int, other: int) -> None:
    with pytest.raises(DisagreementError, match="ranks are in different steps"):
        Exchange(timeout_s=20.0).all_gather("step b" if rank == other else "step a")


@pytest.mark.parametrize("other", range(4))
def test_a_different_step_is_seen_wherever_it_is(other: int) -> None:
    run(4, _in_pairs, _steps_differ, other)
