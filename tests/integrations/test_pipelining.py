"""torch.distributed.pipelining over SendReceive: losses and gradients of every schedule are PyTorch's own."""

from __future__ import annotations

import os
import signal
import threading
import time
import unittest.mock
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ep_plugin import counts
from ep_plugin.collectives.send_receive import MessageWork, Receive, Send, SendReceive
from ep_plugin.errors import CommunicatorClosed, PeerTimeout
from tests.faults.fault_cases import nothing_left_behind, set_deadline
from tests.ranks import run_ranks, values
from tests.scripts_on_ranks import run_script

ROOT = Path(__file__).parents[2]
WIDTH, BATCH, MICRO_BATCHES = 48, 16, 8
# By schedule: its stages on each rank.
SCHEDULES = {"ScheduleGPipe": 1, "Schedule1F1B": 1, "ScheduleInterleaved1F1B": 2, "ScheduleLoopedBFS": 2}
SCHEDULES |= {"ScheduleInterleavedZeroBubble": 2, "ScheduleZBVZeroBubble": 2, "ScheduleDualPipeV": 2}
SCHEDULES |= {"a table of actions": 2}  # of `_by_table`


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
    make = _by_table if name == "a table of actions" else getattr(schedules, name)
    return make(given, MICRO_BATCHES, loss_fn=nn.functional.mse_loss), blocks


def _by_table(stages: list[Any], num_micro_batches: int, **options: Any) -> Any:
    """A schedule that PyTorch does not have: each micro batch goes through all stages before the next one does."""
    from torch.distributed.pipelining.schedules import (
        BACKWARD_INPUT,
        BACKWARD_WEIGHT,
        FORWARD,
        _Action,
        _PipelineScheduleRuntime,
    )

    schedule = _PipelineScheduleRuntime(stages, num_micro_batches, **options)
    size = stages[0].group_size
    table: dict[int, list[_Action | None]] = {}
    for rank in range(size):
        numbers, each = (rank, rank + size), range(num_micro_batches)
        table[rank] = [_Action(number, FORWARD, one) for one in each for number in numbers]
        for one in each:
            for number in reversed(numbers):
                table[rank] += [_Action(number, kind, one) for kind in (BACKWARD_INPUT, BACKWARD_WEIGHT)]
    schedule._prepare_schedule_with_comms(table)
    return schedule


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


class Image(nn.Module):
    """A convolution whose output, and whose input's gradient, are channels-last."""

    def __init__(self, number: int) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.convolution = nn.Conv2d(4, 4, 3, padding=1).to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.convolution(x)).to(memory_format=torch.channels_last)


def _trains_images(rank: int, size: int) -> tuple[list[torch.Tensor], list[torch.Tensor], list[bool]]:
    """Losses and gradients of the second step, and whether each message's tensor was contiguous."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    from ep_plugin.integrations import pipelining

    pipelining.enable()
    stage = Image(rank)
    schedule = ScheduleGPipe(
        PipelineStage(stage, rank, size, torch.device("cpu")), MICRO_BATCHES, loss_fn=nn.functional.mse_loss
    )
    batch, contiguous, losses = SendReceive.batch, list[bool](), list[torch.Tensor]()

    def noted(self: SendReceive, ops: Sequence[Send | Receive]) -> MessageWork:
        contiguous.extend(op.tensor.is_contiguous() for op in ops)
        return batch(self, ops)

    x, target = _images()
    with unittest.mock.patch.object(SendReceive, "batch", noted):
        for _ in range(2):
            stage.zero_grad()
            given = {"target": target, "losses": losses} if rank == size - 1 else {}
            schedule.step(*([x] if rank == 0 else []), **given)
    pipelining.disable()
    gradients = [p.grad for p in stage.parameters() if p.grad is not None]
    return [loss.detach() for loss in losses], gradients, contiguous


def _images() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    made = (torch.randn(BATCH, 4, 6, 5, generator=generator) for _ in range(2))
    return [one.to(memory_format=torch.channels_last) for one in made]


def test_activations_may_be_channels_last() -> None:
    """Gloo refuses them, so one process that runs both stages is the reference."""
    results = values(run_ranks(2, _trains_images, 2))
    stages, (x, target) = [Image(0), Image(1)], _images()
    losses = []
    for part, wanted in zip(x.chunk(MICRO_BATCHES), target.chunk(MICRO_BATCHES), strict=True):
        losses.append(nn.functional.mse_loss(stages[1](stages[0](part)), wanted))
        (losses[-1] / MICRO_BATCHES).backward()
    torch.testing.assert_close(results[1][0], [loss.detach() for loss in losses])
    for (_, gradients, contiguous), stage in zip(results, stages, strict=True):
        assert contiguous and not any(contiguous)
        torch.testing.assert_close(gradients, [p.grad for p in stage.parameters()])


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


@pytest.mark.deadline
def test_a_dead_stage_is_named() -> None:
    peer, seconds = values(run_ranks(2, _loses_a_stage)[:1])[0]
    assert peer == 1 and seconds < 6.5


SCRIPT = """
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)
stage = PipelineStage(torch.nn.Linear(16, 16), rank, ranks, torch.device("cpu"))
schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=torch.nn.functional.mse_loss)
x, losses = torch.linspace(-1, 1, 128).view(8, 16), []
schedule.step(*([x] if rank == 0 else []), **({} if rank == 0 else {"target": x, "losses": losses}))
import ep_plugin.integrations
row = next(row for row in ep_plugin.integrations.status() if row.name == "pipelining")
print([loss.item() for loss in losses], row.state, row.served, row.left)
dist.destroy_process_group()
"""


def test_the_variable_alone_switches_it_on(tmp_path: Path) -> None:
    outputs = {}
    for switch in ("", "pipelining"):
        (tmp_path / "train.py").write_text(SCRIPT)
        run_script(
            [tmp_path / "train.py"], 2, tmp_path, PYTHONPATH=str(ROOT), **({"EP_PLUGIN": switch} if switch else {})
        )
        outputs[switch] = [(tmp_path / f"log.{rank}").read_text().splitlines()[-1].split("] ") for rank in range(2)]
    for (stock, off), (ours, on) in zip(outputs[""], outputs["pipelining"], strict=True):
        assert (stock, off, on) == (ours, "off 0 0", "on 8 0")  # an activation and a gradient for each micro batch


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


def _outlives_a_wrapper(rank: int) -> None:
    """Somebody wraps our function, and we are disabled below it."""
    from torch.distributed.pipelining import schedules

    from ep_plugin.integrations import messages, pipelining

    pipelining.enable()
    ours = schedules._batch_p2p
    schedules._batch_p2p = lambda ops, desc=None: ours(ops, desc)
    for served in (2, 2):
        out = torch.zeros(3)
        ops = [dist.P2POp(op, tensor, 1 - rank) for op, tensor in ((dist.isend, torch.ones(3)), (dist.irecv, out))]
        schedules._wait_batch_p2p(schedules._batch_p2p(ops))
        assert out.tolist() == [1.0] * 3 and counts.num_served["pipelining"] == served
        pipelining.disable()
    assert not messages._entries


def test_others_may_wrap_the_function() -> None:
    values(run_ranks(2, _outlives_a_wrapper))


def _from_threads(rank: int) -> None:
    """Each thread first uses a group of its own, in another order on each rank."""
    from ep_plugin.integrations import messages

    groups = [dist.new_group([0, 1]) for _ in range(2)]
    begun = [threading.Event() for _ in groups]
    made: dict[int, Any] = {}

    def use(place: int, before: int | None) -> None:
        if before is not None:
            begun[before].wait()
        begun[place].set()
        made[place] = messages.messages_of("pipelining", groups[place], torch.empty(0))

    first, second = (0, 1) if rank == 0 else (1, 0)
    threads = [threading.Thread(target=use, args=given) for given in ((first, None), (second, first))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made[0] is not made[1] and None not in made.values()
    messages.close_all("pipelining")


def test_threads_may_first_use_groups_in_any_order() -> None:
    values(run_ranks(2, _from_threads, timeout_s=30))


def _makes_the_group_again(rank: int) -> None:
    from ep_plugin.integrations import messages

    with pytest.raises(ValueError, match="tensor of a message: expected a tensor, got list"):
        messages.messages_of("pipelining", None, [1.0])  # type: ignore[arg-type]

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
