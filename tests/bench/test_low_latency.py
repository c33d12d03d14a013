"""`ep-bench low-latency`: its rows, its comparison, and the memory that it prints."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from typing import Any

import torch

from ep_plugin.bench.suite import measured
from ep_plugin.bench.suites.low_latency import LowLatencySuite
from ep_plugin.moe.communicator import MoECommunicator
from tests.ranks import run_ranks, values

RANKS = 2
SUITE = LowLatencySuite(
    backend="cpu", ranks=RANKS, iterations=2, tokens=[3, 20], hidden=128, topk=2, experts=6, dtype="float32"
)
HALVES = ("", "_send", "_receive")


def _measured(rank: int) -> dict[str, Any]:
    return measured(torch.device("cpu"), SUITE)


def test_every_case_has_its_rows() -> None:
    found = values(run_ranks(RANKS, _measured))[0]
    expected = set()
    for tokens in (3, 20):
        expected |= {(f"dispatch{half}_{kind}_t{tokens}", "ep_plugin") for half in HALVES for kind in ("fp32", "fp8")}
        expected |= {(f"combine{half}_fp32_t{tokens}", "ep_plugin") for half in HALVES}
        expected |= {
            (f"{what}_t{tokens}", "gloo_all_to_all") for what in ("dispatch_fp32", "combine_fp32", "dispatch_fp8")
        }
        expected |= {(f"dispatch_{kind}_t{tokens}", "gloo_all_to_all, routing known") for kind in ("fp32", "fp8")}
    assert {(row["case"], row["impl"]) for row in found["rows"]} == expected
    assert all(row["median_us"] > 0 and row["bytes_wire"] > 0 for row in found["rows"])
    assert [note.partition(" takes ")[0] for note in found["notes"]] == [
        "a communicator for T = 3",
        "a communicator for T = 20",
    ]


def _beside_deep_ep(rank: int) -> dict[str, Any]:
    sys.modules["deep_ep"] = importlib.import_module("ep_plugin.deep_ep")
    return measured(torch.device("cpu"), replace(SUITE, tokens=[20], dtype="bfloat16", peer=["deep_ep"]))


def test_a_peer_with_deep_eps_interface() -> None:
    found = values(run_ranks(RANKS, _beside_deep_ep))[0]
    peer = {row["case"] for row in found["rows"] if row["impl"] == "deep_ep"}
    assert peer == {"dispatch_bf16_t20", "combine_bf16_t20", "dispatch_fp8_t20"}


def _wrong(rank: int) -> dict[str, Any]:
    combine = MoECommunicator.combine
    MoECommunicator.combine = lambda self, y, handle, weights=None: combine(self, y, handle)
    return measured(torch.device("cpu"), SUITE)


def test_wrong_sums_are_not_timed() -> None:
    for found in values(run_ranks(RANKS, _wrong)):
        assert "dispatch_fp32_t3 by ep_plugin: combine: off by" in found["wrong"][0]
