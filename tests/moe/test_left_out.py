"""Rows for other nodes that a dispatch with a capacity has no room for: they are left out, counted, and told to all."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from ep_plugin import MoECommunicatorConfig
from ep_plugin.errors import DisagreementError
from ep_plugin.moe.high_throughput.engine import DISPATCH_POOL
from ep_plugin.moe.legs import chunk_bounds, num_chunks, padded_rows
from tests.moe.moe_cases import LAYOUTS, Case, communicator, make_inputs, named, poisoned, ragged, same_bits
from tests.moe.test_across_nodes import on_nodes
from tests.moe.test_capacity import check_capacity

CHUNKS = 3


def left_out(
    given: Sequence[torch.Tensor], num_nodes: int, num_experts: int, limit: int
) -> tuple[list[torch.Tensor], int, int]:
    """The ids that arrive if each chunk has room for its share of `limit` rows for a node, the rows that are left out,
    and the limit that leaves none out. given: the ids of each rank."""
    per_node, width, room = len(given) // num_nodes, num_experts // num_nodes, -(-limit // CHUNKS)
    arrived, rows, longest = [], 0, 0
    for rank, ids in enumerate(given):
        kept = ids.clone()
        for node in range(num_nodes):
            if node == rank // per_node:
                continue
            is_there = (ids >= 0) & (ids // width == node)
            for first, last in pairwise(chunk_bounds(len(ids), CHUNKS)):
                number = is_there[first:last].any(1).cumsum(0)
                kept[first:last][is_there[first:last] & (number > room).unsqueeze(1)] = -1
                count = int(number[-1]) if last > first else 0
                rows, longest = rows + max(0, count - room), max(longest, count)
        arrived.append(kept)
    return arrived, rows, CHUNKS * longest


def every_limit(rank: int, size: int, per_node: int, limits: tuple[int, ...] = (1, 4, 13, 40)) -> None:
    """The output and the sums are those of a routing without the pairs that were left out."""
    for seed, layout in enumerate(LAYOUTS):
        for routing in ("random", "last rank only"):
            case = Case(tokens=ragged(size, 40, seed), num_experts=2 * size, topk=3, routing=routing, seed=seed)
            inputs = make_inputs(case)
            for limit in limits:
                arrived, rows, required = left_out(inputs.ids, size // per_node, case.num_experts, limit)
                settings = {"max_tokens_per_rank": 40, "max_rows_per_node": limit, "rail_chunks": CHUNKS}
                with communicator(case, layout, **settings) as comm, named((layout, routing, limit)):
                    for share, spare in ((1.0, 5), (0.6, 0)):
                        out, again = check_capacity(rank, comm, replace(inputs, ids=arrived), share, spare, inputs.ids)
                        for each in (out, again):
                            assert (int(each.left_out), int(each.required_per_node)) == (rows, required)
                    whole, _ = comm.dispatch(inputs.x[rank], inputs.ids[rank])
                    expected = inputs.expected(layout)[rank]
                    same_bits("without a capacity", whole.tokens, expected.tokens)
                    assert whole.left_out is None and whole.required_per_node is None


@pytest.mark.slow
@pytest.mark.parametrize(("num_nodes", "per_node"), [(2, 1), (2, 2), (3, 2), (5, 1)])
def test_rows_without_room_are_left_out_and_counted_on_all_ranks(num_nodes: int, per_node: int) -> None:
    on_nodes(num_nodes, per_node, every_limit, per_node)


def _gradients(rank: int, size: int) -> None:
    """A token gets the gradients of the rows that have arrived. Its other pairs have a weight's gradient of 0."""
    case = Case(tokens=(30,) * size, num_experts=2 * size, topk=2, dtype=torch.float64, drop=0.0)
    inputs = make_inputs(case)
    arrived, rows, _ = left_out(inputs.ids, size, case.num_experts, 6)
    assert rows > 0
    settings = {"max_tokens_per_rank": 30, "max_rows_per_node": 6, "rail_chunks": CHUNKS}
    with communicator(case, **settings) as comm, poisoned():
        found = []
        for ids in (inputs.ids[rank], arrived[rank]):
            x, weights = inputs.x[rank].clone().requires_grad_(), inputs.weights[rank].clone().requires_grad_()
            out, handle = comm.dispatch(x, ids, weights, capacity=60 * size)
            sums = comm.combine(torch.sin(out.tokens), handle, weights=out.weights)
            (sums * inputs.bias[rank]).sum().backward()
            found.append((sums, x.grad, weights.grad, out.left_out))
    for name, given, kept in zip(("sums", "of x", "of weights"), *found, strict=False):
        same_bits(name, given, kept)
    assert [int(each[3]) for each in found] == [rows, 0]


def test_what_is_left_out_sends_no_gradient() -> None:
    on_nodes(3, 1, _gradients)


def _disagree(rank: int, size: int) -> str:
    with pytest.raises(DisagreementError) as raised:
        communicator(Case(tokens=(8,) * size, num_experts=size), max_tokens_per_rank=8, max_rows_per_node=3 + rank)
    return str(raised.value)


def test_ranks_agree_on_the_room() -> None:
    for said in on_nodes(2, 1, _disagree):
        assert "max_rows_per_node=3" in said and "max_rows_per_node=4" in said


def _config(**given: int | None) -> MoECommunicatorConfig:
    usual = {"num_experts": 256, "hidden_size": 7168, "topk": 8, "max_tokens_per_rank": 4096}
    return MoECommunicatorConfig(**(usual | given))


def test_the_room_grows_with_the_experts_of_a_token_and_not_with_the_nodes() -> None:
    """With the usual limit, all legs of a chunk together have room for a little more than 2 K rows of each token."""
    config = functools.partial(_config, rail_chunks=4)
    assert [padded_rows(nodes, config(), "cuda") for nodes in (2, 8, 16, 32, 64, 128)] == [
        1024,
        1024,
        1024,
        512,
        256,
        136,
    ]
    assert max((nodes - 1) * padded_rows(nodes, config(), "cuda") for nodes in range(2, 129)) <= 2.2 * 8 * 1024
    assert padded_rows(64, config(max_rows_per_node=101), "cuda") == 26
    assert padded_rows(64, config(max_rows_per_node=2**40), "cuda") == 1024
    assert padded_rows(2, config(max_rows_per_node=1), "cuda") == 1
    for wrong in (0, -1, True, 1.5):
        with pytest.raises(ValueError, match="max_rows_per_node: expected an integer of at least 1"):
            _config(max_rows_per_node=wrong)
    with pytest.raises(ValueError, match='max_rows_per_node: expected None in mode="ll", got 3'):
        _config(mode="ll", max_rows_per_node=3)
    with pytest.raises(ValueError, match="max_rows_per_node: expected None without max_tokens_per_rank, got 3"):
        _config(max_tokens_per_rank=None, max_rows_per_node=3)


@pytest.mark.parametrize(
    ("nodes", "topk", "tokens"), [(64, 8, 32), (64, 8, 128), (32, 4, 64), (128, 8, 4096), (4, 1, 16), (128, 1, 512)]
)
def test_the_usual_room_is_enough_for_evenly_drawn_experts(nodes: int, topk: int, tokens: int) -> None:
    """Also in all legs of a job of 8 ranks per node, a million times."""
    config = _config(topk=topk, max_tokens_per_rank=tokens)
    chunks = num_chunks(nodes, config, "cuda")
    length, room = -(-tokens // chunks), padded_rows(nodes, config, "cuda")
    needed = 1 - (1 - 1 / nodes) ** topk
    chance = sum(
        math.comb(length, rows) * needed**rows * (1 - needed) ** (length - rows) for rows in range(room + 1, length + 1)
    )
    assert chance * nodes * nodes * 8 * chunks < 1e-6


def _memory(rank: int, size: int) -> list[int]:
    """The bytes of the pool of dispatch with the usual limit, with none, and of what one dispatch receives."""
    case = Case(tokens=(256,) * size, num_experts=size, topk=1)
    held = []
    for limit in (None, 256):
        with communicator(case, max_tokens_per_rank=256, max_rows_per_node=limit, rail_chunks=1) as comm:
            inputs = make_inputs(case)
            comm.dispatch(inputs.x[rank], inputs.ids[rank], capacity=256 * size)
            held.append(comm.engine.pool_bytes(DISPATCH_POOL))
    return held


def test_the_usual_limit_bounds_the_pool() -> None:
    for usual, whole in on_nodes(8, 1, _memory):
        assert usual <= whole / 2.5  # 86 rows for each of 7 nodes, in place of 256


def _one_node(rank: int, size: int) -> None:
    case = Case(tokens=(9,) * size, num_experts=size)
    inputs = make_inputs(case)
    with communicator(case, max_tokens_per_rank=9, max_rows_per_node=1) as comm:
        out, _ = comm.dispatch(inputs.x[rank], inputs.ids[rank], capacity=18 * size)
        assert not int(out.overflow) and out.left_out is None and out.required_per_node is None


def test_one_node_leaves_nothing_out() -> None:
    on_nodes(1, 2, _one_node)
