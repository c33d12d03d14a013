"""Megatron's own MoE layers on GPUs; the cases of the CPU tests that GPUs can tell apart. Ranks may share a GPU."""

from __future__ import annotations

import os
from typing import Any

import torch

from ep_plugin.testing.megatron import without_transformer_engine
from tests.gpu import checks, over_nodes
from tests.integrations import megatron_schedule
from tests.integrations.megatron_cases import DEEPSEEK, GRAPHS, RELEASE
from tests.integrations.megatron_layers import initialise, make_config, make_layer
from tests.integrations.test_megatron_graphs import _keep_only

SIZES = {"hidden_size": 256, "moe_ffn_hidden_size": 128, "ffn_hidden_size": 512}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "capacity": {"moe_expert_capacity_factor": 0.5},
    "drop-and-pad": {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True},
    "recompute": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
    "deterministic": {"deterministic_mode": True},
    "deepseek": DEEPSEEK | {"moe_shared_expert_intermediate_size": 64},
}
OURS: dict[str, dict[str, Any]] = {}
"""By case, options of the layer with our dispatcher only."""
if RELEASE >= (0, 18):
    CASES["shared experts beside"] = CASES["deepseek"]
    OURS["shared experts beside"] = {"moe_shared_expert_overlap": True}
REPLAYS = 3


def parity(rank: int, size: int, tp: int) -> dict[str, dict[str, float]]:
    """Relative differences of outputs and gradients, by case and tensor."""
    _start(rank, size, tp)
    found = {name: _differences(rank, size, tp, options, OURS.get(name, {})) for name, options in CASES.items()}
    found["bf16"] = _differences(rank, size, tp, {"bf16": True, "params_dtype": torch.bfloat16}, {})
    return found


def overlapped_schedule(rank: int, size: int) -> dict[str, Any]:
    """What the schedule that overlaps exchanges gives with each dispatcher."""
    _start(rank, size, 1)
    return megatron_schedule.run(rank, size, checks.device_of(rank))


def overlapped_pipeline(rank: int, size: int) -> dict[str, Any]:
    """Runs that schedule over a pipeline, with each dispatcher."""
    _import(rank, size)
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    megatron_schedule.initialise_pipeline()
    model_parallel_cuda_manual_seed(1)
    return megatron_schedule.over_a_pipeline(checks.device_of(rank), _enable)


def graphs_of_parts(rank: int, size: int) -> dict[str, list[float]]:
    """By captured parts of a layer: for each replay, the relative difference between its output and that of the layer
    without a graph. Each replay has new tokens. As in TransformerLayer, only what the graph returns reaches the rest.
    """
    _start(rank, size, 1)
    return {
        "+".join(parts): _replayed(rank, size, parts) for parts in (["moe_router"], ["moe_router", "moe_preprocess"])
    }


@torch.no_grad()
def _replayed(rank: int, size: int, parts: list[str]) -> list[float]:
    from megatron.core.transformer import cuda_graphs

    options = DEEPSEEK | {"cuda_graph_impl": "transformer_engine", GRAPHS: parts}
    layer = make_layer(make_config("flex", 1, size, **SIZES, **options)).cuda()
    generator = torch.Generator("cuda").manual_seed(rank)
    given = [torch.randn((64, 2, SIZES["hidden_size"]), generator=generator, device="cuda") for _ in range(1 + REPLAYS)]
    expected = [layer(x)[0] for x in given]
    x, graph = given[0].clone(), torch.cuda.CUDAGraph()
    cuda_graphs._set_capture_start()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        captured = list(layer(x))
    cuda_graphs._set_capture_end()
    shared, dispatcher = captured.pop(), layer.token_dispatcher
    hidden, probs, *rest = captured
    differences = []
    for tokens, wanted in zip(given[1:], expected[1:], strict=True):
        x.copy_(tokens)
        graph.replay()
        known = {"hidden_states": hidden, "probs": probs, "shared_expert_output": shared}
        if "moe_preprocess" in parts:
            _keep_only(dispatcher, dict(zip(dispatcher.valid_cudagraph_attrs or [], rest, strict=True)))
        else:
            known["routing_map"] = rest[0]
        layer.cudagraph_tensor_store.set(**known)
        differences.append(_relative(layer(hidden)[0], wanted))
        layer.cudagraph_tensor_store.clear()
    return differences


def _start(rank: int, size: int, tp: int) -> None:
    """NCCL, Megatron's groups, and our dispatcher in the place of its own."""
    _import(rank, size)
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    _enable()
    initialise(tp, size // tp)
    model_parallel_cuda_manual_seed(1)


def _import(rank: int, size: int) -> None:
    over_nodes.start(rank, size, nodes=1)
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    without_transformer_engine()
    import megatron.core.transformer.moe.moe_layer  # noqa: F401  there before the hook: served at once


def _enable() -> None:
    import ep_plugin.integrations.hooks

    ep_plugin.integrations.hooks.enable(["megatron"])


def _differences(rank: int, size: int, tp: int, options: dict[str, Any], ours: dict[str, Any]) -> dict[str, float]:
    settings = SIZES | options
    dtype = settings.get("params_dtype", torch.float32)
    backend = "hybridep" if "moe_pad_expert_input_to_capacity" in options else "deepep"
    layers = {}
    for dispatcher, more in (("alltoall", {}), ("flex", ours)):
        config = make_config(dispatcher, tp, size // tp, moe_flex_dispatcher_backend=backend, **(settings | more))
        layers[dispatcher] = make_layer(config).cuda().to(dtype)
    assert type(layers["flex"].token_dispatcher).__name__ == "EpPluginTokenDispatcher"
    layers["flex"].load_state_dict(layers["alltoall"].state_dict())
    results = {}
    torch.use_deterministic_algorithms(bool(options.get("deterministic_mode")))
    for dispatcher, layer in layers.items():
        generator = torch.Generator("cuda").manual_seed(rank)
        shape = (64, 2, settings["hidden_size"])
        x = torch.randn(shape, generator=generator, device="cuda").to(dtype).requires_grad_()
        y, _ = layer(x)
        y.backward(torch.randn(shape, generator=generator, device="cuda").to(dtype))
        grads = {name: parameter.grad for name, parameter in layer.named_parameters() if parameter.grad is not None}
        results[dispatcher] = {"y": y.detach(), "x.grad": x.grad} | grads
    torch.use_deterministic_algorithms(False)
    assert results["flex"].keys() == results["alltoall"].keys()
    return {name: _relative(results["flex"][name], theirs) for name, theirs in results["alltoall"].items()}


def _relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours.double() - theirs.double()).abs().max() / theirs.double().abs().max().clamp_min(1e-3))
