"""Megatron-core's pipeline schedules over SendReceive on CPU ranks: losses and gradients are Megatron's own."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ep_plugin.errors import PeerTimeout
from tests.faults.fault_cases import nothing_left_behind, set_deadline
from tests.integrations.on_cpus import make_distributed_optimizer_run_here
from tests.ranks import run_ranks, values

pytest.importorskip("megatron.core", reason="needs megatron-core")

from tests.integrations.megatron_layers import make_config

SEQUENCE, BATCH, HIDDEN, MICRO_BATCHES = 6, 2, 16, 8
# By name: stages on each rank, and Megatron's options.
SCHEDULES: dict[str, tuple[int, dict[str, Any]]] = {
    "1f1b": (1, {}),
    "1f1b, one by one": (1, {"batch_p2p_comm": False}),
    "interleaved": (2, {"batch_p2p_comm": False, "overlap_p2p_comm": True}),
    "interleaved, batched": (2, {}),
    "lengths that vary": (1, {"variable_seq_lengths": True}),
}


class Chunk(nn.Module):
    """One stage: a layer, between the input that Megatron sets and the output that it sends."""

    def __init__(self, number: int, last: int, vp_stage: int | None, config: Any) -> None:
        super().__init__()
        from megatron.core.enums import ModelType

        torch.manual_seed(number)
        self.model_type = ModelType.encoder_or_decoder
        self.linear = nn.Linear(HIDDEN, HIDDEN)
        self.number, self.last, self.vp_stage, self.config = number, last, vp_stage, config
        self.given: torch.Tensor | None = None

    def set_input_tensor(self, tensor: Any) -> None:
        self.given = tensor[0] if isinstance(tensor, list) else tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = x if self.number == 0 else self.given
        return torch.tanh(self.linear(given)) + given


def _prepare(size: int, stages: int, options: dict[str, Any], frees: bool = True) -> list[Chunk]:
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=size,
        virtual_pipeline_model_parallel_size=stages if stages > 1 else None,
    )
    config = make_config(
        "alltoall",
        1,
        1,
        num_layers=size * stages,
        pipeline_model_parallel_size=size,
        virtual_pipeline_model_parallel_size=stages if stages > 1 else None,
        pipeline_dtype=torch.float32,
        deallocate_pipeline_outputs=frees,
        hidden_size=HIDDEN,
        **options,
    )
    rank = parallel_state.get_pipeline_model_parallel_rank()
    return [
        Chunk(rank + chunk * size, size * stages - 1, chunk if stages > 1 else None, config) for chunk in range(stages)
    ]


def _inputs(config: Any) -> Iterator[torch.Tensor]:
    generator, device = torch.Generator().manual_seed(3), torch.get_default_device()
    lengths = [SEQUENCE + config.variable_seq_lengths * number for number in range(MICRO_BATCHES)]
    made = (torch.randn(length, BATCH, HIDDEN, generator=generator, device="cpu") for length in lengths)
    return iter([one.to(device) for one in made])


def _forward_step(inputs: Iterator[torch.Tensor], chunk: Chunk, *_: Any) -> tuple[torch.Tensor, Any]:
    def loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        value = output.square().mean()
        return value, {"loss": value.detach().clone()}

    return chunk(next(inputs)), loss


def _step(chunks: list[Chunk]) -> list[torch.Tensor]:
    """The losses of the micro batches, where the last stage is."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    found = get_forward_backward_func()(
        forward_step_func=_forward_step,
        data_iterator=[_inputs(one.config) for one in chunks] if len(chunks) > 1 else _inputs(chunks[0].config),
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=MICRO_BATCHES,
        seq_length=SEQUENCE,
        micro_batch_size=BATCH,
        forward_only=False,
    )
    return [one["loss"] for one in found]


def _train(size: int, stages: int, options: dict[str, Any], frees: bool) -> list[torch.Tensor]:
    """Losses, then gradients. frees: Megatron frees outputs that it has sent."""
    chunks = _prepare(size, stages, options, frees)
    losses = _step(chunks) + _step(chunks)
    return losses + [parameter.grad for chunk in chunks for parameter in chunk.parameters()]  # type: ignore[misc]


def _compares(rank: int, size: int, names: list[str]) -> dict[str, tuple[int, int]]:
    """By schedule: calls of ours, and how many losses and gradients differ from Megatron's."""
    make_distributed_optimizer_run_here()
    from megatron.core.pipeline_parallel import p2p_communication

    from ep_plugin.collectives.send_receive import SendReceive
    from ep_plugin.integrations.megatron import pipeline

    stock = p2p_communication._batched_p2p_ops, p2p_communication._p2p_ops
    batch = SendReceive.batch
    started: list[Any] = []
    SendReceive.batch = lambda self, ops: started.append(ops) or batch(self, ops)  # type: ignore[assignment, method-assign, func-returns-value]
    waits: list[str] = []  # Megatron's, for the whole device: ours names the device when it opens or closes
    synchronize = torch.cuda.synchronize

    def counted(*args: Any, **kwargs: Any) -> None:
        waits.extend([] if args or kwargs else [name])
        synchronize(*args, **kwargs)

    torch.cuda.synchronize = counted  # type: ignore[assignment]
    compared = {}
    for name in names:
        waits.clear()
        expected = _train(size, *SCHEDULES[name], frees=False)  # gloo would read them after they are freed
        is_batched = SCHEDULES[name][1].get("batch_p2p_comm", True)
        assert (len(waits) > 0) == is_batched
        for_shapes = len(waits) // 2 if SCHEDULES[name][1].get("variable_seq_lengths") else 0  # Megatron sends them
        started.clear(), waits.clear()
        pipeline.enable()
        found = _train(size, *SCHEDULES[name], frees=True)
        assert len(waits) == for_shapes
        with mock.patch.object(pipeline, "messages_of", return_value=None):  # Megatron's own messages, below ours
            _train(size, *SCHEDULES[name], frees=False)
        assert (len(waits) > 0) == is_batched
        pipeline.disable()
        assert (p2p_communication._batched_p2p_ops, p2p_communication._p2p_ops) == stock
        different = sum(not torch.equal(one, other) for one, other in zip(found, expected, strict=True))
        compared[name] = len(started), different
    nothing_left_behind()
    return compared


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "names"),
    [
        (2, ["1f1b", "1f1b, one by one", "interleaved"]),
        (4, ["interleaved", "interleaved, batched", "lengths that vary"]),
    ],
)
def test_losses_and_gradients_are_those_of_megatron(size: int, names: list[str]) -> None:
    for compared in values(run_ranks(size, _compares, size, names, timeout_s=200, framework="megatron")):
        for name, (calls, different) in compared.items():
            assert different == 0 and calls >= 2 * MICRO_BATCHES, name


def _loses_a_stage(rank: int) -> tuple[int | None, float]:
    make_distributed_optimizer_run_here()
    from megatron.core import parallel_state

    from ep_plugin.integrations.megatron import pipeline
    from ep_plugin.integrations.messages import messages_of

    pipeline.enable()
    chunks = _prepare(2, 1, {})
    _step(chunks)
    p2p = messages_of("megatron", parallel_state.get_pipeline_model_parallel_group(), torch.empty(0))
    set_deadline(p2p._engine, 1.5)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(PeerTimeout) as caught:
        _step(chunks)
    return caught.value.rank, time.monotonic() - began


@pytest.mark.deadline
def test_a_dead_stage_is_named() -> None:
    peer, seconds = values(run_ranks(2, _loses_a_stage, timeout_s=120, framework="megatron")[:1])[0]
    assert peer == 1 and seconds < 6.5
