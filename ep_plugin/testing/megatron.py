"""Makes Megatron-core run without TransformerEngine or grouped_gemm, and its MoE layers on CPUs.

Every function changes this process permanently.
"""

from __future__ import annotations

import contextlib
import functools
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist


def without_transformer_engine() -> None:
    """Define two names that Megatron-core 0.16.1 reads but lacks without TransformerEngine."""
    import megatron.core.utils
    from packaging.version import Version

    if megatron.core.utils._te_version is None:
        megatron.core.utils._te_version = Version("0.0.0")
        import megatron.core.transformer.moe.moe_utils as moe_utils

        if not hasattr(moe_utils, "te_general_gemm"):
            moe_utils.te_general_gemm = None


def serve_grouped_products() -> str:
    """Let Megatron's GroupedMLP multiply by PyTorch where the package grouped_gemm is missing. Returns which."""
    from megatron.core.transformer.moe import grouped_gemm_util

    if grouped_gemm_util.grouped_gemm_is_available() and grouped_gemm_util.ops.gmm is not _grouped_product:
        return "GroupedMLP, products of the package grouped_gemm"
    grouped_gemm_util.ops = SimpleNamespace(gmm=_grouped_product)
    grouped_gemm_util.grouped_gemm = grouped_gemm_util.ops
    return "GroupedMLP, products of torch.nn.functional.grouped_mm"


def _grouped_product(
    rows: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor, trans_b: bool = False
) -> torch.Tensor:
    """``[N, O]``: each group of rows ``[N, I]`` times its weights ``[E_l, I, O]``. counts ``[E_l]``: rows per group."""
    assert not trans_b
    ends = counts.cumsum(0).to(torch.int32).to(rows.device, non_blocking=True)  # the host does not wait
    return torch.nn.functional.grouped_mm(rows, weights, offs=ends)


def make_megatron_run_here() -> None:
    """Replace calls of torch.cuda in MoE layers, and collectives that gloo lacks, by ones for CPUs."""
    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.Stream = cuda.Event = _Anything
    cuda.current_stream = lambda *args: _Anything()
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *args: None
    tensor: Any = torch.Tensor
    tensor.record_stream = lambda self, stream: None
    distributed: Any = dist
    distributed.all_to_all_single = _with_lists(dist.all_to_all_single)
    distributed.all_gather = functools.partial(_all_gather, dist.all_gather)
    distributed.reduce_scatter = _reduce_scatter
    import megatron.core.tensor_parallel.random as random

    random._get_cuda_rng_state = lambda *args, **kwargs: None
    random._set_cuda_rng_state = lambda *args, **kwargs: None
    without_transformer_engine()
    import megatron.core.transformer.moe.experts as experts

    experts.jit_fuser = lambda function: function  # compiling would take a minute


class _Anything:
    """A stream or an event: every method does nothing and returns another."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: _Anything()


def _with_lists(all_to_all_single: Any) -> Any:
    """Split sizes as lists: Megatron converts those on GPUs, but not those on CPUs."""

    @functools.wraps(all_to_all_single)
    def called(*args: Any, **kwargs: Any) -> Any:
        for name, value in kwargs.items():
            if name.endswith("_split_sizes") and torch.is_tensor(value):
                kwargs[name] = value.tolist()
        return all_to_all_single(*args, **kwargs)

    return called


def _all_gather(all_gather: Any, outputs: list[torch.Tensor], mine: torch.Tensor, group: Any = None) -> None:
    """An all-gather of uneven pieces, which gloo lacks and Megatron's alltoall uses under tensor parallelism."""
    most = max(len(output) for output in outputs)
    padded = [mine.new_empty((most, *mine.shape[1:])) for _ in outputs]
    all_gather(padded, torch.cat([mine, mine.new_zeros((most - len(mine), *mine.shape[1:]))]), group=group)
    for output, whole in zip(outputs, padded, strict=True):
        output.copy_(whole[: len(output)])


def _reduce_scatter(output: torch.Tensor, pieces: list[torch.Tensor], group: Any = None) -> None:
    """A reduce-scatter of uneven pieces."""
    for rank, piece in enumerate(pieces):
        total = piece.clone()
        dist.all_reduce(total, group=group)
        if rank == group.rank():
            output.copy_(total)
