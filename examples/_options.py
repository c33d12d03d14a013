"""What one arm of the example trains, and the presets that fill it in. Cheap to import: no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """What one arm trains. ``batch`` and ``seq_len`` are per rank and of each of ``micro_batches``, whose gradients add
    up to a step's; paths are strings, to travel as JSON.

    architecture: a key of PRESETS, transformers' name or MEGATRON. ep_implementation: who exchanges tokens between
    experts, None for a dense model; of Megatron's the type of dispatcher. fsdp2: who gathers parameters and reduces
    gradients, "ep_plugin" or "stock". overlap: shared experts run while ep_plugin dispatches. switched_on: what
    EP_PLUGIN is in the ranks; None leaves it as it is.
    """

    architecture: str
    preset: str | None
    model: str | None
    layers: int
    text: str | None
    steps: int
    seq_len: int
    batch: int
    lr: float
    seed: int
    dtype: str
    ep_implementation: str | None
    fsdp2: str
    micro_batches: int = 1
    overlap: bool = False
    switched_on: str | None = None

    @property
    def arm(self) -> str:
        """What a comparison calls it."""
        return self.ep_implementation or self.fsdp2


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A model and the run that suits it; every value but the widths can be overridden on the command line."""

    widths: dict[str, int]
    layers: int
    dtype: str
    seq_len: int
    batch: int
    steps: int
    lr: float


MOE_PRESETS = {
    # Small enough for four ranks on two cores, and still a real mixture: 32 experts, eight of them per token.
    # At four times this learning rate training is chaotic: differences in the last bit grow to per cents of
    # the loss.
    "tiny": Preset(
        widths={
            "vocab_size": 256, "hidden_size": 256, "intermediate_size": 512,
            "moe_intermediate_size": 32, "num_experts": 32, "num_experts_per_tok": 8,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
        },
        layers=4, dtype="float32", seq_len=128, batch=8, steps=30, lr=5e-4,
    ),
    # The published widths of Qwen3-30B-A3B (48 layers there).
    "30b-a3b": Preset(
        widths={
            "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
            "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
            "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        },
        layers=48, dtype="bfloat16", seq_len=4096, batch=1, steps=30, lr=1e-4,
    ),
}  # fmt: skip

DENSE_PRESETS = {
    "tiny": Preset(
        widths={
            "vocab_size": 256, "hidden_size": 256, "intermediate_size": 512,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
        },
        layers=6, dtype="float32", seq_len=64, batch=2, steps=30, lr=5e-4,
    ),
    # The published widths of Qwen3-4B (36 layers there), whose output projection is the embedding.
    "4b": Preset(
        widths={
            "vocab_size": 151936, "hidden_size": 2560, "intermediate_size": 9728,
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        },
        layers=36, dtype="bfloat16", seq_len=4096, batch=1, steps=50, lr=1e-4,
    ),
}  # fmt: skip

DEEPSEEK_PRESETS = {
    # What is particular of the large one, small: queries and keys through latents, one expert for every token, and 8 of
    # 32 experts by sigmoid from 4 of 8 groups. One dense layer, and three mixtures.
    "tiny": Preset(
        widths={
            "vocab_size": 256, "hidden_size": 256, "intermediate_size": 512,
            "moe_intermediate_size": 32, "n_routed_experts": 32, "num_experts_per_tok": 8, "n_shared_experts": 1,
            "n_group": 8, "topk_group": 4, "first_k_dense_replace": 1,
            "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 96, "kv_lora_rank": 64,
            "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32,
        },
        layers=4, dtype="float32", seq_len=128, batch=8, steps=30, lr=5e-4,
    ),
    # The published widths of DeepSeek-V3 with 4 of its 61 layers: one of its three dense ones, three mixtures.
    "v3": Preset(
        widths={
            "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432,
            "moe_intermediate_size": 2048, "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1,
            "n_group": 8, "topk_group": 4, "first_k_dense_replace": 1,
            "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512,
            "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        },
        layers=4, dtype="bfloat16", seq_len=4096, batch=1, steps=50, lr=1e-4,
    ),
}  # fmt: skip

MEGATRON = "deepseek_v3 of megatron"

PRESETS = {
    "qwen3": DENSE_PRESETS,
    "qwen3_moe": MOE_PRESETS,
    "deepseek_v3": DEEPSEEK_PRESETS,
    # As many mixtures as fit with everything but experts on every GPU: 58 of DeepSeek-V3's 61 layers are such. No more
    # words than its text fills: the published 129,280 would weigh on four layers as they do not on 61.
    MEGATRON: DEEPSEEK_PRESETS
    | {
        "v3": replace(
            DEEPSEEK_PRESETS["v3"],
            widths=DEEPSEEK_PRESETS["v3"].widths | {"first_k_dense_replace": 0, "vocab_size": 32768},
            layers=4,
            lr=2e-5,
        )
    },
}
