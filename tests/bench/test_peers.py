"""The peer of ep-bench by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ep_plugin.bench.exchange.cases import row_factors, wrong_combine, wrong_dispatch
from ep_plugin.bench.exchange.peers import AllToAll, _flat_order, _inverse
from ep_plugin.bench.exchange.workload import DTYPES, FLAT, Workload, batches, expert_factors, other_rows
from tests.ranks import run_ranks, values

RANKS = 3
# Skewed routes: ranks receive unequally. 144: FP8 rows have more scales than whole blocks.
WORKLOAD = Workload(ranks=RANKS, tokens=37, hidden=144, topk=3, experts=12, skew=1.5)
CPU = torch.device("cpu")


def all_turns(rank: int, dtype: str) -> list[str | None]:
    """What is wrong with dispatch and combine, with the rows and routes of each turn."""
    peer = AllToAll(WORKLOAD, CPU)
    return [_wrong(peer, rank, dtype, turn) for turn in range(3)]


def _wrong(peer: Any, rank: int, dtype: str, turn: int) -> str | None:
    everyone = other_rows(batches(WORKLOAD, DTYPES[dtype], CPU), turn, reroute=True)
    out, state = peer.dispatch(everyone[rank])
    problem = wrong_dispatch(out, everyone, WORKLOAD, FLAT, rank)
    if problem or dtype == "float8":
        return problem
    factors = expert_factors(WORKLOAD, DTYPES[dtype], CPU)
    y = out.tokens * row_factors(factors, out).unsqueeze(1)
    return wrong_combine(peer.combine(y, state), everyone[rank], factors)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8"])
def test_the_peer_is_right(dtype: str) -> None:
    assert values(run_ranks(RANKS, all_turns, dtype)) == [[None] * 3] * RANKS


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
