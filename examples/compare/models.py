"""Models of transformers from a preset or a checkpoint, sharded over all ranks."""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import DeepseekV3ForCausalLM, PreTrainedModel, Qwen3ForCausalLM, Qwen3MoeForCausalLM
from transformers.distributed import DistributedConfig

from ep_plugin.integrations.transformers import overlap_shared_experts
from examples.compare.clock import ExchangeClock, register_timed
from examples.compare.options import BETAS, MODELS, WEIGHT_DECAY, Options
from examples.compare.parts import label

# Classes, with the settings of their presets that are no widths.
CLASSES = {
    "qwen3": (Qwen3ForCausalLM, {}),
    "qwen3_moe": (Qwen3MoeForCausalLM, {"norm_topk_prob": True}),
    "deepseek_v3": (DeepseekV3ForCausalLM, {"num_mtp_layers": 0}),
}


def build_model(options: Options, clock: ExchangeClock) -> PreTrainedModel:
    """The model in training mode, its experts spread over all ranks and everything else sharded by FSDP2.

    A preset is initialised in place, each rank its own shards, so that no full copy exists anywhere.
    ``torch.distributed`` must be initialised. `clock` gets the marks of the exchange.
    """
    world = dist.get_world_size()
    model_class, settings = CLASSES[options.model]
    experts = {}
    if options.model != "qwen3":
        experts = {"ep_size": world, "ep_implementation": register_timed(options.arm, clock)}
    distributed = DistributedConfig(fsdp_size=world, **experts)
    shared = {"dtype": getattr(torch, options.dtype), "distributed_config": distributed}
    if options.checkpoint is not None:
        model = model_class.from_pretrained(
            options.checkpoint, local_files_only=True, use_cache=False, num_hidden_layers=options.layers, **shared
        )
    else:
        widths = MODELS[options.model].presets[options.preset].widths
        config = model_class.config_class(**widths, **settings, num_hidden_layers=options.layers, use_cache=False)
        model = model_class.from_pretrained(None, config=config, state_dict={}, **shared)
        _initialise_shards(model, std=config.initializer_range, seed=options.seed)
    if model.config.vocab_size < 256:
        raise ValueError(f"checkpoint: expected a vocabulary of at least 256, got {model.config.vocab_size}")
    if options.table:
        label(model)  # before shared experts are moved, so that they keep their range
    if options.overlaps:
        overlap_shared_experts(model)
    return model.train()


def build_optimizer(model: PreTrainedModel, options: Options) -> torch.optim.AdamW:
    """AdamW, with a parameter group per device mesh: a fused update takes tensors of one mesh only."""
    groups: dict[object, list[torch.nn.Parameter]] = {}
    for parameter in model.parameters():
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups.setdefault(mesh, []).append(parameter)
    fused = next(model.parameters()).is_cuda or None
    settings = {"lr": options.lr, "betas": BETAS, "weight_decay": WEIGHT_DECAY, "fused": fused}
    return torch.optim.AdamW([{"params": parameters} for parameters in groups.values()], **settings)


def _initialise_shards(model: PreTrainedModel, *, std: float, seed: int) -> None:
    """Fill every matrix with N(0, std), each shard from a generator of its own.

    Otherwise ranks that share a seed would hold identical experts: on CPUs random numbers are drawn per local shard.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() < 2:
                continue
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            key = hashlib.sha256(f"{seed}/{name}/{dist.get_rank()}".encode()).digest()
            generator = torch.Generator(local.device).manual_seed(int.from_bytes(key[:7], "little"))
            local.normal_(0.0, std, generator=generator)
