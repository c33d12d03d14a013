"""torchtitan's routed experts with our dispatcher and with its all-to-all, on 4 CPU ranks; how ours gets there."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ep_plugin
from ep_plugin.testing.torchtitan import without_triton
from tests.ranks import run_ranks, values
from tests.scripts_on_ranks import run_code

without_triton()
pytest.importorskip("torchtitan.models.qwen3", reason="needs torchtitan", exc_type=ImportError)

ROOT = Path(__file__).parents[2]
WORLD, LIMIT = 4, 2e-2  # its experts compute in BF16
EXACT = 1e-5
TOKENS = (24, 24, 24, 24), (5, 0, 17, 1)
OVERRIDE = "ep_plugin.integrations.torchtitan.token_dispatcher"
EVERYWHERE: list[dict[str, str]] = [{}, {"EP_PLUGIN_FALLBACK": "stock"}]  # what no fallback serves


@pytest.fixture(scope="module")
def results() -> Callable[[], list[dict[str, Any]]]:
    return functools.cache(lambda: values(run_ranks(WORLD, _run_rank, timeout_s=200)))


@pytest.mark.slow
@pytest.mark.parametrize("tokens", TOKENS, ids=["even", "ragged"])
def test_dispatch_and_combine_match_the_all_to_all(results, tokens: tuple[int, ...]) -> None:
    for rank, found in enumerate(results()):
        difference = found[str(tokens)]
        assert difference.keys() == {"rows", "counts", "out", "x.grad", "scores.grad"}
        assert max(difference.values()) <= EXACT, f"rank {rank}: {difference}"


@pytest.mark.slow
def test_they_match_over_two_nodes() -> None:
    for found in values(run_ranks(WORLD, _run_rank, timeout_s=200, env={"EP_PLUGIN_RANKS_PER_NODE": "2"})):
        assert found["padded"]["nodes"] == 2
        assert max(max(found[str(tokens)].values()) for tokens in TOKENS) <= EXACT
        assert max(found["experts"].values()) <= LIMIT


@pytest.mark.slow
def test_the_routed_experts_of_the_debug_model_match(results) -> None:
    for rank, found in enumerate(results()):
        difference = found["experts"]
        assert len(difference) == 6
        assert max(difference.values()) <= LIMIT, f"rank {rank}: {difference}"


@pytest.mark.slow
def test_quantised_experts_get_padded_groups(results) -> None:
    for found in results():
        assert found["padded"] == {"copied": True, "nodes": 1, "counts": True, "sum": True, "out": True}


@pytest.mark.slow
def test_each_layer_has_its_own_load(results) -> None:
    found = [rank["layers"] for rank in results()]
    assert all(layers.keys() == found[0].keys() for layers in found)
    first, second = (int(name.removeprefix("torchtitan MoE layer ")) for name in found[0])
    assert second == first + 1
    tokens = [sum(layers[f"torchtitan MoE layer {number}"] for layers in found) for number in (first, second)]
    assert tokens == [WORLD * 9 * 3, 2 * WORLD * 9 * 3]


@pytest.mark.slow
def test_the_override_reaches_every_layer_of_the_debug_model() -> None:
    from torchtitan.config.override import OverrideConfig, apply_overrides
    from torchtitan.models.qwen3 import model_registry

    spec = model_registry("debugmodel_moe")
    assert {type(layer.moe.routed_experts.token_dispatcher).__qualname__ for layer in spec.model.layers} == {
        "AllToAllTokenDispatcher.Config"
    }
    said = apply_overrides(OverrideConfig(imports=[OVERRIDE]), spec)
    assert len(said) == len(spec.model.layers)
    for layer in spec.model.layers:
        config = layer.moe.routed_experts.token_dispatcher
        assert type(config).__qualname__ == "EpPluginTokenDispatcher.Config"
        assert (config.num_experts, config.top_k) == (64, 8)


@pytest.mark.slow
def test_the_variable_alone_switches_it_on(tmp_path: Path) -> None:
    code = """
import json, torch
from ep_plugin.testing.torchtitan import without_triton
without_triton()
from torchtitan.models.qwen3 import model_registry
from torchtitan.components.quantization.utils import swap_token_dispatcher
import ep_plugin.integrations
experts = model_registry("debugmodel_moe").model.layers[0].moe.routed_experts
names = [type(experts.token_dispatcher).__qualname__]
swap_token_dispatcher(experts, 16)
names += [type(experts.token_dispatcher).__qualname__, type(experts.token_dispatcher.build()).__name__]
states = {row.name: row.state for row in ep_plugin.integrations.status()}
print(json.dumps([names, experts.token_dispatcher.pad_multiple, states]))
"""
    status, lines = _switched_on(code, tmp_path)
    assert status == 0, lines
    names, pad, states = json.loads(lines[-1])
    padded = "EpPluginPaddedTokenDispatcher"
    assert names == ["EpPluginTokenDispatcher.Config", f"{padded}.Config", padded]
    assert pad == 16 and states["torchtitan"] == "ready"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            "def dispatch(self, x_TD, topk_expert_ids_TK, topk_scores_TK, num_local_tokens_per_expert_E): ...\n"
            "module.AllToAllTokenDispatcher.dispatch = dispatch",
            "expected AllToAllTokenDispatcher.dispatch(self, x_TD, topk_scores_TK, topk_expert_ids_TK, "
            "num_local_tokens_per_expert_E), as in 0.3.0, got (self, x_TD, topk_expert_ids_TK, topk_scores_TK,",
        ),
        (
            "@dataclasses.dataclass(kw_only=True)\n"
            "class Config(module.TorchAOTokenDispatcher.Config):\n    rows_first: bool = False\n"
            "module.TorchAOTokenDispatcher.Config = Config",
            "expected TorchAOTokenDispatcher.Config(num_experts, top_k, pad_multiple), as in 0.3.0, got (num_experts, "
            "top_k, pad_multiple, rows_first)",
        ),
        (
            "del module.BaseEPTokenDispatcher",
            "expected BaseEPTokenDispatcher.dispatch(self, x_TD, topk_scores_TK, topk_expert_ids_TK, "
            "num_local_tokens_per_expert_E), as in 0.3.0, got none",
        ),
    ],
    ids=["other-order", "new-setting", "gone"],
)
def test_a_version_whose_dispatchers_are_called_otherwise_is_refused(change: str, message: str, tmp_path: Path) -> None:
    """The hook sees a torchtitan 0.9.0 whose module of dispatchers ends with `change`."""
    code = f"""
import torch, torchtitan
from ep_plugin.testing.torchtitan import without_triton
without_triton()
torchtitan.__version__ = "0.9.0"
import ep_plugin.integrations.hooks as hooks
hooks._finder.callbacks["torchtitan.models.common.token_dispatcher"].insert(0, lambda: exec({change!r}, {{
    "module": __import__("sys").modules["torchtitan.models.common.token_dispatcher"],
    "dataclasses": __import__("dataclasses"),
}}))
from torchtitan.models.qwen3 import model_registry
"""
    status, lines = _switched_on(code, tmp_path)
    assert status != 0
    last = lines[-1]
    assert last.startswith("ep_plugin.errors.NotSupported: torchtitan 0.9.0: " + message)
    assert last.endswith("leave torchtitan out of EP_PLUGIN and ep_plugin out of the overrides")


@pytest.mark.slow
@pytest.mark.parametrize("variables", EVERYWHERE, ids=["by default", "also in fallback"])
def test_the_experimental_graph_trainer_is_refused_by_name(tmp_path: Path, variables: dict[str, str]) -> None:
    code = """
import torch
from ep_plugin.testing.torchtitan import without_triton
without_triton()
import torchtitan.models.qwen3
from torchtitan.experiments.graph_trainer.common_utils import annotate_moe_ep_regions
annotate_moe_ep_regions()
"""
    status, lines = _switched_on(code, tmp_path, **variables)
    assert status != 0
    assert "graph_trainer: expected AllToAllTokenDispatcher, whose steps it marks" in lines[-1]


def _switched_on(code: str, folder: Path, **variables: str) -> tuple[int | None, list[str]]:
    """The exit status, and the lines of the output."""
    status, output = run_code(code, folder, EP_PLUGIN="torchtitan", PYTHONPATH=str(ROOT), **variables)
    return status, output.strip().splitlines()


@pytest.mark.parametrize("variables", EVERYWHERE, ids=["by default", "also in fallback"])
def test_quantised_experts_without_expert_parallelism_are_refused(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    from ep_plugin.errors import NotSupported
    from ep_plugin.integrations.torchtitan import EpPluginTokenDispatcher

    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    dispatcher = EpPluginTokenDispatcher.Config(num_experts=8, top_k=2, pad_multiple=16).build()
    with pytest.raises(NotSupported, match="expert_parallel_degree: expected more than 1 for quantised experts.*got 1"):
        dispatcher.wire_meshes(ep_mesh=None)


def test_without_expert_parallelism_tokens_stay_here() -> None:
    from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher

    from ep_plugin.integrations.torchtitan import EpPluginTokenDispatcher

    x, scores, ids = _inputs(6, 0)
    outs = []
    for cls in (LocalTokenDispatcher, EpPluginTokenDispatcher):
        dispatcher = cls.Config(num_experts=8, top_k=3).build()
        dispatcher.wire_meshes(ep_mesh=None)
        rows, counts, metadata = dispatcher.dispatch(x, scores, ids, ids.flatten().bincount(minlength=8))
        outs.append(dispatcher.combine(_scaled(rows, counts, 0), metadata, x))
    assert torch.equal(outs[0], outs[1])


def _inputs(tokens: int, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 + rank)
    x = torch.randn((tokens, 32), generator=generator).requires_grad_()
    scores, ids = torch.rand((tokens, 8), generator=generator).topk(3, dim=1)
    return x, scores.detach().requires_grad_(), ids


def _scaled(rows: torch.Tensor, counts: torch.Tensor, first: int) -> torch.Tensor:
    """Experts that can be told apart: number i multiplies by i + 1."""
    return rows * torch.arange(first + 1, first + 1 + len(counts)).repeat_interleave(counts.long()).unsqueeze(1)


def _dispatchers(pad_multiple: int | None = None) -> list[Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

    from ep_plugin.integrations.torchtitan import EpPluginTokenDispatcher

    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("ep",))
    stock = AllToAllTokenDispatcher.Config(num_experts=8, top_k=3).build()
    ours = EpPluginTokenDispatcher.Config(num_experts=8, top_k=3, pad_multiple=pad_multiple).build()
    for dispatcher in (stock, ours):
        dispatcher.wire_meshes(ep_mesh=mesh)
    return [stock, ours]


def _run_rank(rank: int) -> dict[str, Any]:
    from torchtitan.distributed.utils import set_spmd_backend

    set_spmd_backend("default")  # the all-to-all then goes over the mesh that it was given
    found: dict[str, Any] = {}
    for tokens in TOKENS:
        results = []
        for dispatcher in _dispatchers():
            x, scores, ids = _inputs(tokens[rank], rank)
            rows, counts, metadata = dispatcher.dispatch(x, scores, ids, ids.flatten().bincount(minlength=8))
            out = dispatcher.combine(_scaled(rows, counts, 2 * rank), metadata, x)
            (out * x.detach().cos()).sum().backward()
            result = {"rows": rows, "counts": counts, "out": out, "x.grad": x.grad, "scores.grad": scores.grad}
            results.append({name: tensor.detach().double() for name, tensor in result.items()})
        found[str(tokens)] = {name: _relative(results[1][name], theirs) for name, theirs in results[0].items()}
    found["experts"] = _run_experts(rank)
    found["padded"] = _run_padded(rank)
    found["layers"] = _run_layers(rank)
    return found


def _relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    assert ours.shape == theirs.shape
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp_min(1e-3)) if theirs.numel() else 0.0


def _run_padded(rank: int) -> dict[str, Any]:
    stock, ours = _dispatchers(pad_multiple=16)
    x, scores, ids = _inputs(9, rank)
    given = (x, scores, ids, ids.flatten().bincount(minlength=8))
    _, counts, metadata = stock.dispatch(*given)
    rows, padded, kept = ours.dispatch(*given)
    expected = stock.combine(_scaled(_, counts, 2 * rank), metadata, x)
    copied = copy.deepcopy(ours)  # as a model may be, whose layers go on exchanging over the same memory
    out = copied.combine(_scaled(rows, padded, 2 * rank), kept, x)
    return {
        "copied": copied is not ours and copied.communicator is ours.communicator,
        "nodes": len(ours.communicator.engine.node_map.nodes),
        "counts": padded.tolist() == [16 * -(-count // 16) for count in counts.tolist()],
        "sum": int(padded.sum()) == len(rows),
        "out": torch.allclose(out, expected, rtol=1e-5, atol=1e-5),
    }


def _run_layers(rank: int) -> dict[str, int]:
    """By layer, the tokens for this rank's experts: of one dispatch of the first, and two of the second."""
    first, second = (_dispatchers()[1] for _ in range(2))
    x, scores, ids = _inputs(9, rank)
    ep_plugin.record_stats()
    for dispatcher in (first, second, second):
        dispatcher.dispatch(x, scores, ids, ids.flatten().bincount(minlength=8))
    layers = first.communicator.stats().layers
    ep_plugin.record_stats(False)
    return {name: int(tokens.sum()) for name, tokens in layers.items()}


def _run_experts(rank: int) -> dict[str, float]:
    """RoutedExperts as the debug model configures them, on this rank's slice of the experts."""
    from torch.distributed.device_mesh import init_device_mesh
    from torchtitan.models.qwen3 import model_registry

    from ep_plugin.integrations.torchtitan import token_dispatcher

    config = model_registry("debugmodel_moe").model.layers[0].moe.routed_experts
    config.inner_experts.num_experts //= WORLD
    replaced = copy.copy(config)
    replaced.token_dispatcher = token_dispatcher(config.token_dispatcher)
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("ep",))
    results = []
    for one in (config, replaced):
        experts = one.build()
        generator = torch.Generator().manual_seed(rank)
        for parameter in experts.parameters():
            parameter.data.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
        experts.token_dispatcher.wire_meshes(ep_mesh=mesh)
        x = torch.randn((2, 10, 256), generator=generator).requires_grad_()
        scores, ids = torch.rand((2, 10, 64), generator=generator).topk(8, dim=-1)
        scores.requires_grad_()
        out = experts(x, scores, ids, ids.flatten().bincount(minlength=64))
        (out * x.detach().cos()).sum().backward()
        grads = {name: parameter.grad for name, parameter in experts.named_parameters()}
        results.append({"out": out.detach(), "x.grad": x.grad, "scores.grad": scores.grad} | grads)
    assert results[0].keys() == results[1].keys()
    return {name: _relative(results[1][name], theirs) for name, theirs in results[0].items()}
