"""The layers of the suite `megatron`: Megatron-core's own MoELayer, one per dispatcher, with one router and experts.

Without TransformerEngine Megatron's grouped experts are its GroupedMLP, see serve_grouped_products.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist

from ep_plugin.bench.layers import OURS, STOCK
from ep_plugin.bench.workload import Workload
from ep_plugin.testing.megatron import make_megatron_run_here, serve_grouped_products, without_transformer_engine

_DISPATCHERS = {STOCK: "alltoall", OURS: "flex"}
_SEED = 1


def build_layers(workload: Workload, ffn: int, grouped: bool, device: torch.device) -> tuple[dict[str, Any], str]:
    """The layers by implementation, and what their experts are. Collective.

    They share router and experts: BF16, matrices N(0, 0.02), the router the same on all ranks. Routing is sigmoid
    scores' plain top-k, in float32, without groups of experts: for random tokens uniformly random.
    """
    if device.type == "cpu":
        make_megatron_run_here()
    without_transformer_engine()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.moe.moe_layer import MoELayer

    from ep_plugin.integrations import megatron

    megatron.switch_on()
    parallel_state.initialize_model_parallel(expert_model_parallel_size=workload.ranks)
    if device.type == "cuda":
        model_parallel_cuda_manual_seed(_SEED)
    said = serve_grouped_products() if grouped else "SequentialMLP: one expert after the other"
    layers: dict[str, Any] = {}
    for impl, dispatcher in _DISPATCHERS.items():
        config = _config(workload, ffn, grouped, dispatcher, device)
        layer = MoELayer(config, _submodules(workload, grouped), layer_number=1)
        layer.to(device=device, dtype=torch.bfloat16).train()
        if layers:
            layer.router, layer.experts = layers[STOCK].router, layers[STOCK].experts
        layers[impl] = layer
    _initialise(layers[STOCK])
    assert type(layers[OURS].token_dispatcher) is megatron.EpPluginTokenDispatcher
    return layers, said


def _config(workload: Workload, ffn: int, grouped: bool, dispatcher: str, device: torch.device) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=1,
        hidden_size=workload.hidden,
        ffn_hidden_size=ffn,
        moe_ffn_hidden_size=ffn,
        num_attention_heads=1,
        num_moe_experts=workload.experts,
        moe_router_topk=workload.topk,
        moe_router_score_function="sigmoid",
        moe_router_load_balancing_type="none",
        moe_router_dtype="fp32",
        moe_token_dispatcher_type=dispatcher,
        moe_grouped_gemm=grouped,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        expert_model_parallel_size=workload.ranks,
        params_dtype=torch.bfloat16,
        bf16=True,
        perform_initialization=False,
        use_cpu_initialization=device.type == "cpu",
    )


def _submodules(workload: Workload, grouped: bool) -> Any:
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The legacy GroupedMLP will be deprecated")
        spec = get_moe_module_spec(use_te=False, num_experts=workload.experts, moe_grouped_gemm=grouped)
    return spec.submodules


@torch.no_grad()
def _initialise(layer: Any) -> None:
    for module, seed in ((layer.router, 0), (layer.experts, 1 + dist.get_rank())):
        for parameter in module.parameters():
            parameter.normal_(0.0, 0.02, generator=torch.Generator(parameter.device).manual_seed(seed))
