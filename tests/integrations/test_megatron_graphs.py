"""CUDA graphs of parts of Megatron's MoE layer, by the names of each version, on 4 CPU ranks: which are served, and
that the rest of the layer needs only what a graph returns.

CPUs capture nothing: the layer stops where the graph would end, and continues from its outputs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ep_plugin.errors import NotSupported
from tests.integrations.on_cpus import make_megatron_run_here
from tests.ranks import run_ranks, values

pytest.importorskip("megatron.core", reason="needs megatron-core")

from tests.integrations.megatron_cases import DEEPSEEK, GRAPHS, HYBRIDEP, LIMIT, RELEASE, WORLD, refusal, relative
from tests.integrations.megatron_layers import initialise, make_config, make_layer

DROP_AND_PAD = HYBRIDEP | {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}
PARTS = ["attn", "moe_router", "moe_preprocess"]
SERVED_GRAPHS: dict[str, dict[str, Any]] = {
    "transformer engine": {"cuda_graph_impl": "transformer_engine", GRAPHS: PARTS},
    "local": {"cuda_graph_impl": "local", GRAPHS: PARTS},
    "attention": {"cuda_graph_impl": "transformer_engine", GRAPHS: ["attn"]},
    "old name": {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": PARTS},
    "none": {"cuda_graph_impl": "none", GRAPHS: []},
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "whole layers": (
        {"cuda_graph_impl": "transformer_engine", GRAPHS: []},
        f"{GRAPHS}: expected no whole MoE layers, .*got all with cuda_graph_impl='transformer_engine'",
    ),
    "drop-and-pad layers": (
        DROP_AND_PAD | {"cuda_graph_impl": "transformer_engine", GRAPHS: ["attn", "moe"]},
        f"{GRAPHS}: expected no whole MoE layers, .*got attn, moe with",
    ),
    "full": ({"cuda_graph_impl": "local", "cuda_graph_scope": "full"}, f"{GRAPHS}: expected no whole .*got all with"),
    "an iteration": (
        {"cuda_graph_impl": "full_iteration", GRAPHS: []}
        if RELEASE >= (0, 18)
        else {"cuda_graph_impl": "local", GRAPHS: ["full_iteration"]},
        f"{GRAPHS}: expected no whole MoE layers, .*full_iteration",
    ),
}
OVERLAPPED = [False, True] if RELEASE >= (0, 18) else [False]  # shared experts


@pytest.fixture(scope="module")
def results() -> Callable[[], list[dict[str, Any]]]:
    """What every rank found; the world runs once."""
    return functools.cache(lambda: values(run_ranks(WORLD, _run_rank, timeout_s=240, framework="megatron")))


@pytest.mark.slow
@pytest.mark.parametrize("name", SERVED_GRAPHS)
def test_graphs_of_parts_are_served(results, name: str) -> None:
    for found in results():
        assert found["served graphs"][name] == "EpPluginTokenDispatcher"


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_graphs_of_whole_layers_are_refused(results, name: str) -> None:
    for found in results():
        with pytest.raises(NotSupported, match=REFUSED[name][1]):
            raise found["refused"][name]


@pytest.mark.slow
@pytest.mark.parametrize("parts", [["moe_router"], ["moe_router", "moe_preprocess"]], ids="+".join)
@pytest.mark.parametrize("overlapped", OVERLAPPED)
def test_a_layer_goes_on_where_the_graph_of_its_router_ends(results, parts: list[str], overlapped: bool) -> None:
    for found in results():
        assert found["resumed"]["+".join(parts), overlapped] <= LIMIT


@pytest.mark.slow
def test_a_layer_in_three_steps_is_as_in_one(results) -> None:
    for found in results():
        assert found["in steps"] <= LIMIT


def _run_rank(rank: int) -> dict[str, Any]:
    make_megatron_run_here()
    import ep_plugin.integrations.megatron

    ep_plugin.integrations.megatron.enable()
    initialise(1, WORLD)
    found: dict[str, Any] = {}
    found["served graphs"] = {
        name: type(_layer(**options).token_dispatcher).__name__ for name, options in SERVED_GRAPHS.items()
    }
    found["refused"] = {name: refusal(options) for name, (options, _) in REFUSED.items()}
    found["resumed"] = {
        ("+".join(parts), overlapped): _resumed(rank, parts, overlapped)
        for parts in (["moe_router"], ["moe_router", "moe_preprocess"])
        for overlapped in OVERLAPPED
    }
    found["in steps"] = _in_steps(rank)
    return found


def _layer(**options: Any) -> Any:
    return make_layer(make_config("flex", 1, WORLD, **options))


def _input(rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn((7, 2, 32), generator=torch.Generator().manual_seed(rank)).to(dtype).requires_grad_()


def _results(layer: Any, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
    """The output, and all gradients of a sum of it."""
    layer.zero_grad()
    x.grad = None
    (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
    gradients = {name: one.grad.clone() for name, one in layer.named_parameters() if one.grad is not None}
    assert x.grad is not None
    return {"y": y.detach(), "x": x.grad.clone(), **gradients}


def _worst(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    assert ours.keys() == theirs.keys() and len(theirs) >= 5
    return max(relative(ours[name], theirs[name]) for name in theirs)


def _keep_only(dispatcher: Any, attributes: dict[str, Any]) -> None:
    """Of the tensors that the dispatcher has of a call."""
    for name in ("token_indices", "token_probs", "dispatched_probs", "tokens_per_expert", "handle"):
        setattr(dispatcher, name, attributes.get(name))


def _resumed(rank: int, parts: list[str], overlapped: bool) -> float:
    """The layer in one, and as TransformerLayer runs it around the graph of its router: what the graph returns, and
    nothing else, reaches the rest."""
    from megatron.core.transformer import cuda_graphs

    options = DEEPSEEK | ({"moe_shared_expert_overlap": True} if overlapped else {})
    layer = _layer(cuda_graph_impl="transformer_engine", **{GRAPHS: parts}, **options)
    dispatcher, store = layer.token_dispatcher, layer.cudagraph_tensor_store
    x = _input(rank)
    expected = _results(layer, x, layer(x)[0])
    cuda_graphs._set_capture_start()
    captured = list(layer(x))
    cuda_graphs._set_capture_end()
    shared = None if overlapped else captured.pop()
    attributes = dispatcher.valid_cudagraph_attrs or []
    if "moe_preprocess" in parts:
        hidden, probs, *values_of_attributes = captured
        _keep_only(dispatcher, dict(zip(attributes, values_of_attributes, strict=True)))
        store.set(hidden_states=hidden, probs=probs, shared_expert_output=shared)
    else:
        hidden, probs, routing_map = captured
        store.set(hidden_states=hidden, probs=probs, routing_map=routing_map, shared_expert_output=shared)
    y = layer(hidden)[0]
    store.clear()
    return _worst(_results(layer, x, y), expected)


def _in_steps(rank: int) -> float:
    """The layer in one, and as MoETransformerLayer runs it around two graphs of its own."""
    layer = _layer(**DEEPSEEK)
    x = _input(rank)
    expected = _results(layer, x, layer(x)[0])
    layer.fwd_execution_map = "route"
    hidden, probs, shared = layer(x, intermediate_tensors=())
    dispatcher = layer.token_dispatcher
    _keep_only(dispatcher, {name: getattr(dispatcher, name) for name in dispatcher.cudagraph_attrs})
    layer.fwd_execution_map = "expert_compute"
    output, bias = layer(None, intermediate_tensors=(hidden, probs))
    assert bias is None
    layer.fwd_execution_map = "postprocess"
    return _worst(_results(layer, x, layer(None, intermediate_tensors=(output, shared))), expected)
