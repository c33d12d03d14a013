"""Train DeepSeek-V3's mixture-of-experts layers of Megatron-core with its distributed optimizer, on GPUs.

    EP_PLUGIN=megatron torchrun --nproc-per-node 2 examples/train_deepseek_megatron.py [--pipeline 2  # on 4 ranks]

EP_PLUGIN is the line: nothing below names what ep_plugin replaces. The last lines that it prints say what it served.
"""

import argparse

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig

from ep_plugin.integrations import status
from ep_plugin.testing.megatron import submodules_of, without_transformer_engine

SEQUENCE, BATCH, HIDDEN, MICRO_BATCHES, STEPS = 64, 2, 128, 4, 20


class Stage(MegatronModule):
    """Two layers of experts. The last stage returns the losses of its micro batch."""

    model_type = ModelType.encoder_or_decoder
    pre_process = share_embeddings_and_output_weights = False  # Megatron asks every stage for its embeddings

    def __init__(self, config):
        super().__init__(config)
        spec = get_gpt_layer_local_spec(num_experts=config.num_moe_experts, moe_grouped_gemm=False).submodules.mlp
        self.layers = torch.nn.ModuleList(MoELayer(config, submodules_of(spec), number) for number in (1, 2))
        self.given = None  # by the stage before

    def set_input_tensor(self, tensors):
        self.given = tensors[0]

    def forward(self, x):
        hidden = x if parallel_state.is_pipeline_first_stage() else self.given
        for layer in self.layers:
            hidden = hidden + layer(hidden)[0]
        return (hidden - x.roll(1, dims=-1)).square().mean() if parallel_state.is_pipeline_last_stage() else hidden


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pipeline", type=int, default=1, help="stages; the experts are spread over the other ranks")
    stages = parser.parse_args().pipeline
    without_transformer_engine()  # Megatron-core needs this where TransformerEngine is not installed
    dist.init_process_group()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank % torch.cuda.device_count()) if torch.cuda.is_available() else "cpu"
    if torch.cuda.is_available():
        torch.cuda.set_device(device)
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=stages, expert_model_parallel_size=ranks // stages
    )
    config = TransformerConfig(
        num_layers=2 * stages, hidden_size=HIDDEN, ffn_hidden_size=256, num_attention_heads=4, add_bias_linear=False,
        moe_ffn_hidden_size=32, num_moe_experts=32, moe_router_topk=8, moe_router_score_function="sigmoid",
        moe_router_num_groups=8, moe_router_group_topk=4, moe_router_topk_scaling_factor=2.5, moe_router_dtype="fp32",
        moe_router_load_balancing_type="none", moe_shared_expert_intermediate_size=32, moe_token_dispatcher_type="flex",
        pipeline_model_parallel_size=stages, expert_model_parallel_size=ranks // stages, use_cpu_initialization=True,
        bf16=True, params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16,
        finalize_model_grads_func=finalize_model_grads,
    )  # fmt: skip
    torch.manual_seed(0)
    buckets = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True
    )
    model = DistributedDataParallel(config, buckets, Stage(config).to(device, torch.bfloat16))
    settings = OptimizerConfig(optimizer="adam", lr=1e-3, bf16=True, use_distributed_optimizer=True)
    optimizer = get_megatron_optimizer(settings, [model])

    generator = torch.Generator().manual_seed(parallel_state.get_data_parallel_rank())
    for step in range(STEPS):
        model.zero_grad_buffer()
        shape = MICRO_BATCHES, SEQUENCE, BATCH, HIDDEN
        batches = iter(torch.randn(shape, generator=generator).to(device, torch.bfloat16))
        losses = get_forward_backward_func()(
            forward_step_func=lambda data, stage: (stage(next(data)), lambda loss: (loss, loss.detach())),
            data_iterator=batches, model=[model], num_microbatches=MICRO_BATCHES, seq_length=SEQUENCE,
            micro_batch_size=BATCH, forward_only=False,
        )  # fmt: skip
        optimizer.step()
        if losses and parallel_state.get_data_parallel_rank() == 0 and step % 5 in (0, 4):
            print(f"step {step:2}  loss {sum(losses).item() / MICRO_BATCHES:.3f}")
    if rank == 0:
        print(status())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
