"""SendReceive between CPU ranks of different nodes: which messages meet, and what two ends that disagree raise."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from ep_plugin import DisagreementError, NotSupported, SendReceive
from ep_plugin.collectives import messages
from ep_plugin.transport import exchange
from tests.collectives.collective_cases import same_bits, shard
from tests.faults.fault_cases import nothing_left_behind
from tests.ranks import run_ranks, values

KIB, MIB = 2**10, 2**20
ONE_PER_NODE = {"EP_PLUGIN_RANKS_PER_NODE": "1"}
BOOL, F32, I32, U8 = torch.bool, torch.float32, torch.int32, torch.uint8
SIZES = (0, 1, KIB - 1, KIB, KIB + 1, MIB, MIB + KIB, 3 * MIB + 5 * KIB + 7)


def _any_size(rank: int) -> None:
    """Messages of all sizes are under way at once, in one channel."""
    with SendReceive() as p2p:
        mine, theirs = ([shard(number, of, n, U8) for number, n in enumerate(SIZES)] for of in (rank, 1 - rank))
        got = [torch.zeros_like(one) for one in theirs]
        works = [p2p.exchange(sent, into, 1 - rank, 1 - rank) for sent, into in zip(mine, got, strict=True)]
        for work in reversed(works):
            assert work.wait() and work.is_success()
        assert all(map(same_bits, got, theirs))


def test_messages_of_any_size_cross() -> None:
    values(run_ranks(2, _any_size, env=ONE_PER_NODE))


def _disagree(rank: int, sent: torch.Tensor, expected: torch.Tensor) -> str:
    """Both ends raise at once and live on, and so does their group."""
    p2p = SendReceive()
    dist.barrier()
    began = time.monotonic()
    with torch.device("meta"):
        other = p2p.receive(torch.ones(1, device="cpu"), 1 - rank, 1)  # first, since the next call may fail at once
        work = p2p.send(sent, 1) if rank == 0 else p2p.receive(expected.clone(), 0)
    with pytest.raises(DisagreementError) as caught:
        work.wait()
    assert time.monotonic() - began < 10, "an end waited for the group's timeout"
    for again in (work.wait, other.wait, lambda: p2p.send(torch.ones(10), 1 - rank)):
        with pytest.raises(DisagreementError):
            again()
    p2p.close()
    del work, other
    dist.barrier()
    with SendReceive() as later:
        got = torch.zeros(MIB)
        later.exchange(torch.ones(MIB), got, 1 - rank, 1 - rank).wait()
        assert bool(got.all())
    nothing_left_behind()
    return str(caught.value)


@pytest.mark.parametrize(
    ("sent", "expected", "named"),
    [
        (torch.ones(10), torch.ones(11), ["bytes of the message", "40 on rank 0", "44 on rank 1"]),
        (torch.ones(10), torch.ones(9), ["bytes of the message", "40 on rank 0", "36 on rank 1"]),
        (torch.ones(10), torch.ones(3), ["bytes of the message", "40 on rank 0", "12 on rank 1"]),
        (torch.ones(10), torch.ones(0), ["bytes of the message", "40 on rank 0", "0 on rank 1"]),
        (torch.ones(10), torch.ones(10, dtype=I32), ["dtype", "float32 on rank 0", "int32 on rank 1"]),
        (torch.ones(4005, dtype=BOOL), torch.ones(1000), ["bytes of the message", "4005 on rank 0", "4000 on rank 1"]),
        (torch.ones(131_071 + 8, dtype=U8), torch.ones(8, dtype=U8), ["bytes of", "131079 on rank 0", "8 on rank 1"]),
        (torch.ones(32 * MIB + 4, dtype=U8), torch.ones(32 * MIB, dtype=U8), ["bytes of", "33554436 on rank 0"]),
    ],
    ids=lambda given: f"{given.dtype} {tuple(given.shape)}" if isinstance(given, torch.Tensor) else "",
)
def test_ends_on_two_nodes_that_disagree(sent: torch.Tensor, expected: torch.Tensor, named: list[str]) -> None:
    for said in values(run_ranks(2, _disagree, sent, expected, env=ONE_PER_NODE)):
        assert all(one in said for one in named), said


def _makes(first: SendReceive) -> SendReceive:
    """Makes an object whose number has the same remainder as that of `first`, so the tags would be the same, too."""
    assert first._engine is not None
    name, number = first._engine.exchange._group_name, first._engine.exchange.number
    exchange._instances[name] = number + messages._OBJECTS - 1
    second = SendReceive()
    assert second._engine is not None and second._engine.exchange.number == number + messages._OBJECTS
    return second


def _beside_an_open_object(rank: int) -> bool:
    """Rank 0 receives through an object, while rank 1 first sends through another one."""
    with SendReceive() as first, _makes(first) as second:
        got = torch.zeros(2, 100)
        if rank == 0:
            works = [first.receive(got[0], 1), second.receive(got[1], 1)]
        else:
            works = [one.send(torch.full((100,), value), 0) for one, value in ((second, 2.0), (first, 1.0))]
        for work in works:
            work.wait()
        return rank == 1 or got.tolist() == [[1.0] * 100, [2.0] * 100]


def _after_a_disagreement(rank: int) -> bool:
    """One end expects another dtype, so nobody receives the bytes of the first object."""
    first = SendReceive()
    with pytest.raises(DisagreementError):
        (first.send(torch.ones(100), 1) if rank == 0 else first.receive(torch.zeros(100, dtype=I32), 0)).wait()
    first.close()
    with _makes(first) as second:
        got = torch.zeros(100)
        second.exchange(torch.full((100,), 2.0), got, 1 - rank, 1 - rank).wait()
        return got.tolist() == [2.0] * 100


def _after_a_receive_that_stays(rank: int) -> bool:
    """Rank 0 closes while its receive waits, and only rank 0 knows of it."""
    first, lost = SendReceive(), torch.zeros(100)
    if rank == 0:
        first.receive(lost, 1)
    first.close()
    with _makes(first) as second:
        got = torch.zeros(100)
        second.exchange(torch.full((100,), 2.0), got, 1 - rank, 1 - rank).wait()
        return got.tolist() == [2.0] * 100 and not lost.any()


@pytest.mark.parametrize("case", [_beside_an_open_object, _after_a_disagreement, _after_a_receive_that_stays])
def test_objects_far_apart_do_not_meet(case: Callable[[int], bool]) -> None:
    assert values(run_ranks(2, case, env=ONE_PER_NODE, timeout_s=20)) == [True, True]


def _open_at_once(rank: int, most: int) -> str:
    """Objects that are closed in order make room for others."""
    messages._OBJECTS = most
    for _ in range(2 * most):
        SendReceive().close()
    held = [SendReceive() for _ in range(most)]
    with pytest.raises(NotSupported) as caught:
        SendReceive()
    held.pop().close()
    held.append(SendReceive())
    for one in held:
        one.close()
    return str(caught.value)


def test_more_objects_than_tags_are_refused() -> None:
    for said in values(run_ranks(2, _open_at_once, 3, env=ONE_PER_NODE)):
        assert "fewer than 3 SendReceive objects" in said


def _disagree_while_data_moves(rank: int) -> None:
    """Both ends drop everything while the parts of equal size are under way. Gloo may not write to freed memory, nor
    stand still."""
    for _ in range(5):
        p2p, data = SendReceive(), torch.ones(64 * MIB + rank, dtype=U8)
        with contextlib.suppress(DisagreementError):
            (p2p.send(data, 1) if rank == 0 else p2p.receive(data, 0)).wait()
        p2p.close()
        del p2p, data
        gc.collect()
        dist.barrier()


def test_a_group_goes_on_after_a_disagreement() -> None:
    values(run_ranks(2, _disagree_while_data_moves, env=ONE_PER_NODE, timeout_s=40))
