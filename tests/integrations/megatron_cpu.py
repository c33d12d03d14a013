"""Megatron-core's own MoE layers on CPU ranks: what it asks of CUDA without need is answered for the CPU."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
import torch.distributed as dist
from packaging.version import Version


class _Anything:
    """A stream or an event: every method does nothing and returns another."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: _Anything()


def make_megatron_run_here() -> None:
    """Replaces, in this process, the calls of torch.cuda that MoE layers make, and what is missing without TE."""
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment]
    torch.cuda.Stream = torch.cuda.Event = _Anything  # type: ignore[assignment,misc]
    torch.cuda.current_stream = lambda *args: _Anything()  # type: ignore[assignment]
    torch.cuda.stream = lambda stream: contextlib.nullcontext()  # type: ignore[assignment]
    dist.all_to_all_single = _with_lists(dist.all_to_all_single)
    dist.all_gather, dist.reduce_scatter = functools.partial(_all_gather, dist.all_gather), _reduce_scatter
    import megatron.core.tensor_parallel.random as random

    random._get_cuda_rng_state = lambda *args, **kwargs: None
    random._set_cuda_rng_state = lambda *args, **kwargs: None
    without_transformer_engine()


def _with_lists(all_to_all_single: Any) -> Any:
    """Split sizes that were on a GPU have become lists; those on CPUs are still tensors."""

    @functools.wraps(all_to_all_single)
    def called(*args: Any, **kwargs: Any) -> Any:
        for name, value in kwargs.items():
            if name.endswith("_split_sizes") and torch.is_tensor(value):
                kwargs[name] = value.tolist()
        return all_to_all_single(*args, **kwargs)

    return called


def _all_gather(all_gather: Any, outputs: list[torch.Tensor], mine: torch.Tensor, group: Any = None) -> None:
    """Of uneven pieces too, which gloo does not take and Megatron's alltoall has under tensor parallelism."""
    most = max(len(output) for output in outputs)
    padded = [mine.new_empty((most, *mine.shape[1:])) for _ in outputs]
    all_gather(padded, torch.cat([mine, mine.new_zeros((most - len(mine), *mine.shape[1:]))]), group=group)
    for output, whole in zip(outputs, padded, strict=True):
        output.copy_(whole[: len(output)])


def _reduce_scatter(output: torch.Tensor, pieces: list[torch.Tensor], group: Any = None) -> None:
    """Of uneven pieces too."""
    for rank, piece in enumerate(pieces):
        total = piece.clone()
        dist.all_reduce(total, group=group)
        if rank == group.rank():
            output.copy_(total)


def without_transformer_engine() -> None:
    """Megatron-core 0.16.1 compares None with a version, and reads an undefined name in the router."""
    import megatron.core.utils

    if megatron.core.utils._te_version is None:
        megatron.core.utils._te_version = Version("0.0.0")
        import megatron.core.transformer.moe.moe_utils as moe_utils

        if not hasattr(moe_utils, "te_general_gemm"):
            moe_utils.te_general_gemm = None


def make_config(dispatcher: str, tp: int, ep: int, **options: Any) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    settings: dict[str, Any] = dict(
        num_layers=1,
        hidden_size=32,
        ffn_hidden_size=64,
        moe_ffn_hidden_size=16,
        num_attention_heads=4,
        num_moe_experts=8,
        moe_router_topk=3,
        moe_router_load_balancing_type="none",
        moe_router_dtype="fp32",
        moe_token_dispatcher_type=dispatcher,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        tensor_model_parallel_size=tp,
        expert_tensor_parallel_size=tp,
        expert_model_parallel_size=ep,
        sequence_parallel=tp > 1,
        use_cpu_initialization=not torch.cuda.is_initialized(),
    )
    return TransformerConfig(**(settings | options))


def make_layer(config: Any) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.moe.moe_layer import MoELayer

    spec = get_gpt_layer_local_spec(num_experts=config.num_moe_experts, moe_grouped_gemm=False)
    return MoELayer(config, spec.submodules.mlp.submodules, layer_number=1)


def initialise(tp: int, ep: int) -> None:
    """Megatron's groups over the default group, in place of those of an earlier call."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp, expert_model_parallel_size=ep, expert_tensor_parallel_size=tp
    )
