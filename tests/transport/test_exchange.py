"""Exchange: what it carries, how it fails, and what it leaves in the store."""

from __future__ import annotations

import datetime
import time

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ep_plugin.errors import DisagreementError, PeerAborted, PeerTimeout
from ep_plugin.transport.exchange import Exchange
from tests.transport.memory_ranks import GROUP_TIMEOUT_S, die, run


def _subgroups(rank: int, size: int) -> list[dist.ProcessGroup | None]:
    """Groups that overlap, one of them in an order of its own, as this rank sees them."""
    members = [list(range(size)), [0, 1], [2, 0]]
    groups = [dist.new_group(ranks, timeout=datetime.timedelta(seconds=33)) for ranks in members]
    return [group if rank in ranks else None for group, ranks in zip(groups, members, strict=True)]


def _everything_that_works(rank: int, size: int) -> None:
    world = Exchange()
    assert (world.rank, world.size, world.timeout_s) == (rank, size, GROUP_TIMEOUT_S)
    assert world.all_gather("numbers", rank * 10) == [r * 10 for r in range(size)]
    assert world.all_gather("nothing") == [None] * size
    values = [{"text": "π/%", "list": [r, None, 2**62], "flag": True} for r in range(size)]
    assert world.all_gather("structures", values[rank]) == values
    world.barrier("barrier")

    first, second = Exchange(timeout_s=5.0), Exchange(timeout_s=7.0)
    assert (first.timeout_s, second.timeout_s) == (5.0, 7.0)
    names = world.all_gather("names", [world.name, first.name, second.name])
    assert len(set(names[0])) == 3 and names == [names[0]] * size
    # The two are apart: they may be used in any order, as long as each is used alike.
    order = (first, second) if rank % 2 else (second, first)
    for exchange in order:
        exchange._post(0, {"step": "apart", "value": [exchange.name, rank]})
    for exchange in (first, second):
        got = [post["value"] for post in exchange._collect(0, "apart")]
        assert got == [[exchange.name, r] for r in range(size)]

    for group in _subgroups(rank, size):
        if group is not None:
            exchange = Exchange(group)
            assert exchange.timeout_s == 33.0
            ranks = dist.get_process_group_ranks(group)
            assert exchange.all_gather("global rank", rank) == ranks
            assert ranks[exchange.rank] == rank


@pytest.mark.parametrize("size", [1, 3])
def test_values_groups_and_instances(size):
    if size == 1:
        run(1, _single_process)
    else:
        run(size, _everything_that_works)


def _single_process(rank: int, size: int) -> None:
    exchange = Exchange()
    assert exchange.all_gather("alone", (1, "a")) == [[1, "a"]]
    exchange.barrier("alone")


def _keys_stay_few(rank: int, size: int) -> int:
    exchange = Exchange()
    store = c10d._get_process_group_store(dist.group.WORLD)
    exchange.barrier("start")
    before = store.num_keys()
    for turn in range(200):
        assert exchange.all_gather("turn", [turn, rank]) == [[turn, r] for r in range(size)]
    return store.num_keys() - before


def test_keys_do_not_pile_up_in_the_store():
    grown = run(2, _keys_stay_few)
    assert max(grown) <= 2 * 2


def _rank_two_is_missing(rank: int, size: int) -> float:
    exchange = Exchange()
    exchange.barrier("together")
    exchange.timeout_s = 1.0
    if rank == 2:
        die()
    start = time.monotonic()
    with pytest.raises(PeerTimeout, match=r"rank \d waited 1 s at step 'after' of 0\.1 for rank 2") as caught:
        exchange.barrier("after")
    waited = time.monotonic() - start
    assert (caught.value.rank, caught.value.step) == (2, "after")
    with pytest.raises(PeerTimeout) as again:
        exchange.all_gather("another step")
    assert again.value is caught.value
    return waited


def test_dead_rank_is_named_with_the_step_at_the_deadline():
    waited = run(4, _rank_two_is_missing, killed=(2,))
    assert all(1.0 <= seconds < 6.0 for seconds in waited)


def _two_are_missing(rank: int, size: int) -> None:
    exchange = Exchange(timeout_s=0.5)
    if rank == 1:
        with pytest.raises(PeerTimeout, match="for ranks 0, 2"):
            exchange.barrier("alone here")


def test_all_missing_ranks_are_named():
    run(3, _two_are_missing)


def _steps_differ(rank: int, size: int) -> None:
    exchange = Exchange()
    sentence = "expected 'step b' as on rank 1, got 'step a' on rank [02]"
    if rank != 1:
        sentence = f"expected 'step a' as on rank {rank}, got 'step b' on rank 1"
    with pytest.raises(DisagreementError, match=sentence):
        exchange.all_gather("step b" if rank == 1 else "step a")


def _one_aborts(rank: int, size: int) -> None:
    exchange = Exchange()
    exchange.barrier("together")
    if rank == 1:
        exchange.abort("the disk is full")
        with pytest.raises(PeerAborted):
            exchange.barrier("later")
        return
    start = time.monotonic()
    with pytest.raises(PeerAborted, match="rank 1 aborted: the disk is full") as caught:
        exchange.barrier("later")
    assert (caught.value.rank, caught.value.reason) == (1, "the disk is full")
    assert time.monotonic() - start < 5.0


def _bad_groups(rank: int, size: int) -> None:
    with pytest.raises(ValueError, match="group: expected a process group that this rank belongs to"):
        Exchange(dist.GroupMember.NON_GROUP_MEMBER)
    with pytest.raises(TypeError, match="JSON"):
        Exchange(timeout_s=1.0).all_gather("not a value", object())


def _refusals(rank: int, size: int) -> None:
    _steps_differ(rank, size)
    _one_aborts(rank, size)
    _bad_groups(rank, size)


def test_different_steps_aborts_and_bad_groups_are_told_at_once():
    run(3, _refusals)


def test_without_a_process_group_it_says_so():
    with pytest.raises(ValueError, match=r"group: expected an initialised torch\.distributed process group"):
        Exchange()
