"""What a throughput call of ep_plugin.deep_ep costs the host on one CPU rank: operators of torch and calls of Python.

On GPUs an operator takes the host several microseconds. A call may cost less than its limit here, never more.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from ep_plugin.deep_ep import Buffer
from ep_plugin.moe import operators
from tests.moe.moe_cases import on_ranks

TOKENS, HIDDEN, TOPK, EXPERTS = 16, 64, 4, 8
LIMITS = {
    "get_dispatch_layout": (6, 25),
    "dispatch": (22, 10),
    "dispatch, num_worst_tokens": (22, 10),
    "dispatch, known routing": (5, 8),
    "combine": (1, 8),
    "combine, weights": (2, 8),
    "combine, two biases": (3, 142),
}
"""By call: operators of torch where a profiler watches, and functions of Python where nobody does, with room for those
that other versions of torch add."""


def _operators_of(call: Callable[[], Any]) -> Counter[str]:
    """The operators that torch's profiler shows, without those that other operators call."""
    with (
        mock.patch.object(operators, "_watched", lambda inputs: False),  # else the call takes another way
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile,
    ):
        call()
    return Counter(event.name for event in profile.events() if event.cpu_parent is None)


def _functions_of(call: Callable[[], Any]) -> Counter[str]:
    """The functions of Python that a call runs."""
    found: Counter[str] = Counter()

    def count(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            found[f"{frame.f_code.co_filename.rpartition('/')[2]}: {frame.f_code.co_qualname}"] += 1

    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


def _costs(rank: int, size: int) -> dict[str, tuple[Counter[str], Counter[str]]]:
    buffer = Buffer(dist.group.WORLD)
    x, ids = torch.rand(TOKENS, HIDDEN).bfloat16(), torch.rand(TOKENS, EXPERTS).topk(TOPK).indices
    weights = torch.rand(TOKENS, TOPK)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, EXPERTS)
    routed = {"num_tokens_per_rank": per_rank, "is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert}
    routed |= {"topk_idx": ids, "topk_weights": weights}
    rows, _, row_weights, _, handle, _ = buffer.dispatch(x, **routed)
    calls = {
        "get_dispatch_layout": lambda: buffer.get_dispatch_layout(ids, EXPERTS),
        "dispatch": lambda: buffer.dispatch(x, **routed),
        "dispatch, num_worst_tokens": lambda: buffer.dispatch(x, **routed, num_worst_tokens=size * TOKENS),
        "dispatch, known routing": lambda: buffer.dispatch(x, handle=handle),
        "combine": lambda: buffer.combine(rows, handle),
        "combine, weights": lambda: buffer.combine(rows, handle, topk_weights=row_weights),
        "combine, two biases": lambda: buffer.combine(rows, handle, bias=(x, x)),
    }
    for call in calls.values():
        for _ in range(2):
            call()
    return {name: (_operators_of(call), _functions_of(call)) for name, call in calls.items()}


def test_calls_run_no_more_operators_and_functions() -> None:
    (costs,) = on_ranks(1, _costs)
    for name, (found, functions) in costs.items():
        most = LIMITS[name]
        assert found.total() <= most[0], f"{name}: at most {most[0]} operators, got {dict(found)}"
        assert functions.total() <= most[1], f"{name}: at most {most[1]} functions, got {functions.most_common()}"
