"""Models of Megatron-core's own layers, trained by its data parallelism and its distributed optimizer.

`megatron` is a DeepSeek-V3 whose experts are spread over all ranks, `megatron_dense` a Qwen3 without experts. All other
parameters are on every rank. During the backward their gradients are summed in float32, to a shard on each rank. The
rank updates its shard, and the next forward gathers the parameters. An expert is on one rank, so it needs neither.

TransformerEngine and grouped_gemm are not needed. Attention's projections are Megatron's. Megatron's own core attention
takes no latents and keeps S x S scores, so PyTorch's attention takes its place. In BF16 the experts are grouped up to
Megatron-core 0.16, which has such. Shapes: S sequence, B batch, N heads, D and D_v their sizes.
"""

from __future__ import annotations

import hashlib
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.extensions import transformer_engine
from megatron.core.transformer import multi_latent_attention

from ep_plugin.integrations import status
from ep_plugin.testing.megatron import serve_grouped_products, without_transformer_engine
from examples.compare.clock import ExchangeClock
from examples.compare.options import BETAS, MODELS, OURS, WEIGHT_DECAY, Options

if not transformer_engine.HAVE_TE:
    without_transformer_engine()
    multi_latent_attention.HAVE_TE = False  # Megatron-core 0.16.1 assumes that it is there

from megatron.core import optimizer as megatron_optimizer
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

OUR_DISPATCHER = "EpPluginTokenDispatcher"


class MegatronModel(torch.nn.Module):
    """A model in Megatron's data parallelism, called as transformers' models are.

    Where several backwards add up, only the last has to sum over the ranks: see `set_requires_gradient_sync`, which is
    as FSDP2's.
    """

    def __init__(self, gpt: GPTModel) -> None:
        super().__init__()
        self.vocab_size = gpt.vocab_size
        buckets = DistributedDataParallelConfig(
            use_distributed_optimizer=True,
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=True,
            overlap_param_gather=True,
        )
        self.parallel = DistributedDataParallel(gpt.config, buckets, gpt)
        self._not_syncing = ExitStack()

    def set_requires_gradient_sync(self, requires: bool) -> None:
        self._not_syncing.close()
        if not requires:
            self._not_syncing.enter_context(self.parallel.no_sync())

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        """``.loss`` of tokens ``[B, S]``: the mean over the predictions of every next token."""
        positions = torch.arange(input_ids.size(1), device=input_ids.device).expand_as(input_ids)
        losses = self.parallel(input_ids, positions, None, labels=labels.roll(-1, dims=1))
        return SimpleNamespace(loss=losses[:, :-1].mean())


class Optimizer:
    """Megatron's Adam over shards, with what its training loop does around a step."""

    def __init__(self, model: MegatronModel, options: Options) -> None:
        self._model = model.parallel
        settings = megatron_optimizer.OptimizerConfig(
            optimizer="adam",
            lr=options.lr,
            weight_decay=WEIGHT_DECAY,
            adam_beta1=BETAS[0],
            adam_beta2=BETAS[1],
            bf16=options.dtype == "bfloat16",
            fp16=options.dtype == "float16",
            loss_scale=1.0 if options.dtype == "float16" else None,
            params_dtype=getattr(torch, options.dtype),
            use_distributed_optimizer=True,
            overlap_param_gather=True,
        )
        self._shards = megatron_optimizer.get_megatron_optimizer(settings, [self._model], use_gloo_process_groups=False)
        if megatron_optimizer.USING_PYTORCH_OPTIMIZER:
            for group in self.param_groups:
                group["fused"] = True  # as TransformerEngine's Adam is, without temporary copies of the parameters

    @property
    def param_groups(self) -> list[dict]:
        return self._shards.param_groups

    def step(self) -> None:
        finalize_model_grads([self._model])
        self._shards.step()

    def zero_grad(self) -> None:
        self._model.zero_grad_buffer()
        self._shards.zero_grad()


class CausalAttention(MegatronModule):
    """PyTorch's attention in place of Megatron's: value heads may be smaller than those of queries and keys."""

    def __init__(self, config: TransformerConfig, softmax_scale: float | None, **unused: object) -> None:
        super().__init__(config)
        self.softmax_scale = softmax_scale

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *unused: object, **more: object
    ) -> torch.Tensor:
        """query ``[S, B, N, D]``, key ``[S, B, N or fewer, D]``, value as key with D_v: ``[S, B, N * D_v]``."""
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        output = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=self.softmax_scale, enable_gqa=query.size(1) > key.size(1)
        )
        return output.permute(2, 0, 1, 3).flatten(2)


def build_model(options: Options, clock: ExchangeClock | None = None) -> MegatronModel:
    """The model in training mode. Its exchange is not timed: Megatron has no place for `clock`.

    ``torch.distributed`` must be initialised. Raises ``RuntimeError`` where the arm OURS would not be ep_plugin's.
    """
    widths = MODELS[options.model].presets[options.preset].widths
    has_experts = options.model == "megatron"
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            expert_model_parallel_size=dist.get_world_size() if has_experts else 1, create_gloo_process_groups=False
        )
    if options.arm == OURS:
        _check_status()
    config = _deepseek_config(options, widths) if has_experts else _qwen3_config(options, widths)
    gpt = _build_gpt(config, widths["vocab_size"], options.seq_len, ties_embeddings=not has_experts)
    if options.arm == OURS:
        _check_dispatchers(gpt)
    _initialise(gpt, options.seed)
    return MegatronModel(gpt).train()


def build_optimizer(model: MegatronModel, options: Options) -> Optimizer:
    return Optimizer(model, options)


def _build_gpt(config: TransformerConfig, vocab_size: int, seq_len: int, ties_embeddings: bool) -> GPTModel:
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=config.normalization)
    spec.layer_norm = WrappedTorchNorm  # with Apex it would be one that knows no RMSNorm
    for layer in spec.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = CausalAttention
    gpt = GPTModel(
        config,
        spec,
        vocab_size,
        seq_len,
        share_embeddings_and_output_weights=ties_embeddings,
        position_embedding_type="rope",
    )
    # PyTorch's norms are created on CPUs, in its default dtype.
    return gpt.to(device=torch.cuda.current_device(), dtype=config.params_dtype)


def _shared_settings(options: Options, widths: dict[str, int]) -> dict[str, Any]:
    dtype = getattr(torch, options.dtype)
    return {
        "num_layers": options.layers,
        "hidden_size": widths["hidden_size"],
        "ffn_hidden_size": widths["intermediate_size"],
        "num_attention_heads": widths["num_attention_heads"],
        "qk_layernorm": True,
        "layernorm_epsilon": 1e-6,
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "fp16": dtype is torch.float16,
        "perform_initialization": False,
    }


def _qwen3_config(options: Options, widths: dict[str, int]) -> TransformerConfig:
    return TransformerConfig(
        **_shared_settings(options, widths),
        normalization="RMSNorm",
        num_query_groups=widths["num_key_value_heads"],
        kv_channels=widths["head_dim"],
        moe_layer_freq=[0] * options.layers,
    )


def _deepseek_config(options: Options, widths: dict[str, int]) -> MLATransformerConfig:
    dense = widths["first_k_dense_replace"]
    return MLATransformerConfig(
        **_shared_settings(options, widths),
        q_lora_rank=widths["q_lora_rank"],
        kv_lora_rank=widths["kv_lora_rank"],
        qk_head_dim=widths["qk_nope_head_dim"],
        qk_pos_emb_head_dim=widths["qk_rope_head_dim"],
        v_head_dim=widths["v_head_dim"],
        rope_type="rope",
        moe_layer_freq=[0] * dense + [1] * (options.layers - dense),
        num_moe_experts=widths["n_routed_experts"],
        moe_ffn_hidden_size=widths["moe_intermediate_size"],
        moe_shared_expert_intermediate_size=widths["moe_intermediate_size"] * widths["n_shared_experts"],
        moe_router_topk=widths["num_experts_per_tok"],
        moe_router_score_function="sigmoid",
        moe_router_num_groups=widths["n_group"],
        moe_router_group_topk=widths["topk_group"],
        moe_router_topk_scaling_factor=2.5,
        moe_router_load_balancing_type="none",
        moe_router_dtype="fp32",
        moe_grouped_gemm=options.dtype == "bfloat16" and serve_grouped_products() is not None,
        moe_token_dispatcher_type="flex" if options.arm == OURS else options.arm,
        expert_model_parallel_size=dist.get_world_size(),
    )


def _check_status() -> None:
    (row,) = (row for row in status() if row.name == "megatron")
    if row.state not in ("ready", "on"):
        raise RuntimeError(f"EP_PLUGIN=megatron: expected ready, got {row.state} ({row.detail})")


def _check_dispatchers(model: torch.nn.Module) -> None:
    for module in model.modules():
        found = type(module.token_dispatcher).__name__ if isinstance(module, MoELayer) else OUR_DISPATCHER
        if found != OUR_DISPATCHER:
            raise RuntimeError(f"flex: expected {OUR_DISPATCHER}, got {found}; install ep_plugin")


def _initialise(model: torch.nn.Module, seed: int) -> None:
    """Fill every matrix with N(0, 0.02), the same on all ranks, but for experts, of which each rank has its own."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() < 2:
                continue
            key = hashlib.sha256(f"{seed}/{name}/{dist.get_rank() if _is_expert(parameter) else 0}".encode()).digest()
            generator = torch.Generator(parameter.device).manual_seed(int.from_bytes(key[:7], "little"))
            parameter.normal_(0.0, 0.02, generator=generator)


def _is_expert(parameter: torch.nn.Parameter) -> bool:
    return not getattr(parameter, "allreduce", True)
