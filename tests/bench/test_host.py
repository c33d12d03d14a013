"""`ep-bench host`: its rows, and what a sample is."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from ep_plugin.bench.suite import measured
from ep_plugin.bench.suites import host
from ep_plugin.bench.suites.host import HostSuite
from tests.ranks import run_ranks, values

CPU = torch.device("cpu")
SUITE = HostSuite(backend="cpu", ranks=2, iterations=1, calls=2, tokens=3, hidden=256, topk=2, experts=4)
OF_BOTH = {"all_gather", "reduce_scatter"}
OURS = {
    *("low-latency dispatch", "low-latency combine"),
    *("dispatch, the host waits", "dispatch, capacity", "dispatch, known routing", "combine"),
    *("Buffer.get_dispatch_layout", "Buffer.combine", "Buffer.low_latency_dispatch", "Buffer.low_latency_combine"),
    *(f"Buffer.dispatch, {how}" for how in ("the host waits", "num_worst_tokens", "known routing")),
    *("Buffer.dispatch, known routing, async_finish", "Buffer.combine, async_finish"),
    *(f"round trip, {how}, 128 tokens" for how in ("capacity", "the host waits")),
}


def _measured(rank: int) -> dict[str, Any]:
    return measured(CPU, SUITE)


def test_every_call_has_its_row() -> None:
    rows = values(run_ranks(2, _measured))[0]["rows"]
    expected = {(case, impl) for case in OF_BOTH for impl in ("ep_plugin", "gloo")}
    expected |= {("a + b", "torch"), ("empty", "torch"), ("all_to_all", "gloo")}
    assert {(row["case"], row["impl"]) for row in rows} == expected | {(case, "ep_plugin") for case in OURS}
    assert all(row["median_us"] > 0 for row in rows)


def _measured_over_nodes(rank: int) -> dict[str, Any]:
    return measured(CPU, dataclasses.replace(SUITE, nodes=2))


def test_calls_over_nodes_have_their_rows() -> None:
    rows = values(run_ranks(2, _measured_over_nodes, env={"EP_PLUGIN_RANKS_PER_NODE": "1"}))[0]["rows"]
    one_node = {case for case in OURS if case.startswith(("low-latency", "Buffer"))}
    assert {row["case"] for row in rows if row["impl"] == "ep_plugin"} == (OURS | OF_BOTH) - one_node
    assert dataclasses.replace(SUITE, nodes=2).name == "host_2_nodes"


def test_a_sample_is_the_mean_of_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[int]()

    def clock() -> float:
        return 5.0 + len(made) / 8

    monkeypatch.setattr(host.dist, "barrier", lambda: None)
    monkeypatch.setattr(host.time, "perf_counter", clock)
    start, end, _ = host._clock(CPU, 4)(lambda: made.append(0))
    assert (len(made), end - start) == (host._UNTIMED + 4, 125_000)
