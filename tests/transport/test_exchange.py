"""Exchange: what it carries, how it fails, and what it leaves in the store.

The file is long because one class makes all these promises, and each needs ranks of its own.
"""

from __future__ import annotations

import datetime
import functools
import gc
import multiprocessing
import os
import signal
import time
import weakref
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ep_plugin.errors import DisagreementError, EpPluginError, NotSupported, PeerAborted, PeerTimeout, reason_of
from ep_plugin.transport import exchange as transport_exchange
from ep_plugin.transport.agreement import Attempt
from ep_plugin.transport.exchange import Exchange
from ep_plugin.transport.peer import raise_together
from tests.faults.fault_cases import wait_until_stopped
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
    first.barrier("pair up")
    second.barrier("pair up")
    # The two are apart: they may be used in any order, as long as each is used alike.
    order = (first, second) if rank % 2 else (second, first)
    posts = {exchange: {"step": "apart", "value": [exchange.name, rank]} for exchange in order}
    for exchange, post in posts.items():
        exchange._post(1, post)
    for exchange in (first, second):
        ends = time.monotonic() + 5.0
        got = exchange._collect(1, posts[exchange], ends) if rank == 0 else exchange._receive(1, "apart", ends)
        assert [got[r]["value"] for r in range(size)] == [[exchange.name, r] for r in range(size)]

    first.polled_store("kept").set(f"key {rank}", "value")
    world.barrier("kept")
    for group in _subgroups(rank, size):
        if group is not None:
            exchange = Exchange(group)
            assert exchange.timeout_s == 33.0
            ranks = dist.get_process_group_ranks(group)
            assert exchange.all_gather("global rank", rank) == ranks
            assert ranks[exchange.rank] == rank
            exchange.polled_store("kept")
    assert first.polled_store("kept").get(f"key {(rank + 1) % size}") == b"value"
    assert len(transport_exchange._polled) == 1


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


class _Counted:
    """A store that notes how many keys each request names."""

    def __init__(self, store: Any) -> None:
        self._store, self.keys = store, []

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._store, name)

        def call(*args: Any) -> Any:
            self.keys.append(len(args[0]) if isinstance(args[0], list) else 1)
            return function(*args)

        return call


def _requests(rank: int, size: int) -> int:
    """The most keys that a request names."""
    exchange = Exchange()
    exchange._store = counted = _Counted(exchange._store)
    for _ in range(4):
        exchange.barrier("a turn")
    return max(counted.keys)


def test_only_rank_0_reads_what_each_rank_posts():
    most = run(5, _requests)
    assert most[0] > 1 and most[1:] == [1] * 4


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


@pytest.mark.deadline
def test_dead_rank_is_named_with_the_step_at_the_deadline():
    waited = run(4, _rank_two_is_missing, killed=(2,))
    assert 1.0 <= max(waited) < 6.0  # a rank that came later hears of the first one's deadline


def _told(store: dist.Store, key: str) -> None:
    """Waits until another rank of the test has set the key."""
    store.wait([key], datetime.timedelta(seconds=60))


def _leader_comes_last(rank: int, size: int) -> None:
    exchange, store = Exchange(timeout_s=60), c10d._get_default_store()
    exchange.barrier("start")
    if rank == 0:
        _told(store, "given up")
        with pytest.raises(PeerAborted, match="rank [12] aborted: .* for rank 0"):
            exchange.barrier("late")
    else:
        exchange.timeout_s = 0.5
        with pytest.raises(PeerTimeout) as caught:
            exchange.barrier("late")
        assert caught.value.rank == 0
        if store.add("gave up", 1) == size - 1:
            store.set("given up", "")


@pytest.mark.deadline
def test_a_leader_hears_that_its_peers_have_given_up():
    run(3, _leader_comes_last)


def _leader_is_interrupted(rank: int, size: int) -> None:
    exchange, store = Exchange(timeout_s=60), c10d._get_default_store()
    exchange.barrier("start")
    if rank == 0:

        def interrupt() -> None:
            raise KeyboardInterrupt

        exchange.watch = interrupt
        with pytest.raises(KeyboardInterrupt):
            exchange.barrier("with rank 2")
        exchange.abort("KeyboardInterrupt: ")
    elif rank == 1:
        began = time.monotonic()
        with pytest.raises(PeerAborted, match="rank 0 aborted: KeyboardInterrupt"):
            exchange.barrier("with rank 2")
        assert time.monotonic() - began < 20
        store.set("raised", "")
    else:
        _told(store, "raised")  # it never comes


def test_an_abort_ends_the_exchange_that_it_interrupts():
    run(3, _leader_is_interrupted)


def _two_are_missing(rank: int, size: int) -> None:
    exchange = Exchange(timeout_s=0.5)
    if rank == 1:
        with pytest.raises(PeerTimeout, match="for ranks 0, 2"):
            exchange.barrier("alone here")


@pytest.mark.deadline
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


def _leader_is_late(rank: int, size: int) -> None:
    store = dist.distributed_c10d._get_default_store()
    first, second = Exchange(), Exchange()

    def slowly() -> None:
        if store.check(["ep_plugin/all/invitation/0"]):
            _told(store, "ep_plugin/all/accept/1")
            _told(store, "ep_plugin/all/accept/2")

    if rank == 0:
        first.watch = slowly
    with pytest.raises(DisagreementError, match="'step [ab]' as on rank"):
        first.all_gather("step b" if rank == 1 else "step a")
    second.barrier("together")


def test_ranks_that_a_late_leader_invites_compare_with_the_exchange_that_they_began():
    run(3, _leader_is_late)


def _stopped_store(pipe: Any) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    pipe.recv()


def _store_stops(rank: int, size: int, port: int, pid: int) -> float:
    dist.destroy_process_group()
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    exchange = Exchange(timeout_s=1.0)
    exchange.barrier("together")
    dist.barrier()  # over the group's own connections: no rank still reads what the store holds
    if rank == 0:
        os.kill(pid, signal.SIGSTOP)
        wait_until_stopped(pid)
    dist.barrier()
    start = time.monotonic()
    with pytest.raises(PeerTimeout, match="store of the process group does not answer at step 'after'"):
        exchange.barrier("after")
    exchange.close()
    waited = time.monotonic() - start

    another = Exchange(timeout_s=60.0)
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.alarm(1)
    with pytest.raises(KeyboardInterrupt):
        another.barrier("interrupted")
    return waited


@pytest.mark.deadline
def test_a_stopped_store_is_an_error_by_the_deadline_and_can_be_interrupted():
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=_stopped_store, args=(theirs,), daemon=True)
    server.start()
    try:
        waited = run(2, _store_stops, ours.recv(), server.pid)
    finally:
        server.kill()
        server.join()
    assert all(seconds < 5.0 for seconds in waited)


def _made_again(rank: int, size: int) -> None:
    """The groups connect to nobody: gloo's own keys on a store used again can lead it to a connection that is gone."""
    store = c10d._get_default_store()
    for turn in range(5):
        if turn:
            dist.destroy_process_group()
            dist.init_process_group("fake", store=store, rank=rank, world_size=size)
        exchange = Exchange(timeout_s=20.0)
        for step in range(turn + 1):
            assert exchange.all_gather(f"step {step}", [turn, rank]) == [[turn, r] for r in range(size)]


def test_groups_made_again_on_one_store_do_not_meet_old_keys():
    run(2, _made_again)


def _one_is_late(rank: int, size: int) -> float:
    if rank == 1:
        dist.barrier()  # after the other has given up
    start = time.monotonic()
    with pytest.raises(PeerTimeout if rank == 0 else PeerAborted, match="for rank 1"):
        Exchange(timeout_s=0.5 if rank == 0 else 30.0).barrier("construct")
    waited = time.monotonic() - start
    if rank == 0:
        dist.barrier()
    again = Exchange(timeout_s=20.0)
    assert again.all_gather("again", rank) == [0, 1]
    assert len(set(again.all_gather("names", again.name))) == 1
    return waited


@pytest.mark.deadline
def test_a_late_rank_hears_at_once_and_the_next_construction_works():
    assert run(2, _one_is_late)[1] < 5.0


def _one_misses(rank: int, size: int, missing: int) -> None:
    """The others construct without the rank `missing`. Then all retry together: either side is the first to come."""
    store = c10d._get_default_store()
    for turn in range(5):
        for _ in range(0 if rank == missing else turn + 1):
            with pytest.raises((PeerTimeout, PeerAborted), match="for rank"):
                Exchange(timeout_s=0.5).barrier("construct")
        dist.barrier()
        again, come = Exchange(timeout_s=60.0), f"come {turn}"
        if (rank == missing) == (turn % 2 == 1):
            again.watch = functools.partial(store.set, come, "")
        else:
            _told(store, come)
        began = time.monotonic()
        assert again.all_gather("again", [turn, rank]) == [[turn, other] for other in range(size)]
        assert time.monotonic() - began < 20
        again.watch = None
        assert len(set(again.all_gather("names", again.name))) == 1
        again.close()


@pytest.mark.parametrize(("size", "missing"), [(2, 0), (2, 1), (3, 0), (3, 2)])
@pytest.mark.slow
def test_a_retry_works_after_one_rank_has_missed_constructions(size, missing):
    run(size, _one_misses, missing)


def _both_miss(rank: int, size: int) -> None:
    """Each rank constructs alone, a different number of times. Then one fails in a retry that both make."""
    for turn in range(4):
        for one in range(size):
            for _ in range(3 if rank == one == turn % 2 else rank == one):
                with pytest.raises((PeerTimeout, PeerAborted)):
                    Exchange(timeout_s=0.3).barrier("alone")
            dist.barrier()
        exchange = Exchange(timeout_s=60.0)
        began = time.monotonic()
        exchange.barrier("together")
        exchange.close()
        exchange = Exchange(timeout_s=60.0)
        if rank == 1:
            exchange.abort("a bad argument")
        else:
            with pytest.raises(PeerAborted, match="a bad argument"):
                exchange.barrier("start")
        assert time.monotonic() - began < 20
        dist.barrier()


def test_ranks_that_have_missed_each_other_count_alike_after_the_next_agreement():
    run(2, _both_miss)


def _fails_before_others_have_joined(rank: int, size: int) -> float:
    """A rank fails before it has joined. Peers that hear of it late have left tokens that nobody may count on."""
    longest = 0.0
    for _ in range(30):
        exchange = Exchange(timeout_s=8.0)
        if rank == size - 1:
            exchange.abort("a bad argument")
        else:
            with pytest.raises(PeerAborted, match="a bad argument"):
                exchange.barrier("start")
        start = time.monotonic()
        again = Exchange(timeout_s=8.0)
        again.barrier("again")
        longest = max(longest, time.monotonic() - start)
        again.close()
        exchange.close()
    return longest


def test_the_next_construction_works_after_one_that_failed_early():
    assert max(run(4, _fails_before_others_have_joined)) < 5.0


def test_a_leader_hears_of_a_failure_whose_rank_has_begun_again_before_the_leader_looks_for_tokens():
    posts: dict[str, Any] = {}

    def read(keys: dict[int, str]) -> dict[int, Any]:
        if keys == {1: "all/join/1"} and not posts.get("all/join/1"):
            posts.update(Attempt("all", 1, 2, 1).failure({"rank": 1, "abort": "a bad argument"}, waited=False))
            again.begin("again", 8.0, read, posts.update, error_of)
        return {rank: posts[key] for rank, key in keys.items() if key in posts}

    def error_of(failure: dict[str, Any]) -> Exception:
        return PeerAborted(failure["abort"], failure["rank"], failure["abort"])

    leader, next_of_leader, again = Attempt("all", 0, 2, 1), Attempt("all", 0, 2, 2), Attempt("all", 1, 2, 2)
    leader.begin("start", 8.0, read, posts.update, error_of)
    with pytest.raises(PeerAborted, match="a bad argument"):
        while not leader.advance():
            assert not again.advance()
    posts.update(leader.withdrawal())
    next_of_leader.begin("again", 8.0, read, posts.update, error_of)
    while not next_of_leader.advance():
        assert not again.advance()
    assert again.advance()
    assert again.nonce == next_of_leader.nonce != ""


def test_ranks_that_retry_after_one_another_meet() -> None:
    """Rank 1 has given up and comes again. Then rank 2 gives up what it has waited for, and comes again, too."""
    posts: dict[str, Any] = {}

    def read(keys: dict[int, str]) -> dict[int, Any]:
        return {rank: posts[key] for rank, key in keys.items() if key in posts}

    def error_of(failure: dict[str, Any]) -> Exception:
        return PeerAborted(failure["abort"], failure["rank"], failure["abort"])

    def begun(rank: int, number: int) -> Attempt:
        attempt = Attempt("all", rank, 3, number)
        attempt.begin("start", 8.0, read, posts.update, error_of)
        return attempt

    for rank in (1, 2):
        failed = Attempt("all", rank, 3, 1)
        posts.update(failed.failure({"rank": rank, "abort": "it is late", "turn": 0}, waited=True))
        if rank == 1:
            leader, first = begun(0, 1), begun(1, 2)
            assert not leader.advance() and leader.number == 2
    every = [leader, first, begun(2, 2)]
    for _ in range(4):
        ends = [attempt.advance() for attempt in every if not attempt.nonce]
    assert ends == [] or all(ends)
    assert {attempt.nonce for attempt in every} == {leader.token}


def _one_has_no_support(rank: int, size: int) -> None:
    exchange = Exchange(timeout_s=8.0)
    if rank == 1:
        exchange.abort(reason_of(NotSupported("a GPU that reaches no other")))
    else:
        with pytest.raises(NotSupported, match="rank 1: a GPU that reaches no other"):
            exchange.barrier("start")


def test_what_one_rank_does_not_support_is_refused_by_all():
    run(3, _one_has_no_support)


def _a_kernel_times_out(rank: int, size: int) -> float:
    """Rank 0 waits for its peers to grow a pool, when its kernel has waited for rank 2 in vain. Rank 1 comes later."""
    exchange = Exchange(timeout_s=30.0)
    exchange.barrier("together")
    found = PeerTimeout("rank 0 waited 4 s for rank 2 at step dispatch_recv", 2, "dispatch_recv")

    def watch() -> None:
        raise found

    if rank == 0:
        exchange.watch = watch
    if rank:
        dist.barrier()
    start = time.monotonic()
    if rank < 2:
        with pytest.raises(PeerTimeout, match="rank 0 waited 4 s for rank 2 at step dispatch_recv") as caught:
            exchange.barrier("grow")
        assert (caught.value.rank, caught.value.step) == (2, "dispatch_recv")
    waited = time.monotonic() - start
    if rank == 0:
        dist.barrier()
    return waited


def test_a_survivor_names_the_rank_that_another_one_waited_for():
    assert max(run(3, _a_kernel_times_out)) < 5.0


def _closed(rank: int, size: int) -> int:
    store = c10d._get_default_store()
    Exchange().barrier("start")
    dist.barrier()
    before = store.num_keys()
    dist.barrier()
    for _ in range(5):
        exchange = Exchange()
        exchange.barrier("use")
        exchange.barrier("use again")
        exchange.close()
        exchange.close()
    dist.barrier()
    return store.num_keys() - before


def test_close_leaves_no_keys():
    assert run(2, _closed) == [0, 0]


def _dropped(rank: int, size: int) -> None:
    """An exchange holds the group's store, so it must not wait for the garbage collector."""
    gc.disable()
    exchange = Exchange(timeout_s=30.0)
    exchange.barrier("use")
    exchange.close()
    left = weakref.ref(exchange)
    del exchange
    until = time.monotonic() + 10
    while left() is not None:  # a thread may just have answered
        assert time.monotonic() < until
        time.sleep(0.001)


def test_an_exchange_that_is_dropped_is_gone():
    run(2, _dropped)


def _part_of_a_group(rank: int, size: int) -> None:
    if rank == 0:
        return
    exchange = Exchange(timeout_s=1.0, ranks=[1, 2])
    exchange.barrier("together")
    if rank == 2:
        with pytest.raises(EpPluginError, match="rank 2: work failed: OSError: full"):
            raise_together(exchange, "work", OSError("full"))
        return
    with pytest.raises(PeerAborted, match="rank 2 aborted") as caught:
        raise_together(exchange, "work", None)
    assert caught.value.rank == 2
    with pytest.raises(PeerTimeout, match="rank 1 waited 1 s .* for rank 2") as late:
        exchange.barrier("alone")
    assert late.value.rank == 2


@pytest.mark.deadline
def test_errors_of_a_part_name_ranks_of_the_group():
    run(3, _part_of_a_group)


def test_without_a_process_group_it_says_so():
    with pytest.raises(ValueError, match=r"group: expected an initialised torch\.distributed process group"):
        Exchange()
