"""Megatron-core's own MoE layers, small, as tests build them on CPU ranks and on GPUs."""

from __future__ import annotations

from typing import Any

import torch

from ep_plugin.testing.megatron import submodules_of


def make_config(dispatcher: str, tp: int, ep: int, **options: Any) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    settings: dict[str, Any] = dict(
        num_layers=1,
        hidden_size=32,
        ffn_hidden_size=64,
        moe_ffn_hidden_size=16,
        num_attention_heads=4,
        num_moe_experts=8,
        moe_router_topk=3,
        moe_router_load_balancing_type="none",
        moe_router_dtype="fp32",
        moe_token_dispatcher_type=dispatcher,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        tensor_model_parallel_size=tp,
        expert_tensor_parallel_size=tp,
        expert_model_parallel_size=ep,
        sequence_parallel=tp > 1,
        use_cpu_initialization=not torch.cuda.is_initialized(),
    )
    return TransformerConfig(**(settings | options))


def make_layer(config: Any) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.moe.moe_layer import MoELayer

    spec = get_gpt_layer_local_spec(num_experts=config.num_moe_experts, moe_grouped_gemm=False)
    return MoELayer(config, submodules_of(spec.submodules.mlp), layer_number=1)


def initialise(tp: int, ep: int) -> None:
    """Megatron's groups over the default group, in place of those of an earlier call."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp, expert_model_parallel_size=ep, expert_tensor_parallel_size=tp
    )
