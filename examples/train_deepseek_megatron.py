"""Train DeepSeek-V3's mixture-of-experts layers of Megatron-core, experts spread over all ranks, on GPUs.

    EP_PLUGIN=megatron torchrun --nproc-per-node 2 examples/train_deepseek_megatron.py

EP_PLUGIN is the line: nothing below names ep_plugin's dispatcher. Megatron's `flex` then stands for it.
"""

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig

from ep_plugin.testing.megatron import submodules_of, without_transformer_engine


def main() -> None:
    without_transformer_engine()  # Megatron-core needs this where TransformerEngine is not installed
    dist.init_process_group()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank % torch.cuda.device_count()) if torch.cuda.is_available() else "cpu"
    if torch.cuda.is_available():
        torch.cuda.set_device(device)
    parallel_state.initialize_model_parallel(expert_model_parallel_size=ranks)
    config = TransformerConfig(
        num_layers=2, hidden_size=128, ffn_hidden_size=256, num_attention_heads=4, add_bias_linear=False,
        moe_ffn_hidden_size=32, num_moe_experts=32, moe_router_topk=8, moe_router_score_function="sigmoid",
        moe_router_num_groups=8, moe_router_group_topk=4, moe_router_topk_scaling_factor=2.5, moe_router_dtype="fp32",
        moe_router_load_balancing_type="none", moe_shared_expert_intermediate_size=32,
        expert_model_parallel_size=ranks, moe_token_dispatcher_type="flex", use_cpu_initialization=True,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(num_experts=config.num_moe_experts, moe_grouped_gemm=False)
    torch.manual_seed(0)
    layers = [MoELayer(config, submodules_of(spec.submodules.mlp), layer_number=number) for number in (1, 2)]
    layers = torch.nn.ModuleList(layers).to(device)
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.05)

    generator = torch.Generator().manual_seed(rank)
    for step in range(20):
        x = torch.randn((64, 2, 128), generator=generator).to(device)  # [sequence, batch, hidden]
        hidden = x
        for layer in layers:
            hidden = hidden + layer(hidden)[0]
        loss = (hidden - x.roll(1, dims=-1)).square().mean()
        loss.backward()
        for parameter in layers.parameters():
            if getattr(parameter, "allreduce", True):  # all but experts, whose gradients include all ranks' tokens
                dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and step % 5 in (0, 4):
            print(f"step {step:2}  loss {loss.item():.3f}  through {type(layers[0].token_dispatcher).__name__}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
