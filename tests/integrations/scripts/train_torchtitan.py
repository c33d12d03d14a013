"""Trains torchtitan's debug mixture-of-experts model with its own trainer, experts sharded over all ranks.

torchrun --nproc-per-node 2 train_torchtitan.py OUT [--compile BACKEND] [--exchange deepep]
"""

import argparse
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.qwen3 import model_registry
from torchtitan.models.qwen3.config_registry import qwen3_moe_debug
from torchtitan.tools.logging import init_logger

STEPS, VOCABULARY = 4, 256


class Numbers(BaseTokenizer):
    """Tokens are numbers already."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, *, tokenizer_path: str) -> None:
        super().__init__()

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, tokens: list[int]) -> str:
        return " ".join(map(str, tokens))

    def get_vocab_size(self) -> int:
        return VOCABULARY


class Counting(BaseDataLoader):
    """Sequences that count up from random numbers."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config: Config, *, dp_rank: int, seq_len: int, local_batch_size: int, **unused: Any) -> None:
        self.generator = torch.Generator().manual_seed(dp_rank)
        self.shape = (local_batch_size, seq_len)

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        batch, length = self.shape
        while True:
            first = torch.randint(VOCABULARY, (batch, 1), generator=self.generator)
            tokens = (first + torch.arange(length + 1)) % VOCABULARY
            yield {"input": tokens[:, :-1], "positions": torch.arange(length).expand(batch, length)}, tokens[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


class Recording(MetricsProcessor):
    """Keeps the mean loss of every step."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        pass

    def log(self, step: int, global_avg_loss: float, *args: Any, **kwargs: Any) -> None:
        self.losses = [*getattr(self, "losses", []), global_avg_loss]
        super().log(step, global_avg_loss, *args, **kwargs)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--compile", help="the backend with which torch.compile compiles blocks")
    parser.add_argument("--exchange", default="standard", help="torchtitan's comm_backend of the experts")
    args = parser.parse_args()
    out, backend = args.out, args.compile
    init_logger()
    config = qwen3_moe_debug()
    config.model_spec = model_registry("debugmodel_moe", moe_comm_backend=args.exchange)
    config.dump_folder = str(out)
    config.tokenizer, config.dataloader = Numbers.Config(), Counting.Config()
    config.metrics = Recording.Config(log_freq=1)
    config.debug.seed = 0
    config.checkpoint.enable = False
    config.parallelism.expert_parallel_degree = int(os.environ["WORLD_SIZE"])
    config.parallelism.spmd_backend = "partial_dtensor"
    training = config.training
    training.local_batch_size, training.seq_len, training.steps = 2, 32, STEPS
    training.mixed_precision_param, training.disable_cuda_graphs = "float32", True
    if backend:
        config.compile.enable, config.compile.components, config.compile.backend = True, ["model"], backend
        config.activation_checkpoint = None
    del config.model_spec.model.layers[2:]
    for layer in config.model_spec.model.layers:  # the default has no backward on CPUs
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
        layer.moe.routed_experts.inner_experts.hidden_dim = 64
    trainer = config.build()
    trainer.train()
    (out / f"losses.{os.environ['RANK']}.json").write_text(json.dumps(trainer.metrics_processor.losses))
    trainer.close()


if __name__ == "__main__":
    main()
