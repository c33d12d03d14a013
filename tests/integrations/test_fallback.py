"""EP_PLUGIN_FALLBACK=stock: frameworks serve what ep_plugin does not, with one warning, and as they do without it."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage

from ep_plugin.errors import NotSupported
from ep_plugin.integrations import hooks, status
from ep_plugin.integrations.fallback import falls_back
from ep_plugin.integrations.groups import check_group
from ep_plugin.runtime import streams
from tests.gpu import over_nodes
from tests.integrations.logs import logged_warnings
from tests.ranks import run_ranks, values

SIZE = 4
REASON = "nodes with different numbers of ranks"


Found = tuple[dict[str, Any], list[str], dict[str, tuple[int, int]]]


def _on_unequal_nodes(rank: int, train: Callable[[int], dict[str, Any]]) -> Found:
    """What ``train(rank)`` finds on a node of 3 ranks and one of 1; what was said; what was served and left."""
    os.environ |= {"EP_PLUGIN_HOST": f"host {rank // 3}", "EP_PLUGIN_FALLBACK": "stock", "RANK": str(rank)}
    with logged_warnings() as said:
        found = train(rank)
    return found, said, {row.name: (row.served, row.left) for row in status()}


def _check_said(rank: int, said: list[str], *integrations: str) -> None:
    """Rank 0 has named each integration once, with the reason."""
    assert len(said) == (len(integrations) if rank == 0 else 0), said
    for integration in integrations if rank == 0 else ():
        (sentence,) = (one for one in said if f"{integration} is left" in one)
        assert REASON in sentence


def _qwen(rank: int) -> dict[str, Any]:
    return over_nodes.losses(rank, SIZE, "qwen3_moe", served=False)


@pytest.mark.slow
def test_a_model_of_transformers_in_fsdp2_trains_as_without() -> None:
    pytest.importorskip("transformers")
    outcomes = run_ranks(
        SIZE, _on_unequal_nodes, _qwen, timeout_s=200, env={"EP_TEST_DEVICE": "cpu"}, framework="transformers"
    )
    for rank, (found, said, counts) in enumerate(values(outcomes)):
        theirs, ours = found.values()
        assert ours == theirs and ours[-1] < ours[0]
        _check_said(rank, said, "transformers", "fsdp2")
        assert all(served == 0 for served, _ in counts.values())
        assert counts["transformers"][1] > 0 and counts["fsdp2"][1] > 0


def _megatron_layer(rank: int) -> dict[str, Any]:
    from tests.integrations.megatron_cases import Case, run_case
    from tests.integrations.megatron_layers import initialise
    from tests.integrations.on_cpus import make_megatron_run_here

    make_megatron_run_here()
    import ep_plugin.integrations.megatron

    ep_plugin.integrations.megatron.enable()
    initialise(1, SIZE)
    return run_case(rank, Case(), dispatcher="StockTokenDispatcher")


@pytest.mark.slow
def test_a_layer_of_megatron_is_as_with_its_all_to_all() -> None:
    pytest.importorskip("megatron.core")
    outcomes = run_ranks(SIZE, _on_unequal_nodes, _megatron_layer, timeout_s=200, framework="megatron")
    for rank, (found, said, counts) in enumerate(values(outcomes)):
        assert set(found["difference"].values()) == {0.0}
        assert counts["megatron"][0] == 0 and counts["megatron"][1] > 0
        _check_said(rank, said, "megatron")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"overlap_moe_expert_parallel_comm": True}, "overlap_moe_expert_parallel_comm makes Megatron use"),
        ({"fp8": "e4m3", "moe_flex_dispatcher_backend": "hybridep"}, "leaves the padding to the backend hybridep"),
        ({"fp4": "e2m1", "moe_flex_dispatcher_backend": "ncclep"}, "leaves the padding to the backend ncclep"),
    ],
)
def test_a_layer_of_megatron_that_needs_flex_is_refused(options: dict[str, Any], why: str) -> None:
    pytest.importorskip("megatron.core")
    for error in values(run_ranks(1, _refused, options, framework="megatron", env={"EP_PLUGIN_FALLBACK": "stock"})):
        assert "the group" in error and why in error


def _refused(rank: int, options: dict[str, Any]) -> str:
    from tests.integrations.on_cpus import make_megatron_run_here

    make_megatron_run_here()
    from ep_plugin.integrations.megatron import dispatcher

    defaults = {"overlap_moe_expert_parallel_comm": False, "fp8": None, "fp4": None}
    config = SimpleNamespace(**defaults | {"moe_flex_dispatcher_backend": "deepep"} | options)
    fails = mock.patch.object(dispatcher, "EpPluginTokenDispatcher", side_effect=NotSupported("the group"))
    with fails, pytest.raises(NotSupported) as refused:
        dispatcher.dispatcher_or_stock(1, [0], config)
    return str(refused.value)


def _experts_of_torchtitan(rank: int) -> dict[str, Any]:
    from ep_plugin.testing.torchtitan import without_triton

    without_triton()
    from torchtitan.distributed.utils import set_spmd_backend

    from tests.integrations import test_torchtitan

    set_spmd_backend("default")
    return {"difference": test_torchtitan._run_experts(rank)}


@pytest.mark.slow
def test_experts_of_torchtitan_are_as_with_its_all_to_all() -> None:
    pytest.importorskip("torchtitan.distributed.utils")
    outcomes = run_ranks(SIZE, _on_unequal_nodes, _experts_of_torchtitan, timeout_s=200)
    for rank, (found, said, counts) in enumerate(values(outcomes)):
        assert set(found["difference"].values()) == {0.0} and counts["torchtitan"] == (0, 1)
        _check_said(rank, said, "torchtitan")


def _pipeline(rank: int) -> dict[str, Any]:
    from ep_plugin.integrations import pipelining
    from tests.integrations import test_pipelining

    theirs = test_pipelining._train("Schedule1F1B", rank, SIZE)
    pipelining.enable()
    ours = test_pipelining._train("Schedule1F1B", rank, SIZE)
    pipelining.disable()
    pairs = zip([*ours[0], *ours[1]], [*theirs[0], *theirs[1]], strict=True)
    return {"equal": [torch.equal(one, other) for one, other in pairs]}


@pytest.mark.slow
def test_a_pipeline_is_as_with_messages_of_pytorch() -> None:
    for rank, (found, said, counts) in enumerate(values(run_ranks(SIZE, _on_unequal_nodes, _pipeline))):
        assert all(found["equal"]) and counts["pipelining"][0] == 0 < counts["pipelining"][1]
        _check_said(rank, said, "pipelining")


def _refuses(rank: int, size: int) -> None:
    from transformers import PreTrainedModel

    os.environ["EP_PLUGIN_HOST"] = f"host {rank // 3}"
    load = PreTrainedModel._load_pretrained_model
    counting = mock.patch.object(PreTrainedModel, "_load_pretrained_model", side_effect=load)
    with counting as loads, pytest.raises(NotSupported, match=REASON):
        over_nodes.losses(rank, size, "qwen3_moe")
    assert loads.call_count == 1  # of the model with the built-in exchange
    assert _runs_on_a_shared_batch(size).isfinite().all()


def _runs_on_a_shared_batch(size: int) -> torch.Tensor:
    """Logits of a model for which "auto" chooses transformers' all-reduce, on any group."""
    from transformers.distributed import DistributedConfig

    import ep_plugin.integrations.transformers as ours
    from tests.integrations import test_transformers

    ours.enable()
    model = test_transformers._model(hidden_size=64, num_experts=size, num_experts_per_tok=2)
    model.config.num_key_value_heads = size
    shared = DistributedConfig(ep_size=size, tp_size=size)
    model = type(model).from_pretrained(None, config=model.config, state_dict={}, distributed_config=shared)
    with torch.no_grad():
        return model(input_ids=torch.arange(8).unsqueeze(0)).logits


@pytest.mark.slow
def test_without_the_variable_all_ranks_refuse_before_weights_are_loaded() -> None:
    pytest.importorskip("transformers")
    values(run_ranks(SIZE, _refuses, SIZE, timeout_s=200, env={"EP_TEST_DEVICE": "cpu"}, framework="transformers"))


def _sharded(**options: Any) -> FSDPModule:
    return fully_shard(torch.nn.Linear(8, 8), mesh=init_device_mesh("cpu", (dist.get_world_size(),)), **options)


def _enables(**options: Any) -> None:
    from ep_plugin.integrations import fsdp2

    model = _sharded(**options)
    try:
        fsdp2.enable(model)
    except NotSupported:
        assert fsdp2.launches(model).parameter_groups == 0  # PyTorch still serves the model
        raise


def _shards_later() -> None:
    from ep_plugin.integrations import fsdp2

    fsdp2.enable()
    _sharded()


def _makes_a_stage() -> None:
    from ep_plugin.integrations import pipelining

    pipelining.enable()
    PipelineStage(torch.nn.Linear(8, 8), dist.get_rank(), SIZE, torch.device("cpu"))


# What makes the group known, the ranks, and the ranks of the first nodes. The last node has the others.
KNOWN: dict[str, tuple[Callable[[], None], int, int]] = {
    "fsdp2, a model is enabled": (_enables, SIZE, 3),
    "fsdp2, a model is enabled that reshards over three ranks": (
        functools.partial(_enables, reshard_after_forward=3),
        6,
        2,
    ),
    "fsdp2, a module is sharded": (_shards_later, SIZE, 3),
    "pipelining, a stage is made": (_makes_a_stage, SIZE, 3),
}


def _says_at_once(rank: int, case: str, fallback: bool) -> list[str]:
    make, _, per_node = KNOWN[case]
    os.environ |= {"EP_PLUGIN_HOST": f"host {rank // per_node}", "RANK": str(rank)}
    if not fallback:
        with pytest.raises(NotSupported, match=REASON):
            make()
        return []
    os.environ["EP_PLUGIN_FALLBACK"] = "stock"
    with logged_warnings() as said:
        make()
        make()
    return said


@pytest.mark.parametrize("fallback", [False, True], ids=["refused", "left"])
@pytest.mark.parametrize("case", KNOWN)
def test_groups_are_refused_where_they_become_known(case: str, fallback: bool) -> None:
    for rank, said in enumerate(values(run_ranks(KNOWN[case][1], _says_at_once, case, fallback))):
        _check_said(rank, said, *([case.partition(",")[0]] if fallback else []))


def _needs_kernels_for_gpus(rank: int) -> None:
    with mock.patch.object(streams, "_C", object()), pytest.raises(ValueError, match="has no CUDA kernels"):
        check_group("transformers", dist.group.WORLD, "cuda")


def test_a_build_without_cuda_kernels_is_refused_with_the_group() -> None:
    values(run_ranks(1, _needs_kernels_for_gpus))


def test_a_version_that_is_not_served(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    later = hooks.INTEGRATIONS["pipelining"]._replace(at_least="99")
    monkeypatch.setitem(hooks.INTEGRATIONS, "pipelining", later)
    import torch.distributed.pipelining.schedules as schedules

    stock = schedules._batch_p2p
    with pytest.raises(NotSupported, match="pipelining: expected torch 99 or newer"):
        hooks.enable(["pipelining"])
    hooks.disable(["pipelining"])
    monkeypatch.setenv("EP_PLUGIN_FALLBACK", "stock")
    hooks.enable(["pipelining"])
    assert re.search("pipelining is left to the framework .*torch 99 or newer", caplog.text)
    (row,) = (row for row in status() if row.name == "pipelining")
    assert row.state == "stock" and schedules._batch_p2p is stock
    hooks.disable(["pipelining"])


def test_only_rank_0_warns_and_only_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    error: Any = NotSupported("expected a test")
    assert not falls_back("fsdp2", error)
    monkeypatch.setenv("EP_PLUGIN_FALLBACK", "stock")
    for name, rank in (("fsdp2", "0"), ("fsdp2", "0"), ("transformers", "1")):
        monkeypatch.setenv("RANK", rank)
        assert falls_back(name, error)
    assert [(one.name, one.levelname, one.getMessage()) for one in caplog.records] == [
        ("ep_plugin", "WARNING", "fsdp2 is left to the framework (EP_PLUGIN_FALLBACK): expected a test")
    ]
