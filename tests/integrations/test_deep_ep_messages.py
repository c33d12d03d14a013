"""ElasticBuffer's pipeline messages and all-gather sessions, on CPU ranks and emulated nodes, and what they refuse."""

from __future__ import annotations

import functools
import random
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from ep_plugin import deep_ep
from tests.moe.moe_cases import on_ranks
from tests.moe.test_across_nodes import on_nodes

MESSAGES, MOST_NUMEL, UNDER_WAY = 60, 5000, 3


def _messages(size: int, seed: int) -> list[tuple[int, int, int, torch.Tensor]]:
    """(when it is sent, sender, receiver, contents), the same on all ranks."""
    chooser, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    found = []
    for when in range(MESSAGES):
        sender = chooser.randrange(size)
        receiver = (sender + chooser.choice((1, -1))) % size
        found.append((when, sender, receiver, torch.randn(chooser.randrange(MOST_NUMEL), generator=generator)))
    return found


def every_message(rank: int, size: int, device: str = "cpu", group: Any = None) -> None:
    """Each rank sends when its turn comes and receives a little later, so that sends run ahead of their receives."""
    buffer = deep_ep.ElasticBuffer(group, explicitly_destroy=True)
    for seed in range(2):
        buffer.pp_set_config(4 * MOST_NUMEL, UNDER_WAY)
        turns: list[tuple[int, bool, int, torch.Tensor]] = []
        for when, sender, receiver, contents in _messages(size, seed):
            if sender == rank:
                turns.append((when, True, receiver, contents))
            if receiver == rank:
                turns.append((when + 2, False, sender, contents))
        for _, sends, peer, contents in sorted(turns, key=lambda turn: turn[:3]):
            expected = contents.to(device)
            if sends:
                sent = expected.clone()
                buffer.pp_send(sent, peer)
                sent.fill_(float("nan"))  # it may change
            else:
                got = torch.full_like(expected, float("nan"))
                buffer.pp_recv(got, peer)
                assert torch.equal(got, expected)
    buffer.destroy()


@pytest.mark.parametrize("size", [2, 3, 4])
def test_neighbours_get_what_was_sent(size: int) -> None:
    on_ranks(size, every_message)


def test_neighbours_on_other_nodes() -> None:
    on_nodes(2, 2, every_message)


def every_session(rank: int, size: int, device: str = "cpu", group: Any = None) -> None:
    buffer = deep_ep.ElasticBuffer(group, explicitly_destroy=True)
    assert deep_ep.ElasticBuffer.get_agrs_buffer_size_hint(cast(Any, dist.group.WORLD), 5) == 2 << 20
    bytes_of = functools.partial(deep_ep.ElasticBuffer.get_agrs_num_max_session_bytes, cast(Any, dist.group.WORLD))
    most = bytes_of([(3, 5)] * 3, torch.float32) + bytes_of((4096,), torch.bfloat16)
    most += bytes_of(torch.Size([7]), torch.int64) + bytes_of(((0, 2),), torch.half)
    buffer.agrs_set_config(most, 5)

    def of(rank: int, session: int, number: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 * session + 10 * rank + number)
        shape, dtype = [((3, 5), torch.float32), ((4096,), torch.bfloat16), ((7,), torch.int64), ((0, 2), torch.half)][
            number
        ]
        return torch.randint(0, 100, shape, generator=generator).to(dtype).to(device)

    for session in range(4):
        with buffer.agrs_new_session():
            mine = [of(rank, session, number) for number in range(4)]
            placed = buffer.agrs_get_inplace_tensor([tuple(mine[0].shape), tuple(mine[0].shape)], torch.float32)
            assert isinstance(placed, tuple)
            placed[1].copy_(mine[0])
            alone, wait = buffer.all_gather(mine[0])
            *several, wait_for_all = buffer.all_gather(mine[1:])
            in_place, wait_in_place = buffer.all_gather(placed[1])
            assert in_place[rank].data_ptr() == placed[1].data_ptr()
            for each in (wait, wait_for_all, wait_in_place):
                each()
            for number, gathered in enumerate([alone, *several]):
                assert torch.equal(gathered, torch.stack([of(other, session, number) for other in range(size)]))
            assert torch.equal(in_place, alone)
            with pytest.raises(ValueError, match="expected at most 5 in a session"):
                buffer.all_gather(mine[0])
    with buffer.agrs_new_session(enabled=False), pytest.raises(ValueError, match=r"all_gather\(\): expected an open"):
        buffer.all_gather(torch.ones(1, device=device))
    buffer.destroy()


@pytest.mark.parametrize("size", [2, 3])
def test_sessions_gather(size: int) -> None:
    on_ranks(size, every_session)


def test_sessions_over_two_nodes() -> None:
    on_nodes(2, 2, every_session)


def _refusals(rank: int, size: int) -> None:
    buffer = deep_ep.ElasticBuffer(cast(Any, dist.group.WORLD), explicitly_destroy=True)
    t = torch.ones(4)
    for call, before in ((lambda: buffer.pp_send(t, 1), "pp_set_config"), (lambda: buffer.all_gather(t), "agrs_set")):
        with pytest.raises(ValueError, match=rf"expected {before}.*\(\) on every rank before this call, got none"):
            call()
    with pytest.raises(ValueError, match="num_max_tensor_bytes: expected an integer of at least 1, got 0"):
        buffer.pp_set_config(0, 1)
    buffer.pp_set_config(16, 1)
    for message, tensor, peer in (
        ("t: expected at most 16 bytes, as in pp_set_config, got 20", torch.ones(5), (rank + 1) % size),
        ("t: expected a contiguous tensor", torch.ones(4, 2).t(), (rank + 1) % size),
        (rf"dst_rank_idx: expected a neighbour in the ring, .*, got {rank}", t, rank),
        ("dst_rank_idx: expected a neighbour .*, got 7", t, 7),
    ):
        with pytest.raises(ValueError, match=message):
            buffer.pp_send(tensor, peer)
    buffer.agrs_set_config(size * 16, 2)
    buffer.create_agrs_session()
    with pytest.raises(ValueError, match="expected no session that is open"):
        buffer.create_agrs_session()
    with pytest.raises(
        ValueError, match=f"expected at most {size * 16} gathered bytes in a session, .* got {size * 20}"
    ):
        buffer.all_gather(torch.ones(5))
    with pytest.raises(ValueError, match="t: expected contiguous tensors"):
        buffer.all_gather(torch.ones(2, 2).t())
    buffer.destroy_agrs_session()
    with pytest.raises(ValueError, match=r"destroy_agrs_session\(\): expected an open session"):
        buffer.destroy_agrs_session()
    buffer.destroy()


def test_refusals() -> None:
    on_ranks(4, _refusals)
