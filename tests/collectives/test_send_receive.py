"""SendReceive on CPU ranks: what arrives, in which order, what is refused, and how failures end.

The file is long because tests/gpu/messages.py runs these cases on GPUs, so they have one place.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import gc
import os
import random
import signal
import threading
import time
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ep_plugin import DisagreementError, PeerAborted, PeerTimeout, Receive, Send, SendReceive
from tests.collectives.collective_cases import DTYPES, same_bits, shard
from tests.faults.fault_cases import nothing_left_behind, set_deadline
from tests.integrations.logs import logged_warnings
from tests.ranks import run_ranks, values

MIB = 2**20
LANE = MIB  # bytes that a lane of CPUs holds
MORE = 9 * MIB + 3  # than any lane holds
DEADLINE_S, GRACE_S = 1.5, 5.0
ONE_PER_NODE = {"EP_PLUGIN_RANKS_PER_NODE": "1"}
SIZES = (0, 1, 3, 129, 4097, 65_536, 65_537, 200_001, LANE, 3 * LANE + 5)


TEN, SQUARE = torch.arange(10.0), torch.ones(2, 2)


# Long payloads repeat after so many bytes. It divides no lane's size, so a cell holds other bytes in each round.
_PERIOD = 4 * MIB - 17


@functools.cache
def _random_bytes() -> torch.Tensor:
    return shard(0, 0, _PERIOD, torch.uint8)


def _payload(number: int, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
    """Random bytes, at most `nbytes`, as `dtype`. Payloads of different numbers below 10,000 differ."""
    nbytes -= nbytes % dtype.itemsize
    source, begin = _random_bytes(), 16 * (number % 10_000)
    whole = source.repeat(1 + (begin + nbytes) // _PERIOD) if begin + nbytes > _PERIOD else source
    made = whole[begin : begin + nbytes].clone()
    return made.remainder_(2).view(dtype) if dtype is torch.bool else made.view(dtype)


def _open(deadline_s: float | None = None, **settings: Any) -> SendReceive:
    p2p = SendReceive(**settings)
    if deadline_s is not None:
        set_deadline(p2p._engine, deadline_s)
    return p2p


def _random_operations(rank: int, size: int, seed: int, rounds: int, largest: int) -> tuple[int, int]:
    """Every rank draws the same messages, starts its own in calls of any size, and waits in any order. On CPUs gloo
    sends them, too, to be compared with."""
    alike, own = random.Random(seed), random.Random(seed * 100 + rank)
    count = wrong = 0
    with SendReceive(num_channels=3) as p2p:
        for _ in range(rounds):
            ops: list[Send | Receive] = []
            expected: list[tuple[torch.Tensor, torch.Tensor]] = []
            for _ in range(alike.randrange(1, 4 * size)):
                src, dst = alike.sample(range(size), 2)
                channel, dtype = alike.randrange(3), alike.choice(DTYPES)
                nbytes = alike.choice([alike.choice(SIZES), alike.randrange(300)])
                if alike.random() < 0.002:
                    nbytes = largest
                count += 1
                if rank not in (src, dst):
                    continue
                payload = _payload(count, nbytes, dtype)
                if rank == src:
                    ops.append(Send(payload, dst, channel))
                else:
                    room = payload.new_ones(len(payload) + own.randrange(2))
                    ops.append(Receive(room[len(room) - len(payload) :], src, channel))  # of another alignment
                    expected.append((ops[-1].tensor, payload))
            works, mine = [], list(ops)
            while ops:
                first = own.randrange(1, len(ops) + 1)
                works.append(p2p.batch(ops[:first]))
                del ops[:first]
            own.shuffle(works)
            for work in works:
                assert work.wait()
                assert work.is_success() and work.exception() is None
            wrong += sum(not same_bits(received, payload) for received, payload in expected)
            if torch.get_default_device().type == "cpu":
                wrong += _over_gloo(mine)
    nothing_left_behind()
    return count, wrong


def _over_gloo(ops: list[Send | Receive]) -> int:
    """Sends the same messages over gloo, in the same order. Returns how many differ from what has been received."""
    works, received = [], []
    for op in ops:
        data = op.tensor.view(torch.uint8)
        if len(data) == 0:
            continue  # gloo does not send them
        if isinstance(op, Send):
            works.append(dist.isend(data, op.dst, tag=op.channel))
        else:
            received.append((data, torch.empty_like(data)))
            works.append(dist.irecv(received[-1][1], op.src, tag=op.channel))
    for work in works:
        work.wait()
    return sum(not torch.equal(ours, theirs) for ours, theirs in received)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "rounds", "largest", "least"),
    [(2, 1200, 64 * MIB, 4800), (3, 600, 5 * MIB, 3500), (8, 150, 2 * MIB, 2300)],
)
def test_random_operations_arrive_bit_for_bit(size: int, rounds: int, largest: int, least: int) -> None:
    """More than 10,000 messages in all."""
    for count, wrong in values(run_ranks(size, _random_operations, size, 7 + size, rounds, largest, timeout_s=250)):
        assert count >= least and wrong == 0


def _both_ways(rank: int) -> bool:
    """Both send far more than a lane holds before they receive, and one of them waits for the send first."""
    other, count = 1 - rank, MORE
    with SendReceive() as p2p:
        mine, theirs = (torch.full((count,), value, dtype=torch.uint8) for value in (rank + 1, 0))
        sends = p2p.send(mine, other)
        receives = p2p.receive(theirs, other)
        for work in (sends, receives) if rank else (receives, sends):
            work.wait()
        return bool((theirs == other + 1).all())


def test_two_ranks_that_send_first_do_not_block_each_other() -> None:
    assert values(run_ranks(2, _both_ways)) == [True, True]


def _everyone_to_everyone(rank: int, size: int, num_channels: int) -> None:
    """All send, in one batch and ahead of what they receive, more than lanes hold."""
    lanes = [(peer, channel) for peer in range(size) if peer != rank for channel in range(num_channels)]
    with SendReceive(num_channels=num_channels) as p2p:
        sent = [torch.full((MORE - 3,), 40 * rank + 10 * peer + channel, dtype=torch.uint8) for peer, channel in lanes]
        got = [torch.zeros_like(one) for one in sent]
        sends = [Send(one, *lane) for one, lane in zip(sent, lanes, strict=True)]
        p2p.batch([*sends, *(Receive(one, *lane) for one, lane in zip(got, lanes, strict=True))]).wait()
        for one, (peer, channel) in zip(got, lanes, strict=True):
            assert bool((one == 40 * peer + 10 * rank + channel).all()), f"from rank {peer} in channel {channel}"


def test_everyone_sends_to_everyone_before_it_receives() -> None:
    values(run_ranks(4, _everyone_to_everyone, 4, 2))


def _moves_alone(rank: int) -> bool:
    """Neither waits before a barrier of gloo: messages move on while the ranks do something else."""
    with SendReceive() as p2p:
        data = torch.full((5 * LANE,), rank + 1, dtype=torch.uint8)
        work = p2p.send(data, 1) if rank == 0 else p2p.receive(data, 0)
        del data
        gc.collect()
        until = time.monotonic() + 20
        while not work.is_completed() and time.monotonic() < until:
            time.sleep(0.01)
        dist.barrier()
        return work.is_success() and (rank == 0 or bool((work.result()[0] == 1).all()))


def _moves_by_its_thread(rank: int) -> bool:
    with SendReceive() as p2p:
        data = torch.full((5 * LANE,), rank + 1, dtype=torch.uint8)
        work = p2p.send(data, 1) if rank == 0 else p2p.receive(data, 0)
        if rank == 0:
            dist.barrier()  # the receiver comes only when it has everything
            return work.wait()
        work.wait()
        dist.barrier()
        return bool((data == 1).all())


@pytest.mark.parametrize("function", [_moves_alone, _moves_by_its_thread])
def test_messages_move_while_nobody_waits(function: Any) -> None:
    assert values(run_ranks(2, function)) == [True, True]


def _in_order(rank: int) -> list[int]:
    """Messages of a channel come in the order of their sends, and channels do not wait for each other."""
    with SendReceive(num_channels=2) as p2p:
        if rank == 0:
            works = [p2p.send(torch.tensor([number]), 1, channel=number % 2) for number in range(100)]
            for work in works:
                work.wait()
            return []
        got = torch.zeros(100, dtype=torch.int64)
        odd = [p2p.receive(got[number : number + 1], 0, channel=1) for number in range(50)]
        even = [p2p.receive(got[number : number + 1], 0, channel=0) for number in range(50, 100)]
        for work in odd + even:
            work.wait()
        return got.tolist()


def test_messages_of_a_channel_keep_their_order() -> None:
    assert values(run_ranks(2, _in_order))[1] == [*range(1, 100, 2), *range(0, 100, 2)]


def _to_itself(rank: int) -> None:
    with SendReceive() as p2p:
        size, out = dist.get_world_size(), torch.zeros(3)
        p2p.exchange(torch.full((3,), rank + 1.0), out, rank, rank).wait()
        assert out.tolist() == [rank + 1.0] * 3
        ring = torch.zeros(1)
        p2p.exchange(torch.tensor([float(rank)]), ring, (rank + 1) % size, (rank - 1) % size).wait()
        assert ring.item() == (rank - 1) % size
        assert p2p.batch([]).wait()


@pytest.mark.parametrize("size", [1, 3])
def test_a_rank_may_send_to_itself_in_a_batch(size: int) -> None:
    values(run_ranks(size, _to_itself))


def _in_another_order_of_dimensions(rank: int) -> str:
    """Channels last, and a transposed matrix in the same batch; then ends that differ."""
    p2p, peer = SendReceive(), 1 - rank
    image = torch.arange(2.0 * 3 * 4 * 5).view(2, 3, 4, 5).to(memory_format=torch.channels_last)
    matrix = torch.arange(6.0).view(2, 3).t()
    got, got_matrix = torch.empty_like(image), torch.empty_like(matrix)
    assert not got.is_contiguous() and not got_matrix.is_contiguous()
    sends = [Send(image + rank, peer), Send(matrix - rank, peer), Send(image, rank)]
    own = torch.empty_like(image)
    p2p.batch([*sends, Receive(got, peer), Receive(got_matrix, peer), Receive(own, rank)]).wait()
    assert torch.equal(got, image + peer) and torch.equal(got_matrix, matrix - peer) and torch.equal(own, image)
    sent, got = (image, got) if rank == 0 else (image.contiguous(), got.contiguous())
    with pytest.raises(DisagreementError) as caught:
        p2p.exchange(sent, got, peer, peer).wait()
    p2p.close()
    return str(caught.value)


NODES = {"one node": {}, "two nodes": ONE_PER_NODE}


@pytest.mark.parametrize("env", NODES.values(), ids=NODES)
def test_dimensions_may_lie_in_another_order_at_both_ends(env: dict[str, str]) -> None:
    for said in values(run_ranks(2, _in_another_order_of_dimensions, env=env)):
        assert "torch.float32 with dimensions in the order [0, 2, 3, 1] on rank 0" in said, said


def _from_threads(rank: int) -> bool:
    """A thread for each channel, as a framework's autograd threads would."""
    with SendReceive(num_channels=4) as p2p:
        results: list[bool] = []

        def talk(channel: int) -> None:
            for number in range(50):
                got = torch.zeros(1000 * channel + 1)
                p2p.exchange(torch.full_like(got, number + channel), got, 1 - rank, 1 - rank, channel).wait()
                results.append(bool((got == number + channel).all()))

        threads = [threading.Thread(target=talk, args=(channel,)) for channel in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return len(results) == 200 and all(results)


def test_threads_may_share_an_object() -> None:
    assert values(run_ranks(2, _from_threads)) == [True, True]


def _across_nodes(rank: int) -> None:
    """Ranks of other nodes are reached through the group's backend, those of this node through lanes."""
    with SendReceive() as p2p:
        for number, nbytes in enumerate((1, 4097, 3 * LANE)):
            peers = [peer for peer in range(4) if peer != rank]
            got = {peer: torch.zeros(nbytes, dtype=torch.uint8) for peer in peers}
            sent = torch.full((nbytes,), 10 * rank + number, dtype=torch.uint8)
            work = p2p.batch([Send(sent, peer) for peer in peers] + [Receive(got[peer], peer) for peer in peers])
            assert work.wait() and work.is_completed()
            assert all(bool((got[peer] == 10 * peer + number).all()) for peer in peers)


def test_messages_cross_nodes() -> None:
    values(run_ranks(4, _across_nodes, env={"EP_PLUGIN_RANKS_PER_NODE": "2"}))


def _disagrees(rank: int, what: str, count: int) -> str:
    p2p = SendReceive()
    if rank == 0:
        with contextlib.suppress(DisagreementError):  # where a wait also sees failures of other messages
            p2p.send(torch.ones(10), 1).wait()
        dist.barrier()
        with pytest.raises(DisagreementError) as caught:
            p2p.check()
    else:
        got = torch.ones(count, dtype=torch.int32 if what == "dtype" else torch.float32)
        work = p2p.receive(got, 0)
        with pytest.raises(DisagreementError) as caught:
            work.wait()
        assert work.is_completed() and not work.is_success() and isinstance(work.exception(), DisagreementError)
        dist.barrier()
    with pytest.raises(DisagreementError):
        p2p.send(torch.ones(10), 1 - rank)
    p2p.close()
    nothing_left_behind()
    return str(caught.value)


DISAGREE = [("bytes of the message", 11), ("bytes of the message", 9), ("dtype", 10)]


def _names_both_ends(said: str, what: str, count: int) -> bool:
    values_of = "torch.int32 on rank 1, torch.float32 on rank 0" if what == "dtype" else f"{4 * count} on rank 1, 40 on"
    return what in said and values_of in said


@pytest.mark.parametrize(("what", "count"), DISAGREE)
def test_ends_that_disagree(what: str, count: int) -> None:
    first, second = values(run_ranks(2, _disagrees, what, count))
    assert first == second and _names_both_ends(second, what, count), second


def _loses_a_peer(rank: int, what: str) -> tuple[int | None, float]:
    p2p = _open(DEADLINE_S)
    data = torch.ones(MORE, dtype=torch.uint8)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(PeerTimeout) as caught:
        (p2p.send(data, 1) if what == "send" else p2p.receive(data, 1)).wait()
    seconds = time.monotonic() - began
    assert what in str(caught.value)
    if what == "receive":
        assert bool((data == 255).all()), "what has not arrived must not look as if it had"
    with pytest.raises(PeerTimeout):
        p2p.check()
    p2p.close()
    p2p.close()
    nothing_left_behind()
    return caught.value.rank, seconds


@pytest.mark.deadline
@pytest.mark.parametrize("what", ["send", "receive"])
def test_a_dead_peer_is_named_within_the_deadline(what: str) -> None:
    outcomes = run_ranks(3, _loses_a_peer, what)
    for peer, seconds in values([outcomes[0], outcomes[2]]):
        assert peer == 1 and seconds < DEADLINE_S + GRACE_S


def _say_when_it_waits(p2p: SendReceive, key: str) -> None:
    """Sets `key` in the store as soon as this rank is in a wait of `p2p`."""
    store, engine = _store(), p2p._engine
    assert engine is not None

    def look() -> None:
        while not engine.control.num_waiters:
            time.sleep(0.001)
        store.set(key, "")

    threading.Thread(target=look, daemon=True).start()


def _store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def _aborts(rank: int) -> float:
    p2p = SendReceive()
    if rank == 1:
        _store().wait(["rank 0 waits", "rank 2 waits"])
        p2p.abort("no room")
        p2p.close()
        return 0.0
    _say_when_it_waits(p2p, f"rank {rank} waits")
    began = time.monotonic()
    with pytest.raises(PeerAborted, match="rank 1 aborted: no room"):
        p2p.receive(torch.ones(3), 1).wait()
    p2p.close()
    nothing_left_behind()
    return time.monotonic() - began


def test_an_abort_ends_the_waits_of_peers() -> None:
    assert max(values(run_ranks(3, _aborts))) < 3


def _times_out_softly(rank: int) -> None:
    """A timeout of the caller's is no fault: the message arrives later."""
    with SendReceive() as p2p:
        got = torch.zeros(4)
        if rank == 0:
            work = p2p.receive(got, 1)
            with pytest.raises(PeerTimeout, match=r"expected the messages to end within 0:00:00\.100000"):
                work.wait(datetime.timedelta(seconds=0.1))
            assert not work.is_completed() and work.exception() is None
            dist.barrier()
            assert work.wait() and got.tolist() == [1.0] * 4
        else:
            dist.barrier()
            p2p.send(torch.ones(4), 0).wait()


@pytest.mark.deadline
def test_a_timeout_of_the_caller_is_no_fault() -> None:
    values(run_ranks(2, _times_out_softly))


def _closes_early(rank: int) -> bool:
    """close() waits for what this rank has sent, though nobody waited for its Work."""
    p2p = SendReceive()
    got = torch.zeros(4 * LANE, dtype=torch.uint8)
    if rank == 0:
        p2p.send(torch.ones_like(got), 1)
        _store().set("rank 0 closes", "")
    else:
        _store().wait(["rank 0 closes"])
        p2p.receive(got, 0).wait()
        unanswered = p2p.receive(torch.zeros(1), 0)
    p2p.close()
    if rank == 1:
        assert unanswered.is_completed() and not unanswered.is_success()
    nothing_left_behind()
    return rank == 0 or bool(got.all())


def test_close_waits_for_sends() -> None:
    assert values(run_ranks(2, _closes_early)) == [True, True]


def _closes_in_vain(rank: int) -> int | None:
    """Nobody receives: `close` waits as long as any wait, says so, and the Work names the peer."""
    p2p = _open(DEADLINE_S)
    dist.barrier()
    if rank == 1:
        dist.barrier()
        p2p.close()
        return None
    work = p2p.send(torch.ones(MORE, dtype=torch.uint8), 1)
    with logged_warnings() as logged:
        p2p.close()
    dist.barrier()
    assert len(logged) == 1 and "closed with an error that no call has raised" in logged[0] and "rank 1" in logged[0]
    assert isinstance(work.exception(), PeerTimeout) and not work.is_success()
    with pytest.raises(PeerTimeout, match="for rank 1 at step send") as caught:
        work.wait()
    nothing_left_behind()
    return caught.value.rank


@pytest.mark.deadline
def test_a_send_that_nobody_receives_is_not_lost_silently() -> None:
    assert values(run_ranks(2, _closes_in_vain))[0] == 1


def _forks(rank: int) -> bool:
    """A forked child neither hangs nor takes the rank's messages."""
    with SendReceive() as p2p:
        got = torch.zeros(3 * LANE, dtype=torch.uint8)
        work = p2p.send(torch.ones_like(got), 1) if rank == 0 else p2p.receive(got, 0)
        child = os.fork()
        if child == 0:
            try:
                p2p.receive(torch.ones(1), 1 - rank)
            except Exception as error:
                p2p.close()
                os._exit(7 if "forked child" in str(error) else 1)
            os._exit(2)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        work.wait()
        return code == 7 and (rank == 0 or bool(got.all()))


def test_a_forked_child_is_refused() -> None:
    assert values(run_ranks(2, _forks)) == [True, True]


def _quantised() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch advises another package
        return torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8)


def _bad_input(rank: int) -> None:
    p2p, x = SendReceive(num_channels=2), torch.ones(4)
    overlapping = [Send(TEN[:4], rank), Receive(TEN[2:6], rank)]
    cases: list[tuple[Any, str]] = [
        (lambda: p2p.send(x, 2), r"dst: expected 0 to 1, got 2"),
        (lambda: p2p.send(x, -1), r"dst: expected 0 to 1, got -1"),
        (lambda: p2p.send(x, "1"), r"dst: expected 0 to 1, got '1'"),
        (lambda: p2p.send(x, 1, channel=2), r"channel: expected 0 to 1, got 2"),
        (lambda: p2p.send([1.0], 1 - rank), r"tensor: expected a tensor, got list"),
        (lambda: p2p.send(torch.ones(4, 4)[:, ::2], 1 - rank), r"contiguous tensor.* got shape \(4, 2\) with strides"),
        (lambda: p2p.send(torch.ones(1, 4).expand(3, 4), 1 - rank), r"without gaps or overlaps, got shape \(3, 4\)"),
        (lambda: p2p.send(torch.ones([2, 2] + [1] * 11).transpose(0, 1), 1 - rank), r"of at most 12 dimensions"),
        (lambda: p2p.send(torch.ones(4).to_sparse(), 1 - rank), r"expected a dense tensor"),
        (lambda: p2p.send(x.to_mkldnn(), 1 - rank), r"tensor: expected a dense tensor, got one of .*mkldnn"),
        (lambda: p2p.receive(x.to_mkldnn(), 1 - rank), r"tensor: expected a dense tensor, got one of .*mkldnn"),
        (lambda: p2p.send(torch.ones(4, device="meta"), 1 - rank), r"expected device cpu, got meta"),
        (lambda: p2p.send(x, rank), r"expected a receive in the batch for each send of rank"),
        (lambda: p2p.receive(x, rank), r"got 0 sends and 1 receives"),
        (lambda: p2p.exchange(x, torch.ones(5), rank, rank), r"expected 16 bytes of torch.float32"),
        (lambda: p2p.exchange(SQUARE, SQUARE.t(), rank, rank), r"the order of dimensions \(\) in .*, got \(1, 0\)"),
        (lambda: p2p.batch([Send(torch.zeros(3), rank), Receive(x[:3], rank), *overlapping]), r"got 8 bytes in both"),
        (lambda: p2p.batch([x]), r"ops\[0\]: expected Send or Receive, got Tensor"),
        (lambda: p2p.batch(Send(x, 1 - rank)), r"expected a sequence of Send and Receive"),
        (lambda: p2p.batch([Send(x, 1 - rank), Send(x, 9)]), r"ops\[1\].dst"),
        (lambda: SendReceive(num_channels=0), r"num_channels: expected 1 to 16, got 0"),
        (lambda: SendReceive(num_channels="2"), r"num_channels: expected an integer"),
        (lambda: SendReceive(device="banana"), r"device: expected cpu, cuda"),
        (lambda: p2p.send(_quantised(), 1 - rank), r"expected a tensor without scale and zero point, got .*quint8"),
        (lambda: p2p.batch([]).wait(datetime.timedelta(seconds=-1)), r"timeout: expected .* of at least 0, got -1 s"),
        (lambda: p2p.batch([]).wait(1.0), r"timeout: expected a timedelta, got 1.0"),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()
    got = torch.zeros(4)
    p2p.exchange(x, got, 1 - rank, 1 - rank).wait()
    assert got.tolist() == x.tolist() == [1.0] * 4, "nothing was sent by what was refused"
    p2p.close()
    with pytest.raises(Exception, match="closed"):
        p2p.send(x, 1 - rank)


def test_bad_input_is_refused_before_anything_is_sent() -> None:
    values(run_ranks(2, _bad_input))


def _not_alike(rank: int) -> str:
    with pytest.raises((DisagreementError, PeerAborted)) as caught:
        SendReceive(num_channels=1 + rank)
    return str(caught.value)


def test_ranks_agree_on_channels() -> None:
    for said in values(run_ranks(2, _not_alike)):
        assert "num_channels" in said


def _two_objects(rank: int) -> None:
    """Two objects of one group, and one of a smaller group with other ranks."""
    small = dist.new_group([2, 0])
    with SendReceive() as first, SendReceive() as second:
        if rank in (0, 2):
            with SendReceive(small) as third:
                got, peer = torch.zeros(1), 1 - dist.get_rank(small)
                third.exchange(torch.tensor([float(rank)]), got, peer, peer).wait()
                assert got.item() == 2 - rank
        one, two = torch.zeros(1), torch.zeros(1)
        after, before = (rank + 1) % 3, (rank - 1) % 3
        works = [second.exchange(torch.tensor([2.0]), two, after, before)]
        works.append(first.exchange(torch.tensor([1.0]), one, after, before))
        for work in works:
            work.wait()
        assert (one.item(), two.item()) == (1.0, 2.0)
    nothing_left_behind()


def test_objects_do_not_meet() -> None:
    values(run_ranks(3, _two_objects))


def _ring(rank: int, size: int, dtype: torch.dtype) -> None:
    from examples.ring_all_gather import ring_all_gather

    for count in (1, 1000, 400_001):
        mine, *expected = (_payload(peer, count * dtype.itemsize, dtype) for peer in (rank, *range(size)))
        with SendReceive() as p2p:
            assert same_bits(ring_all_gather(p2p, mine), torch.stack(expected))


@pytest.mark.parametrize(("size", "dtype"), [(2, torch.bfloat16), (3, torch.float32), (5, torch.uint8)])
def test_a_ring_all_gather_is_bit_exact(size: int, dtype: torch.dtype) -> None:
    values(run_ranks(size, _ring, size, dtype))
