"""The peers of ep-bench by themselves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from ep_plugin.bench.exchange.oracle import expert_rows, wrong_combine, wrong_dispatch
from ep_plugin.bench.exchange.peers import PLAIN, RailAllToAll, _flat_order, _inverse
from ep_plugin.bench.exchange.workload import DTYPES, FLAT, Batch, Workload, batches, expert_factors, other_rows
from tests.ranks import run_ranks, values

RANKS = 3
# Skewed routes: ranks receive unequally. 144: FP8 rows have more scales than whole blocks.
WORKLOAD = Workload(ranks=RANKS, tokens=37, hidden=144, topk=3, experts=12, skew=1.5)
CPU = torch.device("cpu")


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
