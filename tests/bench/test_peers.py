"""The peers of ep-bench by themselves."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ep_plugin.bench.exchange import sums
from ep_plugin.bench.exchange.oracle import expert_rows, wrong_combine, wrong_dispatch
from ep_plugin.bench.exchange.peers import PLAIN, RailAllToAll, _flat_order, _inverse
from ep_plugin.bench.exchange.workload import DTYPES, FLAT, Batch, Workload, batches, expert_factors, other_rows
from ep_plugin.bench.suite import measured
from ep_plugin.bench.suites.moe import LowLatencySuite, MoeSuite
from tests.ranks import run_ranks, values

RANKS = 3
# Skewed routes: ranks receive unequally. 144: FP8 rows have more scales than whole blocks.
WORKLOAD = Workload(ranks=RANKS, tokens=37, hidden=144, topk=3, experts=12, skew=1.5)
CPU = torch.device("cpu")
MOE = MoeSuite(
    backend="cpu", ranks=2, iterations=1, tokens=20, hidden=256, topk=2, experts=6, dtype=["bfloat16", "float8"],
    layout=["token_major"], peer=["none"],
)  # fmt: skip


def all_turns(rank: int, name: str, dtype: str) -> list[str | None]:
    """What is wrong with dispatch, cached dispatch and combine, with the rows and routes of each turn."""
    peer, state = PLAIN[name](WORKLOAD, CPU), None
    found = []
    for turn in range(4):
        problem, state = _wrong(peer, rank, dtype, turn, state if turn == 2 else None)
        found.append(problem)
    return found


def _wrong(peer: Any, rank: int, dtype: str, turn: int, previous: Any) -> tuple[str | None, Any]:
    """previous: the state of the turn before, whose routing is used again."""
    everyone = other_rows(batches(WORKLOAD, DTYPES[dtype], CPU), turn, reroute=True)
    if previous is not None:
        routes = other_rows(batches(WORKLOAD, DTYPES[dtype], CPU), turn - 1, reroute=True)
        everyone = [replace(batch, ids=other.ids) for batch, other in zip(everyone, routes, strict=True)]
    out, state = peer.dispatch(everyone[rank], previous)
    return _wrong_results(peer, rank, dtype, everyone, out, state), state


def _wrong_results(peer: Any, rank: int, dtype: str, everyone: list[Batch], out: Any, state: Any) -> str | None:
    problem = wrong_dispatch(out, everyone, WORKLOAD, FLAT, rank)
    if problem or dtype == "float8":
        return problem
    factors = expert_factors(WORKLOAD, DTYPES[dtype], CPU)
    return wrong_combine(peer.combine(expert_rows(factors, out, rank), state), everyone[rank], factors)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8"])
@pytest.mark.parametrize("name", PLAIN)
def test_the_peer_is_right(name: str, dtype: str) -> None:
    assert values(run_ranks(RANKS, all_turns, name, dtype)) == [[None] * 4] * RANKS


def _beside_deep_ep(rank: int) -> dict[str, Any]:
    sys.modules["deep_ep"] = importlib.import_module("ep_plugin.deep_ep")
    return measured(CPU, replace(MOE, peer=["deep_ep"]))


def test_throughput_calls_with_deep_eps_interface() -> None:
    found = values(run_ranks(2, _beside_deep_ep))[0]
    peer = {row["case"] for row in found["rows"] if row["impl"] == "deep_ep"}
    token_major = {"dispatch_token_major_bf16", "dispatch_cached_token_major_bf16", "combine_token_major_bf16"}
    assert peer == token_major | {"dispatch_token_major_fp8", "dispatch_cached_token_major_fp8"}


def _beside_deep_ep_with_float32(rank: int) -> list[tuple[str, str]]:
    """DeepEP refuses float32."""
    sys.modules["deep_ep"] = SimpleNamespace()  # type: ignore[assignment]
    throughput = measured(CPU, replace(MOE, peer=["deep_ep"], dtype=["float32"]))
    low_latency = LowLatencySuite(
        backend="cpu", ranks=2, iterations=1, tokens=[8], hidden=256, topk=2, experts=6, dtype="float32",
        peer=["deep_ep"], calls=1,
    )  # fmt: skip
    return [(row["case"], row["impl"]) for row in throughput["rows"] + measured(CPU, low_latency)["rows"]]


def test_deep_ep_takes_no_part_in_cases_of_float32() -> None:
    found = values(run_ranks(2, _beside_deep_ep_with_float32))[0]
    assert ("combine_token_major_fp32", "ep_plugin") in found and ("combine_fp32_t8", "ep_plugin") in found
    assert all(impl == "ep_plugin" for _, impl in found)


def _doubled(rank: int) -> dict[str, Any]:
    sys.modules["deep_ep"] = importlib.import_module("ep_plugin.deep_ep")
    kind = importlib.import_module("ep_plugin.bench.exchange.deep_ep").DeepEpThroughput
    combine = kind.combine
    kind.combine = lambda self, y, state: 2 * combine(self, y, state)
    return measured(CPU, replace(MOE, peer=["deep_ep"], dtype=["bfloat16"]))


def test_wrong_sums_of_deep_ep_are_found() -> None:
    wrong = values(run_ranks(2, _doubled))[0]["wrong"]
    assert all("combine_token_major_bf16 by deep_ep: expected relative errors" in sentence for sentence in wrong)


@pytest.mark.parametrize("way", [sums.by_embedding_bag, sums.by_matrix_product, sums.in_order_of_k])
def test_each_way_of_summing_is_right(way: sums.Sum) -> None:
    rows, weights = torch.randn(11, 6), torch.randn(4, 3)
    numbers = torch.randint(0, 11, (4, 3))
    expected = (rows[numbers].double() * weights.double().unsqueeze(2)).sum(1)
    torch.testing.assert_close(way(rows, numbers, weights).double(), expected, rtol=1e-5, atol=1e-5)


def test_the_fastest_way_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    monkeypatch.setattr(sums, "_fastest", {})
    monkeypatch.setattr(sums, "_seconds", lambda way, *_: {"by_matrix_product": 1.0}.get(way.__name__, 2.0))
    matrix_product = sums.by_matrix_product

    def by_matrix_product(*given: torch.Tensor) -> torch.Tensor:
        called.append("product")
        return matrix_product(*given)

    monkeypatch.setattr(sums, "by_matrix_product", by_matrix_product)
    rows, numbers = torch.ones(3, 2), torch.zeros(4, 2, dtype=torch.int64)
    assert torch.equal(sums.weighted_sums(rows, numbers, torch.ones(4, 2)), torch.full((4, 2), 2.0))
    assert called == ["product"]


ROWS = torch.tensor([[0, 3, 0], [0, 2, 5], [4, 0, 1], [0, 0, 7], [2, 2, 0], [6, 1, 0]])  # 3 nodes of 2 ranks


class Garbled(RailAllToAll):
    """Rank 4 changes a byte that it sends on the last leg."""

    def __call__(self) -> None:
        self._legs[-1].leaving[:1] += int(self._rank == 4)
        super().__call__()


def over_the_rail(rank: int, there: int, back: int, kind: type[RailAllToAll]) -> str | None:
    rail = kind(ROWS, there, back, CPU)
    rail()
    return rail.check(lambda run: run())


@pytest.mark.parametrize(("there", "back"), [(12, 0), (0, 8), (16, 4)], ids=["there", "back", "there and back"])
def test_the_rail_carries_what_it_is_given(there: int, back: int) -> None:
    assert values(run_ranks(6, over_the_rail, there, back, RailAllToAll)) == [None] * 6


def test_a_rail_that_carries_something_else_is_found() -> None:
    found = values(run_ranks(6, over_the_rail, 16, 4, Garbled))
    wrong = "expected the bytes that the other nodes have sent, got others"
    assert found == [wrong if rank == 2 else None for rank in range(6)]  # rank 4 returns rows to rank 2 first


@pytest.mark.parametrize(
    "arriving",
    [[[2, 0, 1], [0, 0, 3]], [[0, 0], [0, 0]], [[1], [0], [2]], [[0, 4, 0, 1]]],
    ids=["empty between others", "nothing", "one expert", "one source"],
)
def test_rows_by_source_and_expert_are_put_by_expert_and_source(arriving: list[list[int]]) -> None:
    counts = torch.tensor(arriving)
    arrived = [
        (expert, source) for source, row in enumerate(arriving) for expert, n in enumerate(row) for _ in range(n)
    ]
    expected = sorted(range(len(arrived)), key=lambda place: arrived[place])
    to_flat = _flat_order(counts, len(arrived))
    assert to_flat.tolist() == expected
    assert _inverse(to_flat).tolist() == [expected.index(place) for place in range(len(arrived))]
