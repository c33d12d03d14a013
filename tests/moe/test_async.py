"""Operations that are started now and completed later, by wait() or by the next operation."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from ep_plugin.moe.in_flight import DispatchWork
from ep_plugin.moe.reference import reference_combine
from tests.moe.moe_cases import (
    FLAT,
    LAYOUTS,
    Case,
    Inputs,
    check_combine,
    check_dispatch,
    close,
    communicator,
    expert_rows,
    make_inputs,
    named,
    on_ranks,
    poisoned,
    ragged,
    round_trip,
    same_bits,
)


def _inputs(size: int, seed: int, most: int = 30) -> Inputs:
    return make_inputs(Case(tokens=ragged(size, most, seed), num_experts=2 * size, dtype=torch.float64, seed=seed))


def _started_and_waited(rank: int, size: int) -> None:
    """Pools that may grow and pools of a fixed size start differently. The former send after a host wait."""
    for layout in LAYOUTS:
        for most in (None, 60):
            first, second = _inputs(size, 1), _inputs(size, 2, most=60)
            with communicator(first.case, layout, max_tokens_per_rank=most) as comm, named((layout, most)), poisoned():
                for inputs in (first, second, first):
                    expected = inputs.expected(layout)
                    work = comm.dispatch_async(inputs.x[rank], inputs.ids[rank], inputs.weights[rank])
                    assert not work.done
                    out, handle = work.wait()
                    assert work.done and work.wait() is work.wait()
                    check_dispatch(out, expected[rank])
                    again = comm.dispatch_async(inputs.x[rank], inputs.ids[rank], previous_handle=handle)
                    same_bits("cached", again.wait()[0].tokens, out.tokens)
                    _combined_later(rank, comm, inputs, expected, handle)


def _combined_later(rank, comm, inputs, expected, handle) -> None:
    case = inputs.case
    y = [expert_rows(len(out.tokens), case.hidden, case.dtype, r) for r, out in enumerate(expected)]
    weights = [out.weights for out in expected]
    exact = reference_combine(y, expected, list(case.tokens), weights)[rank] + inputs.bias[rank]
    work = comm.combine_async(y[rank], handle, weights=weights[rank], bias=inputs.bias[rank])
    assert not work.done
    result = work.wait()
    assert work.done and work.wait() is result
    close("combine_async", result, exact, 100 * torch.ones_like(exact), case.dtype)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_started_then_waited_for(size: int) -> None:
    on_ranks(size, _started_and_waited)


def _overtaken(rank: int, size: int) -> None:
    """The next operation completes the started one. wait() still returns the same bits, in any order."""
    first, second = _inputs(size, 3), _inputs(size, 4, most=50)
    expected = first.expected(FLAT), second.expected(FLAT)
    with communicator(first.case) as comm, poisoned():
        one = comm.dispatch_async(first.x[rank], first.ids[rank], first.weights[rank])
        two = comm.dispatch_async(second.x[rank], second.ids[rank], second.weights[rank])
        three = comm.dispatch_async(first.x[rank], first.ids[rank], first.weights[rank])
        assert (one.done, two.done, three.done) == (True, True, False)
        (out2, handle2), (out1, handle1) = two.wait(), one.wait()
        check_dispatch(out1, expected[0][rank])
        check_dispatch(out2, expected[1][rank])
        check_combine(comm, handle2, second, expected[1], weighted=True)
        check_dispatch(three.wait()[0], expected[0][rank])

        pending = comm.dispatch_async(first.x[rank], first.ids[rank], first.weights[rank])
        check_combine(comm, handle1, first, expected[0], weighted=True)
        check_dispatch(pending.wait()[0], expected[0][rank])

        y = expert_rows(len(out1.tokens), first.case.hidden, first.case.dtype, rank)
        plain = comm.combine(y, handle1)
        sums = comm.combine_async(y, handle1)
        moved = comm.dispatch_async(second.x[rank], second.ids[rank], second.weights[rank])
        more = comm.combine_async(y, handle1)
        for work in (more, sums):
            same_bits("combine overtaken", work.wait(), plain)
        check_dispatch(moved.wait()[0], expected[1][rank])

        comm.dispatch_async(second.x[rank], second.ids[rank])  # never waited for
        comm.combine_async(y, handle1)
        round_trip(comm, second, expected[1])


@pytest.mark.parametrize("size", [1, 2, 4])
def test_overtaken_by_what_comes_next(size: int) -> None:
    on_ranks(size, _overtaken)


def _layer_gradients(rank, comm, inputs, overtake: str) -> dict[str, torch.Tensor]:
    """Gradients of x, weights and bias. Each operation is started, and completed by the next one."""
    x, weights, bias = (
        tensor.clone().requires_grad_() for tensor in (inputs.x[rank], inputs.weights[rank], inputs.bias[rank])
    )
    ids = inputs.ids[rank]

    def between() -> None:
        if overtake == "dispatch":
            comm.dispatch(inputs.x[rank], ids)
        elif overtake == "dispatch_async":
            comm.dispatch_async(inputs.x[rank], ids)
        elif overtake == "no_grad":
            with torch.no_grad():
                comm.dispatch(inputs.x[rank], ids)
        elif overtake == "backward":
            other = inputs.x[rank].clone().requires_grad_()
            out_handle = before
            comm.combine(torch.sin(other.new_ones(rows, other.shape[1]).requires_grad_()), out_handle).sum().backward()

    out, before = comm.dispatch(inputs.x[rank], ids)
    rows = len(out.tokens)
    if overtake == "":
        out, handle = comm.dispatch(x, ids, weights)
        z = comm.combine(torch.sin(out.tokens), handle, weights=out.weights, bias=bias)
    else:
        dispatched = comm.dispatch_async(x, ids, weights)
        between()
        out, handle = dispatched.wait()
        combined = comm.combine_async(torch.sin(out.tokens), handle, weights=out.weights, bias=bias)
        between()
        z = combined.wait()
    (z * torch.cos(z.detach())).sum().backward()
    return {"x": x.grad, "weights": weights.grad, "bias": bias.grad}


def _overtaken_with_gradients(rank: int, size: int) -> None:
    for layout in LAYOUTS:
        inputs = _inputs(size, 5)
        with communicator(inputs.case, layout) as comm, poisoned():
            expected = _layer_gradients(rank, comm, inputs, "")
            for overtake in ("nothing", "dispatch", "dispatch_async", "no_grad", "backward"):
                with named((layout, overtake)):
                    for name, gradient in _layer_gradients(rank, comm, inputs, overtake).items():
                        same_bits(name, gradient, expected[name])


@pytest.mark.parametrize("size", [1, 2, 3])
def test_gradients_whoever_completes_it(size: int) -> None:
    on_ranks(size, _overtaken_with_gradients)


def _waited_for_by_two(rank: int, size: int) -> None:
    inputs = _inputs(size, 8)
    with communicator(inputs.case) as comm:
        for _ in range(50):
            work = comm.dispatch_async(inputs.x[rank], inputs.ids[rank])
            together = threading.Barrier(2)

            def wait(work: DispatchWork = work, together: threading.Barrier = together) -> object:
                together.wait()
                return work.wait()

            with ThreadPoolExecutor(2) as threads:
                first, second = (thread.result() for thread in [threads.submit(wait) for _ in range(2)])
            assert first is second


def test_two_threads_may_wait_for_one_work() -> None:
    on_ranks(2, _waited_for_by_two)


def _interleaved(rank: int, size: int) -> None:
    """One communicator's operation is in flight while another communicator runs several."""
    first, second = _inputs(size, 6), _inputs(size, 7)
    with communicator(first.case) as one, communicator(second.case) as two:
        for _ in range(3):
            work = one.dispatch_async(first.x[rank], first.ids[rank], first.weights[rank])
            round_trip(two, second, second.expected(FLAT))
            out, handle = work.wait()
            check_dispatch(out, first.expected(FLAT)[rank])
            fresh = replace(first, x=[x + 1 for x in first.x])
            again = one.dispatch_async(fresh.x[rank], first.ids[rank], first.weights[rank], previous_handle=handle)
            round_trip(two, second, second.expected(FLAT))
            check_dispatch(again.wait()[0], fresh.expected(FLAT)[rank])


@pytest.mark.parametrize("size", [2, 3])
def test_another_communicator_works_meanwhile(size: int) -> None:
    on_ranks(size, _interleaved)
