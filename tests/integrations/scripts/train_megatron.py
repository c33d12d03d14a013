"""Trains a stack of Megatron-core MoE layers on random targets, experts sharded over all ranks.

torchrun --nproc-per-node 2 train_megatron.py OUT DISPATCHER
"""

import functools
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig

STEPS, LAYERS, HIDDEN, EXPERTS, TOPK = 4, 2, 32, 8, 2


def build(**options: Any) -> torch.nn.ModuleList:
    """options: of TransformerConfig, beside the sizes."""
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        ffn_hidden_size=64,
        moe_ffn_hidden_size=16,
        num_attention_heads=4,
        num_moe_experts=EXPERTS,
        moe_router_topk=TOPK,
        add_bias_linear=False,
        expert_model_parallel_size=dist.get_world_size(),
        use_cpu_initialization=True,
        **options,
    )
    spec = get_gpt_layer_local_spec(num_experts=EXPERTS, moe_grouped_gemm=False)
    mlp = spec.submodules.mlp  # a ModuleSpec, from Megatron-core 0.19 on a functools.partial
    submodules = mlp.keywords["submodules"] if isinstance(mlp, functools.partial) else mlp.submodules
    torch.manual_seed(0)
    return torch.nn.ModuleList(MoELayer(config, submodules, layer_number=number + 1) for number in range(LAYERS))


def main() -> None:
    out, dispatcher = Path(sys.argv[1]), sys.argv[2]
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    parallel_state.initialize_model_parallel(expert_model_parallel_size=dist.get_world_size())
    layers = build(moe_token_dispatcher_type=dispatcher, moe_router_load_balancing_type="none", moe_router_dtype="fp32")
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(STEPS):
        x = torch.randn((8, 2, HIDDEN), generator=generator)
        target, hidden = x.roll(1, dims=-1), x
        for layer in layers:
            hidden = hidden + layer(hidden)[0]
        loss = (hidden - target).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    (out / f"losses.{dist.get_rank()}.json").write_text(json.dumps(losses))
    dist.barrier()


if __name__ == "__main__":
    main()
