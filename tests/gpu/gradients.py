"""Gradients on GPUs, against autograd through the oracle's arithmetic."""

from __future__ import annotations

import itertools

import torch

from ep_plugin import DispatchLayout
from tests.gpu.checks import FLAT, TOKEN_MAJOR, Case, assert_close, communicator, make_inputs
from tests.moe.moe_cases import roundings_of


def gradients(rank: int, size: int) -> None:
    for layout, dtype in itertools.product((FLAT, TOKEN_MAJOR), (torch.float32, torch.bfloat16)):
        check_gradients(rank, size, layout, dtype)


def check_gradients(rank: int, size: int, layout: DispatchLayout, dtype: torch.dtype) -> None:
    """Those of x, the weights and the experts' scale."""
    case = Case(dtype=dtype, hidden=64, tokens=90, layout=layout)
    given = make_inputs(case, size, 7)
    with communicator(case, rank, size, timeout_s=60) as comm:
        device = comm.engine.device
        x = given.x[rank].to(device, copy=True).requires_grad_()
        weights = given.weights[rank].to(device, copy=True).requires_grad_()
        out, handle = comm.dispatch(x, given.ids[rank].to(device), weights)
        z = comm.combine(torch.tanh(out.tokens), handle, weights=out.weights)
        target = torch.linspace(-1, 1, case.hidden, device=device)
        (z * target).sum().backward()  # by way of gradients that are neither contiguous nor of the rows' dtype

        x_ref = given.x[rank].double().requires_grad_()
        w_ref = given.weights[rank].double().requires_grad_()
        kept = (given.ids[rank] >= 0).double()
        z_ref = torch.tanh(x_ref) * (w_ref * kept).sum(1, keepdim=True)
        target_ref = target.cpu().double()
        (z_ref * target_ref).sum().backward()
        assert x.grad is not None and weights.grad is not None
        assert x_ref.grad is not None and w_ref.grad is not None
        more = roundings_of(comm) - 2
        # Beside those of a combine: tanh's own; for x the target's, the weighted row's, that of tanh's derivative
        # 1 - y * y, whose y * y is off by two; for the weights those of the two rows multiplied.
        y, share = torch.tanh(given.x[rank].double()).abs(), (given.weights[rank].double() * kept).sum(1, True)
        assert_close("z", z, z_ref.detach(), y * share, dtype, roundings=3 + more)
        slopes = target_ref.abs() * (1 + y * y) * share
        assert_close("x.grad", x.grad, x_ref.grad, slopes, dtype, roundings=7 + more)
        products = (target_ref.abs() * y).sum(1, True) * kept
        assert_close("weights.grad", weights.grad, w_ref.grad, products, dtype, roundings=2 + more)
