"""Gradients through low-latency dispatch and combine, and the operators under torch.compile."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from ep_plugin import MoECommunicator
from ep_plugin.moe.layout import DispatchOutput
from tests.moe.low_latency_cases import low_latency
from tests.moe.moe_cases import Case, Inputs, make_inputs, named, on_ranks, poisoned

ON_ANY_DEVICE = ((5, torch.float32), (3, torch.bfloat16))
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}


def _present(out: DispatchOutput) -> torch.Tensor:
    """bool ``[E_l, N, 1]``: the rows that are there. Others may hold anything, NaN too."""
    return (torch.arange(out.tokens.shape[1]) < out.num_tokens_per_expert.unsqueeze(1)).unsqueeze(2)


def _layer(
    comm: MoECommunicator, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor | None, experts: torch.Tensor
) -> torch.Tensor:
    """Expert e computes experts[e] * row * row."""
    out, handle = comm.dispatch(x, ids)
    rows = out.tokens.masked_fill(~_present(out), 0)
    return comm.combine(experts.unsqueeze(1) * rows * rows, handle, weights=weights)


def _oracle(inputs: Inputs, x: list, weights: list, experts: torch.Tensor, weighted: bool) -> list[torch.Tensor]:
    """The same layer in plain torch, for all ranks."""
    sums = []
    for mine, ids, factors in zip(x, inputs.ids, weights, strict=True):
        y = experts[ids.clamp(min=0).long()] * (mine * mine).unsqueeze(1)
        factor = (factors if weighted else torch.ones_like(factors)) * (ids >= 0)
        sums.append((y * factor.unsqueeze(2).to(y.dtype)).sum(1))
    return sums


def _gradients(rank: int, size: int) -> None:
    gradients_of(rank, size, ((1, torch.float64), (3, torch.float64), *ON_ANY_DEVICE))


def gradients_of(rank: int, size: int, calls: Iterable[tuple[int, torch.dtype]] = ON_ANY_DEVICE) -> None:
    """calls: experts per token, and the dtype of rows."""
    for topk, dtype in calls:
        case = Case(tokens=(7, 0, 20), num_experts=6, topk=topk, dtype=dtype, hidden=8, seed=topk)
        inputs = make_inputs(case)
        per_rank = case.num_experts // size
        generator = torch.Generator().manual_seed(5)
        experts = torch.randn(case.num_experts, case.hidden, generator=generator, dtype=torch.float64).to(dtype)
        for weighted in (True, False):
            x, w = ([t.clone().requires_grad_() for t in given] for given in (inputs.x, inputs.weights))
            all_experts = experts.clone().requires_grad_()
            loss = sum(
                (z * b.cos()).sum()
                for z, b in zip(_oracle(inputs, x, w, all_experts, weighted), inputs.bias, strict=True)
            )
            loss.backward()
            own_x, own_w = inputs.x[rank].clone().requires_grad_(), inputs.weights[rank].clone().requires_grad_()
            own = experts[rank * per_rank : (rank + 1) * per_rank].clone().requires_grad_()
            with named((topk, dtype, weighted)), poisoned(), low_latency(case) as comm:
                z = _layer(comm, own_x, inputs.ids[rank], own_w if weighted else None, own)
                (z * inputs.bias[rank].cos()).sum().backward()
                t = {"rtol": TOLERANCE[dtype], "atol": 20 * TOLERANCE[dtype]}
                torch.testing.assert_close(own_x.grad, x[rank].grad, **t)
                torch.testing.assert_close(own.grad, all_experts.grad[rank * per_rank : (rank + 1) * per_rank], **t)
                if weighted:
                    torch.testing.assert_close(own_w.grad, w[rank].grad, **t)


def test_gradients() -> None:
    on_ranks(3, _gradients)


def _finite_differences(rank: int, size: int) -> None:
    case = Case(tokens=(3, 3), num_experts=4, topk=2, dtype=torch.float64, hidden=2, drop=0.2)
    inputs = make_inputs(case)
    experts = torch.randn(2, 2, dtype=torch.float64)
    with low_latency(case) as comm:
        given = inputs.x[rank].clone().requires_grad_(), inputs.weights[rank].clone().requires_grad_()
        assert torch.autograd.gradcheck(lambda x, weights: _layer(comm, x, inputs.ids[rank], weights, experts), given)


def test_gradients_by_finite_differences() -> None:
    on_ranks(2, _finite_differences)


def _frozen(rank: int, size: int) -> None:
    """Gradients of the weights alone, and of y alone."""
    case = Case(tokens=(7, 12), num_experts=4, topk=2, hidden=8)
    inputs = make_inputs(case)
    with low_latency(case) as comm:
        out, handle = comm.dispatch(inputs.x[rank], inputs.ids[rank])
        y, weights = torch.randn(out.tokens.shape), inputs.weights[rank].clone().requires_grad_()
        comm.combine(y, handle, weights=weights).sum().backward()
        alone, weights.grad = weights.grad, None
        y.requires_grad_()
        comm.combine(y, handle, weights=weights).sum().backward()
        torch.testing.assert_close(weights.grad, alone)
        assert (y.grad.masked_select(~_present(out)) == 0).all()
        work = comm.combine_async(y, handle, weights)
        first, y.grad = y.grad, None
        work.wait().sum().backward()
        torch.testing.assert_close(y.grad, first)


def test_gradients_of_some_inputs() -> None:
    on_ranks(2, _frozen)


class _Layer(torch.nn.Module):
    def __init__(self, comm: MoECommunicator, hidden: int, topk: int) -> None:
        super().__init__()
        self.comm, self.topk = comm, topk
        self.router = torch.nn.Linear(hidden, comm.config.num_experts, bias=False)
        self.experts = torch.nn.Parameter(torch.randn(comm.num_local_experts, hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = self.router(x).softmax(-1).topk(self.topk)
        return x + _layer(self.comm, x, ids, weights, self.experts)


def _compiled(rank: int, size: int) -> None:
    torch.manual_seed(rank)
    case = Case(tokens=(40, 40), num_experts=4, hidden=16)
    with low_latency(case) as comm:
        layer = _Layer(comm, 16, 2)
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
        for tokens in (20, 37, 3):
            x = torch.randn(tokens - rank, 16)
            results = []
            for run in (layer, compiled):
                layer.zero_grad()
                given = x.clone().requires_grad_()
                z = run(given)
                (z * torch.cos(x)).sum().backward()
                results.append([z.detach(), given.grad, *(p.grad.clone() for p in layer.parameters())])
            for plain, got in zip(*results, strict=True):
                torch.testing.assert_close(got, plain)


def test_a_layer_in_one_graph() -> None:
    on_ranks(2, _compiled)


def _fakes(rank: int, size: int, quantize: str | None) -> None:
    case = dataclasses.replace(Case(tokens=(5, 7), num_experts=4, dtype=torch.bfloat16, hidden=640))
    inputs = make_inputs(case)
    from torch._subclasses.fake_tensor import FakeTensorMode

    with low_latency(case) as comm:
        arguments = comm._dispatch_arguments(inputs.x[rank], inputs.ids[rank], None, None, None, None, quantize)
        real = torch.ops.ep_plugin.dispatch(*arguments, 0)
        with FakeTensorMode() as mode:
            fakes = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in arguments]
            made = torch.ops.ep_plugin.dispatch(*fakes, 0)
        for fake, one in zip(made, real, strict=True):
            assert (fake.shape, fake.stride(), fake.dtype) == (one.shape, one.stride(), one.dtype)


@pytest.mark.parametrize("quantize", [None, "e4m3", "e4m3_ue8m0"])
def test_fakes_have_the_shapes_and_strides_of_results(quantize: str | None) -> None:
    on_ranks(2, _fakes, quantize)


def _watched_and_not(rank: int, size: int) -> None:
    """torch sees the operators where a mode or a profiler is on, maybe in one of forward and backward alone."""
    inputs = make_inputs(Case(tokens=(7, 3), num_experts=4, topk=2, hidden=8, dtype=torch.float32))
    ids, weights = inputs.ids[rank], inputs.weights[rank]
    experts = torch.ones(4 // size, 8)

    def nobody() -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    watchers = nobody, lambda: FlopCounterMode(display=False), torch.profiler.profile
    with low_latency(inputs.case) as comm:

        def layer(x: torch.Tensor) -> torch.Tensor:
            return _layer(comm, x, ids, weights, experts)

        gradients = []
        for forward, backward in itertools.product(watchers, watchers):
            x = inputs.x[rank].clone().requires_grad_()
            with named((forward, backward)):
                with forward():
                    z = checkpoint(layer, x, use_reentrant=False)
                with backward():
                    z.square().sum().backward()
                assert x.grad is not None
                gradients.append(x.grad)
        assert all(torch.equal(gradient, gradients[0]) for gradient in gradients)
        for watcher in watchers:
            with watcher():
                _, handle = comm.dispatch(inputs.x[rank].clone().requires_grad_(), ids)
            assert not any(part.requires_grad for part in handle[:-1]) and handle.totals.device.type == "cpu"
            copy.deepcopy(handle)


def test_forward_and_recomputation_may_be_watched_or_not() -> None:
    on_ranks(2, _watched_and_not)
