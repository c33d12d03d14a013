"""Gradients of dispatch and combine, against the oracle's own autograd and against finite differences.

The file is long because all tests share one layer, its leaves and its oracle.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from ep_plugin import DispatchLayout, MoECommunicator, NotSupported
from ep_plugin.dtypes import weight_dtype
from ep_plugin.moe import autograd
from ep_plugin.moe.layout import DispatchOutput
from ep_plugin.moe.reference import ReferenceOutput, reference_combine
from tests.moe.moe_cases import (
    FLAT,
    LAYOUTS,
    TOKEN_MAJOR,
    Case,
    Inputs,
    communicator,
    make_inputs,
    named,
    on_ranks,
    poisoned,
    ragged,
    same_bits,
)

DTYPES = (torch.float64, torch.float32, torch.bfloat16)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}


@dataclass(frozen=True, kw_only=True)
class Leaves:
    """The leaves of one rank: x ``[T, H]``, weights ``[T, K]``, bias ``[T, H]``, experts ``[E_l, H]``."""

    x: torch.Tensor
    weights: torch.Tensor
    bias: torch.Tensor
    experts: torch.Tensor

    def grads(self) -> dict[str, torch.Tensor]:
        return {name: leaf.grad for name, leaf in vars(self).items()}


def _leaves(inputs: Inputs, rank: int, dtype: torch.dtype | None = None) -> Leaves:
    """Fresh leaves with this rank's values, in `dtype` if one is given."""
    case = inputs.case
    generator = torch.Generator().manual_seed(1000 + case.seed + rank)
    shape = (case.num_experts // case.size, case.hidden)
    experts = torch.randn(shape, generator=generator, dtype=torch.float64).to(case.dtype)
    tensors = (inputs.x[rank], inputs.weights[rank], inputs.bias[rank], experts)
    x, weights, bias, experts = (tensor.to(dtype or tensor.dtype).clone().requires_grad_() for tensor in tensors)
    return Leaves(x=x, weights=weights, bias=bias, experts=experts)


def _experts(out: DispatchOutput | ReferenceOutput, scale: torch.Tensor) -> torch.Tensor:
    """The experts: sine of a row times each local expert's vector, averaged over the row's experts."""
    if out.topk_ids is None:
        assert out.row_expert_ids is not None
        return torch.sin(out.tokens * scale[out.row_expert_ids.clamp(min=0).long()])
    here = (out.topk_ids >= 0).unsqueeze(2)
    return torch.sin(out.tokens * (scale[out.topk_ids.clamp(min=0).long()] * here).sum(1))


def _layer(comm: MoECommunicator, leaves: Leaves, ids: torch.Tensor, weighted: bool = True) -> torch.Tensor:
    out, handle = comm.dispatch(leaves.x, ids, leaves.weights)
    y = _experts(out, leaves.experts)
    if weighted:
        return comm.combine(y, handle, weights=out.weights, bias=leaves.bias)
    assert out.weights is not None  # the experts apply the weights
    factor = out.weights if out.weights.dim() == 1 else out.weights.sum(1)
    return comm.combine((y * factor.unsqueeze(1)).to(y.dtype), handle, bias=leaves.bias)


def _oracle(inputs: Inputs, layout: DispatchLayout, every: list[Leaves], alignment: int = 1) -> list[torch.Tensor]:
    """The layer of all ranks, in float64."""
    live = replace(inputs, x=[leaves.x for leaves in every], weights=[leaves.weights for leaves in every])
    received = live.expected(layout, alignment)
    y = [_experts(out, leaves.experts) for out, leaves in zip(received, every, strict=True)]
    z = reference_combine(y, received, list(inputs.case.tokens), [out.weights for out in received])
    return [rows + leaves.bias for rows, leaves in zip(z, every, strict=True)]


def _cotangents(inputs: Inputs) -> list[torch.Tensor]:
    return [torch.cos(3 * x.double()) for x in inputs.x]


def _expected(inputs: Inputs, layout: DispatchLayout, rank: int, alignment: int = 1) -> dict[str, torch.Tensor]:
    every = [_leaves(inputs, r, torch.float64) for r in range(inputs.case.size)]
    outputs = _oracle(inputs, layout, every, alignment)
    sum((z * g).sum() for z, g in zip(outputs, _cotangents(inputs), strict=True)).backward()
    return every[rank].grads()


def _compare(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    for name, gradient in expected.items():
        got = actual[name]
        assert got is not None, f"{name}: expected a gradient, got None"
        scale = max(1.0, float(gradient.abs().max())) if gradient.numel() else 1.0
        tolerance = TOLERANCE[dtype] * scale
        torch.testing.assert_close(got.double(), gradient, rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


def _case(size: int, routing: str, dtype: torch.dtype, seed: int) -> Inputs:
    topk = min(3, 2 * size)
    return make_inputs(
        Case(
            tokens=ragged(size, 14, seed),
            num_experts=2 * size,
            topk=topk,
            hidden=8,
            dtype=dtype,
            routing=routing,
            seed=seed,
        )
    )


def _against_the_oracle(rank: int, size: int) -> None:
    drawn = [("random", dtype) for dtype in DTYPES]
    drawn += [
        (routing, torch.float64) for routing in ("last rank only", "one expert", "even ranks drop", "all dropped")
    ]
    all_inputs = [_case(size, routing, dtype, seed) for seed, (routing, dtype) in enumerate(drawn)]
    for layout, alignment in ((FLAT, 1), (FLAT, 8), (TOKEN_MAJOR, 1)):
        with communicator(all_inputs[0].case, layout, expert_alignment=alignment) as comm:
            for inputs in all_inputs:
                dtype = inputs.case.dtype
                expected = _expected(inputs, layout, rank, alignment)
                cotangent = _cotangents(inputs)[rank].to(dtype)
                for weighted in (True, False):
                    with named((layout, alignment, inputs.case, weighted)), poisoned():
                        leaves = _leaves(inputs, rank)
                        _layer(comm, leaves, inputs.ids[rank], weighted).backward(cotangent)
                        _compare(leaves.grads(), expected, dtype)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_gradients_match_the_oracle(size: int) -> None:
    on_ranks(size, _against_the_oracle)


def _finite_differences(rank: int, size: int) -> None:
    """All ranks perturb their own inputs at the same time, since a rank's result depends on its own tokens only."""
    for layout in LAYOUTS:
        case = Case(tokens=(3,) * size, num_experts=2 * size, topk=2, hidden=2, dtype=torch.float64)
        inputs = make_inputs(case)
        leaves = _leaves(inputs, rank)
        with communicator(case, layout) as comm, named(layout):

            def layer(x: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
                return _layer(comm, replace(leaves, x=x, weights=weights, bias=bias), inputs.ids[rank])  # noqa: B023

            assert torch.autograd.gradcheck(layer, (leaves.x, leaves.weights, leaves.bias))


@pytest.mark.parametrize("size", [1, 2])
def test_gradcheck_in_float64(size: int) -> None:
    on_ranks(size, _finite_differences)


def _weights_as_they_please(rank: int, size: int) -> None:
    """The user changes weights, including those of experts on other ranks, which must have no effect."""
    for layout in LAYOUTS:
        inputs = _case(size, "random", torch.float64, 4)
        received = inputs.expected(layout)
        weights = [torch.cos(torch.arange(o.weights.numel()).double()).view_as(o.weights) for o in received]
        y = [torch.sin(torch.arange(o.tokens.numel()).double()).view_as(o.tokens) for o in received]
        live_y, live_weights = ([t.clone().requires_grad_() for t in tensors] for tensors in (y, weights))
        z = reference_combine(live_y, received, list(inputs.case.tokens), live_weights)
        sum((rows * g).sum() for rows, g in zip(z, _cotangents(inputs), strict=True)).backward()
        with communicator(inputs.case, layout) as comm, named(layout), poisoned():
            _, handle = comm.dispatch(inputs.x[rank], inputs.ids[rank])
            my_y, my_weights = y[rank].clone().requires_grad_(), weights[rank].clone().requires_grad_()
            comm.combine(my_y, handle, weights=my_weights).backward(_cotangents(inputs)[rank])
            for name, mine, oracle in (("y", my_y, live_y[rank]), ("weights", my_weights, live_weights[rank])):
                expected = torch.zeros_like(oracle) if oracle.grad is None else oracle.grad
                torch.testing.assert_close(mine.grad, expected, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("size", [2, 3])
def test_gradients_of_weights_that_the_user_made(size: int) -> None:
    on_ranks(size, _weights_as_they_please)


def _partly(rank: int, size: int) -> None:
    """Only some inputs need a gradient, or only some outputs are used. All ranks do the same."""
    for layout in LAYOUTS:
        inputs = _case(size, "random", torch.float64, 5)
        expected = _expected(inputs, layout, rank)
        ids, cotangent = inputs.ids[rank], _cotangents(inputs)[rank]
        with communicator(inputs.case, layout) as comm:
            for needed in (
                {"x"},
                {"weights"},
                {"bias"},
                {"experts"},
                {"weights", "bias"},
                set(vars(_leaves(inputs, rank))),
            ):
                with named((layout, needed)):
                    leaves = _leaves(inputs, rank)
                    for name, leaf in vars(leaves).items():
                        leaf.requires_grad_(name in needed)
                    _layer(comm, leaves, ids).backward(cotangent)
                    _compare(leaves.grads(), {name: expected[name] for name in needed}, torch.float64)
                    assert all(leaves.grads()[name] is None for name in set(expected) - needed)
            _unused_outputs(comm, inputs, layout, rank)


def _unused_outputs(comm: MoECommunicator, inputs: Inputs, layout: DispatchLayout, rank: int) -> None:
    """Backward through the weights alone, and through the rows alone."""
    leaves = _leaves(inputs, rank)
    received = inputs.expected(layout)
    out, _ = comm.dispatch(leaves.x, inputs.ids[rank], leaves.weights)
    assert out.weights is not None
    (3 * out.weights).sum().backward()
    same_bits("x, tokens unused", leaves.x.grad, torch.zeros_like(leaves.x))
    kept = (inputs.ids[rank] >= 0).double()
    same_bits("weights, tokens unused", leaves.weights.grad, 3 * kept)
    leaves = _leaves(inputs, rank)
    out, _ = comm.dispatch(leaves.x, inputs.ids[rank], leaves.weights)
    out.tokens.sum().backward()
    same_bits("weights unused", leaves.weights.grad, torch.zeros_like(leaves.weights))
    rows = torch.zeros(sum(inputs.case.tokens), dtype=torch.float64)
    for one in received:
        per_row = one.pair_token if layout is FLAT else torch.stack([one.pair_token, one.pair_row]).unique(dim=1)[0]
        rows.index_add_(0, per_row, torch.ones(len(per_row), dtype=torch.float64))
    mine = rows.split(list(inputs.case.tokens))[rank].unsqueeze(1).expand_as(leaves.x).contiguous()
    same_bits("x, weights unused", leaves.x.grad, mine)


@pytest.mark.parametrize("size", [1, 3])
def test_what_needs_no_gradient_gets_none(size: int) -> None:
    on_ranks(size, _partly)


def _rerun(rank: int, size: int) -> None:
    """Recomputation, a graph kept for a second backward, one handle for two combines, a cached dispatch."""
    for layout in LAYOUTS:
        inputs = _case(size, "random", torch.float64, 6)
        expected = _expected(inputs, layout, rank)
        ids, cotangent = inputs.ids[rank], _cotangents(inputs)[rank]
        with communicator(inputs.case, layout) as comm:
            for name, run in _ways_to_run(comm, ids, cotangent).items():
                with named((layout, name)):
                    leaves = _leaves(inputs, rank)
                    times = run(leaves)
                    grads = {field: gradient / times for field, gradient in leaves.grads().items()}
                    _compare(grads, expected, torch.float64)


def _ways_to_run(
    comm: MoECommunicator, ids: torch.Tensor, cotangent: torch.Tensor
) -> dict[str, Callable[[Leaves], int]]:
    """Each case runs backward, and returns the accumulated gradient as a multiple of the plain one."""

    def layer(x: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        return _layer(comm, Leaves(x=x, weights=weights, bias=bias, experts=experts), ids)

    def checkpointed(leaves: Leaves, reentrant: bool) -> int:
        checkpoint(layer, *vars(leaves).values(), use_reentrant=reentrant).backward(cotangent)
        return 1

    def nested(leaves: Leaves) -> int:
        inner = lambda *args: checkpoint(layer, *args, use_reentrant=False)  # noqa: E731
        checkpoint(inner, *vars(leaves).values(), use_reentrant=False).backward(cotangent)
        return 1

    def kept(leaves: Leaves) -> int:
        z = layer(*vars(leaves).values())
        z.backward(cotangent, retain_graph=True)
        layer(*vars(leaves).values()).backward(cotangent)
        z.backward(cotangent)
        return 3

    def two_combines(leaves: Leaves) -> int:
        out, handle = comm.dispatch(leaves.x, ids, leaves.weights)
        y = _experts(out, leaves.experts)
        first = comm.combine(y, handle, weights=out.weights, bias=leaves.bias)
        second = comm.combine(y, handle, weights=out.weights, bias=leaves.bias)
        (first + second).backward(cotangent)
        return 2

    def cached(leaves: Leaves) -> int:
        with torch.no_grad():
            _, handle = comm.dispatch(leaves.x, ids)
        out, handle = comm.dispatch(leaves.x, ids, leaves.weights, previous_handle=handle)
        comm.combine(_experts(out, leaves.experts), handle, weights=out.weights, bias=leaves.bias).backward(cotangent)
        return 1

    def out_of_order(leaves: Leaves) -> int:
        first, second = layer(*vars(leaves).values()), layer(*vars(leaves).values())
        first.backward(cotangent)
        second.backward(cotangent)
        return 2

    return {
        "checkpoint": lambda leaves: checkpointed(leaves, False),
        "reentrant checkpoint": lambda leaves: checkpointed(leaves, True),
        "nested checkpoint": nested,
        "graph kept": kept,
        "two combines of one handle": two_combines,
        "cached dispatch": cached,
        "backward in the order of forward": out_of_order,
    }


@pytest.mark.parametrize("size", [1, 2, 4])
def test_recomputed_kept_and_reused(size: int) -> None:
    on_ranks(size, _rerun)


def _two_layers(rank: int, size: int) -> None:
    """Layers of one model share a communicator. Backward runs in reverse order, with several handles outstanding."""
    inputs = _case(size, "random", torch.float64, 8)
    case, ids = inputs.case, inputs.ids[rank]
    every = [_leaves(inputs, r) for r in range(size)]
    first = _oracle(inputs, FLAT, every)
    again = replace(inputs, x=first)
    received = replace(again, weights=[leaves.weights for leaves in every]).expected(FLAT)
    y = [_experts(out, leaves.experts) for out, leaves in zip(received, every, strict=True)]
    second = reference_combine(y, received, list(case.tokens), [out.weights for out in received])
    sum((z * g).sum() for z, g in zip(second, _cotangents(inputs), strict=True)).backward()
    with communicator(case) as comm:
        leaves = _leaves(inputs, rank)
        hidden = _layer(comm, leaves, ids)
        out, handle = comm.dispatch(hidden, ids, leaves.weights)
        z = comm.combine(_experts(out, leaves.experts), handle, weights=out.weights)
        z.backward(_cotangents(inputs)[rank])
        _compare(leaves.grads(), every[rank].grads(), torch.float64)


@pytest.mark.parametrize("size", [1, 3])
def test_layers_that_share_a_communicator(size: int) -> None:
    on_ranks(size, _two_layers)


def _without_gradients(rank: int, size: int) -> None:
    inputs = _case(size, "random", torch.float32, 7)
    leaves = _leaves(inputs, rank)
    for layout in LAYOUTS:
        with communicator(inputs.case, layout) as comm:
            expected = _layer(comm, leaves, inputs.ids[rank]).detach()
            for mode in (torch.no_grad, torch.inference_mode):
                with mode(), named((layout, mode.__name__)):
                    out, handle = comm.dispatch(leaves.x, inputs.ids[rank], leaves.weights)
                    z = comm.combine(_experts(out, leaves.experts), handle, weights=out.weights, bias=leaves.bias)
                    assert not out.tokens.requires_grad and not z.requires_grad
                    same_bits("result", z, expected)


@pytest.mark.parametrize("size", [2])
def test_without_gradients(size: int) -> None:
    on_ranks(size, _without_gradients)


def _keeps_no_rows(rank: int, size: int) -> None:
    inputs = _case(size, "random", torch.float64, 9)
    with communicator(inputs.case) as comm:
        out, handle = comm.dispatch(inputs.x[rank], inputs.ids[rank], inputs.weights[rank])
        for weights, kept in ((None, False), (out.weights, True)):
            y = (out.tokens * 2).requires_grad_()
            saved: list[int] = []
            pack = lambda tensor, saved=saved: saved.append(tensor.data_ptr()) or tensor  # noqa: E731
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                z = comm.combine(y, handle, weights=weights)
            assert (y.data_ptr() in saved) == kept
            z.sum().backward()


def test_plain_sum_does_not_keep_the_rows() -> None:
    on_ranks(1, _keeps_no_rows)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_weights_gradient_by_one_kernel(dtype: torch.dtype) -> None:
    """Widths with and without a remainder, and no rows. Weighted rows have the same bits as PyTorch's."""
    wide = weight_dtype(dtype)
    for num_rows, hidden in ((0, 16), (1, 8), (3, 24), (131, 200)):
        y, rows = torch.randn(2, num_rows, hidden, dtype=torch.float64).to(dtype)
        factors, kept, before = torch.rand(num_rows, dtype=wide), y.clone(), rows.clone()
        with _Records() as records:
            dots = autograd.weight_grad(y, rows, factors)
        assert records.largest <= num_rows  # no wide copy of the rows
        assert dots.dtype is wide
        torch.testing.assert_close(dots, (y.to(wide) * before.to(wide)).sum(dim=1), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(rows, before.mul_(factors.unsqueeze(1)), rtol=0, atol=0)
        torch.testing.assert_close(y, kept, rtol=0, atol=0)


def _counted_kernels(rank: int, size: int) -> None:
    """Backward uses operators if a mode records them, or if a hook has changed the saved tensors."""
    inputs = _case(size, "random", torch.float32, 13)
    kernel, calls = autograd.weight_grad, [0]

    def counted(*given: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        return kernel(*given)

    autograd.weight_grad = counted  # type: ignore[assignment]
    changed = torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, _doubled)
    for layout in LAYOUTS:
        gradients = []
        with communicator(inputs.case, layout) as comm:
            for around, kernels in ((contextlib.nullcontext(), 1), (_Records(), 0), (changed, 0)):
                leaves = _leaves(inputs, rank)
                calls[0] = 0
                with around:
                    _layer(comm, leaves, inputs.ids[rank]).square().sum().backward()
                assert calls[0] == kernels
                gradients.append((leaves.x.grad, leaves.weights.grad))
        torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(gradients[2], gradients[0], rtol=1e-5, atol=1e-5)


def _doubled(saved: torch.Tensor) -> torch.Tensor:
    return saved.double() if saved.is_floating_point() else saved


class _Records(TorchDispatchMode):
    """A mode that sees every operator, as recorders do. `largest`: the most elements that one has returned."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            self.largest = max(self.largest, made.numel())
        return made


@pytest.mark.parametrize("size", [2])
def test_backward_takes_one_kernel_where_nobody_watches(size: int) -> None:
    on_ranks(size, _counted_kernels)


def test_weights_gradient_of_rows_that_are_lazily_negated() -> None:
    """Its sign is pending, so its memory has the wrong sign. The kernel reads memory, so must not get it."""
    y = torch.randn(3, 8, dtype=torch.complex64).conj().imag
    assert y.is_neg()
    rows, factors = torch.randn(3, 8), torch.rand(3)
    with torch.no_grad():
        grad_y, grad_factors = autograd._weighed_back(y, rows, factors)
    torch.testing.assert_close(grad_factors, (y * rows).sum(dim=1))
    torch.testing.assert_close(grad_y, rows * factors.unsqueeze(1))


def _forward_mode(rank: int, size: int) -> None:
    inputs = _case(size, "random", torch.float32, 11)
    x, ids, weights = inputs.x[rank], inputs.ids[rank], inputs.weights[rank]
    with communicator(inputs.case) as comm, forward_ad.dual_level():
        for given in ((forward_ad.make_dual(x, x), weights), (x, forward_ad.make_dual(weights, weights))):
            with pytest.raises(NotSupported, match="expected no tangents"):
                comm.dispatch(given[0], ids, given[1])
        out, handle = comm.dispatch(x, ids, weights)  # in a level to which none of these belongs
        comm.combine(out.tokens, handle, weights=out.weights)


def test_tangents_are_refused_and_not_lost() -> None:
    on_ranks(2, _forward_mode)
