"""Dispatch and combine over two emulated nodes: cases for GPUs, which also run on CPUs (checks.device_of).

All ranks may share one GPU. Each is a host of its own for NCCL; EP_PLUGIN_HOST makes nodes of them.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import time
import unittest.mock
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ep_plugin
from ep_plugin import MoECommunicator, PeerAborted, PeerTimeout
from ep_plugin.moe import legs
from ep_plugin.testing.nodes import Cluster, variables_of
from tests.gpu import checks, features, gradients, graphs, load_cases
from tests.integrations import on_cpus
from tests.moe import test_left_out
from tests.ranks import note

NODES = 2
GRID = [name for name in checks.CASES if not name.startswith(("real_widths", "wide"))]
WIDE = [name for name in checks.CASES if name not in GRID]  # slow on CPUs
DEADLINE_S = 12.0 if torch.cuda.device_count() > 0 else 4.0  # NCCL takes seconds to connect ranks of one busy GPU
LONGEST_S = DEADLINE_S + 5
REPLAYS = 100
WIDE_CHUNKS = 4


def place(rank: int, size: int, nodes: int = NODES) -> None:
    """Sets the variables by which this rank is on its node, and may share a GPU, once NCCL starts."""
    given = variables_of(rank, Cluster(nodes=nodes, ranks=size // nodes, gpus=["0"]), port=0)
    used = ("NCCL_", "TORCH_SYMM_MEM_", "EP_PLUGIN_HOST")
    os.environ.update({name: value for name, value in given.items() if name.startswith(used)})


def start(rank: int, size: int, nodes: int = NODES) -> None:
    """Puts this rank on its node. On a GPU, the default group gets NCCL for GPUs beside gloo for CPUs."""
    place(rank, size, nodes)
    if checks.device_of(rank).type == "cpu":
        return
    store = dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    store = dist.PrefixStore("over_nodes", store)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=rank, world_size=size)


def on_nodes(rank: int, function: Callable[..., Any], size: int, *args: Any) -> Any:
    """What ``function(rank, size, *args)`` returns on its node."""
    start(rank, size)
    return function(rank, size, *args)


@contextlib.contextmanager
def _one_rail(rank: int, size: int) -> Iterator[None]:
    """The communicators in the block share a rail, and cut rows into two chunks unless they say how many.

    Ranks that share a GPU take turns of some 2 ms, so what counts is how often they wait for each other.
    """
    two = unittest.mock.patch.object(legs, "default_chunks", lambda *sizes: 2)
    with checks.communicator(checks.Case(hidden=64), rank, size, timeout_s=60), two:
        yield


@contextlib.contextmanager
def _case(name: str, rank: int, size: int) -> Iterator[None]:
    note(f"case {name}")
    try:
        yield
    except Exception as error:
        error.add_note(f"case {name}, rank {rank} of {size}")
        raise


# -- right results ---------------------------------------------------------------------------------------------------


def grid(rank: int, size: int, names: list[str]) -> list[str]:
    """Layouts, dtypes, weights, known routings, ragged and empty ranks. Returns the names of the cases that ran."""
    with _one_rail(rank, size):
        for seed, name in enumerate(names):
            case, chunks = checks.CASES[name], WIDE_CHUNKS if name in WIDE else None
            with (
                _case(name, rank, size),
                checks.communicator(case, rank, size, timeout_s=60, rail_chunks=chunks) as comm,
            ):
                assert comm.engine.node_map.num_nodes == NODES
                checks.check_round(comm, case, seed)
    return names


def bits_do_not_depend_on_chunks(rank: int, size: int) -> None:
    """Nor do they differ from run to run."""
    case = checks.Case(tokens=150, hidden=256, topk=5)
    given = checks.make_inputs(case, size, 3)
    results = []
    for chunks, runs in ((6, 2), (1, 1)):
        with checks.communicator(case, rank, size, timeout_s=60, rail_chunks=chunks) as comm:
            parts = [part[rank].to(comm.engine.device) for part in (given.x, given.ids, given.weights)]
            for _ in range(runs):
                out, handle = comm.dispatch(*parts)
                z = comm.combine(out.tokens.sin(), handle, weights=out.weights)
                results.append((out.tokens.cpu(), z.cpu()))
    for tokens, z in results[1:]:
        assert torch.equal(tokens, results[0][0]) and torch.equal(z, results[0][1])


def rows_cross_once(rank: int, size: int) -> None:
    """A token goes once to the other node if it is needed there, and one row returns for it."""
    case = checks.Case(tokens=90, hidden=256, topk=4, ragged=17)
    given = checks.make_inputs(case, size, 5)
    per_node = case.experts_per_rank * (size // NODES)

    def crossing(source: int) -> int:
        ids = given.ids[source]
        return int(((ids >= 0) & (ids // per_node != source * NODES // size)).any(1).sum())

    sent, returned = crossing(rank), crossing((rank + size // NODES) % size)
    row, ids, weights = case.hidden * case.dtype.itemsize, 4 * case.topk, 4 * case.topk
    with checks.communicator(case, rank, size, timeout_s=60, rail_chunks=3) as comm:
        device = comm.engine.device
        counts = 8 * (12 + 3 * (1 + size // NODES + per_node))  # the header, and in each chunk counts of the other node
        known = counts if device.type == "cpu" else 0  # GPUs compare nothing where the host waits for nothing
        x, topk_ids, topk_weights = (part[rank].to(device) for part in (given.x, given.ids, given.weights))

        def bytes_of(call: Callable[[], Any]) -> tuple[Any, int]:
            before = comm.rail_bytes_sent
            return call(), comm.rail_bytes_sent - before

        (out, handle), fresh = bytes_of(lambda: comm.dispatch(x, topk_ids, topk_weights))
        _, cached = bytes_of(lambda: comm.dispatch(x, topk_ids, previous_handle=handle))
        _, back = bytes_of(lambda: comm.combine(out.tokens, handle))
    expected = [sent * (row + ids + weights) + counts, sent * row + known, returned * row + known]
    assert [fresh, cached, back] == expected


def rows_left_out(rank: int, size: int) -> None:
    """Results are those of a routing without the pairs for which a leg has no room, and all ranks know their number."""
    case = checks.Case(tokens=90, hidden=256, topk=4, ragged=17)
    given = checks.make_inputs(case, size, 6)
    arrived, rows, required = test_left_out.left_out(given.ids, NODES, case.experts_per_rank * size, 30)
    assert rows > 0
    settings: dict[str, Any] = {"max_tokens_per_rank": case.tokens, "max_rows_per_node": 30}
    found = []
    with checks.communicator(case, rank, size, timeout_s=60, rail_chunks=test_left_out.CHUNKS, **settings) as comm:
        for ids in (given.ids[rank], arrived[rank]):
            x, topk_ids, weights = (part.to(comm.engine.device) for part in (given.x[rank], ids, given.weights[rank]))
            out, handle = comm.dispatch(x, topk_ids, weights, capacity=case.tokens * case.topk * size)
            sums = comm.combine(out.tokens.sin(), handle, weights=out.weights)
            told = int(out.left_out), int(out.required_per_node)
            found.append((told, out.tokens, out.weights, out.num_tokens_per_expert, sums))
    assert found[0][0] == (rows, required) and found[1][0][0] == 0
    assert all(torch.equal(*both) for both in zip(found[0][1:], found[1][1:], strict=True))


def late(rank: int, size: int) -> None:
    """The last rank comes late. It is waited for by the other rank of its node, and on its rail. The rank of that rail
    is waited for in its own node."""
    case = checks.Case(tokens=40, hidden=256, topk=4)
    given = checks.make_inputs(case, size, 7)
    blamed = {0: 1, 1: 3, 2: 3}
    ep_plugin.record_stats()
    with checks.communicator(case, rank, size, timeout_s=60) as comm:
        x, ids = given.x[rank].to(comm.engine.device), given.ids[rank].to(comm.engine.device)
        for _ in range(2):
            comm.dispatch(x, ids)
        comm.stats(reset=True)
        dist.barrier()
        if rank == size - 1:
            time.sleep(load_cases.LATE_S)
        for _ in range(2):  # on GPUs the second one shows who was late on the rail
            comm.dispatch(x, ids)
        seconds = comm.stats().waited_ns.double() / 1e9
        for other in range(size):
            waited = blamed.get(rank) == other
            lower, upper = (0.6, 2.0) if waited else (-0.01, 0.4)
            assert lower * load_cases.LATE_S <= float(seconds[other]) < upper * load_cases.LATE_S, (rank, seconds)


def replayed(rank: int, size: int) -> None:
    assert graphs.replayed(rank, size, REPLAYS) == REPLAYS


def quantised(rank: int, size: int) -> None:
    """Some of the widths, for all kernels."""
    features.quantised(rank, size, ("bf16_token_major", "short_last_block", "empty_ranks"))


def abort(rank: int, size: int) -> None:
    """An abort reaches the other node within a second, and a new communicator works afterwards."""
    case = checks.Case(hidden=256, tokens=64)
    given = checks.make_inputs(case, size, 1)
    with checks.communicator(case, rank, size, timeout_s=60) as comm:
        parts = [part[rank].to(comm.engine.device) for part in (given.x, given.ids, given.weights)]
        comm.dispatch(*parts)
        began = checks.started(comm)
        if rank == size - 1:
            comm.abort("out of luck")
        else:
            with pytest.raises(PeerAborted, match="out of luck") as caught:
                while True:
                    comm.dispatch(*parts)
                    checks.synchronize(comm.engine.device)
            took = time.monotonic() - began
            assert caught.value.rank == size - 1 and took < 1.5, f"rank {rank}: {took:.1f} s"
    group = dist.new_group(list(range(size)))  # on CPUs an abort breaks the connections of its group
    with MoECommunicator(group, checks.config_of(case, size, timeout_s=60), checks.device_of(rank)) as later:
        checks.check_round(later, case, 2)


_left: list[Any] = []


def graph_outlives(rank: int, size: int) -> None:
    """The last communicator of a rail closes while a CUDA graph has operations of the rail. Another one works, and the
    process ends with the graph."""
    case = graphs.CASE
    batch = graphs.random_batch(size, torch.Generator().manual_seed(size))
    with checks.communicator(case, rank, size, timeout_s=60, max_tokens_per_rank=case.tokens) as comm:
        device = comm.engine.device
        factor, given = graphs.factors(size).to(device), graphs.Batch(*(part[rank].to(device) for part in batch))
        graphs.step(comm, given, factor)  # makes the pools
        replay = graphs.recorded_step(comm, given, factor)
        replay()
        note("closes")
        began = checks.started(comm)
    assert time.monotonic() - began < LONGEST_S
    with checks.communicator(case, rank, size, timeout_s=60) as later:
        checks.check_round(later, case, 1)
    _left.append(replay)


CASES: dict[str, Callable[[int, int], Any]] = {
    check.__name__: check
    for check in (
        bits_do_not_depend_on_chunks,
        rows_cross_once,
        rows_left_out,
        features.scales_travel,
        quantised,
        features.capacity,
        features.outstanding,
        features.misaligned,
        gradients.gradients,
        late,
        replayed,
    )
}


def cases(rank: int, size: int, names: list[str]) -> list[str]:
    """Those of CASES, in one start of the ranks. Returns the names of those that passed."""
    with _one_rail(rank, size):
        for name in names:
            with _case(name, rank, size):
                CASES[name](rank, size)
    return names


# -- a rank that dies ------------------------------------------------------------------------------------------------


def survive(rank: int, size: int, victim: int) -> tuple[str, int | None, float]:
    """The victim dies before its third dispatch. What a survivor says, and how long it took.

    A survivor stays for as long again: nothing of NCCL's ends its process.
    """
    case = checks.Case(hidden=256, tokens=64)
    given = checks.make_inputs(case, size, 1)
    config = checks.config_of(case, size, timeout_s=DEADLINE_S, max_tokens_per_rank=case.tokens)
    comm = MoECommunicator(None, config, checks.device_of(rank))
    parts = [part[rank].to(comm.engine.device) for part in (given.x, given.ids, given.weights)]

    def round_trip() -> None:
        out, handle = comm.dispatch(*parts)
        comm.combine(out.tokens, handle, weights=out.weights)
        checks.synchronize(comm.engine.device)
        comm.check()

    round_trip()
    round_trip()
    _meet(size)
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises((PeerTimeout, PeerAborted)) as caught:
        for _ in range(3):
            round_trip()
    took, error = time.monotonic() - began, caught.value
    with pytest.raises(type(error)):
        comm.dispatch(*parts)
    comm.close()
    time.sleep(LONGEST_S - DEADLINE_S if comm.engine.device.type == "cpu" else LONGEST_S)
    return str(error), error.rank, took


def _meet(size: int) -> None:
    """Returns when all ranks have come here. By the store: no collective is under way when a rank dies."""
    store = dist.distributed_c10d._get_default_store()
    if store.add("over_nodes/met", 1) == size:
        store.set("over_nodes/all", "")
    store.wait(["over_nodes/all"])


# -- models ----------------------------------------------------------------------------------------------------------


def losses(rank: int, size: int, name: str, served: bool = True) -> dict[str, list[float]]:
    """Of a small model, through the built-in exchange and through ours: a Qwen3-MoE of transformers in FSDP2 with our
    gathers ("qwen3_moe"), or a DeepSeek-V3 of Megatron-core ("megatron"). served: whether ours serves FSDP2."""
    from ep_plugin.integrations import fsdp2
    from examples.compare import train
    from examples.compare.clock import ExchangeClock
    from examples.compare.options import MODELS, OURS, Options

    device, preset = checks.device_of(rank), MODELS[name].presets["tiny"]
    is_megatron = name == "megatron"
    if device.type == "cuda":
        os.environ["LOCAL_RANK"] = str(device.index)  # by which transformers chooses the device
    if is_megatron:
        if device.type == "cpu":
            on_cpus.make_distributed_optimizer_run_here()
        import ep_plugin.integrations.megatron

        ep_plugin.integrations.megatron.enable()
    models = importlib.import_module(f"examples.compare.{'megatron' if is_megatron else 'models'}")
    options = Options(
        model=name, arm=OURS, preset="tiny", checkpoint=None, layers=2, text=__file__, steps=4, seq_len=32,
        batch=2, micro_batches=1, lr=preset.lr, dtype="float32", seed=0, fsdp2=not is_megatron, overlap=False,
    )  # fmt: skip
    found = {}
    for arm in (MODELS[name].built_in, OURS):
        chosen, clock = replace(options, arm=arm), ExchangeClock(device)
        model = models.build_model(chosen, clock)
        if chosen.enables_fsdp2:
            fsdp2.enable(model)
        run_step = train._stepper(model, models.build_optimizer(model, chosen), chosen, device)
        means, _, _ = train._run_steps(run_step, chosen, device, clock)
        dist.all_reduce(means)
        found[arm] = (means / size).tolist()
        if chosen.enables_fsdp2:
            assert (fsdp2.launches(model).all_gathers > 0) == served
    return found


def assert_same_losses(found: dict[str, list[float]]) -> None:
    """Both train, from the same loss, and their losses stay together."""
    theirs, ours = found.values()
    assert ours == pytest.approx(theirs, rel=1e-4) and ours[-1] < ours[0]
