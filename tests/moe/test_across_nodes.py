"""Dispatch and combine over emulated nodes: the cases of one node, rows and bytes on the rails, and refusals.

EP_PLUGIN_RANKS_PER_NODE splits this machine into nodes; EP_PLUGIN_HOST does so with interleaved ranks.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import unittest.mock
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from ep_plugin import MoECommunicator, MoECommunicatorConfig
from ep_plugin.errors import DisagreementError, NotSupported
from ep_plugin.moe.across_nodes import dispatch
from ep_plugin.moe.legs import CHUNK_BYTES, MOST_CHUNKS, chunk_bounds, default_chunks, legs_of, num_chunks
from tests.moe import (
    test_async,
    test_autograd,
    test_capacity,
    test_combine,
    test_compile,
    test_handles,
    test_layouts,
    test_quantize,
)
from tests.moe.moe_cases import (
    FLAT,
    LAYOUTS,
    Case,
    communicator,
    expert_rows,
    make_inputs,
    named,
    poisoned,
    ragged,
    round_trip,
    same_bits,
)
from tests.ranks import run_ranks, values

HEADER_BYTES = (9 + 2 + 1) * 8  # of a message, with what was left out and how long the sender waited
LONG = os.environ.get("EP_TEST_LONG") == "1"
SHAPES = [(2, 1), (2, 2), (2, 4), (3, 2), (4, 2)]  # nodes and ranks of each


def on_nodes(num_nodes: int, per_node: int, function: Callable[..., Any], *args: Any, timeout_s: float = 200) -> Any:
    """What ``function(rank, size, *args)`` returned on each rank of `num_nodes` nodes."""
    size = num_nodes * per_node
    env = {"EP_PLUGIN_RANKS_PER_NODE": str(per_node)}
    return values(run_ranks(size, function, size, *args, timeout_s=timeout_s, env=env))


def _chunks_of_few(rank: int, size: int) -> None:
    """A chunk of 7 tokens is longer than the same chunk of 8, the most. All tokens go to all ranks."""
    case = Case(tokens=(7,) * size, num_experts=size, topk=size)
    inputs = make_inputs(case)
    expected = inputs.expected(FLAT)[rank]
    with communicator(case, FLAT, rail_chunks=5, max_tokens_per_rank=8) as comm:
        out, handle = comm.dispatch(inputs.x[rank], inputs.ids[rank], inputs.weights[rank], capacity=7 * size)
        same_bits("tokens", out.tokens[: len(expected.tokens)], expected.tokens)
        whole = comm.dispatch(inputs.x[rank], inputs.ids[rank], inputs.weights[rank])
        z, without = comm.combine(out.tokens, handle), comm.combine(whole[0].tokens, whole[1])
        same_bits("sums", z, without)


@pytest.mark.slow
def test_padding_has_room_for_every_number_of_tokens():
    on_nodes(2, 1, _chunks_of_few)
    on_nodes(3, 1, _chunks_of_few)


class _Operators(TorchDispatchMode):
    """Counts operators of torch, but for those that only allocate, or return views."""

    def __init__(self) -> None:
        super().__init__()
        self.count = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, returned = func.overloadpacket.__name__, func._schema.returns
        is_view = any(each.alias_info is not None and not each.alias_info.is_write for each in returned)
        if not is_view and not name.startswith(("empty", "new_empty")):
            self.count[name] += 1
        return func(*args, **(kwargs or {}))


class CountedKernels:
    """Counts the kernels of a table."""

    def __init__(self, table: Any) -> None:
        self._table, self.count = table, Counter[str]()

    def __getattr__(self, name: str) -> Any:
        self.count[name] += 1
        return getattr(self._table, name)


def _calls_of_python(call: Callable[[], Any]) -> int:
    count = 0

    def counted(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(counted)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count


def _costs(rank: int, size: int, chunks: int) -> dict[str, Any]:
    """What a round trip costs the host. Each rank has a row for every leg."""
    case = Case(tokens=(16,) * size, num_experts=size, topk=size)
    inputs = make_inputs(case)
    with communicator(case, FLAT, rail_chunks=chunks) as comm:
        engine, nodes, rails = comm.engine, comm.nodes, comm.engine.rails

        def dispatch() -> Any:
            return comm.dispatch(inputs.x[rank], inputs.ids[rank], inputs.weights[rank])

        def round_trip() -> None:
            out, handle = dispatch()
            comm.combine(out.tokens, handle)

        for _ in range(2):
            round_trip()
        calls = [_calls_of_python(dispatch)]
        out, handle = dispatch()
        calls.append(_calls_of_python(lambda: comm.combine(out.tokens, handle, out.weights)))
        engine.kernels = kernels = CountedKernels(engine.kernels)
        with (
            unittest.mock.patch.object(engine, "wait_totals", wraps=engine.wait_totals) as totals,
            unittest.mock.patch.object(nodes, "_read", wraps=nodes._read) as counts,
            unittest.mock.patch.object(rails, "start", wraps=rails.start) as starts,
        ):
            round_trip()
        engine.kernels = kernels._table
        given = inputs.x[rank], inputs.ids[rank], inputs.weights[rank]
        with _Operators() as operators:  # a mode sees the public calls as one operator each
            made = comm.in_flight.run(comm.new_dispatch(*given, None, None, None, [], comm.number))
            again = made[0], None, None, None, False, list(made[8:]), comm.number
            comm.in_flight.run(comm.new_combine(*again))
        return {
            "waits for totals": totals.call_count,
            "reads of counts": counts.call_count,
            "exchanges": starts.call_count,
            "kernels": dict(kernels.count),
            "operators": dict(operators.count),
            "calls of Python": calls,
        }


@pytest.mark.parametrize(
    "sizes", [(2, 4, 8, 16), pytest.param((2, 32), marks=pytest.mark.skipif(not LONG, reason="EP_TEST_LONG=1 runs it"))]
)
def test_a_round_trip_costs_as_much_over_many_nodes(sizes: Sequence[int]) -> None:
    for chunks in (1, 3):
        (first, *others) = [each for size in sizes for each in on_nodes(size, 1, _costs, chunks)]
        assert all(costs == first for costs in others), (first, others)
        assert first["waits for totals"] == 1
        assert first["reads of counts"] == 2  # of the dispatch; on CPUs also of combine, which compares them
        assert first["exchanges"] == 1 + chunks + 1 + chunks  # counts, rows; counts, sums
        each_segment = dict.fromkeys(("plan", "notify", "dispatch_send", "dispatch_recv"), 1 + chunks)
        each_segment |= dict.fromkeys(("combine_send", "combine_recv"), 1 + chunks)
        others = {"layout": 1, "place": 1, "positions": chunks, "pack": 1, "combine_add": 1}
        assert first["kernels"] == each_segment | others
        assert first["operators"] == {"copy_": 1}  # a handle's words, when the host knows how many rows come
        assert sum(first["kernels"].values()) == 10 + 7 * chunks <= 14 + 8 * chunks
        assert max(first["calls of Python"]) <= 150 + 15 * (chunks - 1)


# -- the cases of one node -------------------------------------------------------------------------------------------

ONE_NODE_CASES = [
    (test_layouts._every_case, (2, 1), (2, 2), (3, 2), (2, 4)),
    (test_layouts._wide, (2, 2)),
    (test_layouts._without_weights_and_strided, (2, 1)),
    (test_layouts._scales, (2, 2), (5, 1), (8, 1)),
    (test_layouts._twice, (2, 2)),
    (test_combine._float32_sums, (2, 2)),
    (test_combine._bias, (2, 2)),
    (test_combine.starts_from_the_bias, (2, 1)),
    (test_combine._weights_of_absent_experts, (2, 1)),
    (test_combine._rows_not_to_read, (2, 2)),
    (test_combine._another_dtype, (2, 1)),
    (test_autograd._against_the_oracle, (2, 1), (2, 2), (4, 2)),
    (test_autograd._finite_differences, (2, 1)),
    (test_autograd._weights_as_they_please, (2, 1)),
    (test_autograd._partly, (3, 1)),
    (test_autograd._rerun, (2, 2)),
    (test_autograd._two_layers, (2, 1)),
    (test_autograd._without_gradients, (2, 1)),
    (test_capacity._every_capacity, (2, 1), (2, 2)),
    (test_capacity._gradients, (2, 1)),
    (test_async._started_and_waited, (2, 2)),
    (test_async._overtaken, (2, 2)),
    (test_async._overtaken_with_gradients, (2, 1)),
    (test_async._interleaved, (2, 1)),
    (test_quantize._every_width, (2, 2)),
    (test_quantize._with_capacity, (3, 1)),
    (test_quantize._gradients, (2, 1)),
    (test_handles._outstanding, (2, 2)),
    (test_handles._reused, (2, 2)),
    (test_handles._interleaved, (2, 2)),
    (test_handles._shared, (2, 1)),
    (test_handles._moved, (2, 1)),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "num_nodes", "per_node"),
    [
        pytest.param(function, *nodes, id=f"{function.__module__[15:]}{function.__name__}-{nodes[0]}x{nodes[1]}")
        for function, *shapes in ONE_NODE_CASES
        for nodes in (SHAPES if LONG else shapes)
    ],
)
def test_as_on_one_node(function: Callable[..., Any], num_nodes: int, per_node: int) -> None:
    on_nodes(num_nodes, per_node, function)


@pytest.mark.slow
@pytest.mark.parametrize(("num_nodes", "per_node"), SHAPES if LONG else [(2, 1)])
@pytest.mark.parametrize(("backend", "steps"), [("aot_eager", [20, 37, 3]), ("inductor", [3])])
def test_a_layer_in_one_graph(backend: str, steps: list[int], num_nodes: int, per_node: int) -> None:
    on_nodes(num_nodes, per_node, test_compile._compiled, backend, steps, timeout_s=600)


# -- what nodes add --------------------------------------------------------------------------------------------------


def _interleaved(rank: int, size: int) -> None:
    os.environ["EP_PLUGIN_HOST"] = f"host {rank % 2}"
    case = Case(tokens=ragged(size, 50, 2), num_experts=3 * size, topk=4, hidden=16)
    inputs = make_inputs(case)
    for layout in LAYOUTS:
        with communicator(case, layout) as comm, named(layout), poisoned():
            assert comm.engine.node_map.nodes == ((0, 2, 4), (1, 3, 5))
            round_trip(comm, inputs, inputs.expected(layout))


def test_ranks_may_be_interleaved_over_nodes() -> None:
    values(run_ranks(6, _interleaved, 6, timeout_s=120))


def _chunks(rank: int, size: int) -> None:
    case = Case(tokens=ragged(size, 90, 1), num_experts=4 * size, topk=5, hidden=64, dtype=torch.bfloat16)
    inputs = make_inputs(case)
    found = []
    for chunks in (None, 1, 2, 6, 6):
        with communicator(case, FLAT, rail_chunks=chunks) as comm:
            out, handle = comm.dispatch(inputs.x[rank], inputs.ids[rank], inputs.weights[rank])
            y = expert_rows(len(out.tokens), case.hidden, case.dtype, rank)
            found.append((out.tokens, out.weights, comm.combine(y, handle, out.weights)))
    for chunks, results in zip((1, 2, 6, 6), found[1:], strict=True):
        for name, result, first in zip(("tokens", "weights", "sums"), results, found[0], strict=True):
            same_bits(f"{name} in {chunks} chunks", result, first)


def test_bits_do_not_depend_on_the_number_of_chunks() -> None:
    on_nodes(2, 2, _chunks)


def _rows_for_nodes(case: Case, ids: torch.Tensor, per_node: int, own: int) -> int:
    """(token, other node) pairs: the least number of rows that must cross."""
    node = ids.div(case.num_experts // case.size * per_node, rounding_mode="floor")
    nodes = range(case.size // per_node)
    return sum(int(((node == other) & (ids >= 0)).any(dim=1).sum()) for other in nodes if other != own)


def _bytes_on_rails(rank: int, size: int, per_node: int, near: bool) -> None:
    """Rows cross once per node, with their weights and, the first time, their ids; sums come back once."""
    case = Case(tokens=(40, 64, 7, 0, 33, 50, 12, 21)[:size], num_experts=4 * size, topk=4, hidden=64)
    inputs = make_inputs(case)
    node, K, ids = rank // per_node, case.topk, inputs.ids[rank]
    if near:  # node-limited routing: every token stays on its node or goes to the next one
        width = 4 * per_node
        ids = torch.where((ids // width - node) % (size // per_node) <= 1, ids, -1)
    others = [
        torch.where((i // (4 * per_node) - r // per_node) % (size // per_node) <= 1, i, -1) if near else i
        for r, i in enumerate(inputs.ids)
    ]
    sent = _rows_for_nodes(case, ids, per_node, node)
    returned = sum(
        int(((others[r] // (4 * per_node) == node) & (others[r] >= 0)).any(dim=1).sum())
        for r in range(rank % per_node, size, per_node)
        if r != rank
    )
    with communicator(case, FLAT) as comm:
        rails, C = comm.engine.rails, comm.nodes.chunks
        counts = (size // per_node - 1) * (HEADER_BYTES + 8 * C * (1 + per_node + 4 * per_node))

        def crossed(call: Callable[[], Any]) -> tuple[Any, int]:
            before = rails.bytes_sent
            return call(), rails.bytes_sent - before

        row = case.hidden * 4
        (out, handle), fresh = crossed(lambda: comm.dispatch(inputs.x[rank], ids, inputs.weights[rank]))
        assert fresh == sent * (row + 4 * K + 4 * K) + counts
        _, cached = crossed(lambda: comm.dispatch(inputs.x[rank], ids, previous_handle=handle))
        assert cached == sent * row + counts
        _, back = crossed(lambda: comm.combine(out.tokens, handle))
        assert back == returned * row + counts


@pytest.mark.parametrize("near", [False, True], ids=["anywhere", "near nodes"])
@pytest.mark.parametrize(("num_nodes", "per_node"), [(2, 2), (3, 2), (3, 1)])
def test_a_row_crosses_once_to_each_node_that_needs_it(num_nodes: int, per_node: int, near: bool) -> None:
    on_nodes(num_nodes, per_node, _bytes_on_rails, per_node, near)


def _fuzzed(rank: int, size: int, calls: int) -> None:
    generator = torch.Generator().manual_seed(7)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=generator))

    for chunks in range(4):
        layout, experts = LAYOUTS[chunks % 2], size * draw(1, 6)
        largest = Case(tokens=(0,) * size, num_experts=experts, topk=min(experts, 8), hidden=64)
        with communicator(largest, layout, rail_chunks=chunks or None) as comm:
            for _ in range(calls // 4):
                case = Case(
                    tokens=tuple(draw(0, 24) for _ in range(size)),
                    num_experts=experts,
                    topk=draw(1, largest.topk),
                    hidden=4 * draw(1, 16),
                    seed=draw(0, 1 << 30),
                    drop=draw(0, 9) / 10,
                )
                inputs = make_inputs(case)
                with named(case):
                    round_trip(comm, inputs, inputs.expected(layout))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("shape", "calls"), [((2, 2), 120), ((3, 2), 60)])
def test_random_calls(shape: tuple[int, int], calls: int) -> None:
    on_nodes(*shape, _fuzzed, 10 * calls if LONG else calls, timeout_s=1150)


def _like_an_earlier_call(rank: int, size: int) -> None:
    """A call that looks like one that has passed is refused for what its form does not say."""
    case = Case(tokens=(7,) * size, num_experts=2 * size, topk=2)
    inputs = make_inputs(case)
    x, ids, weights = inputs.x[rank], inputs.ids[rank], inputs.weights[rank]
    with communicator(case, FLAT, max_tokens_per_rank=8) as comm:
        assert comm.nodes is not None

        def refused(reason: str, *given: Any, **settings: Any) -> None:
            with pytest.raises(ValueError, match=reason):
                comm.dispatch(*given, **settings)

        out, handle = comm.dispatch(x, ids, weights)
        with unittest.mock.patch.object(dispatch, "check_dispatch", side_effect=AssertionError("checked in full")):
            comm.dispatch(x, ids, weights)
        assert len(comm.nodes.checked) == 1
        freed = x.clone()
        freed.untyped_storage().resize_(0)
        refused("x: expected a storage of at least", freed, ids, weights)
        refused("expected distinct experts", x, torch.zeros_like(ids), weights)
        refused("topk_ids: expected -1 or 0 to", x, torch.full_like(ids, 2 * size), weights)
        refused("contiguous rows", x.t().contiguous().t(), ids, weights)
        refused("expected at most max_tokens_per_rank=8", x.repeat(2, 1), ids, weights)
        comm.dispatch(x, ids, weights, capacity=1)
        refused("capacity: expected an integer of at least 0", x, ids, weights, capacity=True)
        refused("capacity: expected an integer of at least 0", x, ids, weights, capacity=[1])
        refused("capacity: expected an integer of at least 0", x, ids, weights, capacity=-1)
        refused(r"topk_ids: expected the shape \(7, 2\)", x, ids[:, :1].contiguous(), previous_handle=handle)
        with unittest.mock.patch.object(comm.engine.streams, "capturing", lambda: 1):
            refused("capacity: expected a number of rows while a CUDA graph is captured", x, ids, weights)
        assert len(comm.nodes.checked) == 2
        same_bits("tokens", comm.dispatch(x, ids, weights)[0].tokens, out.tokens)


def test_a_call_like_an_earlier_one_is_checked_again() -> None:
    on_nodes(2, 1, _like_an_earlier_call)


def _refused(rank: int, size: int) -> None:
    settings = {"num_experts": size, "hidden_size": 16, "topk": 1}
    with pytest.raises(DisagreementError, match="rail_chunks=[23].*rail_chunks=[23]"):
        MoECommunicator(None, MoECommunicatorConfig(**settings, rail_chunks=2 + rank % 2))
    with pytest.raises(NotSupported, match=r'shrink: expected False in mode="ll" over several nodes, got True for 2'):
        MoECommunicator(None, MoECommunicatorConfig(**settings, mode="ll", max_tokens_per_rank=4, shrink=True))
    with pytest.raises(NotSupported, match="expected a backend for CPU memory, such as gloo, got cuda:gloo for cpu"):
        MoECommunicator(dist.new_group(backend="cuda:gloo"), MoECommunicatorConfig(**settings), "cpu")
    with pytest.raises(ValueError, match="rail_chunks: expected at most 6, got 7"):
        MoECommunicatorConfig(**settings, rail_chunks=7)


def test_wrong_settings_are_refused_by_name() -> None:
    on_nodes(2, 1, _refused)


def _unequal(rank: int, size: int) -> None:
    os.environ["EP_PLUGIN_HOST"] = f"host {rank // 2}"
    with pytest.raises(NotSupported, match="nodes with different numbers of ranks"):
        MoECommunicator(None, MoECommunicatorConfig(num_experts=size, hidden_size=16, topk=1))


def test_nodes_of_different_sizes_are_refused() -> None:
    values(run_ranks(3, _unequal, 3))


def test_more_rows_are_cut_into_more_chunks() -> None:
    tokens = CHUNK_BYTES["cuda"] // (2 * 1024)
    given = [1, tokens, 2 * tokens, 3 * tokens, 100 * tokens]
    assert [default_chunks(2, each, 1024, 8, "cuda") for each in given] == [1, 1, 2, 3, MOST_CHUNKS]
    assert default_chunks(2, None, 7168, 8, "cuda") == 3 and default_chunks(2, None, 64, 8, "cuda") == 1
    assert [default_chunks(2, each // 4, 1024, 8, "cpu") for each in given] == [1, 1, 2, 3, MOST_CHUNKS]
    # Over more nodes a token crosses more often, up to once for each of its experts.
    assert [default_chunks(nodes, tokens, 1024, 2, "cuda") for nodes in (2, 4, 8, 64, 1024)] == [1, 1, 2, 2, 2]
    config = MoECommunicatorConfig(num_experts=8, hidden_size=1024, topk=1, max_tokens_per_rank=2 * tokens)
    assert [num_chunks(nodes, config, "cuda") for nodes in (1, 2, 64)] == [0, 1, 2]
    assert num_chunks(2, dataclasses.replace(config, rail_chunks=5), "cuda") == 5


def test_legs_meet_and_cover_all_tokens() -> None:
    for num_nodes in (2, 3, 5, 8):
        chunks = 4
        every = [legs_of(node, num_nodes, chunks) for node in range(num_nodes)]
        for node, legs in enumerate(every):
            assert len(legs) == (num_nodes - 1) * chunks
            for number, leg in enumerate(legs):
                assert every[leg.to][number].source == node and every[leg.source][number].to == node
        assert chunk_bounds(37, chunks)[0] == 0 and chunk_bounds(37, chunks)[-1] == 37
