"""A DeepSeek-V3 from Megatron-core's own layers, experts spread over all ranks and everything else on each of them.

It runs without TransformerEngine and without grouped_gemm. Attention's projections are Megatron's; between them, where
its own core attention takes no latents, is PyTorch's. Experts are Megatron's grouped ones in BF16, the dtype of which
PyTorch multiplies groups. Shapes: S sequence, B batch, N heads, D and D_v their sizes.
"""

from __future__ import annotations

import functools
import hashlib
from types import SimpleNamespace

import torch
import torch.distributed as dist
from _options import PRESETS, TrainOptions
from megatron.core import parallel_state
from megatron.core.extensions import transformer_engine
from megatron.core.transformer import multi_latent_attention

from ep_plugin.testing.megatron import serve_grouped_products, without_transformer_engine

if not transformer_engine.HAVE_TE:
    without_transformer_engine()
    multi_latent_attention.HAVE_TE = False  # Megatron-core 0.16.1 takes it to be there

from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import MLATransformerConfig

OURS = "EpPluginTokenDispatcher"


class MegatronDeepseek(torch.nn.Module):
    """Called as the models of transformers are; gradients are means over the ranks once backward is through.

    Of several backwards that add up, the last alone need sum over the ranks: ``set_requires_gradient_sync`` as FSDP2's.
    """

    def __init__(self, config: MLATransformerConfig, vocab_size: int, seq_len: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self._syncing = SimpleNamespace(on=True)
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=config.normalization)
        spec.layer_norm = WrappedTorchNorm  # with Apex it would be one that knows no RMSNorm
        for layer in spec.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = CausalAttention
        self.gpt = GPTModel(config, spec, vocab_size, seq_len, position_embedding_type="rope")
        # Norms of PyTorch are made in its own default dtype, on CPUs.
        self.to(device=torch.cuda.current_device(), dtype=config.params_dtype)
        for parameter in self.parameters():
            if not _is_expert(parameter):  # an expert's gradient has the tokens of all ranks in it already
                # A hook that held the model would keep it for ever: the collector does not see parameters' hooks.
                parameter.register_post_accumulate_grad_hook(functools.partial(_sum, self._syncing))

    def set_requires_gradient_sync(self, requires: bool) -> None:
        self._syncing.on = requires

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        """Of tokens ``[B, S]``: ``.loss``, the mean over what each token but the last of a sequence is followed by."""
        positions = torch.arange(input_ids.size(1), device=input_ids.device).expand_as(input_ids)
        losses = self.gpt(input_ids, positions, None, labels=labels.roll(-1, dims=1))
        loss = losses[:, :-1].mean()
        share = loss / dist.get_world_size()  # of the mean over the ranks, whose gradients are summed
        return SimpleNamespace(loss=share + (loss - share).detach())


class CausalAttention(MegatronModule):
    """PyTorch's attention in the place of Megatron's: value heads may be smaller than those of queries and keys."""

    def __init__(self, config: MLATransformerConfig, softmax_scale: float, **unused: object) -> None:
        super().__init__(config)
        self.softmax_scale = softmax_scale

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *unused: object, **more: object
    ) -> torch.Tensor:
        """query and key ``[S, B, N, D]``, value ``[S, B, N, D_v]``: ``[S, B, N * D_v]``."""
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        output = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=self.softmax_scale
        )
        return output.permute(2, 0, 1, 3).flatten(2)


def build_model(options: TrainOptions) -> MegatronDeepseek:
    """The model in training mode, its exchange the dispatcher that ``options.ep_implementation`` names.

    ``torch.distributed`` must be initialised. Raises ``RuntimeError`` where "flex" is not ep_plugin's.
    """
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(expert_model_parallel_size=dist.get_world_size())
    serve_grouped_products()
    widths = PRESETS[options.architecture][options.preset].widths
    model = MegatronDeepseek(_config(options, widths), widths["vocab_size"], options.seq_len)
    if options.ep_implementation == "flex":
        _check_dispatchers(model)
    _initialise(model, options.seed)
    return model.train()


def _config(options: TrainOptions, widths: dict[str, int]) -> MLATransformerConfig:
    dense = widths["first_k_dense_replace"]
    dtype = getattr(torch, options.dtype)
    return MLATransformerConfig(
        num_layers=options.layers,
        hidden_size=widths["hidden_size"],
        ffn_hidden_size=widths["intermediate_size"],
        num_attention_heads=widths["num_attention_heads"],
        q_lora_rank=widths["q_lora_rank"],
        kv_lora_rank=widths["kv_lora_rank"],
        qk_head_dim=widths["qk_nope_head_dim"],
        qk_pos_emb_head_dim=widths["qk_rope_head_dim"],
        v_head_dim=widths["v_head_dim"],
        rope_type="rope",
        qk_layernorm=True,
        layernorm_epsilon=1e-6,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
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
        moe_grouped_gemm=dtype is torch.bfloat16,
        moe_token_dispatcher_type=options.ep_implementation,
        expert_model_parallel_size=dist.get_world_size(),
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        fp16=dtype is torch.float16,
        perform_initialization=False,
    )


def _check_dispatchers(model: torch.nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, MoELayer) and type(module.token_dispatcher).__name__ != OURS:
            raise RuntimeError(
                f"flex: expected {OURS}, got {type(module.token_dispatcher).__name__}; "
                "install ep_plugin, and under torchrun set EP_PLUGIN=megatron"
            )


def _initialise(model: torch.nn.Module, seed: int) -> None:
    """Every matrix becomes N(0, 0.02): the same on all ranks, but for experts, which are each rank's own."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() < 2:
                continue
            key = hashlib.sha256(f"{seed}/{name}/{dist.get_rank() if _is_expert(parameter) else 0}".encode()).digest()
            generator = torch.Generator(parameter.device).manual_seed(int.from_bytes(key[:7], "little"))
            parameter.normal_(0.0, 0.02, generator=generator)


def _sum(syncing: SimpleNamespace, parameter: torch.nn.Parameter) -> None:
    assert parameter.grad is not None
    if syncing.on:
        dist.all_reduce(parameter.grad)


def _is_expert(parameter: torch.nn.Parameter) -> bool:
    return not getattr(parameter, "allreduce", True)
