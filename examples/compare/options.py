"""The models that can be compared, their presets, and what one arm trains."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated

from typer import Argument, Option

OURS = "ep_plugin"
DTYPES = ("float32", "bfloat16", "float16")
BETAS, WEIGHT_DECAY = (0.9, 0.95), 0.01  # of Adam


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A model and the run that suits it. The command line can override every value but the widths.

    seq_len, batch: per rank, of each of `micro_batches` batches whose gradients add up to a step's.
    """

    widths: dict[str, int]
    layers: int
    seq_len: int
    dtype: str = "float32"
    batch: int = 1
    micro_batches: int = 1
    steps: int = 30
    lr: float = 1e-4

    @property
    def dense_layers(self) -> int:
        """Layers without experts, before all others."""
        return self.widths.get("first_k_dense_replace", 0)


@dataclass(frozen=True, kw_only=True)
class Model:
    """built_in: the framework's own exchange or collectives, the other arm. The first preset is the default.

    module: of this package, with `build_model` and `build_optimizer`.
    """

    built_in: str
    presets: dict[str, Preset] = field(repr=False)
    module: str = "models"


QWEN3_MOE = {
    # Small enough for four ranks on two cores, and still a mixture: 32 experts, eight of them per token. At four times
    # this learning rate training is chaotic: differences in the last bit grow to per cents of the loss.
    "tiny": Preset(
        widths={
            "vocab_size": 256, "hidden_size": 256, "intermediate_size": 512,
            "moe_intermediate_size": 32, "num_experts": 32, "num_experts_per_tok": 8,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
        },
        layers=4, seq_len=128, batch=8, lr=5e-4,
    ),
    # The published widths of Qwen3-30B-A3B (48 layers there).
    "30b-a3b": Preset(
        widths={
            "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
            "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
            "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        },
        layers=48, seq_len=4096, dtype="bfloat16",
    ),
}  # fmt: skip

QWEN3 = {
    "tiny": Preset(
        widths={
            "vocab_size": 256, "hidden_size": 256, "intermediate_size": 512,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
        },
        layers=6, seq_len=64, batch=2, lr=5e-4,
    ),
    # The published widths of Qwen3-4B (36 layers there), whose output projection is the embedding.
    "4b": Preset(
        widths={
            "vocab_size": 151936, "hidden_size": 2560, "intermediate_size": 9728,
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        },
        layers=36, seq_len=4096, dtype="bfloat16", steps=50,
    ),
}  # fmt: skip

DEEPSEEK_V3 = {
    # Small, with the features of the large one: queries and keys through latents, a shared expert, and 8 of 32 experts
    # by sigmoid from 4 of 8 groups. One dense layer and three mixtures.
    "tiny": Preset(
        widths={
            "vocab_size": 256, "hidden_size": 256, "intermediate_size": 512,
            "moe_intermediate_size": 32, "n_routed_experts": 32, "num_experts_per_tok": 8, "n_shared_experts": 1,
            "n_group": 8, "topk_group": 4, "first_k_dense_replace": 1,
            "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 96, "kv_lora_rank": 64,
            "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32,
        },
        layers=4, seq_len=128, batch=8, lr=5e-4,
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
        layers=4, seq_len=4096, dtype="bfloat16", steps=50,
    ),
}  # fmt: skip

MEGATRON = {
    # A mixture, as 58 of DeepSeek-V3's 61 layers are. An expert's parameter takes 18 bytes: in BF16 and float32, its
    # gradient, and two moments. So on 4 GPUs a layer takes 53 GB of each, and one layer fits 80 GB. A vocabulary that
    # the text fills: 129,280 words would dominate one layer, but not 61.
    "v3": replace(
        DEEPSEEK_V3["v3"],
        widths=DEEPSEEK_V3["v3"].widths | {"first_k_dense_replace": 0, "vocab_size": 32768},
        layers=1,
        micro_batches=4,
        lr=2e-5,
    ),
    "tiny": replace(DEEPSEEK_V3["tiny"], micro_batches=4),
}

MEGATRON_DENSE = {
    # 24 of 36 layers: parameters, gradients and moments take 25 GB of each of 4 GPUs, activations about as much again.
    "4b": replace(QWEN3["4b"], layers=24),
    "tiny": QWEN3["tiny"],
}

MODELS = {
    "qwen3_moe": Model(built_in="all_to_all", presets=QWEN3_MOE),
    "qwen3": Model(built_in="stock", presets=QWEN3),
    "deepseek_v3": Model(built_in="all_to_all", presets=DEEPSEEK_V3),
    "megatron": Model(built_in="alltoall", presets=MEGATRON, module="megatron"),
    "megatron_dense": Model(built_in="stock", presets=MEGATRON_DENSE, module="megatron"),
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """What one arm trains. A comparison's arms differ in `arm` and `title` alone. Ranks get it as JSON.

    Annotated fields are options of the command line; None is replaced by the preset's value before anything is trained.
    checkpoint: in place of the preset's widths and weights. arm: OURS, or the name of what is built in. title: of the
    progress bar.
    """

    model: Annotated[str, Argument(help=" | ".join(MODELS))]
    preset: Annotated[
        str | None, Option(help="tiny, or a published size. (default: tiny; megatron: v3; megatron_dense: 4b)")
    ] = None
    checkpoint: Annotated[str | None, Option(metavar="<path>", help="Folder of a checkpoint to train on.")] = None
    layers: Annotated[int | None, Option(min=1, help="Decoder layers. (default: all)")] = None
    text: Annotated[
        str | None, Option(metavar="<path>", help="File or folder. (default: Python's standard library)")
    ] = None
    steps: Annotated[int | None, Option(min=1, help="Optimizer steps. (default: the preset's)")] = None
    seq_len: Annotated[int | None, Option(min=2, help="Tokens per sequence. (default: the preset's)")] = None
    batch: Annotated[int | None, Option(min=1, help="Sequences per rank. (default: the preset's)")] = None
    micro_batches: Annotated[int | None, Option(min=1, help="Batches per step. (default: the preset's)")] = None
    lr: Annotated[float | None, Option(min=0, help="Learning rate of AdamW. (default: the preset's)")] = None
    dtype: Annotated[str | None, Option(help=" | ".join(DTYPES) + " (default: the preset's)")] = None
    seed: Annotated[int, Option(help="Of the weights and of the batches.")] = 0
    fsdp2: Annotated[bool, Option(help="ep_plugin gathers and reduces for FSDP2 too.")] = True
    overlap: Annotated[bool, Option(help="Shared experts run during ep_plugin's dispatch.")] = True
    table: Annotated[bool, Option("--table", help="Profile 3 more steps, and show where their time goes.")] = False
    arm: str = OURS
    title: str = ""

    @property
    def enables_fsdp2(self) -> bool:
        return self.arm == OURS and self.fsdp2

    @property
    def overlaps(self) -> bool:
        return self.arm == OURS and self.overlap
