"""torch.distributed.pipelining over SendReceive: losses and gradients of every schedule are PyTorch's own."""

from __future__ import annotations

import os
import signal
import time
import unittest.mock
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ep_plugin.collectives.send_receive import MessageWork, Receive, Send, SendReceive
from ep_plugin.errors import CommunicatorClosed, PeerTimeout
from tests.faults.fault_cases import nothing_left_behind, set_deadline
from tests.ranks import run_ranks, values

WIDTH, BATCH, MICRO_BATCHES = 48, 16, 8
# By schedule: its stages on each rank.
SCHEDULES = {"ScheduleGPipe": 1, "Schedule1F1B": 1, "ScheduleInterleaved1F1B": 2, "ScheduleLoopedBFS": 2}
SCHEDULES |= {"ScheduleInterleavedZeroBubble": 2, "ScheduleZBVZeroBubble": 2, "ScheduleDualPipeV": 2}


class Block(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)) + x


def _stages(name: str, rank: int, size: int) -> list[int]:
    """The stages of a rank: in turn, or in the shape of a V."""
    if SCHEDULES[name] == 1:
        return [rank]
    return (
        [rank, 2 * size - 1 - rank] if name in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV") else [rank, rank + size]
    )


def _schedule(name: str, rank: int, size: int) -> tuple[Any, list[Block]]:
    from torch.distributed.pipelining import PipelineStage, schedules

    numbers = _stages(name, rank, size)
    blocks, device = [Block(number) for number in numbers], torch.get_default_device()
    stages = [
        PipelineStage(block, number, size * len(numbers), device) for number, block in zip(numbers, blocks, strict=True)
    ]
    given = stages if len(stages) > 1 else stages[0]
    return getattr(schedules, name)(given, MICRO_BATCHES, loss_fn=nn.functional.mse_loss), blocks


def _step(schedule: Any, numbers: list[int], num_stages: int, seed: int) -> list[torch.Tensor]:
    """The losses of the micro batches, where the last stage is."""
    generator = torch.Generator().manual_seed(seed)
    made = (torch.randn(BATCH, WIDTH, generator=generator, device="cpu") for _ in range(2))
    x, target = (one.to(torch.get_default_device()) for one in made)
    losses: list[torch.Tensor] = []
    given = {"target": target, "losses": losses} if num_stages - 1 in numbers else {}
    schedule.step(*([x] if 0 in numbers else []), **given)
    return [loss.detach() for loss in losses]


def _train(name: str, rank: int, size: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Losses of two steps, and this rank's parameters after them."""
    schedule, blocks = _schedule(name, rank, size)
    optimizer = torch.optim.SGD([p for block in blocks for p in block.parameters()], lr=0.1)
    losses: list[torch.Tensor] = []
    for seed in range(2):
        losses += _step(schedule, _stages(name, rank, size), size * SCHEDULES[name], seed)
        optimizer.step()
        optimizer.zero_grad()
    return losses, [p.detach().clone() for block in blocks for p in block.parameters()]


def _compares(rank: int, size: int, name: str) -> tuple[int, list[str]]:
    from torch.distributed.pipelining import schedules

    from ep_plugin.integrations import pipelining

    stock = schedules._batch_p2p
    expected = _train(name, rank, size)
    pipelining.enable()
    batch, calls = SendReceive.batch, 0

    def counted(self: SendReceive, ops: Sequence[Send | Receive]) -> MessageWork:
        nonlocal calls
        calls += 1
        return batch(self, ops)

    with unittest.mock.patch.object(SendReceive, "batch", counted):
        arms = {"ours": _train(name, rank, size), "ours again": _train(name, rank, size)}
    pipelining.disable()
    assert schedules._batch_p2p is stock
    arms["PyTorch's own again"] = _train(name, rank, size)
    nothing_left_behind()
    different = []
    for arm, found in arms.items():
        for what, ours, theirs in zip(("losses", "parameters"), found, expected, strict=True):
            different += [
                f"{arm}: {what} {index}: {one.flatten()[:4]}, {other.flatten()[:4]}"
                for index, (one, other) in enumerate(zip(ours, theirs, strict=True))
                if not torch.equal(one, other)
            ]
    return calls, different


@pytest.mark.parametrize(("name", "size"), [(name, 2) for name in SCHEDULES] + [("Schedule1F1B", 4)])
def test_losses_and_parameters_are_those_of_pytorch(name: str, size: int) -> None:
    for calls, different in values(run_ranks(size, _compares, size, name, timeout_s=120)):
        assert not different and calls > MICRO_BATCHES


def _loses_a_stage(rank: int) -> tuple[int | None, float]:
    from ep_plugin.integrations import messages, pipelining

    pipelining.enable()
    schedule, _ = _schedule("Schedule1F1B", rank, 2)
    _step(schedule, [rank], 2, seed=0)
    through = messages.messages_of("pipelining", None, torch.empty(0))
    assert through is not None
    set_deadline(through._engine, 1.5)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(PeerTimeout) as caught:
        _step(schedule, [rank], 2, seed=1)
    return caught.value.rank, time.monotonic() - began


def test_a_dead_stage_is_named() -> None:
    peer, seconds = values(run_ranks(2, _loses_a_stage)[:1])[0]
    assert peer == 1 and seconds < 6.5


def _other_messages(rank: int) -> None:
    """Messages with a tag stay PyTorch's, and those of one step may belong to two groups."""
    from torch.distributed.pipelining import schedules

    from ep_plugin.integrations import pipelining

    pipelining.enable()
    other, more = 1 - rank, dist.new_group([0, 1])
    sent, got = torch.full((3,), rank + 1.0), [torch.zeros(3) for _ in range(3)]
    ops = []
    for out, group, tag in zip(got, (None, more, None), (0, 0, 5), strict=True):
        ops += [dist.P2POp(dist.isend, sent, other, group, tag), dist.P2POp(dist.irecv, out, other, group, tag)]
    works = schedules._batch_p2p(ops)
    schedules._wait_batch_p2p(works)
    assert all(out.tolist() == [other + 1.0] * 3 for out in got)
    assert schedules._batch_p2p([]) == []
    pipelining.disable()


def test_messages_of_several_groups_and_with_tags() -> None:
    values(run_ranks(2, _other_messages))


def _makes_the_group_again(rank: int) -> None:
    from ep_plugin.integrations import messages

    tensor = torch.empty(0)
    assert messages.messages_of("pipelining", None, tensor.to("meta")) is None  # CPUs and GPUs are served
    first = messages.messages_of("pipelining", None, tensor)
    other = messages.messages_of("megatron", None, tensor)
    assert first is not None and other is not None
    dist.barrier()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(messages, "is_alive", lambda group: group is not dist.group.WORLD)  # as if it had been destroyed
        messages.messages_of("pipelining", dist.new_group([0, 1]), tensor)
    for closed in (first, other):
        with pytest.raises(CommunicatorClosed):
            closed.check()
    last = messages.messages_of("megatron", None, tensor)
    messages.close_all("pipelining")
    assert last is not None and last is messages.messages_of("megatron", None, tensor)
    messages.close_all("megatron")


def test_objects_of_destroyed_groups_are_closed() -> None:
    values(run_ranks(2, _makes_the_group_again))
