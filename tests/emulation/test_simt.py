"""The CUDA kernels on CPUs: their sources, run by fibers (tests/emulation), with the checks of tests/gpu.

Only a GPU shows memory order, speed, CUDA graphs, copy engines and large sizes: tests/gpu checks those.
"""

from __future__ import annotations

import itertools
import os
import signal
import unittest.mock
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ep_plugin import DispatchLayout, HierarchicalAllGather, HierarchicalReduceScatter
from ep_plugin.moe import arguments as validate
from ep_plugin.moe.autograd import weight_grad
from tests import emulation as simt
from tests.collectives.collective_cases import BF16, FP16, FP32, gathered_by_gloo, poisoned, reduced, same_bits, shard
from tests.faults import handle_cases
from tests.faults import test_across_nodes as faults_over_nodes
from tests.gpu import checks, early, features, gradients, load_cases, small_operations
from tests.gpu import test_faults as faults
from tests.gpu_stand_in import serve_with
from tests.integrations import test_deep_ep
from tests.moe import test_layout as layout_kernel
from tests.moe import test_left_out as left_out
from tests.moe import test_node_kernels as node_kernels
from tests.moe import test_one_output as one_output
from tests.moe import test_statistics as statistics
from tests.moe.moe_cases import LAYOUTS, Case, communicator, make_inputs, named, ragged, round_trip
from tests.moe.test_combine import starts_from_the_bias
from tests.ranks import run_ranks, values

SIMT = {"EP_TEST_KERNELS": "simt"}
# Small enough for fibers, but for the last two: rows of several pieces, and more tokens than rows are cut in parts for.
CASES = {
    name: checks.CASES[name]
    for name in (
        "token_major",
        "fp16_int32_ids",
        "aligned",
        "one_expert_each",
        "sixteen_byte_rows",
        "empty_ranks",
        "all_dropped",
        "one_rank_receives_all",
    )
} | {
    "pieces": checks.Case(dtype=FP32, hidden=1980, tokens=40, ragged=17),
    "whole rows": checks.Case(hidden=72, tokens=1100, topk=2, ragged=500),
}
COUNTS = (1, 17, 4096, 20_001, 150_001)


def _on_ranks(size: int, function: Callable[..., Any], *args: Any, **environment: str) -> list[Any]:
    return values(run_ranks(size, function, size, *args, timeout_s=120, env=SIMT | environment))


# -- dispatch and combine ------------------------------------------------------------------------------------------


def _over_nodes(rank: int, size: int) -> None:
    case = Case(tokens=ragged(size, 20, 1), num_experts=2 * size, topk=3, hidden=64, dtype=FP32)
    inputs = make_inputs(case)
    for layout in LAYOUTS:
        with communicator(case, layout, max_tokens_per_rank=20) as comm, named(layout):
            given = inputs.x[rank], inputs.ids[rank]
            out, handle = round_trip(comm, inputs, inputs.expected(layout))
            again, _ = comm.dispatch_async(*given, previous_handle=handle).wait()
            assert same_bits(again.tokens, out.tokens)
            fixed, bounded = comm.dispatch(*given, inputs.weights[rank], capacity=len(out.tokens) + 3)
            assert same_bits(fixed.tokens[: len(out.tokens)], out.tokens)
            sums = [comm.combine(each.tokens, key) for each, key in ((out, handle), (fixed, bounded))]
            assert same_bits(comm.combine_with_values(out.tokens, handle, None)[0], sums[0])
            comm.set_sms(**checks.ONE_KERNEL)
            again, handle = comm.dispatch(*given, inputs.weights[rank])
            assert same_bits(again.tokens, out.tokens)
            assert same_bits(*sums) and same_bits(comm.combine(again.tokens, handle), sums[0])


@pytest.mark.slow
@pytest.mark.parametrize(("size", "per_node"), [(4, 2), (3, 1), (6, 2)])
def test_over_nodes(size: int, per_node: int) -> None:
    _on_ranks(size, _over_nodes, EP_PLUGIN_RANKS_PER_NODE=str(per_node))


@pytest.mark.slow
def test_rows_left_out_over_nodes() -> None:
    _on_ranks(4, left_out.every_limit, 2, (4,), EP_PLUGIN_RANKS_PER_NODE="2")
    _on_ranks(3, left_out.every_limit, 1, (13,), EP_PLUGIN_RANKS_PER_NODE="1")


@pytest.mark.deadline
@pytest.mark.parametrize("name", ["large ids", "one expert twice"])
def test_counts_that_are_not_those_of_the_ids(name: str) -> None:
    env = SIMT | faults_over_nodes.TWO_NODES
    said = values(run_ranks(4, faults_over_nodes._sends_named_garbage, name, timeout_s=120, env=env))
    assert all(said) and faults_over_nodes.GARBAGE[name][2] in said[0], said


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, checks.ONE_KERNEL], ids=["two kernels", "one kernel"])
def test_load_statistics(settings: dict[str, int]) -> None:
    _on_ranks(4, statistics._one_node, settings)
    _on_ranks(3, _late, settings)


def _late(rank: int, size: int, settings: dict[str, int]) -> None:
    load_cases.late(rank, size, **settings)


def _rounds(rank: int, size: int, names: Sequence[str], settings: dict[str, int]) -> list[str]:
    done = []
    for seed, name in enumerate(names):
        case = CASES[name]
        if case.topk > case.experts_per_rank * size:
            continue
        with checks.communicator(case, rank, size, timeout_s=60, **settings) as comm:
            checks.check_round(comm, case, seed)
        done.append(name)
    return done


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_cases(size: int) -> None:
    names = list(CASES) if size <= 2 else ["token_major", "aligned", "empty_ranks", "pieces"]
    assert len(_on_ranks(size, _rounds, names, {})[0]) >= len(names) - 1


@pytest.mark.slow
@pytest.mark.parametrize("plain", ["0", "1"])
def test_cases_in_one_kernel(plain: str) -> None:
    assert len(_on_ranks(2, _rounds, list(CASES), checks.ONE_KERNEL, EP_PLUGIN_PLAIN_KERNELS=plain)[0]) == len(CASES)


@pytest.mark.slow
def test_plain_kernels() -> None:
    assert len(_on_ranks(2, _rounds, list(CASES), {}, EP_PLUGIN_PLAIN_KERNELS="1")[0]) == len(CASES)


@pytest.mark.parametrize("plain", ["0", "1"])
@pytest.mark.parametrize("per_node", ["1", "2"])
def test_sums_start_from_the_bias(per_node: str, plain: str) -> None:
    settings = {"EP_PLUGIN_PLAIN_KERNELS": plain, "EP_PLUGIN_RANKS_PER_NODE": per_node}
    _on_ranks(2, starts_from_the_bias, (BF16, FP16, FP32), **settings)


def _features(rank: int, size: int) -> None:
    small = {name: features.QUANTIZED[name] for name in ("short_last_block", "narrow", "empty_ranks")}
    with unittest.mock.patch.dict(features.QUANTIZED, small, clear=True):
        features.quantised(rank, size)
        features.quantised_in_one_kernel(rank, size)
    features.scales_travel(rank, size)
    features.capacity(rank, size)
    features.capacity_in_one_kernel(rank, size)
    gradients.gradients(rank, size)


@pytest.mark.slow
def test_features() -> None:
    _on_ranks(2, _features)


def _deep_ep(rank: int, size: int) -> None:
    test_deep_ep._all_calls(rank, size, test_deep_ep.CASES[size][-1:])


@pytest.mark.slow
def test_deep_eps_interface() -> None:
    _on_ranks(3, _deep_ep)


@pytest.mark.slow
def test_pools_that_must_grow_for_one_rank() -> None:
    _on_ranks(2, early.grows_unevenly)


def _survive(rank: int, size: int, gate: str) -> tuple[str, int | None, str, float]:
    with unittest.mock.patch.object(faults, "DEADLINE_S", 5.0):  # fibers are not as fast as GPUs
        return faults.survive(rank, size, gate)


@pytest.mark.deadline
@pytest.mark.parametrize("gate", ["notify", "dispatch_send", "combine_send"])
def test_survivors_name_the_dead(gate: str) -> None:
    outcomes = run_ranks(3, _survive, 3, gate, timeout_s=90, env=SIMT)
    assert outcomes[faults.VICTIM].exitcode == -signal.SIGKILL
    for rank in (0, 2):
        _, blamed, step, _ = values([outcomes[rank]])[0]
        assert blamed == faults.VICTIM and step in faults.STEPS[gate]


def test_an_abort_ends_the_waits_of_peers() -> None:
    _on_ranks(3, faults.told_of_abort)


def _bad_ids(rank: int, size: int) -> None:
    with unittest.mock.patch.object(validate, "_check_id_values"):  # which the host does on CPUs alone
        faults.bad_ids(rank, size, 64)


def test_bad_ids() -> None:
    _on_ranks(2, _bad_ids)


@pytest.mark.slow
@pytest.mark.parametrize("plain", ["0", "1"])
@pytest.mark.parametrize("layout", [DispatchLayout.FLAT, DispatchLayout.TOKEN_MAJOR])
def test_contents_of_handles(layout: DispatchLayout, plain: str) -> None:
    refused = _on_ranks(2, handle_cases.extremes_are_refused, layout, EP_PLUGIN_PLAIN_KERNELS=plain)
    assert refused[0] == handle_cases.NUM_EXTREMES
    _on_ranks(2, handle_cases.ids_beyond_the_last_do_no_harm, layout, EP_PLUGIN_PLAIN_KERNELS=plain)


def test_pairs_of_a_slot_name_one_row() -> None:
    _on_ranks(2, handle_cases.rows_apart_are_refused)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [DispatchLayout.FLAT, DispatchLayout.TOKEN_MAJOR])
def test_random_words_in_handles(layout: DispatchLayout) -> None:
    assert _on_ranks(3, handle_cases.anything_goes, layout, 9, 20)[0] > 5


def _computes_weight_grads(rank: int, size: int) -> None:
    generator = torch.Generator().manual_seed(1)
    for dtype, (num_rows, hidden) in itertools.product((BF16, FP16, FP32), ((0, 64), (1, 8), (3, 40), (70, 1032))):
        y, rows = (torch.randn(num_rows, hidden, generator=generator).to(dtype) for _ in "yr")
        factors = torch.rand(num_rows, generator=generator)
        before = rows.clone()
        dots = weight_grad(y, rows, factors)
        torch.testing.assert_close(dots.double(), (y.double() * before.double()).sum(dim=1), rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(rows, before.mul_(factors.unsqueeze(1)), rtol=0, atol=0)


def test_weight_grad() -> None:
    _on_ranks(1, _computes_weight_grads)


@pytest.mark.parametrize("case", [*node_kernels.CASES, node_kernels.refuses_arguments])
def test_node_kernels(case: Callable[..., None]) -> None:
    _on_ranks(1, case)


@pytest.mark.parametrize("check", [*layout_kernel.CHECKS, layout_kernel.refuses_arguments])
def test_layout_kernel(check: Callable[..., None]) -> None:
    _on_ranks(1, check)


@pytest.mark.slow
@pytest.mark.parametrize("plain", ["0", "1"])
@pytest.mark.parametrize("layout", [DispatchLayout.FLAT, DispatchLayout.TOKEN_MAJOR])
def test_dispatches_fill_one_output(layout: DispatchLayout, plain: str) -> None:
    for one_kernel in (False, True):
        _on_ranks(3, one_output.fills_one_output, layout, one_kernel, EP_PLUGIN_PLAIN_KERNELS=plain)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [DispatchLayout.FLAT, DispatchLayout.TOKEN_MAJOR])
def test_rewritten_bases_are_checked(layout: DispatchLayout) -> None:
    _on_ranks(2, one_output.refuses_bases_outside, layout)


# -- all-gather and reduce-scatter ---------------------------------------------------------------------------------

WAYS = [(2, "auto"), *(pytest.param(*way, marks=pytest.mark.slow) for way in [(3, "auto"), (3, "sm"), (5, "auto")])]


def _gathers(rank: int, size: int, path: str) -> None:
    with HierarchicalAllGather() as gather:
        serve_with(gather, path, simt.load())
        for seed, (count, offset) in enumerate(itertools.product(COUNTS, (0, 1))):
            mine = shard(seed, rank, count + offset, BF16)[offset:]
            expected = gathered_by_gloo(mine)
            for whole in (poisoned(size * count, BF16), gather.allocate(size * count, BF16)):
                gather(whole, mine)
                assert same_bits(whole, expected), f"{count} elements from {offset} on"


@pytest.mark.parametrize(("size", "path"), WAYS)
def test_gathers(size: int, path: str) -> None:
    _on_ranks(size, _gathers, path)


def _numbers_come_round(rank: int, size: int) -> list[list[int]]:
    """The calls of small gathers and of small sums that were wrong."""
    calls, cpu = small_operations.PERIOD + 20, torch.device("cpu")
    with HierarchicalAllGather() as gather, HierarchicalReduceScatter() as scatter:
        for made in (gather, scatter):
            serve_with(made, "auto", simt.load())
        return [
            small_operations.gathers(gather, rank, size, cpu, calls),
            small_operations.sums(scatter, rank, size, cpu, calls),
        ]


@pytest.mark.slow
def test_numbers_of_small_operations_come_round() -> None:
    """The flag of the 2048th operation after is the same: what the first one left must not be taken for it."""
    assert _on_ranks(2, _numbers_come_round) == [[[], []]] * 2


def _found_by_kernels(rank: int, size: int, name: str, odd: int) -> str:
    made = small_operations.DIFFERENT[name][0]()
    serve_with(made, "auto", simt.load())
    return small_operations.told_by_kernels(made, name, rank == odd, torch.device("cpu"))


@pytest.mark.slow
@pytest.mark.parametrize("name", small_operations.DIFFERENT)
def test_kernels_find_small_operations_that_differ(name: str) -> None:
    for said in _on_ranks(3, _found_by_kernels, name, 1):
        assert small_operations.DIFFERENT[name][2] in said, said


def _sums(rank: int, size: int, path: str) -> None:
    with HierarchicalReduceScatter(sms=3) as scatter:
        serve_with(scatter, path, simt.load())
        for seed, (count, dtype) in enumerate(itertools.product(COUNTS, (BF16, FP16, FP32))):
            whole = [shard(seed, source, size * count, dtype).view(size, count) for source in range(size)]
            out = poisoned(count, dtype)
            scatter(out, whole[rank].flatten(), op=dist.ReduceOp.AVG)
            assert same_bits(out, reduced(whole, rank, size, 1 / size)), f"{count} of {dtype}"


@pytest.mark.parametrize(("size", "path"), WAYS)
def test_sums(size: int, path: str) -> None:
    _on_ranks(size, _sums, path)


# -- the emulation itself ------------------------------------------------------------------------------------------


def _goes_wrong(rank: int, size: int, name: str, said: str = os.devnull) -> bytes:
    with open(said, "w") as file:
        os.dup2(file.fileno(), 2)
    memory = torch.zeros(256, dtype=torch.uint8)
    memory[:128] = 7
    simt.load().run_wrong(name, memory.data_ptr())
    return bytes(memory.tolist())


WRONG = {
    "lanes apart": "while others are in",
    "threads apart": "all threads wait for each other",
    "asks the dead": "asks for the value of a lane that has ended",
    "loads unaligned": "not aligned to 16 bytes",
    "leaves early": "ends without having waited for its bulk stores",
}


@pytest.mark.parametrize("name", WRONG)
def test_what_no_gpu_promises_ends_the_process(name: str, tmp_path: Path) -> None:
    said = tmp_path / "said"
    (outcome,) = run_ranks(1, _goes_wrong, 1, name, str(said), env=SIMT)
    assert outcome.exitcode == -signal.SIGABRT
    assert WRONG[name] in said.read_text()


@pytest.mark.slow
def test_copies_take_as_long_as_they_may() -> None:
    read, filled, signalled = (_on_ranks(1, _goes_wrong, f"{what} early")[0] for what in ("reads", "fills", "signals"))
    assert read[128] != 7, "a stage was full before anybody waited for it"
    assert filled[128:] == bytes([2] * 128), "a store had read its stage before anybody waited for it"
    assert signalled[0] == 0, "a store had arrived before anybody waited for it"
