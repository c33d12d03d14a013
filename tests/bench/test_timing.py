"""The clocks of ep-bench."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from ep_plugin.bench import timing


def test_a_host_whose_clock_is_ahead_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    def ahead(moment: torch.Tensor, op: dist.ReduceOp) -> None:
        moment += 10**15

    monkeypatch.setattr(dist, "all_reduce", ahead)
    began = time.monotonic()
    start, end, _ = timing.clock_of(torch.device("cpu"))(lambda: None)
    assert end - start >= 0 and time.monotonic() - began < 5


def test_calls_in_a_row_count_as_one_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "all_reduce", lambda moment, op: None)
    made: list[int] = []
    now = 0  # nanoseconds; a look at the clock takes one microsecond, and a call 20 milliseconds

    def clock() -> int:
        nonlocal now
        now += 1000
        return now

    def call() -> None:
        nonlocal now
        made.append(now)
        now += 20_000_000

    monkeypatch.setattr(time, "perf_counter_ns", clock)
    start, end, _ = timing.clock_of(torch.device("cpu"), calls=5)(call)
    assert len(made) == 5
    assert end - start == pytest.approx(1e-3 * (made[-1] + 20_000_000 - made[0]) / 5, rel=0.001)
    assert 2e4 <= end - start < 2.1e4
