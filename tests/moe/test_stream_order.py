"""The control path of GPUs over nodes, on stand-ins for streams and NCCL: everything comes after what it needs."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import ep_plugin
from ep_plugin import _C
from ep_plugin.config import DispatchLayout
from ep_plugin.errors import CaptureRefused
from tests.moe.moe_cases import LAYOUTS, Case, communicator, make_inputs, ragged
from tests.moe.stream_order import CALLER, Log, TorchOnStreams, as_on_gpus
from tests.ranks import run_ranks, values

TOKENS = 40


def _run(comm: Any, log: Log, operation: Any, host_waits: bool = False) -> Any:
    """Runs an operation, and checks that the caller's stream comes after all of it. host_waits: as it may."""
    log.events.clear()
    start, finish, log.host_may_wait = operation.start, operation.finish, host_waits

    def noted(half: Any) -> Any:
        with TorchOnStreams(log), pytest.MonkeyPatch.context() as patch:
            if not host_waits:
                patch.setattr(torch.Tensor, "tolist", None)
            return half()

    operation.start, operation.finish = (lambda: noted(start)), (lambda: noted(finish))
    result = comm.in_flight.run(operation)
    log.all_before(CALLER)
    log.check_made()
    return result


def _round_trips(rank: int, size: int, layout: DispatchLayout, quantize: str | None, asked: int | None) -> None:
    case = Case(tokens=ragged(size, TOKENS, 1), num_experts=4 * size, topk=4, hidden=128)
    inputs, capacity = make_inputs(case), size * TOKENS * case.topk
    with communicator(case, layout, rail_chunks=asked, max_tokens_per_rank=TOKENS) as comm:
        ep_plugin.record_stats()
        log, chunks = as_on_gpus(comm), comm.new_dispatch.args[0].chunks
        given = inputs.x[rank], inputs.ids[rank]
        for fixed in (None, capacity):
            fresh = *given, inputs.weights[rank], None, fixed, quantize, [], comm.number
            result = _run(comm, log, comm.new_dispatch(*fresh), host_waits=fixed is None)
            _check_dispatch(log, chunks, host_waits=fixed is None)
            _check_routing(log)
            waited, *waited_for = comm.nodes._waits[_C.waits_head_words - 1 :].tolist()
            assert waited > 0 and min(waited_for) >= 0
            handle, weights = list(result[8:]), result[2]
            cached = *given, None, None, fixed, None, handle, comm.number
            rows = _run(comm, log, comm.new_dispatch(*cached))[0]
            _check_dispatch(log, chunks, host_waits=False)
            combine = comm.new_combine(rows, weights, inputs.x[rank], weights, False, handle, comm.number)
            sums, extra = _run(comm, log, combine)
            assert sums.shape == given[0].shape and extra.shape == given[1].shape
            _check_combine(log, chunks)


def _check_dispatch(log: Log, chunks: int, host_waits: bool) -> None:
    """Rows start before anything waits, or is sent inside the node; they are waited for one chunk after the other."""
    started, waited = log.order("start", "rows"), log.order("wait", "rows")
    assert len(started) == len(waited) == chunks
    assert started[-1] < min(*waited, *log.order("kernel", "dispatch_send"), *log.order("kernel", "dispatch_recv"))
    sends, receives = log.order("kernel", "dispatch_send"), log.order("kernel", "dispatch_recv")
    assert len(sends) == len(receives) == chunks + 1 and sends[0] < waited[0]
    for chunk, wait in enumerate(waited):
        assert wait < sends[chunk + 1] < receives[chunk + 1]
    assert len(log.order("host waits")) == (1 if host_waits else 0)


def _check_routing(log: Log) -> None:
    """All segments are notified before rows cross. Tokens of other nodes are planned when they have come."""
    (counts,), plans = log.order("wait", "counts"), log.order("kernel", "plan")
    notified, started, waited = log.order("kernel", "notify"), log.order("start", "rows"), log.order("wait", "rows")
    assert counts < plans[0] < notified[0] and notified[-1] < started[0]
    for wait, plan, positions in zip(waited, plans[1:], log.order("kernel", "positions"), strict=True):
        assert wait < plan < positions
    assert len(notified) == len(plans) == len(waited) + 1


def _check_combine(log: Log, chunks: int) -> None:
    """Each sum returns before the next segment is waited for; all of them before any is waited for."""
    started, waited, receives = (
        log.order("start", "sums"),
        log.order("wait", "sums"),
        log.order("kernel", "combine_recv"),
    )
    assert len(started) == len(waited) == chunks and len(receives) == chunks + 1
    for chunk, start in enumerate(started):
        assert receives[chunk] < start < receives[chunk + 1]
    assert started[-1] < waited[0] and waited[-1] < log.order("kernel", "combine_add")[0]
    assert not log.order("host waits") and not log.order("start", "counts")


@pytest.mark.parametrize(("quantize", "chunks"), [(None, None), ("e4m3", 2)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_everything_comes_after_what_it_needs(layout: DispatchLayout, quantize: str | None, chunks: int | None) -> None:
    env = {"EP_PLUGIN_RANKS_PER_NODE": "2"}
    values(run_ranks(4, _round_trips, 4, layout, quantize, chunks, env=env, timeout_s=200))


def _breaks(rank: int, size: int, left_out: str) -> list[str]:
    """Leaves one thing out of the order of streams, and returns what the log says of it."""
    case = Case(tokens=(TOKENS,) * size, num_experts=4 * size, topk=4, hidden=64)
    inputs, said = make_inputs(case), []
    with communicator(case, LAYOUTS[0], max_tokens_per_rank=TOKENS) as comm:
        log = as_on_gpus(comm)
        nodes, streams = comm.new_dispatch.args[0], comm.engine.streams
        if left_out == "enter":
            nodes.enter = lambda: None
        elif left_out == "rail":
            streams.on_own = contextlib.nullcontext  # messages start and are waited for on the caller's stream
        elif left_out == "join":
            streams.join = lambda: None
        arguments = inputs.x[rank], inputs.ids[rank], inputs.weights[rank], None, None, None, [], comm.number
        try:
            _run(comm, log, comm.new_dispatch(*arguments), host_waits=True)
        except AssertionError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("left_out", ["enter", "rail", "join"])
def test_an_order_that_is_left_out_is_noticed(left_out: str) -> None:
    for said in values(run_ranks(2, _breaks, 2, left_out, env={"EP_PLUGIN_RANKS_PER_NODE": "1"})):
        assert len(said) == 1 and ("is not ordered after" in said[0] or "may not be over" in said[0]), said


def _captures(rank: int, size: int) -> None:
    """A capture holds its rail. One that cannot be captured refuses a capture, before anything is enqueued."""
    case = Case(tokens=(TOKENS,) * size, num_experts=4 * size, topk=4, hidden=64)
    inputs = make_inputs(case)
    with communicator(case, LAYOUTS[0], max_tokens_per_rank=TOKENS) as comm:
        log, streams = as_on_gpus(comm), comm.engine.streams
        arguments = inputs.x[rank], inputs.ids[rank], None, None, size * TOKENS * 4, None, [], comm.number
        rail = comm.engine.rails._rail
        streams.captured = 7
        with pytest.raises(CaptureRefused, match="run one step of this shape before capturing"):
            _run(comm, log, comm.new_dispatch(*arguments))
        assert not log.events, "a capture that finds no pool goes on without the dispatch"
        streams.captured = 0
        _run(comm, log, comm.new_dispatch(*arguments))
        assert not rail.held
        streams.captured, rail.follow = 7, lambda work: SimpleNamespace(wait=lambda: None)  # in place of an event
        _run(comm, log, comm.new_dispatch(*arguments))
        assert rail.held and not log.order("host waits")
        rail.captures = False
        with pytest.raises(CaptureRefused, match="expected a rail over NCCL while a CUDA graph is captured"):
            _run(comm, log, comm.new_dispatch(*arguments))
        assert not log.events
        streams.captured = 0
        _run(comm, log, comm.new_dispatch(*arguments))


def test_a_rail_that_cannot_be_captured_refuses_a_capture() -> None:
    values(run_ranks(2, _captures, 2, env={"EP_PLUGIN_RANKS_PER_NODE": "1"}))
