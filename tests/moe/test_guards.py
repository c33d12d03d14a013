"""Guards of a communicator against changed handles, threads, gradients of gradients and a wrong device."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist

from ep_plugin.moe import communicator as module
from tests.moe.moe_cases import FLAT, LAYOUTS, Case, communicator, make_inputs, named, on_ranks, same_bits


def _changed_handles(rank: int, size: int) -> None:
    inputs = make_inputs(Case(tokens=(20,) * size, num_experts=2 * size))
    with communicator(inputs.case, max_tokens_per_rank=32) as comm:
        x, ids, weights = inputs.x[rank], inputs.ids[rank], inputs.weights[rank]
        out, handle = comm.dispatch(x, ids, weights)
        wrong = {
            "recv_rows": handle.recv_rows.long(),
            "plan": handle.plan[:-1],
            "topk_ids": handle.topk_ids.double(),
        }
        for field, tensor in wrong.items():
            with named(field), pytest.raises(ValueError, match="expected"):
                comm.combine(out.tokens, handle._replace(**{field: tensor}))
            with named(field), pytest.raises(ValueError, match="expected"):
                comm.dispatch(x, ids, previous_handle=handle._replace(**{field: tensor}))
        limited, limited_handle = comm.dispatch(x, ids, weights, capacity=len(out.tokens) + 5)
        with pytest.raises(ValueError, match=r"y: expected the \d+ rows that dispatch returned, got 4"):
            comm.combine(limited.tokens[:4].contiguous(), limited_handle)
        again, _ = comm.dispatch(x, ids, weights)  # nothing was launched, so all ranks continue
        same_bits("tokens", again.tokens, out.tokens)


@pytest.mark.parametrize("size", [1, 2])
def test_changed_handles_are_refused(size: int) -> None:
    on_ranks(size, _changed_handles)


def _threads(rank: int, size: int) -> None:
    inputs = make_inputs(Case(tokens=(50,), num_experts=4))
    expected = inputs.expected(FLAT)[0]
    errors: list[BaseException] = []
    with communicator(inputs.case) as comm:

        def work() -> None:
            try:
                for _ in range(50):
                    out, handle = comm.dispatch_async(inputs.x[0], inputs.ids[0], inputs.weights[0]).wait()
                    same_bits("tokens", out.tokens, expected.tokens)
                    comm.combine_async(out.tokens, handle).wait()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not errors, errors


def test_threads_take_turns() -> None:
    on_ranks(1, _threads)


def _second_order(rank: int, size: int) -> None:
    for layout in LAYOUTS:
        inputs = make_inputs(Case(tokens=(6,) * size, num_experts=2 * size, dtype=torch.float64, hidden=2))
        with named(layout), communicator(inputs.case, layout) as comm:
            weights = inputs.weights[rank].clone().requires_grad_()
            x = inputs.x[rank].clone().requires_grad_()
            out, handle = comm.dispatch(x, inputs.ids[rank], weights)
            z = comm.combine(out.tokens**2, handle)
            # Second derivatives: 6 w for a weight's cube, and 2 for a row's square on each rank that received it.
            loss = (out.weights**3).sum() + z.sum()
            first = torch.autograd.grad(loss, (x, weights), create_graph=True)
            second = torch.autograd.grad(sum(grad.sum() for grad in first), (x, weights))
            kept = (inputs.ids[rank] >= 0).double()
            torch.testing.assert_close(second[1], 6 * weights.detach() * kept)
            owners = inputs.ids[rank].div(2, rounding_mode="floor").masked_fill(inputs.ids[rank] < 0, -1)
            ranks = torch.stack([(owners == r).any(dim=1) for r in range(size)]).sum(dim=0).double()
            terms = kept.sum(dim=1) if layout is FLAT else ranks
            torch.testing.assert_close(second[0], (2 * terms).unsqueeze(1).expand_as(x))


@pytest.mark.parametrize("size", [1, 2])
def test_gradients_of_gradients(size: int) -> None:
    on_ranks(size, _second_order)


def _default_device(rank: int, size: int) -> str:
    torch.cuda.is_available = lambda: True  # as on a machine with GPUs
    assert "cuda" in str(dist.get_backend_config(None))
    return str(module.resolve_device(None, None))


def test_a_gloo_group_is_on_the_cpu_also_where_there_are_gpus() -> None:
    assert on_ranks(2, _default_device) == ["cpu", "cpu"]


def _another_default_device(rank: int, size: int) -> None:
    inputs = make_inputs(Case(tokens=(9,) * size, num_experts=2 * size))
    expected = inputs.expected(FLAT)[rank]
    with communicator(inputs.case) as comm, torch.device("meta"):
        work = comm.dispatch_async(inputs.x[rank], inputs.ids[rank], inputs.weights[rank])
        comm.dispatch_async(inputs.x[rank], inputs.ids[rank]).wait()  # completes the first outside of any operator
        out, handle = work.wait()
        z = comm.combine(out.tokens, handle, weights=out.weights)
    same_bits("tokens", out.tokens, expected.tokens)
    assert handle.totals.device.type == z.device.type == "cpu"


def test_torchs_default_device_is_nothing_to_us() -> None:
    on_ranks(2, _another_default_device)
