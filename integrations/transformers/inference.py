"""Inference with experts over all ranks: whole weights on every rank, and low-latency exchanges for few tokens.

    config = InferenceConfig(ep_size=ranks, ep_implementation="ep_plugin")
    model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-30B-A3B", distributed_config=config)
    with torch.no_grad(), low_latency(model, max_tokens_per_rank=64):
        model(input_ids=tokens, past_key_values=cache)  # at most 64 tokens on each rank

docs/low-latency.md lists what it needs and what it refuses.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers.distributed.configuration_utils import DistributedConfig

from ep_plugin import MoECommunicatorConfig
from ep_plugin.integrations import hooks
from ep_plugin.integrations.transformers.expert_parallel import exchanges


@dataclass
class InferenceConfig(DistributedConfig):
    """A DistributedConfig without FSDP: each rank has a batch of its own, all weights, and its share of the experts.

    It makes the meshes of a DistributedConfig: `fsdp_size` is the number of ranks with different batches, by default
    `ep_size`. But weights are not sharded over these ranks, so nothing gathers weights in a forward.

    Raises:
        NotSupported: this version of transformers applies FSDP through other functions.
    """

    def __post_init__(self) -> None:
        if self.fsdp_size is None:
            self.fsdp_size = self.ep_size
        super().__post_init__()
        _leave_weights_whole()


@functools.cache
def _leave_weights_whole() -> None:
    """Makes models with an InferenceConfig skip FSDP when they are loaded."""
    from transformers.distributed import mixin

    name = "apply_fully_sharded_data_parallelism"
    hooks.check_signatures("transformers", mixin, [f"{name}(model, mesh_manager, fsdp_plan, ep_plan)"])
    stock = getattr(mixin, name)

    @functools.wraps(stock)
    def apply(model: Any, *args: Any, **kwargs: Any) -> torch.nn.Module:
        if isinstance(model.config.distributed_config, InferenceConfig):
            return model
        return stock(model, *args, **kwargs)

    setattr(mixin, name, apply)


@contextlib.contextmanager
def low_latency(model: torch.nn.Module, *, max_tokens_per_rank: int) -> Iterator[None]:
    """Makes the experts of `model` exchange tokens in low latency, `MoECommunicator(mode="ll")`. For decoding.

    All ranks must enter and leave the context between the same forwards. Inside it no forward waits for the host. So a
    forward can be captured into a CUDA graph, after a first forward has made the memory. You may replay the graph
    outside the context. You may enter the context again, also with another number.

    Args:
        model: a model that was loaded with ``ep_implementation="ep_plugin"``, or with "auto" under
            ``EP_PLUGIN=transformers``.
        max_tokens_per_rank: most tokens that a rank has in a forward, 1 to 4096, the same on all ranks. Each expert
            computes ``R * max_tokens_per_rank`` rows, so do not make it larger than needed.

    Raises:
        ValueError: no experts of `model` exchange tokens through ep_plugin, or a wrong number. A forward with more
            tokens on a rank raises it, too.
        NotSupported: the expert-parallel group spans nodes. A forward raises it, too, if gradients are enabled.
    """
    MoECommunicatorConfig(num_experts=1, hidden_size=1, topk=1, mode="ll", max_tokens_per_rank=max_tokens_per_rank)
    found = [exchange for module in model.modules() if (exchange := exchanges.get(id(module))) is not None]
    if not found:
        raise ValueError(f"model: expected experts whose exchange is ep_plugin's, found none in {type(model).__name__}")
    for exchange in found:
        exchange.check_low_latency()
    before = [exchange.max_tokens_per_rank for exchange in found]
    for exchange in found:
        exchange.max_tokens_per_rank = max_tokens_per_rank
    try:
        yield
    finally:
        for exchange, limit in zip(found, before, strict=True):
            exchange.max_tokens_per_rank = limit
