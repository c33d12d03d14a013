"""EP_PLUGIN_RANGES: the ranges that a profiler shows around operations, and the layers around them."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import re
from collections.abc import Iterator

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile

import ep_plugin
from ep_plugin import HierarchicalAllGather, HierarchicalReduceScatter, SendReceive
from ep_plugin.integrations import fsdp2
from tests.faults.fault_cases import open_communicator, round_trip, tokens_for
from tests.gpu import ranges
from tests.ranks import run_ranks, values

RANGES = {"EP_PLUGIN_RANGES": "profiler"}
NBYTES = 5 * 8 * 4  # of the tokens of round_trip, each of which goes to two experts
OPERATIONS = [f"dispatch of C, {NBYTES} bytes", f"combine of C, {2 * NBYTES} bytes"]
LAYER = re.compile(r"^(FSDP2|Megatron layer|torchtitan MoE layer|transformers MoE layer) ")


@contextlib.contextmanager
def seen(names: list[str]) -> Iterator[None]:
    """Adds the names of our ranges in the block, in their order, with C in the place of a communicator's name."""
    with profile(activities=[ProfilerActivity.CPU]) as found:
        yield
    for event in sorted(found.events(), key=lambda event: event.time_range.start):
        name = re.sub(r"communicator [^\s,:]+", "C", event.name)
        names += [name] if LAYER.match(name) or " of C" in name else []


def _operations(rank: int) -> list[str]:
    names: list[str] = []
    slow, fast = open_communicator(2), open_communicator(2, mode="ll", max_tokens_per_rank=5, max_row_bytes=32)
    x, ids, weights = tokens_for(rank, 2, 5)
    gather, scatter, messages = HierarchicalAllGather(), HierarchicalReduceScatter(), SendReceive()
    fast.combine(fast.dispatch(x, ids)[0].tokens, fast.dispatch(x, ids)[1])  # makes its memory, and the collectives'
    with seen(names):
        round_trip(slow)
        slow.dispatch_async(x, ids, weights).wait()
        fast.dispatch_async(x, ids).wait()
        gather(torch.empty(8), torch.zeros(4))
        scatter(torch.empty(4), torch.zeros(8))
        messages.exchange(torch.zeros(3), torch.empty(3), 1 - rank, 1 - rank).wait()
    for one in (slow, fast, gather, scatter, messages):
        one.close()
    return names


def test_every_operation_has_a_range_with_its_communicator_and_bytes() -> None:
    halves = [f"dispatch ({half} half) of C, {NBYTES} bytes" for half in ("send", "receive")]
    expected = [
        *OPERATIONS,
        *halves,
        *halves,
        "all-gather of C, 16 bytes",
        "reduce-scatter of C, 16 bytes",
        "send-receive of C, 24 bytes",
        "send-receive (wait) of C, 24 bytes",
    ]
    assert values(run_ranks(2, _operations, env=RANGES)) == [expected] * 2


def test_there_are_no_ranges_by_default() -> None:
    assert values(run_ranks(2, _operations)) == [[]] * 2


def _over_nodes(rank: int) -> list[str]:
    names: list[str] = []
    with open_communicator(2) as comm, seen(names):
        round_trip(comm)
    return names


def test_the_steps_of_a_rail_lie_in_their_operation() -> None:
    for names in values(run_ranks(2, _over_nodes, env={**RANGES, "EP_PLUGIN_RANKS_PER_NODE": "1"})):
        begin, end = (names.index(name) for name in OPERATIONS)
        for steps in (names[begin + 1 : end], names[end + 1 :]):
            sizes = [re.match(r"rail of C: send and receive, (\d+) bytes", name) for name in steps]
            assert sum(int(size[1]) for size in sizes if size) > 0
            assert any(name.startswith("rail of C: wait") for name in steps)


def _fsdp2(rank: int) -> list[str]:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    fsdp2.enable(model)
    names: list[str] = []
    model(torch.ones(1, 8)).sum().backward()
    with seen(names):
        model(torch.ones(1, 8)).sum().backward()
    fsdp2.disable(model)
    return names


def test_fsdp2_names_the_parameter_group_in_forward_and_backward() -> None:
    for names in values(run_ranks(2, _fsdp2, env=RANGES)):
        for layer in ("0", "1"):
            inside = [after for before, after in itertools.pairwise(names) if before == f"FSDP2 {layer}"]
            shard = (8 * 8 + 8) * 4 // 2  # bytes of a rank's half of weight and bias
            assert set(inside) == {f"{operation} of C, {shard} bytes" for operation in ("all-gather", "reduce-scatter")}


class _Experts(torch.nn.Module):
    """They return their rows times their weights."""

    num_experts = 2

    def forward(self, rows: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return rows * weights.sum(1, keepdim=True)


def _transformers(rank: int) -> list[str]:
    from ep_plugin.integrations.transformers import EpPluginExpertParallel

    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("ep", "tp"))
    layers = [EpPluginExpertParallel(_Experts(), mesh["ep"], mesh["tp"]) for _ in range(2)]
    x, ids, weights = tokens_for(rank, 2, 5)

    def forward(x: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            x = layer(x, ids, weights)
        return x

    names: list[str] = []
    with seen(names):
        plain = forward(x)
    torch.testing.assert_close(torch.compile(forward, backend="aot_eager")(x), plain)
    comm = open_communicator(2)

    def there_and_back(x: torch.Tensor) -> torch.Tensor:
        out, handle = comm.dispatch(x, ids, weights)
        return comm.combine(out.tokens, handle, weights=out.weights)

    torch.testing.assert_close(torch.compile(there_and_back, fullgraph=True, backend="aot_eager")(x), x)
    return names


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
def test_transformers_numbers_its_moe_layers_and_still_compiles() -> None:
    for names in values(run_ranks(2, _transformers, env=RANGES, timeout_s=120, framework="transformers")):
        assert [name for name in names if LAYER.match(name)] == [f"transformers MoE layer {n}" for n in range(2)]
        assert names[1:3] == OPERATIONS


def _megatron(rank: int) -> list[str]:
    from tests.integrations.on_cpus import make_megatron_run_here

    make_megatron_run_here()
    import ep_plugin.integrations.megatron as megatron
    from tests.integrations.megatron_layers import initialise, make_config, make_layer

    initialise(1, 2)
    megatron.enable()
    ep_plugin.record_stats()
    layer = make_layer(make_config("flex", 1, 2))
    layer.set_layer_number(7)
    names: list[str] = []
    with seen(names):
        layer(torch.randn(3, 2, 32))
    rows_bytes = 3 * 2 * 32 * 4
    assert names[1] == f"dispatch of C, {rows_bytes} bytes"
    (stats,) = ep_plugin.stats().values()
    assert torch.equal(stats.layers["Megatron layer 7"], stats.tokens) and stats.tokens.any()
    megatron.disable()
    assert "ep_plugin" not in type(layer).set_layer_number.__module__
    return names


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs megatron-core")
def test_megatron_names_the_layer() -> None:
    for names in values(run_ranks(2, _megatron, env=RANGES, timeout_s=120, framework="megatron")):
        assert [name.partition(" of C")[0] for name in names] == [
            "Megatron layer 7", "dispatch", "Megatron layer 7", "combine",
        ]  # fmt: skip


def _torchtitan(rank: int) -> list[str]:
    from ep_plugin.testing.torchtitan import without_triton

    without_triton()
    from ep_plugin.integrations.torchtitan import EpPluginTokenDispatcher

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    x, ids, weights = tokens_for(rank, 2, 5)
    names: list[str] = []
    with seen(names):
        for _ in range(2):
            layer = EpPluginTokenDispatcher.Config(num_experts=4, top_k=2).build()
            layer.wire_meshes(ep_mesh=mesh)
            rows, _, metadata = layer.dispatch(x, weights, ids, ids.flatten().bincount(minlength=4))
            layer.combine(rows, metadata, x)
    return names


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("torchtitan") is None, reason="needs torchtitan")
def test_torchtitan_numbers_its_moe_layers() -> None:
    expected = [one for layer in range(2) for name in OPERATIONS for one in (f"torchtitan MoE layer {layer}", name)]
    assert values(run_ranks(2, _torchtitan, env=RANGES, timeout_s=120)) == [expected] * 2


def _nvtx(rank: int) -> tuple[list[str], list[str]]:
    """With a stand-in for the library of NVTX."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.version, "cuda", "13.0")
        for function in ("range_push", "range_pop"):
            patch.setattr(torch.cuda.nvtx, function, lambda *name: None)
        return ranges.pushed(rank, 2)


def test_nvtx_gets_the_communicator_and_bytes() -> None:
    for names, expected in values(run_ranks(2, _nvtx, env={"EP_PLUGIN_RANGES": "nvtx", "EP_TEST_DEVICE": "cpu"})):
        assert names == expected


def _without_nvtx(rank: int) -> str:
    with pytest.raises(ValueError) as caught:
        open_communicator(2)
    return str(caught.value)


@pytest.mark.skipif(torch.version.cuda is not None, reason="needs a PyTorch without CUDA")
def test_nvtx_is_refused_where_pytorch_has_none() -> None:
    said = "EP_PLUGIN_RANGES: expected profiler, since this PyTorch was built without CUDA, got 'nvtx'"
    assert values(run_ranks(2, _without_nvtx, env={"EP_PLUGIN_RANGES": "nvtx"})) == [said] * 2
