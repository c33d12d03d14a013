"""Low latency over emulated nodes of CPUs: the cases of one node, halves, gradients, bytes, memory, and refusals."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ep_plugin import _C, record_stats
from ep_plugin.errors import NotSupported
from ep_plugin.moe.low_latency.combine import LowLatencyCombine
from tests.moe import test_low_latency, test_low_latency_autograd, test_low_latency_halves
from tests.moe.low_latency_cases import check_rows, check_sums, expert_results, low_latency, round_trip
from tests.moe.moe_cases import ROUTINGS, Case, make_inputs, named, poisoned, same_bits
from tests.moe.test_across_nodes import SHAPES, on_nodes
from tests.ranks import run_ranks, values

SLOW = pytest.mark.slow
HEADER_BYTES = 64  # of a leg


def _ragged(size: int) -> tuple[int, ...]:
    """T of each rank: none, few, and more than a group of slots has."""
    return tuple(itertools.islice(itertools.cycle((5, 0, 140, 33)), size))


def _every_routing(rank: int, size: int) -> None:
    case = Case(tokens=_ragged(size), num_experts=3 * size, topk=3, hidden=40, dtype=torch.bfloat16)
    with low_latency(case) as comm:
        assert comm.engine.node_map.num_nodes > 1
        for number, routing in enumerate(ROUTINGS):
            with named(routing), poisoned():
                round_trip(comm, make_inputs(dataclasses.replace(case, routing=routing, seed=number)))


MARKED = [pytest.param(*shape, marks=SLOW if shape[0] * shape[1] > 6 else ()) for shape in SHAPES]


@pytest.mark.parametrize(("num_nodes", "per_node"), MARKED)
def test_routings(num_nodes: int, per_node: int) -> None:
    on_nodes(num_nodes, per_node, _every_routing)


CASES: list[Callable[..., Any]] = [
    test_low_latency._all_shapes,
    test_low_latency._all_dtypes,
    test_low_latency._fewer_pairs,
    test_low_latency._zero_weights,
    test_low_latency._bias,
    test_low_latency._smaller_calls,
    test_low_latency._outputs_of_megabytes,
    test_low_latency_autograd._finite_differences,
    test_low_latency_autograd._frozen,
    test_low_latency_autograd._compiled,
    test_low_latency_autograd._watched_and_not,
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__.strip("_"))
def test_cases_of_one_node(case: Callable[..., Any]) -> None:
    on_nodes(2, 1, case)


OF_THREE: list[Callable[..., Any]] = [
    test_low_latency._all_shapes,
    test_low_latency._repeats,
    test_low_latency_autograd._gradients,
]


@pytest.mark.parametrize("case", OF_THREE, ids=lambda case: case.__name__.strip("_"))
def test_cases_of_three_nodes(case: Callable[..., Any]) -> None:
    on_nodes(3, 1, case)


@pytest.mark.parametrize("per_node", [1, 2])
def test_quantized_rows(per_node: int) -> None:
    on_nodes(2, per_node, test_low_latency._quantized)


HALVES: list[Callable[..., Any]] = [
    test_low_latency_halves._either_order,
    test_low_latency_halves._late,
    test_low_latency_halves._third,
    test_low_latency_halves._dropped,
]


@pytest.mark.parametrize("case", HALVES, ids=lambda case: case.__name__.strip("_"))
def test_halves(case: Callable[..., Any]) -> None:
    on_nodes(3, 1, case)


@pytest.mark.slow
@pytest.mark.parametrize("per_node", [1, 2])
def test_hundreds_of_operations(per_node: int) -> None:
    on_nodes(2, per_node, test_low_latency_halves._many, 400)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif("EP_TEST_LONG" not in os.environ, reason="takes minutes: EP_TEST_LONG=1 runs it")
def test_fifty_thousand_operations() -> None:
    on_nodes(2, 1, test_low_latency_halves._many, 50_000, timeout_s=1750)


def _interleaved(rank: int, size: int) -> None:
    """Ranks 0, 2, 4 are on one node, ranks 1, 3, 5 on the other."""
    os.environ["EP_PLUGIN_HOST"] = f"node {rank % 2}"
    case = Case(tokens=(4, 0, 9, 130, 2, 70), num_experts=12, topk=4, seed=3)
    with low_latency(case) as comm:
        assert comm.engine.node_map.nodes == ((0, 2, 4), (1, 3, 5))
        for seed in range(4):
            with poisoned():
                round_trip(comm, make_inputs(dataclasses.replace(case, seed=seed)))


def test_ranks_may_be_interleaved_over_nodes() -> None:
    values(run_ranks(6, _interleaved, 6, timeout_s=120))


def _bits(rank: int, size: int) -> list[torch.Tensor]:
    case = Case(tokens=(20, 60, 7, 33), num_experts=8, topk=5, dtype=torch.bfloat16, hidden=256, seed=12)
    inputs = make_inputs(case)
    with low_latency(case) as comm:
        out, handle = comm.dispatch(inputs.x[rank], inputs.ids[rank])
        rows = check_rows(comm, out, inputs)
        y = expert_results(inputs, out.tokens.shape[1])
        return [out.tokens.flatten(0, 1)[rows.place], comm.combine(y[rank], handle, weights=inputs.weights[rank])]


def test_bits_are_the_same_run_after_run() -> None:
    first, again = (on_nodes(2, 2, _bits) for _ in range(2))
    for mine, theirs in zip(first, again, strict=True):
        for name, one, other in zip(("rows", "sums"), mine, theirs, strict=True):
            same_bits(name, one, other)


# -- what crosses, and memory ---------------------------------------------------------------------------------------


def _row_bytes(K: int, H: int) -> int:
    return -(-(4 + 4 * K) // 16) * 16 + 4 * H


def _bytes(rank: int, size: int) -> None:
    """A token crosses once to each node, with no row that is not there."""
    K, H, E = 4, 16, 4 * size
    case = Case(tokens=(30, 7, 0, 64), num_experts=E, topk=K, hidden=H, seed=5)
    inputs = make_inputs(case)
    record_stats()
    with low_latency(case) as comm:
        other = 1 - comm.engine.node
        node_of = inputs.ids[rank].div(E // 2, rounding_mode="floor")
        crosses = int((node_of == other).any(dim=1).sum())  # ids of -1 are on node -1
        out, handle = comm.dispatch(inputs.x[rank], inputs.ids[rank])
        counts = -(-2 * (E // 2) // 16) * 16
        assert comm.rail_bytes_sent == HEADER_BYTES + counts + crosses * _row_bytes(K, H)
        before, (load, peer) = comm.rail_bytes_sent, (comm.stats(), (rank + 2) % 4)
        theirs = inputs.ids[peer].div(E // 2, rounding_mode="floor") == comm.engine.node
        arrives = int((theirs & (inputs.ids[peer] >= 0)).any(dim=1).sum())
        assert load.rail_bytes_sent == before
        assert load.rail_bytes_received == HEADER_BYTES + counts + arrives * _row_bytes(K, H)
        comm.combine(out.tokens, handle, weights=inputs.weights[rank])
        weights, sums = HEADER_BYTES + 4 * K * crosses, HEADER_BYTES + 4 * H * arrives
        assert comm.rail_bytes_sent - before == weights + sums
        assert comm.stats(reset=True).rail_bytes_sent == comm.rail_bytes_sent
        assert comm.stats().rail_bytes_sent == comm.stats().rail_bytes_received == 0


def test_bytes_that_cross() -> None:
    on_nodes(2, 2, _bytes)


def _exchanges(rank: int, size: int) -> list[tuple[str, int]]:
    """The exchanges of a dispatch and a combine, and how many messages this rank sends in each."""
    case = Case(tokens=(3,) * size, num_experts=size, topk=1)
    inputs, found = make_inputs(case), []
    with low_latency(case) as comm:
        round_trip(comm, inputs)
        start = comm.engine.rails.start

        def counted(sends: Any, receives: Any, what: str, *rest: Any) -> Any:
            found.append((what, len(sends)))
            return start(sends, receives, what, *rest)

        comm.engine.rails.start = counted
        round_trip(comm, inputs)
    return found


@pytest.mark.parametrize("num_nodes", [2, 4])
def test_exchanges_do_not_grow_with_the_nodes(num_nodes: int) -> None:
    for found in on_nodes(num_nodes, 1, _exchanges):
        names = ("rows of a dispatch", "weights of a combine", "sums of a combine")
        assert found == [(name, num_nodes - 1) for name in names]


def test_memory_is_that_of_the_formula() -> None:
    """2 T slot (4 (N - 1) + G (N + 1)), the words of the own node, and the heads of rows."""
    T, K, H = 128, 8, 7168
    for nodes, each in ((2, 8), (8, 8), (32, 8)):
        shape = _C.LlShape(max_tokens=T, max_topk=K, slot_bytes=2 * H, num_nodes=nodes, node_experts=256 // nodes)
        rows = 2 * T * 2 * H * (4 * (nodes - 1) + each * (nodes + 1))
        found = _C.ll_block_bytes(each, shape)
        assert rows < found < 1.1 * rows + 16 * 2**20, (nodes, each, found, rows)


def _memory(rank: int, size: int) -> None:
    case = Case(tokens=(8,) * size, num_experts=size, hidden=16)
    with low_latency(case) as comm:
        round_trip(comm, make_inputs(case))
        blocks = {buffer.what: buffer.nbytes for buffer in comm.peer_buffers()}
        assert blocks["low-latency memory"] == comm.engine.memory_bytes == _C.ll_block_bytes(2, comm.engine.shape)


def test_the_memory_is_made_once() -> None:
    on_nodes(2, 2, _memory)


# -- legs that are late, or wrong ------------------------------------------------------------------------------------


def _late_legs(rank: int, size: int) -> None:
    """Two dispatches are under way, and the first one's legs come last, by other nodes in another order."""
    case = Case(tokens=(20, 5, 60), num_experts=6, topk=5, dtype=torch.bfloat16, hidden=40)
    held: list[tuple[Any, ...]] = []
    with low_latency(case) as comm:
        round_trip(comm, make_inputs(case))
        legs = comm.engine._legs[0]
        start = legs._rails.start

        def late(sends: Any, receives: Any, *rest: Any) -> Any:
            """Receives at once. Sends only when asked, the last node first."""
            held.append((list(reversed(sends)), rest))
            return start([], receives, *rest)

        def send_held(number: int) -> None:
            sends, rest = held[number]
            for piece in sends:
                legs._rails.wait(start([piece], [], *rest))

        pair = [make_inputs(dataclasses.replace(case, seed=seed)) for seed in (1, 2)]
        for order in ((0, 1), (1, 0)):
            legs._rails.start = late
            works = [comm.dispatch_async(one.x[rank], one.ids[rank]) for one in pair]
            legs._rails.start = start
            for number in order:
                send_held(number)
            held.clear()
            outs = {number: works[number].wait() for number in reversed(order)}
            for number in order:
                check_rows(comm, outs[number][0], pair[number])
                y = expert_results(pair[number], outs[number][0].tokens.shape[1])
                sums = comm.combine(y[rank], outs[number][1], pair[number].weights[rank])
                check_sums(pair[number], rank, y, sums)


def test_legs_may_come_late_and_in_any_order() -> None:
    on_nodes(3, 1, _late_legs)


# -- refusals ----------------------------------------------------------------------------------------------------------


def _refused(rank: int, size: int) -> None:
    case = Case(tokens=(4,) * size, num_experts=size)
    with pytest.raises(NotSupported, match='shrink: expected False in mode="ll" over several nodes, got True for 2'):
        low_latency(case, shrink=True)
    case = dataclasses.replace(case, hidden=128, dtype=torch.bfloat16)
    inputs = make_inputs(case)
    with low_latency(case) as comm:
        out, handle = comm.dispatch(inputs.x[rank], inputs.ids[rank])
        call = LowLatencyCombine(
            comm.engine, out.tokens, None, None, None, False, (handle.topk_ids, handle.plan), comm.number, logfmt=True
        )
        with pytest.raises(NotSupported, match="logfmt: expected False over several nodes, got True for 2"):
            comm.in_flight.run(call)
        round_trip(comm, inputs)


def test_what_is_refused() -> None:
    on_nodes(2, 1, _refused)
