"""The models that the examples train: presets, or a checkpoint on disk, sharded over all ranks."""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist
from _options import PRESETS, TrainOptions
from torch.distributed.tensor import DTensor
from transformers import DeepseekV3ForCausalLM, PreTrainedModel, Qwen3ForCausalLM, Qwen3MoeForCausalLM
from transformers.distributed import DistributedConfig

# Each with what its presets set beside widths.
MODELS = {
    "qwen3": (Qwen3ForCausalLM, {}),
    "qwen3_moe": (Qwen3MoeForCausalLM, {"norm_topk_prob": True}),
    "deepseek_v3": (DeepseekV3ForCausalLM, {"num_mtp_layers": 0}),
}


def build_model(options: TrainOptions, *, ep_implementation: str | None) -> PreTrainedModel:
    """The model, experts spread over all ranks and everything else FSDP-sharded, in training mode.

    ``ep_implementation`` is the exchange by its registered name; None builds a dense model. A checkpoint is read from
    its folder; a preset is initialised in place, each rank its own shards, so that no full copy of it exists anywhere.
    ``torch.distributed`` must be initialised.
    """
    world, dtype = dist.get_world_size(), getattr(torch, options.dtype)
    model_type, settings = MODELS[options.architecture]
    if ep_implementation is None:
        distributed = DistributedConfig(fsdp_size=world)
    else:
        distributed = DistributedConfig(ep_size=world, fsdp_size=world, ep_implementation=ep_implementation)
    if options.model is not None:
        overrides = {"num_hidden_layers": options.layers} if options.layers else {}
        model = model_type.from_pretrained(
            options.model,
            dtype=dtype,
            distributed_config=distributed,
            local_files_only=True,
            use_cache=False,
            **overrides,
        )
    else:
        widths = PRESETS[options.architecture][options.preset].widths
        config = model_type.config_class(**widths, **settings, num_hidden_layers=options.layers, use_cache=False)
        model = model_type.from_pretrained(
            None, config=config, state_dict={}, dtype=dtype, distributed_config=distributed
        )
        _initialise_shards(model, std=config.initializer_range, seed=options.seed)
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
