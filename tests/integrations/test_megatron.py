"""Megatron's own MoE layer through our dispatcher and through its alltoall, on 4 CPU ranks: outputs, all gradients."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ep_plugin.errors import NotSupported
from tests.integrations.megatron_layers import initialise, make_config, make_layer
from tests.integrations.on_cpus import make_megatron_run_here
from tests.ranks import run_ranks, values

pytest.importorskip("megatron.core", reason="needs megatron-core")

from tests.integrations.megatron_cases import DEEPSEEK, GRAPHS, LIMIT, RELEASE, VERSION, WORLD, Case, relative, run_case

ROOT = Path(__file__).parents[2]
PADDED = {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}
RECOMPUTE = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
CASES = {
    "ep4": Case(),
    "tp2-ep2": Case(tp=2),
    "tp4": Case(tp=4),
    "capacity": Case(options={"moe_expert_capacity_factor": 0.5}),
    "capacity-tp2": Case(tp=2, options={"moe_expert_capacity_factor": 0.5}),
    "drop-and-pad": Case(options=PADDED, ours={"moe_flex_dispatcher_backend": "hybridep"}, tokens=16),
    "drop-and-pad-tp2": Case(tp=2, options=PADDED, ours={"moe_flex_dispatcher_backend": "hybridep"}, tokens=16),
    "deepseek": Case(options=DEEPSEEK),
    "deepseek-tp2": Case(tp=2, options=DEEPSEEK),
    "recompute": Case(options=RECOMPUTE),
    "fp64-router": Case(options={"moe_router_dtype": "fp64"}),
    "one-expert-a-rank": Case(options={"num_moe_experts": 4, "moe_router_topk": 1, "moe_router_pre_softmax": True}),
    "few-sms": Case(ours={"moe_deepep_num_sms": 6}),
    "one-token": Case(tokens=1),
}
if RELEASE >= (0, 18):
    overlapped = {"moe_shared_expert_overlap": True}
    CASES |= {
        "shared-overlap": Case(options=DEEPSEEK, ours=overlapped),
        "shared-overlap-tp2": Case(tp=2, options=DEEPSEEK, ours=overlapped),
    }
if RELEASE >= (0, 19):
    CASES |= {
        "few-sms": Case(ours={"moe_flex_dispatcher_num_sms": 6}),
        "drop-and-pad-uneven": Case(
            options=PADDED,
            ours={"moe_flex_dispatcher_backend": "hybridep", "moe_hybridep_pad_uneven_dispatch_inputs": True},
            tokens=16,
        ),
    }


@pytest.fixture(scope="module")
def results() -> Callable[[], list[dict[str, Any]]]:
    """What every rank found; the world runs once, all of its cases."""
    return functools.cache(lambda: values(run_ranks(WORLD, _run_rank, timeout_s=240, framework="megatron")))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.slow
def test_matches_alltoall(results, name: str) -> None:
    for rank, found in enumerate(results()):
        difference = found[name]["difference"]
        assert len(difference) >= 5
        worst = max(difference, key=difference.get)
        assert difference[worst] <= LIMIT, f"rank {rank}: {worst} differs by {difference[worst]}"


@pytest.mark.parametrize("name", CASES)
def test_every_exchange_is_ours(results, name: str) -> None:
    recomputed = name == "recompute"
    for found in results():
        assert found[name]["ours"] == {
            "dispatch": 2 if recomputed else 1,
            "combine": 2 if recomputed else 1,
            "stock": 0,
        }
        assert found[name]["theirs"]["dispatch"] == 0
        assert (found[name]["theirs"]["stock"] > 0) == (CASES[name].tp < WORLD)  # over tensor parallel ranks it gathers


@pytest.mark.slow
def test_matches_alltoall_over_two_nodes() -> None:
    names = ["ep4", "tp2-ep2", "capacity-tp2", "deepseek"]
    for rank, found in enumerate(
        values(run_ranks(WORLD, _run_some, names, timeout_s=240, env={"EP_TEST_NODES": "2"}, framework="megatron"))
    ):
        for name in names:
            assert found[name]["ours"] == {"dispatch": 1, "combine": 1, "stock": 0}
            assert max(found[name]["difference"].values()) <= LIMIT, f"rank {rank}, {name}: {found[name]['difference']}"


def test_what_is_not_served_is_refused_when_the_layer_is_built(results) -> None:
    expected = {
        "shared expert overlap": "moe_shared_expert_overlap: expected False with the flex dispatcher",
        "top-k": "moe_router_topk: expected at most 128 times 1/2 .* got 65",
        "drop-and-pad": "num_moe_experts: expected at most 128 times 1/2 .*padded expert may take any token, got 128",
        "whole graphs": f"{GRAPHS}: expected no whole MoE layers, but parts .*got moe with",
    }
    if RELEASE >= (0, 18):
        expected["budget"] = "moe_expert_rank_capacity_factor: expected None, .*drops none, got 1.5"
    for found in results():
        assert found["refused"].keys() == expected.keys()
        for name, message in expected.items():
            with pytest.raises(NotSupported, match=message):
                raise found["refused"][name]


def test_padding_that_inference_switches_on_later_changes_nothing(results) -> None:
    for found in results():
        assert found["padded decode"] <= LIMIT


# What is done to the Megatron-core that is here, and what is said then.
OTHER_MEGATRONS = {
    "old": (
        "package_info.__version__ = '0.15.3'",
        "megatron: expected megatron.core 0.16.1 or newer and below 0.20, got 0.15.3; install such a version",
    ),
    "new": (
        "package_info.__version__ = '0.20.0'",
        "megatron: expected megatron.core 0.16.1 or newer and below 0.20, got 0.20.0; install such a version",
    ),
    "other-call": (
        "module.MoEFlexTokenDispatcher.token_dispatch = lambda self, hidden_states, probs, stream: None",
        f"megatron.core {VERSION}: expected MoEFlexTokenDispatcher.token_dispatch(self, hidden_states, probs, "
        "async_finish, allocate_on_comm_stream), as in 0.16.1, got (self, hidden_states, probs, stream); install",
    ),
    "gone": (
        "del module.MoEFlexTokenDispatcher",
        f"megatron.core {VERSION}: expected MoEFlexTokenDispatcher.__init__(self, num_local_experts, "
        "local_expert_indices, config, pg_collection), as in 0.16.1, got none; install",
    ),
    "no-option": (
        "del TransformerConfig.moe_router_dtype",
        f"megatron.core {VERSION}: expected TransformerConfig.moe_router_dtype, as in 0.16.1, got none; install",
    ),
}


@pytest.fixture(scope="module")
def refusals() -> dict[str, str]:
    """What a script is told by each: one process imports Megatron, and a child of it makes the change."""
    changes = {name: change for name, (change, _) in OTHER_MEGATRONS.items()}
    code = f"""
import json, os
from tests.integrations.on_cpus import make_megatron_run_here
make_megatron_run_here()
from megatron.core import package_info
import megatron.core.transformer.moe.moe_layer
import megatron.core.transformer.moe.token_dispatcher as module
from megatron.core.transformer.transformer_config import TransformerConfig
for name, change in {changes!r}.items():
    child = os.fork()
    if child == 0:
        exec(change)
        try:
            import ep_plugin.integrations.megatron
            ep_plugin.integrations.megatron.enable()
            said = "nothing"
        except Exception as error:
            said = f"{{type(error).__name__}}: {{error}}"
        print(json.dumps([name, said]), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHER_MEGATRONS)
def test_another_megatron_is_refused_when_a_script_switches_it_on_itself(refusals: dict[str, str], name: str) -> None:
    assert refusals[name].startswith(f"NotSupported: {OTHER_MEGATRONS[name][1]}")


def test_padding_for_quantisation_the_schedules_copies_and_graph_attributes(results) -> None:
    for found in results():
        parts = found["parts"]
        assert parts["counts"] == [16 * -(-count // 16) for count in parts["unpadded"]]
        assert parts["padding is zero"] and parts["host"]
        assert parts["freed rows are copied"] and parts["kept rows are not"]
        assert parts["graph attributes"] == ["token_indices"]
        assert parts["manager"]


def test_megatrons_deepep_functions_work_on_our_deep_ep(results) -> None:
    for found in results():
        assert found["fused_a2a"] <= LIMIT


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ep4", "tp2-ep2", "capacity", "recompute", "fp64-router"])
def test_megatrons_own_deepep_backend_trains_on_our_deep_ep(deepep_results, name: str) -> None:
    for rank, found in enumerate(deepep_results()):
        difference = found[name]["difference"]
        assert len(difference) >= 5
        assert max(difference.values()) <= LIMIT, f"rank {rank}: {difference}"
        ours = found[name]["ours"]
        assert min(ours["dispatch"], ours["combine"]) >= 2 and ours["stock"] == 0  # forward and backward


@pytest.fixture(scope="module")
def deepep_results() -> Callable[[], list[dict[str, Any]]]:
    return functools.cache(lambda: values(run_ranks(WORLD, _run_deepep, timeout_s=240, framework="megatron")))


def _run_deepep(
    rank: int, names: Sequence[str] = ("ep4", "capacity", "recompute", "fp64-router", "tp2-ep2")
) -> dict[str, Any]:
    import ep_plugin.integrations.hooks

    ep_plugin.integrations.hooks.enable(["deep_ep"])
    make_megatron_run_here()
    for name in ("fused_a2a", "token_dispatcher", "moe_layer"):  # this file has imported some of them before
        importlib.reload(importlib.import_module(f"megatron.core.transformer.moe.{name}"))
    found = {}
    for name in names:
        if name in ("ep4", "tp2-ep2"):
            initialise(CASES[name].tp, WORLD // CASES[name].tp)
        found[name] = run_case(rank, CASES[name], dispatcher="MoEFlexTokenDispatcher")
    return found


def _run_rank(rank: int) -> dict[str, Any]:
    make_megatron_run_here()
    import megatron.core.transformer.moe.moe_layer  # noqa: F401  there before the hook: served at once

    import ep_plugin.integrations.hooks

    ep_plugin.integrations.hooks.enable(["megatron", "deep_ep"])
    found: dict[str, Any] = {}
    tp = 0
    for name, case in sorted(CASES.items(), key=lambda item: item[1].tp):
        if case.tp != tp:
            tp = case.tp
            initialise(tp, WORLD // tp)
        found[name] = run_case(rank, case)
        if tp == 1 and "parts" not in found:
            found["parts"] = _run_parts(rank)
            found["fused_a2a"] = _run_fused_a2a(rank)
            found["padded decode"] = _run_padded_decode(rank)
        if tp == 2 and "refused" not in found:
            found["refused"] = _run_refusals()
    return found


def _run_some(rank: int, names: list[str]) -> dict[str, Any]:
    make_megatron_run_here()
    import ep_plugin.integrations.megatron

    ep_plugin.integrations.megatron.enable()
    found: dict[str, Any] = {}
    for name in names:
        case = CASES[name]
        initialise(case.tp, WORLD // case.tp)
        found[name] = run_case(rank, case)
    return found


def _run_padded_decode(rank: int) -> float:
    """Megatron's inference pads between calls what a layer was built without, dropping nothing."""
    from megatron.core.inference.utils import set_decode_expert_padding

    layer = make_layer(make_config("flex", 1, WORLD)).eval()
    x = torch.randn((7, 2, 32), generator=torch.Generator().manual_seed(rank))
    with torch.no_grad():
        plain = layer(x)[0]
        set_decode_expert_padding(layer, True, capacity_factor=layer.config.num_moe_experts / 3)
        padded = layer(x)[0]
    return relative(padded, plain)


def _dispatcher(config: Any) -> Any:
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection

    from ep_plugin.integrations.megatron import EpPluginTokenDispatcher

    return EpPluginTokenDispatcher(
        config.num_moe_experts // config.expert_model_parallel_size, [], config, get_default_pg_collection()
    )


def _run_parts(rank: int) -> dict[str, Any]:
    """The dispatcher by itself: a quantised configuration, the overlapping schedule, and partial graphs."""
    config = make_config("flex", 1, WORLD)
    # What TransformerConfig itself accepts only where TransformerEngine is.
    config.fp8, config.fp8_recipe, config.moe_router_padding_for_quantization = "e4m3", "delayed", True
    dispatcher = _dispatcher(config)
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn((9, 1, 32), generator=generator)
    probs = torch.rand((9, 8), generator=generator)
    chosen = torch.zeros(9, 8, dtype=torch.bool).scatter_(1, probs.topk(3).indices, True)
    rows, some = dispatcher.dispatch_preprocess(x, chosen, probs * chosen)
    dispatcher._comm_manager.token_probs = some.detach()  # as the schedule does
    tokens, weights = dispatcher.token_dispatch(rows, some)
    again, counts, _ = dispatcher.dispatch_postprocess(tokens, weights)
    kept = again is tokens
    config.overlap_moe_expert_parallel_comm = True
    copied = dispatcher.dispatch_postprocess(tokens, weights)[0]
    config.moe_flex_dispatcher_backend = "hybridep"
    kept &= dispatcher.dispatch_postprocess(tokens, weights)[0] is tokens
    everyone: list[Any] = [None] * WORLD
    dist.all_gather_object(everyone, chosen)
    unpadded = torch.cat(everyone).sum(0).view(WORLD, -1)[rank].tolist()
    padding = torch.cat([part[count:] for part, count in zip(tokens.split(counts.tolist()), unpadded, strict=True)])
    out = dispatcher.combine_postprocess(dispatcher.token_combine(dispatcher.combine_preprocess(tokens)))
    assert out.shape == x.shape and dispatcher.handle is None
    return {
        "counts": counts.tolist(),
        "unpadded": unpadded,
        "host": counts.device.type == "cpu" and counts.dtype is torch.int64,
        "padding is zero": not padding.any() and len(padding) == sum(counts) - sum(unpadded),
        "freed rows are copied": copied.data_ptr() != tokens.data_ptr() and torch.equal(copied, tokens),
        "kept rows are not": kept,
        "graph attributes": [name for name in dispatcher.cudagraph_attrs if torch.is_tensor(getattr(dispatcher, name))],
        "manager": dispatcher._comm_manager.get_number_of_tokens_per_expert() is counts,
    }


def _run_refusals() -> dict[str, Exception]:
    layer = SimpleNamespace(use_shared_expert_gate=False)
    changes = {
        "top-k": {"moe_router_topk": 65},
        "drop-and-pad": {"moe_pad_expert_input_to_capacity": True, "num_moe_experts": 128},
        "whole graphs": {"cuda_graph_impl": "local", GRAPHS: [SimpleNamespace(name="moe")]},
    }
    if RELEASE >= (0, 18):
        changes["budget"] = {"moe_expert_rank_capacity_factor": 1.5}
    found: dict[str, Exception] = {}
    for name, options in changes.items():
        config = make_config("flex", 2, 2)
        for option, value in options.items():
            setattr(config, option, value)
        with pytest.raises(NotSupported) as caught:
            _dispatcher(config)
        found[name] = caught.value
    for variables in ({}, {"EP_PLUGIN_FALLBACK": "stock"}):  # no fallback serves it
        with mock.patch.dict(os.environ, variables), pytest.raises(NotSupported) as caught:
            _dispatcher(make_config("flex", 2, 2)).set_shared_experts(layer)
        found["shared expert overlap"] = caught.value
    return found


def _run_fused_a2a(rank: int) -> float:
    """Megatron's autograd functions over `import deep_ep`: a round trip and its gradients."""
    from megatron.core.transformer.moe import fused_a2a

    fused_a2a = importlib.reload(fused_a2a)
    assert fused_a2a.HAVE_DEEP_EP and not fused_a2a.HAVE_HYBRIDEP
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn((11, 32), generator=generator).requires_grad_()
    probs, ids = torch.rand((11, 8), generator=generator).topk(3)
    probs.requires_grad_()
    fused_a2a.set_deepep_num_sms(20)
    rows, local, weights, counts, handle = fused_a2a.fused_dispatch(x, ids, probs, 8, dist.group.WORLD, True, True)
    assert counts.tolist() == [int((local == expert).sum()) for expert in range(2)]
    factor = weights.masked_fill(local < 0, 0).sum(1, keepdim=True)
    y, _ = fused_a2a.fused_combine(rows * factor, dist.group.WORLD, handle, True, True)
    (y * x.detach().sin()).sum().backward()
    exact = x.detach() * probs.detach().sum(1, keepdim=True)
    grad_x = x.detach().sin() * probs.detach().sum(1, keepdim=True)
    grad_probs = (x.detach().sin() * x.detach()).sum(1, keepdim=True).expand_as(probs)
    pairs = ((y, exact), (x.grad, grad_x), (probs.grad, grad_probs))
    return max(relative(ours.detach(), theirs) for ours, theirs in pairs)
