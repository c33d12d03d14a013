"""The peers of ep-bench by themselves: rows in pieces, scales beside rows, and ways to sum."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ep_plugin.bench.exchange import columns, gather, pieces_of, spread, width_of
from ep_plugin.bench.oracle import Oracle, wrong_combine
from ep_plugin.bench.peers import AllToAll, AllToAllKept, TokenMajorAllToAll, _permutation, tune
from ep_plugin.bench.peers_dedup import DedupAllToAll
from ep_plugin.bench.specs import FLAT, TOKEN_MAJOR
from ep_plugin.bench.sums import Fastest, bag_sum, chunked_sum, gathered_sum
from ep_plugin.bench.workload import DTYPES, Workload, batches, expert_rows, other_rows
from tests.ranks import run_ranks, values

RANKS = 3
# Skewed routes: ranks receive unequally. 144: rows of FP8 are no multiple of pieces, nor scales of 8 bytes.
WORKLOAD = Workload(ranks=RANKS, tokens=37, hidden=144, topk=3, experts=12, skew=1.5)
CPU = torch.device("cpu")


def all_ways(rank: int, dtype: str) -> list[tuple[str, int, str | None]]:
    """What is wrong with each peer's dispatch and combine, for each number of pieces."""
    found = []
    for peer in (AllToAll, AllToAllKept, DedupAllToAll):
        for pieces in (1, 2, 4):
            made = peer(WORKLOAD, CPU)
            made.dispatch_pieces = made.combine_pieces = pieces
            for turn in range(2):
                found.append((peer.__name__, pieces, _wrong(made, rank, dtype, turn)))
    return found


def _wrong(peer: Any, rank: int, dtype: str, turn: int) -> str | None:
    everyone = other_rows(batches(WORKLOAD, DTYPES[dtype], CPU), turn, reroute=True)
    oracle = Oracle(WORKLOAD, everyone, FLAT, rank)
    received = peer.dispatch(everyone[rank])
    problem = oracle.wrong_dispatch(received)
    if problem or dtype == "float8":
        return problem

    def rows_of(other: int) -> torch.Tensor:
        return expert_rows(WORKLOAD, other, oracle.rows(other), turn, DTYPES[dtype], CPU)

    return wrong_combine(oracle.combined(rows_of), peer.combine(rows_of(rank), received.state))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8"])
def test_peers_are_right_in_any_number_of_pieces(dtype: str) -> None:
    for found in values(run_ranks(RANKS, all_ways, dtype)):
        assert len(found) == 18
        assert [way for way in found if way[2]] == []


def token_major(rank: int, dtype: str) -> str | None:
    everyone = batches(WORKLOAD, DTYPES[dtype], CPU)
    received = TokenMajorAllToAll(WORKLOAD, CPU).dispatch(everyone[rank])
    return Oracle(WORKLOAD, everyone, TOKEN_MAJOR, rank).wrong_dispatch(received)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8"])
def test_rows_per_token_and_rank_are_right(dtype: str) -> None:
    assert values(run_ranks(RANKS, token_major, dtype)) == [None] * RANKS


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
    to_flat, from_flat = _permutation(counts, torch.arange(len(arrived)))
    assert to_flat.tolist() == expected
    assert from_flat.tolist() == [expected.index(place) for place in range(len(arrived))]


def chosen_pieces(rank: int) -> tuple[int, int, str | None]:
    peer = AllToAll(WORKLOAD, CPU)
    tune(peer, batches(WORKLOAD, torch.float32, CPU)[rank], CPU)
    return peer.dispatch_pieces, peer.combine_pieces, _wrong(peer, rank, "float32", 1)


def test_all_ranks_choose_the_same_pieces() -> None:
    found = values(run_ranks(RANKS, chosen_pieces))
    assert len(set(found)) == 1  # or the next exchange would not have ended
    assert {found[0][0], found[0][1]} <= {1, 2, 4} and found[0][2] is None


@pytest.mark.parametrize(("dtype", "scales", "word"), [
    ("float8", 56, torch.int64), ("float8", 1, torch.int32), ("bfloat16", None, torch.int64),
])  # fmt: skip
@pytest.mark.parametrize("count", [1, 2, 4])
def test_pieces_hold_every_byte_once_at_aligned_places(
    dtype: str, scales: int | None, word: torch.dtype, count: int
) -> None:
    x = torch.randint(0, 100, (5, 7168), dtype=torch.uint8).view(DTYPES[dtype])
    beside = None if scales is None else torch.rand(5, scales)
    index = torch.tensor([4, 0, 0, 2])
    pieces = pieces_of(x, beside, count)
    back, beside_back = torch.zeros_like(x)[:4], None if beside is None else torch.zeros_like(beside)[:4]
    for piece, into in zip(pieces, pieces_of(back, beside_back, count), strict=True):
        packed = gather(piece, index, torch.empty(4, width_of(piece), dtype=word))
        spread(packed, torch.arange(4), into)
    assert torch.equal(back.view(torch.uint8), x.view(torch.uint8)[index])
    assert beside is None or torch.equal(beside_back, beside[index])
    assert len(pieces) == count and all(part.dtype is word for piece in pieces for part in piece)
    assert all(cut * word.itemsize % 16 == 0 for cut in columns(x.view(word), count))


def test_all_ways_to_sum_agree_and_the_chosen_one_stays() -> None:
    random = torch.Generator().manual_seed(0)
    rows = torch.randn(12, 16, generator=random)
    position = torch.randperm(12, generator=random).view(4, 3)
    weights = torch.rand(4, 3, generator=random)
    expected = (rows[position] * weights.unsqueeze(2)).sum(1)
    calls = []

    def slow(*given: torch.Tensor) -> torch.Tensor:
        calls.append(len(given))
        return torch.stack([gathered_sum(*given) for _ in range(2000)])[0]

    chosen = Fastest(slow, bag_sum)
    for _ in range(2):
        assert torch.allclose(chosen(rows, position, weights), expected, atol=1e-6)
    assert len(calls) == 4
    assert torch.allclose(gathered_sum(rows, position, weights), expected, atol=1e-6)


def test_sums_in_chunks_are_those_of_the_whole() -> None:
    random = torch.Generator().manual_seed(0)
    rows = torch.randn(300, 7168, generator=random)
    position = torch.randint(0, 300, (301, 8), generator=random)  # chunks of 73 tokens, the last one short
    weights = torch.rand(301, 8, generator=random)
    assert torch.allclose(chunked_sum(rows, position, weights), gathered_sum(rows, position, weights))
