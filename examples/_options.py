"""What one arm of the example trains, and the presets that fill it in. Cheap to import: no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """What one arm trains. ``batch`` and ``seq_len`` are per rank; paths are strings, to travel as JSON.

    ep_implementation: who exchanges tokens between experts, None for a dense model. fsdp2: who gathers parameters and
    reduces gradients, "ep_plugin" or "stock".
    """

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
