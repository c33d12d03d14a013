"""Megatron's DistributedOptimizer over our collectives on GPUs. Four ranks may share one."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from ep_plugin import counts
from ep_plugin.testing.megatron import without_transformer_engine
from tests.gpu import over_nodes
from tests.integrations import test_megatron_optimizer as cpu
from tests.integrations.megatron_layers import make_config

WIDTH, LAYERS = 4096, 4  # a bucket is a layer, 32 MiB in BF16, which copy engines gather


def cases(rank: int, size: int, names: list[str]) -> dict[str, Any]:
    """Runs these cases of the CPU test, and returns its findings."""
    _start(rank, size)
    torch.use_deterministic_algorithms(True)  # gradients of experts are scattered by atomic additions otherwise
    return cpu.run_cases(rank, {name: cpu.CASES[name] for name in names})


def forward_trace(rank: int, size: int) -> dict[str, Any]:
    """Traces a forward pass that gathers: the kernels' names, and how many copies begin between products."""
    _start(rank, size)
    from ep_plugin.integrations import hooks

    hooks.enable(["megatron"])
    cpu._initialise(1)
    layers = [torch.nn.Linear(WIDTH, WIDTH, bias=False, device="cuda", dtype=torch.bfloat16) for _ in range(LAYERS)]
    config = make_config("alltoall", 1, 1, bf16=True, params_dtype=torch.bfloat16)
    model, optimizer = cpu.wrapped(torch.nn.Sequential(*layers), config, cpu.Case(cpu.OVERLAP), WIDTH * WIDTH)
    x = torch.randn(4096, WIDTH, device="cuda", dtype=torch.bfloat16)
    for _ in range(2):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        model(x).float().pow(2).mean().backward()
        model.finish_grad_sync()
        optimizer.step()
    torch.cuda.synchronize()
    served = counts.num_served["megatron"]
    with profile(activities=[ProfilerActivity.CUDA]) as profiler, torch.no_grad():
        model(x)
        torch.cuda.synchronize()
    work = [
        one for one in profiler.profiler.kineto_results.events() if one.device_type() == torch.autograd.DeviceType.CUDA
    ]
    kernels = [one for one in work if not one.name().startswith(("Memcpy", "Memset"))]
    # The largest kernels are the products; the copies of a gather go to every other rank.
    products = sorted(sorted(kernels, key=lambda one: one.duration_ns())[-LAYERS:], key=lambda one: one.start_ns())
    copies = [one.start_ns() for one in work if one.name().startswith("Memcpy")]
    return {
        "served": counts.num_served["megatron"] - served,
        "kernels": sorted({one.name() for one in kernels}),
        "copies": len(copies),
        "copies between products": sum(products[0].start_ns() < start < products[-1].start_ns() for start in copies),
    }


def _start(rank: int, size: int) -> None:
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    over_nodes.start(rank, size, nodes=1)
    torch.cuda.set_device(rank % torch.cuda.device_count())
    torch.cuda.init()
    without_transformer_engine()
    import megatron.core.transformer.moe.moe_layer  # noqa: F401  there before the hook: served at once
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    cpu._initialise(1)
    model_parallel_cuda_manual_seed(1)
