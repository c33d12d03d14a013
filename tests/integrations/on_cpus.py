"""Makes Megatron-core's MoE layers and torchtitan's trainer run on CPU ranks.

Every function changes this process permanently. ``python -m tests.integrations.on_cpus SCRIPT [ARGUMENTS]`` runs a
script that trains with Megatron-core's distributed optimizer.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import runpy
import sys
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from ep_plugin import env
from ep_plugin.testing.megatron import without_transformer_engine
from ep_plugin.testing.torchtitan import stand_in, without_triton

_IMPORTED_ONLY = {"datasets": ("datasets", "datasets.distributed"), "tensorboard": ("torch.utils.tensorboard",)}


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
    torch.compiler.set_stance("force_eager")  # Megatron compiles its fusions, which would take a minute


def make_distributed_optimizer_run_here() -> None:
    """Do so for its distributed optimizer and schedules: what they make on "cuda" is made here, and they
    meet no other type of tensor than those they know."""
    make_megatron_run_here()
    cuda: Any = torch.cuda
    cuda.default_stream = cuda.current_stream
    cuda.synchronize = lambda *args: None
    _Here().__enter__()


class _Here(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        found = function(*args, **kwargs)
        return found.replace("torch.", "torch.cuda.") if function is torch.Tensor.type and len(args) == 1 else found


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


def make_torchtitan_run_here() -> None:
    """Make its trainer run on CPUs, also under a PyTorch without torch.distributed.set_timeout."""
    without_triton()
    for package, modules in _IMPORTED_ONLY.items():
        if importlib.util.find_spec(package) is None:
            for module in modules:
                stand_in(module)
    if not hasattr(dist, "set_timeout"):
        dist.set_timeout = lambda timeout, group=None: None  # type: ignore[attr-defined]
    import torchtitan.tools.utils as utils

    utils.device_type, utils.device_module = "cpu", _cpu_as_accelerator()
    utils.get_local_device = lambda: torch.device("cpu")
    _let_gloo_multiply()
    if "deep_ep" in env.integrations():
        run_torchtitans_deepep_here()


def run_torchtitans_deepep_here() -> None:
    """Its operators are registered for CUDA alone, though nothing in them needs it. `deep_ep` must be ours."""
    from torchtitan.distributed.deepep import deepep

    torch.library.impl("deepep::dispatch", "CPU")(deepep._dispatch_op_impl)
    torch.library.impl("deepep::combine", "CPU")(deepep._combine_op_impl)


def _let_gloo_multiply() -> None:
    """Gloo has no PREMUL_SUM, with which FSDP2 averages experts' gradients: multiply first, then sum."""
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter as Stock

    def reduce_scatter(self: Any, output_tensor: Any, input_tensor: Any, group: Any, op: Any, **kwargs: Any) -> Any:
        if op == dist.ReduceOp.PREMUL_SUM:
            _, factor = op.__getstate__()
            input_tensor, op = input_tensor * factor, dist.ReduceOp.SUM
        return theirs(self, output_tensor, input_tensor, group, op, **kwargs)

    theirs: Any = Stock.__call__
    Stock.__call__ = reduce_scatter  # type: ignore[method-assign]


def _cpu_as_accelerator() -> SimpleNamespace:
    """A stand-in for torch.cuda."""
    nothing = dict.fromkeys(("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats"))
    properties = SimpleNamespace(name="CPU", total_memory=2**30)
    answers: dict[str, Any] = nothing | {
        "current_device": 0,
        "device_count": 1,
        "get_device_name": "CPU",
        "get_device_properties": properties,
        "memory_stats": {},
    }
    return SimpleNamespace(**{name: lambda *args, answer=answer: answer for name, answer in answers.items()})


if __name__ == "__main__":
    del sys.argv[0]
    make_distributed_optimizer_run_here()
    runpy.run_path(sys.argv[0], run_name="__main__")
