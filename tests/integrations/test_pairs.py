"""The collectives of process groups: which groups share them, and when they are closed."""

from __future__ import annotations

import datetime
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ep_plugin.errors import CommunicatorClosed, PeerTimeout
from ep_plugin.integrations import pairs
from tests.ranks import run_ranks, values

CPU = torch.device("cpu")


def _in_another_order(rank: int) -> None:
    groups = [dist.new_group(timeout=datetime.timedelta(seconds=2)) for _ in range(2)]
    user, output = pairs.PairUser("fsdp2"), torch.empty(2)
    for number, group in enumerate(groups):
        user.pair(group, CPU).all_gather(output, torch.full((1,), float(number)))
        assert output.tolist() == [number, number]
    with pytest.raises(PeerTimeout, match="in the same order"):
        user.pair(groups[rank], CPU).all_gather(output, torch.ones(1))


def test_a_gather_of_one_group_never_meets_another_groups() -> None:
    """They have the same ranks and sizes."""
    values(run_ranks(2, _in_another_order))


def _destroyed(rank: int) -> None:
    user, other = pairs.PairUser("fsdp2"), pairs.PairUser("fsdp2")
    first, model = dist.new_group(), torch.nn.Module()
    gone = user.pair(first, CPU, model)
    assert other.pair(first, CPU) is gone and gone.num_users == 2
    gone.all_gather(torch.empty(2), torch.ones(1))
    dist.barrier()
    dist.destroy_process_group(first)
    again = user.pair(dist.new_group(), CPU, model)
    assert list(pairs._pairs.values()) == [again] and again.num_users == 1
    again.all_gather(torch.empty(2), torch.ones(1))
    with pytest.raises(CommunicatorClosed):
        gone.all_gather(torch.empty(2), torch.ones(1))
    other.leave()
    assert again.num_users == 1
    user.leave()
    assert pairs._pairs == {}


def test_collectives_of_destroyed_groups_are_closed() -> None:
    values(run_ranks(2, _destroyed))


def _alone(rank: int) -> None:
    alone = [dist.new_group([one]) for one in range(2)][rank]
    user, output, mine = pairs.PairUser("fsdp2"), torch.empty(4), torch.arange(4.0)
    pair = user.pair(alone, CPU)
    with mock.patch.dict(pairs.STOCK_FROM_BYTES, {"cpu": 1}):  # as on GPUs
        assert pair.why_left("all_gather", output) is None
    pair.run("all_gather", output, mine, async_op=True).wait()
    assert torch.equal(output, mine)
    user.leave()


def test_a_gather_over_one_rank_is_served_in_memory_that_nobody_else_maps() -> None:
    values(run_ranks(2, _alone))
