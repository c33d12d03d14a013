"""What tests of low-latency calls by C share: counts of calls and of checks, and comparisons of results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ep_plugin import MoECommunicator
from ep_plugin.moe.low_latency.combine import LowLatencyCombine
from ep_plugin.moe.low_latency.dispatch import LowLatencyDispatch
from tests.moe.moe_cases import Case

CASE = Case(tokens=(4, 4), num_experts=4, hidden=128, topk=2, dtype=torch.bfloat16)


class Watching(TorchDispatchMode):
    """Sees all operators, so that calls go through the operators of ep_plugin."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def calls_of(comm: MoECommunicator) -> int:
    """The operations, or halves of them, that have run."""
    return int(comm.engine.control.num_calls)


class Checks:
    """Counts the calls of low latency that Python checks."""

    def __init__(self) -> None:
        self.num = 0
        for kind in (LowLatencyDispatch, LowLatencyCombine):
            mock.patch.object(kind, "check", self._counting(kind.check)).start()

    def _counting(self, check: Callable[[Any], None]) -> Callable[[Any], None]:
        def counting(call: Any) -> None:
            self.num += 1
            check(call)

        return counting


def tokens_of(generator: torch.Generator, num_tokens: int, hidden: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    x = torch.randn(num_tokens, hidden, generator=generator).to(dtype)
    ids = torch.rand(num_tokens, 4, generator=generator).topk(2).indices
    ids[torch.rand(ids.shape, generator=generator) < 0.2] = -1
    return x, ids, torch.rand(num_tokens, 2, generator=generator, dtype=torch.float32)


def defined_rows(made: torch.Tensor, counts: torch.Tensor) -> list[torch.Tensor]:
    """The rows that a dispatch defines, as bytes; the others hold anything."""
    return [of.contiguous().view(torch.uint8)[: int(n)] for of, n in zip(made, counts, strict=True)]


def same_dispatches(one: Any, other: Any) -> None:
    """Compares two dispatches: all that they define, and the tensors' forms."""
    (out, handle), (out2, handle2) = one, other
    assert type(out) is type(out2) and type(handle) is type(handle2) and len(handle) == len(handle2)
    for field in out._fields:
        a, b = getattr(out, field), getattr(out2, field)
        assert (a is None) == (b is None), field
        if a is not None:
            forms = [(t.shape, t.stride(), t.dtype, t.requires_grad, t.is_inference(), type(t)) for t in (a, b)]
            assert forms[0] == forms[1], field
    assert torch.equal(out.num_tokens_per_expert, out2.num_tokens_per_expert)
    assert torch.equal(out.expert_offsets, out2.expert_offsets) and torch.equal(handle.topk_ids, handle2.topk_ids)
    assert handle.plan.shape == handle2.plan.shape
    for name in ("tokens", "scales"):
        if getattr(out, name) is not None:
            pairs = (defined_rows(getattr(given, name), out.num_tokens_per_expert) for given in (out, out2))
            assert all(map(torch.equal, *pairs)), name
