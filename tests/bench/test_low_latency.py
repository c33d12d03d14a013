"""`ep-bench low-latency`: its rows, its comparisons, and the memory that it prints."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from ep_plugin.bench.exchange import cases, peers
from ep_plugin.bench.exchange.cases import EpPlugin, time_cases
from ep_plugin.bench.exchange.oracle import wrong_dispatch
from ep_plugin.bench.exchange.peers import AllToAll, received
from ep_plugin.bench.exchange.workload import FLAT, Batch, batches
from ep_plugin.bench.suite import WrongResult, measured
from ep_plugin.bench.suites.moe import LowLatencySuite
from ep_plugin.bench.timing import Run
from ep_plugin.moe.communicator import MoECommunicator
from ep_plugin.moe.reference import reference_dispatch, reference_quantize
from tests.ranks import run_ranks, values

CPU = torch.device("cpu")
RANKS = 2
SUITE = LowLatencySuite(
    backend="cpu", ranks=RANKS, iterations=2, tokens=[3, 20], hidden=128, topk=2, experts=6, dtype="float32"
)
HALVES = ("", "_send", "_receive")


def _measured(rank: int) -> dict[str, Any]:
    return measured(CPU, SUITE)


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
    return measured(CPU, replace(SUITE, tokens=[20], dtype="bfloat16", peer=["deep_ep"]))


def test_a_peer_with_deep_eps_interface() -> None:
    found = values(run_ranks(RANKS, _beside_deep_ep))[0]
    peer = {row["case"] for row in found["rows"] if row["impl"] == "deep_ep"}
    assert peer == {"dispatch_bf16_t20", "combine_bf16_t20", "dispatch_fp8_t20"}


# -- wrong results ---------------------------------------------------------------------------------------------------


Spoil = Callable[[pytest.MonkeyPatch], None]


def _swap(rows: torch.Tensor) -> None:
    rows[[0, 1]] = rows[[1, 0]]


class SwappedRows(AllToAll):
    """Two rows of a dispatch change places."""

    def dispatch(self, batch: Batch, previous: Any = None) -> Any:
        out, state = super().dispatch(batch, previous)
        _swap(out.tokens)
        return out, state


class SwappedWhereKnown(SwappedRows):
    """Two rows of a dispatch change places where the routing is known."""

    def dispatch(self, batch: Batch, previous: Any = None) -> Any:
        return (AllToAll if previous is None else SwappedRows).dispatch(self, batch, previous)


class DoubleSums(AllToAll):
    """Sums are twice as large."""

    def combine(self, y: torch.Tensor, state: Any) -> torch.Tensor:
        return 2 * super().combine(y, state)


class WrongHalves(EpPlugin):
    """Two rows of a dispatch change places, and sums are twice as large."""

    def start_dispatch(self, batch: Batch, previous: Any = None) -> Run:
        receive: Any = super().start_dispatch(batch, previous)

        def wrongly() -> Any:
            out, state = receive()
            _swap(out.tokens[0])
            return out, state

        return wrongly

    def start_combine(self, y: torch.Tensor, state: Any) -> Run:
        receive: Any = super().start_combine(y, state)
        return lambda: 2 * receive()


def _as_all_to_all(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(peers.PLAIN, "all_to_all", SwappedWhereKnown)


def _halves(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(cases, "EpPlugin", WrongHalves)


def _without_weights(patch: pytest.MonkeyPatch) -> None:
    combine = MoECommunicator.combine
    patch.setattr(MoECommunicator, "combine", lambda self, y, handle, weights=None: combine(self, y, handle))


def _in_deep_ep(part: str, patch: pytest.MonkeyPatch) -> None:
    """Two rows of a part of DeepEP's output change places."""
    kind = importlib.import_module("ep_plugin.bench.exchange.deep_ep").DeepEp
    right = kind.dispatch

    def dispatch(self: Any, batch: Batch, previous: Any = None) -> Any:
        out, state = right(self, batch, previous)
        _swap(getattr(out, part)[0])
        return out, state

    patch.setattr(kind, "dispatch", dispatch)


def _nothing(patch: pytest.MonkeyPatch) -> None: ...


ROWS, SUMS, FP8 = "tokens: expected", "expected relative errors", "tokens times scales: expected"
# Case, implementation, what is said of it, the peer, and what makes it wrong.
WRONG: dict[str, tuple[str, str, str, str, Spoil]] = {
    "sums without weights": ("combine_bf16", "ep_plugin", SUMS, "none", _without_weights),
    "dispatch, send half": ("dispatch_send_bf16", "ep_plugin", ROWS, "none", _halves),
    "dispatch, receive half": ("dispatch_receive_bf16", "ep_plugin", ROWS, "none", _halves),
    "dispatch of FP8, receive half": ("dispatch_receive_fp8", "ep_plugin", ROWS, "none", _halves),
    "combine, send half": ("combine_send_bf16", "ep_plugin", SUMS, "none", _halves),
    "combine, receive half": ("combine_receive_bf16", "ep_plugin", SUMS, "none", _halves),
    "peer's rows": ("dispatch_bf16", "SwappedRows", ROWS, f"{__name__}:SwappedRows", _nothing),
    "peer's rows of FP8": ("dispatch_fp8", "SwappedRows", ROWS, f"{__name__}:SwappedRows", _nothing),
    "peer's sums": ("combine_bf16", "DoubleSums", SUMS, f"{__name__}:DoubleSums", _nothing),
    "routing known": ("dispatch_bf16", "gloo_all_to_all, routing known", ROWS, "all_to_all", _as_all_to_all),
    "DeepEP's rows": ("dispatch_bf16", "deep_ep", ROWS, "deep_ep", functools.partial(_in_deep_ep, "tokens")),
    "DeepEP's rows of FP8": ("dispatch_fp8", "deep_ep", FP8, "deep_ep", functools.partial(_in_deep_ep, "tokens")),
    "DeepEP's scales": ("dispatch_fp8", "deep_ep", FP8, "deep_ep", functools.partial(_in_deep_ep, "scales")),
}


def _said(rank: int) -> dict[str, list[str]]:
    """What is said of each case of WRONG."""
    sys.modules["deep_ep"] = importlib.import_module("ep_plugin.deep_ep")
    specs = {spec.name: spec for spec in replace(SUITE, tokens=[20], dtype="bfloat16").specs()}
    found = {}
    for name, (case, _, _, peer, spoil) in WRONG.items():
        with pytest.MonkeyPatch.context() as patch, pytest.raises(WrongResult) as raised:
            spoil(patch)
            time_cases(CPU, [specs[f"{case}_t20"]], [peer], 1)
        found[name] = raised.value.args[0]
    return found


@pytest.fixture(scope="module")
def said() -> list[dict[str, list[str]]]:
    return values(run_ranks(RANKS, _said))


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_wrong_results_are_not_timed(said: list[dict[str, list[str]]], name: str) -> None:
    """The implementation is found wrong on every rank, and no other one is."""
    case, impl, what, _, _ = WRONG[name]
    for found in said:
        starts = [f"rank {rank}: {case}_t20 by {impl}: {what}" for rank in range(RANKS)]
        assert [text[: len(start)] for text, start in zip(found[name], starts, strict=True)] == starts


def test_rows_of_deep_ep_are_put_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deep_ep", importlib.import_module("ep_plugin.deep_ep"))
    deep_ep = importlib.import_module("ep_plugin.bench.exchange.deep_ep")
    peer = object.__new__(deep_ep.DeepEp)
    peer._tokens = 4
    # Two experts. Of the first, rank 1's rows come before rank 0's; the second has one row of rank 1.
    token = torch.tensor([[3, 0, 2, 1, -9], [2, 9, 9, 9, 9]], dtype=torch.int32)
    ranges = torch.tensor([[2 << 32 | 2, 0 << 32 | 2], [0, 0 << 32 | 1]])
    rows = torch.arange(10.0).view(2, 5, 1)
    out = received(tokens=rows, scales=rows + 100, num_tokens_per_expert=torch.tensor([4, 1]))
    found = peer.in_order(out, (None, (token, ranges)))
    assert found.tokens[0, :4, 0].tolist() == [3, 2, 1, 0] and found.tokens[1, 0, 0] == 5
    assert found.scales[0, :4, 0].tolist() == [103, 102, 101, 100]


@pytest.mark.parametrize(("factor", "exact"), [(1.0, True), (1 + 2**-20, False), (1.5, None)])
def test_scales_that_are_rounded_otherwise(factor: float, exact: bool | None) -> None:
    """exact: whether they also pass where FP8 is compared bit for bit; None: they pass nowhere."""
    workload = SUITE.workloads()[1]
    everyone = [replace(batch, quantize=True) for batch in batches(workload, torch.bfloat16, CPU)]
    given = [batch.x for batch in everyone], [batch.ids for batch in everyone], [batch.weights for batch in everyone]
    right = reference_dispatch(*given, num_experts=workload.experts)[0]
    tokens, scales = reference_quantize(right.tokens)
    counts = right.num_tokens_per_expert
    flat = received(tokens=tokens, scales=scales * factor, num_tokens_per_expert=counts)
    found = [wrong_dispatch(flat, everyone, workload, FLAT, 0, exact_fp8=compared) for compared in (True, False)]
    assert [problem is None for problem in found] == [exact is True, exact is not None]
    assert wrong_dispatch(flat._replace(num_tokens_per_expert=counts + 1), everyone, workload, FLAT, 0) is not None
