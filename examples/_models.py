"""The Qwen3-MoE models that the example trains: presets, or a checkpoint on disk, sharded over every rank."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
import torch.distributed as dist
from _options import PRESETS
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.distributed import DistributedConfig


def build_model(
    *,
    preset: str | None,
    path: Path | None,
    layers: int,
    dtype: torch.dtype,
    ep_implementation: str,
    seed: int,
) -> PreTrainedModel:
    """The model, experts spread over all ranks and everything else FSDP-sharded, in training mode.

    A checkpoint is read from ``path``; a preset is initialised in place, each rank its own shards, so that no
    full copy of it exists anywhere. ``torch.distributed`` must be initialised.
    """
    world = dist.get_world_size()
    distributed = DistributedConfig(ep_size=world, fsdp_size=world, ep_implementation=ep_implementation)
    if path is not None:
        overrides = {"num_hidden_layers": layers} if layers else {}
        model = Qwen3MoeForCausalLM.from_pretrained(
            path,
            dtype=dtype,
            distributed_config=distributed,
            local_files_only=True,
            use_cache=False,
            **overrides,
        )
    else:
        config = Qwen3MoeConfig(
            **PRESETS[preset].widths, num_hidden_layers=layers, norm_topk_prob=True, use_cache=False
        )
        model = Qwen3MoeForCausalLM.from_pretrained(
            None, config=config, state_dict={}, dtype=dtype, distributed_config=distributed
        )
        _initialise_shards(model, std=config.initializer_range, seed=seed)
    if model.config.vocab_size < 256:
        raise ValueError(f"model: expected a vocabulary of at least 256, got {model.config.vocab_size}")
    return model.train()


def _initialise_shards(model: PreTrainedModel, *, std: float, seed: int) -> None:
    """Overwrite every matrix with N(0, std), each shard from a stream of its own.

    Without this, ranks that share a random seed would hold identical experts: random numbers are drawn per
    local shard on CPUs.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() < 2:
                continue
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            key = hashlib.sha256(f"{seed}/{name}/{dist.get_rank()}".encode()).digest()
            generator = torch.Generator(local.device).manual_seed(int.from_bytes(key[:7], "little"))
            local.normal_(0.0, std, generator=generator)
