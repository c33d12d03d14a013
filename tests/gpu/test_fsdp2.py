"""FSDP2 on GPUs through ours, judged by the whole model in plain torch; ranks share a GPU where there are more."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from ep_plugin.integrations import fsdp2
from tests.gpu import fsdp2 as on_gpus
from tests.gpu.checks import device_of
from tests.integrations import fsdp2_cases as cases
from tests.ranks import run_ranks, values

STEPS = 3
CLOSE = 1e-5  # float32 whose terms are added in another order


def trained(rank: int, device: torch.device, shape: tuple[int, ...], micro_batches: int) -> tuple[int, int]:
    """Gathers and reduce-scatters of a model on a mesh of (shards) or (replicas, shards); AssertionError unless it
    becomes what the whole model does."""
    names = ("replicate", "shard")[-len(shape) :]
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    case = cases.Case(sums=len(shape) > 1)  # between replicas gloo reduces here, which only sums
    torch.manual_seed(0)
    whole, model = cases.Model(case).to(device), cases.build(case, mesh=mesh)
    assert fsdp2.enable(model) == cases.LAYERS + 1
    optimizers = [torch.optim.SGD(each.parameters(), lr=1.0) for each in (whole, model)]
    size = dist.get_world_size()
    for step in range(STEPS):
        for micro in range(micro_batches):
            model.set_requires_gradient_sync(micro == micro_batches - 1)
            generator = torch.Generator().manual_seed(10 * step + micro)
            batches = torch.randint(61, (size, 5, 7), generator=generator).to(device)
            _loss(model, batches[rank]).backward()
            for batch in batches:
                (_loss(whole, batch) / size).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    shard, shards = mesh["shard"].get_local_rank(), shape[-1]
    before = cases.Model(case)
    for (name, ours), theirs, start in zip(
        model.named_parameters(), whole.parameters(), before.parameters(), strict=True
    ):
        mine = ours.to_local()
        torch.testing.assert_close(mine, theirs.chunk(shards)[shard], rtol=0, atol=CLOSE, msg=lambda m, n=name: n + m)
        assert (theirs.cpu() - start).abs().max() > 100 * CLOSE, name
    ran = fsdp2.launches(model)
    return ran.all_gathers, ran.reduce_scatters


def _loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


def _on_gpus(rank: int, shape: tuple[int, ...], micro_batches: int) -> tuple[int, int]:
    device = device_of(rank)
    torch.cuda.set_device(device)
    return trained(rank, device, shape, micro_batches)


@pytest.mark.gpu(1)
@pytest.mark.parametrize(("shape", "micro_batches"), [((2,), 1), ((3,), 2), ((2, 2), 1), ((2, 1), 2)])
def test_a_sharded_model_becomes_what_the_whole_one_does(shape: tuple[int, ...], micro_batches: int) -> None:
    for gathers, scatters in values(run_ranks(math.prod(shape), _on_gpus, shape, micro_batches, timeout_s=120)):
        if shape[-1] > 1:
            assert gathers >= STEPS * micro_batches * cases.LAYERS and scatters == STEPS * (cases.LAYERS + 1)
        else:  # a rank alone in its shard group has nothing to exchange in it
            assert (gathers, scatters) == (0, 0)


WORLD = 4  # pairs of ranks to shard over, and of replicas


@pytest.fixture(scope="module")
def results() -> Callable[[], list[dict[str, Any]]]:
    """Results by case of every rank; the ranks run once however many tests ask."""
    return functools.cache(lambda: values(run_ranks(WORLD, on_gpus.run_cases, timeout_s=400)))


@pytest.mark.gpu(1)
@pytest.mark.timeout(450)
@pytest.mark.xdist_group("fsdp2")
@pytest.mark.parametrize("name", cases.CASES)
def test_as_with_plain_torch(results: Callable[[], list[dict[str, Any]]], name: str) -> None:
    limit = max(cases.CASES[name].limit, CLOSE)
    for rank in results():
        result = rank[name]
        assert isinstance(result, dict), result
        assert result["losses"] <= limit and result["parameters"] <= limit, result
        assert result["ran"] == result["plain"] and min(result["ran"]) > 0 and result["left"] == (0, 0), result


@pytest.mark.gpu(1)
@pytest.mark.parametrize(
    "options",
    [{}, {"reshard_after_forward": False}, {"mp_policy": cases.BF16}],
    ids=["plain", "kept after forward", "reduced in float32"],
)
def test_a_rank_alone_copies_nothing(options: dict[str, Any]) -> None:
    (stock,), (ours,) = (values(run_ranks(1, on_gpus.experts_alone, ours, options)) for ours in (False, True))
    assert ours["losses"] == stock["losses"] and ours["gradients"] == stock["gradients"]
    assert stock["chunk_cat"] and not ours["chunk_cat"]
    # All gradients, one group's second ones, and rows; FSDP2 also holds parameters and two buffers of a group.
    assert ours["peak"] < 1.6 and ours["peak"] < stock["peak"] - 0.3, (ours["peak"], stock["peak"])


@pytest.mark.gpu(1)
@pytest.mark.skipif(os.environ.get("CUDA_LAUNCH_BLOCKING") == "1", reason="launches wait for the device")
@pytest.mark.parametrize("width", [40, 512])
def test_a_step_synchronises_nothing(width: int) -> None:
    """width: of small shards, and of larger ones."""
    for ahead, gathers, scatters in values(run_ranks(2, on_gpus.steps_ahead_of_the_device, width, timeout_s=120)):
        assert ahead, "the host has waited for the device"
        assert gathers >= cases.LAYERS and scatters == cases.LAYERS + 1
