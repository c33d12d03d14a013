"""A DeepSeek-V3 of Megatron-core's own layers: experts are spread over all ranks, everything else is on each of them.

It needs neither TransformerEngine nor grouped_gemm. Attention's projections are Megatron's. Megatron's own core
attention takes no latents, so PyTorch's attention takes its place. In BF16 the experts are grouped up to Megatron-core
0.16, which has such. Shapes: S sequence, B batch, N heads, D and D_v their sizes.
"""

from __future__ import annotations

import functools
import hashlib
from types import SimpleNamespace

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.extensions import transformer_engine
from megatron.core.transformer import multi_latent_attention

from ep_plugin.testing.megatron import serve_grouped_products, without_transformer_engine
from examples.compare.clock import ExchangeClock
from examples.compare.options import MODELS, OURS, Options

if not transformer_engine.HAVE_TE:
    without_transformer_engine()
    multi_latent_attention.HAVE_TE = False  # Megatron-core 0.16.1 assumes that it is there

from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import MLATransformerConfig

OUR_DISPATCHER = "EpPluginTokenDispatcher"


class MegatronDeepseek(torch.nn.Module):
    """Called as transformers' models are. After backward, gradients are means over the ranks.

    Where several backwards add up, only the last has to sum over the ranks: see `set_requires_gradient_sync`, which is
    as FSDP2's.
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
        # PyTorch's norms are created on CPUs, in its default dtype.
        self.to(device=torch.cuda.current_device(), dtype=config.params_dtype)
        for parameter in self.parameters():
            if not _is_expert(parameter):  # an expert's gradient includes the tokens of all ranks already
                # The hook must not hold the model: the garbage collector does not see parameters' hooks.
                parameter.register_post_accumulate_grad_hook(functools.partial(_sum, self._syncing))

    def set_requires_gradient_sync(self, requires: bool) -> None:
        self._syncing.on = requires

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        """``.loss`` of tokens ``[B, S]``: the mean over the predictions of every next token."""
        positions = torch.arange(input_ids.size(1), device=input_ids.device).expand_as(input_ids)
        losses = self.gpt(input_ids, positions, None, labels=labels.roll(-1, dims=1))
        loss = losses[:, :-1].mean()
        share = loss / dist.get_world_size()  # of the mean over the ranks, whose gradients are summed
        return SimpleNamespace(loss=share + (loss - share).detach())


class CausalAttention(MegatronModule):
    """PyTorch's attention in place of Megatron's: value heads may be smaller than those of queries and keys."""

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


def build_model(options: Options, clock: ExchangeClock | None = None) -> MegatronDeepseek:
    """The model in training mode. Its exchange is not timed: Megatron has no place for `clock`.

    ``torch.distributed`` must be initialised. Raises ``RuntimeError`` where "flex" is not ep_plugin's dispatcher.
    """
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(expert_model_parallel_size=dist.get_world_size())
    widths = MODELS["megatron"].presets[options.preset].widths
    model = MegatronDeepseek(_config(options, widths), widths["vocab_size"], options.seq_len)
    if options.arm == OURS:
        _check_dispatchers(model)
    _initialise(model, options.seed)
    return model.train()


def _config(options: Options, widths: dict[str, int]) -> MLATransformerConfig:
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
        moe_grouped_gemm=dtype is torch.bfloat16 and serve_grouped_products() is not None,
        moe_token_dispatcher_type="flex" if options.arm == OURS else options.arm,
        expert_model_parallel_size=dist.get_world_size(),
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        fp16=dtype is torch.float16,
        perform_initialization=False,
    )


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


def _sum(syncing: SimpleNamespace, parameter: torch.nn.Parameter) -> None:
    assert parameter.grad is not None
    if syncing.on:
        dist.all_reduce(parameter.grad)


def _is_expert(parameter: torch.nn.Parameter) -> bool:
    return not getattr(parameter, "allreduce", True)
