"""Dispatch and combine with one kernel that sends and receives. CPUs test the control path, which GPUs share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from ep_plugin.runtime.streams import Streams
from tests.moe.moe_cases import (
    LAYOUTS,
    Case,
    check_dispatch,
    communicator,
    make_inputs,
    named,
    on_ranks,
    poisoned,
    ragged,
    round_trip,
    same_bits,
)

ONE_KERNEL = {"dispatch_recv_sms": 0, "combine_recv_sms": 0}


def _rounds(rank: int, size: int) -> None:
    """Ranks may choose differently. Pools grow, have a fixed size, or serve a known routing."""
    for layout in LAYOUTS:
        for most in (None, 60):
            settings: dict[str, Any] = {"max_tokens_per_rank": most, **(ONE_KERNEL if rank % 3 != 1 else {})}
            first = Case(tokens=ragged(size, 20, 1), num_experts=2 * size)
            with communicator(first, layout, **settings) as comm, named((layout, most)), poisoned():
                for seed, largest in ((1, 20), (2, 60), (3, 5)):
                    inputs = make_inputs(replace(first, tokens=ragged(size, largest, seed), seed=seed))
                    round_trip(comm, inputs, inputs.expected(layout))


@pytest.mark.parametrize("size", [1, 2, 5])
def test_rounds(size: int) -> None:
    on_ranks(size, _rounds)


def _without_the_host(rank: int, size: int) -> None:
    """Asynchronous calls, with more capacity than rows, and with a routing used again."""
    case = Case(tokens=ragged(size, 30, 4), num_experts=2 * size)
    inputs = make_inputs(case)
    for layout in LAYOUTS:
        expected = inputs.expected(layout)[rank]
        rows = len(expected.tokens)
        arguments = inputs.x[rank], inputs.ids[rank], inputs.weights[rank]
        with communicator(case, layout, max_tokens_per_rank=30, **ONE_KERNEL) as comm, named(layout), poisoned():
            work = comm.dispatch_async(*arguments, capacity=rows + 3)
            assert not work.done
            out, handle = work.wait()
            same_bits("tokens", out.tokens[:rows], expected.tokens)
            assert not out.tokens[rows:].any() and int(out.required) == rows
            again, _ = comm.dispatch(*arguments, previous_handle=handle, capacity=rows + 3)
            same_bits("cached", again.tokens, out.tokens)
            begun = comm.dispatch_async(*arguments)
            comm.combine(out.tokens, handle, weights=out.weights)
            check_dispatch(begun.wait()[0], expected)


@pytest.mark.parametrize("size", [1, 3])
def test_without_the_host(size: int) -> None:
    on_ranks(size, _without_the_host)


class _RecordingStreams(Streams):
    """Streams that remember the memory that they must keep."""

    def __init__(self) -> None:
        self.kept: set[int] = set()

    def enter_on(self, stream: int, sms: int, needed: int) -> None:
        pass

    def record(self, *tensors: torch.Tensor | None) -> None:
        self.kept |= {tensor.data_ptr() for tensor in tensors if tensor is not None}


def _outputs_are_kept(rank: int, size: int) -> None:
    """After a fault the caller may never join the streams. They must know the memory that kernels still write."""
    case = Case(tokens=ragged(size, 30, 4), num_experts=2 * size)
    inputs = make_inputs(case)
    with communicator(case, LAYOUTS[0], **ONE_KERNEL) as comm:
        streams = _RecordingStreams()
        comm.engine.use(streams)
        work = comm.dispatch_async(inputs.x[rank], inputs.ids[rank], inputs.weights[rank])
        kept = set(streams.kept)
        out, handle = work.wait()
        for tensor in (out.tokens, out.weights, out.row_expert_ids, out.num_tokens_per_expert, handle.recv_rows):
            assert tensor is not None and tensor.data_ptr() in kept
        begun = comm.combine_async(out.tokens, handle, weights=out.weights)
        kept = set(streams.kept)
        assert begun.wait().data_ptr() in kept


def test_outputs_under_way_are_kept_whatever_happens() -> None:
    on_ranks(2, _outputs_are_kept)


def _sms_change(rank: int, size: int) -> None:
    """SM counts change while operations are in flight, and differ between ranks. The rows stay the same."""
    case = Case(tokens=ragged(size, 30, 4), num_experts=2 * size)
    inputs = make_inputs(case)
    expected = inputs.expected(LAYOUTS[0])
    arguments = inputs.x[rank], inputs.ids[rank], inputs.weights[rank]
    with communicator(case, LAYOUTS[0]) as comm:
        first = comm.dispatch_async(*arguments)
        if rank == 0:
            comm.set_sms(**ONE_KERNEL)
            assert comm.engine.dispatch_sms(30, 64, 2, False).receiving == 0
        check_dispatch(first.wait()[0], expected[rank])
        round_trip(comm, inputs, expected)
        comm.set_sms()
        assert comm.engine.dispatch_sms(30, 64, 2, False).receiving > 0
        round_trip(comm, inputs, expected)
        with pytest.raises(ValueError, match=r"set_sms: expected names among dispatch_send_sms, .*, got send_sms"):
            comm.set_sms(send_sms=4)
        with pytest.raises(ValueError, match="combine_send_sms: expected an integer of at least 1, got 0"):
            comm.set_sms(combine_send_sms=0)


def test_sms_may_change_between_operations() -> None:
    on_ranks(2, _sms_change)
