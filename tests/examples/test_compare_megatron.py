"""The Megatron model of examples/compare, small and on CPU ranks; the command itself asks for GPUs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from examples.compare.options import OURS, Options
from tests.integrations.on_cpus import make_megatron_run_here
from tests.ranks import run_ranks, values

pytest.importorskip("megatron.core", reason="needs megatron-core")

WORLD, STEPS = 2, 3
OPTIONS = Options(
    model="megatron", arm=OURS, preset="tiny", checkpoint=None, layers=2, text=None, steps=STEPS, seq_len=16, batch=2,
    micro_batches=1, lr=1e-3, dtype="float32", seed=0, fsdp2=False, overlap=False,
)  # fmt: skip
ARMS = (OURS, "alltoall")


def test_model_trains_through_flex_as_through_alltoall() -> None:
    for found in values(run_ranks(WORLD, _run_rank, timeout_s=240)):
        assert found["refused"] == "expected EpPluginTokenDispatcher, got NoneType"
        assert found[OURS]["losses"][-1] < found[OURS]["losses"][0]
        assert found[OURS]["losses"] == pytest.approx(found["alltoall"]["losses"], rel=1e-5)
        for arm in ARMS:
            assert found[arm]["spread"] == 0  # parameters that every rank has stay the same
            assert found[arm]["slope"] == pytest.approx(1.0, abs=0.1)
            assert found[arm]["micro batches"] < 1e-5 < found[arm]["without the first"]


def _run_rank(rank: int) -> dict[str, Any]:
    make_megatron_run_here()
    from megatron.core.transformer.moe import moe_layer

    import ep_plugin.integrations.megatron
    from examples.compare import megatron, train

    found: dict[str, Any] = {"refused": _refusal(megatron, moe_layer)}
    ep_plugin.integrations.megatron.enable()
    for arm in ARMS:
        model = megatron.build_model(replace(OPTIONS, arm=arm))
        found[arm] = _accumulated(train.backward, model, rank) | _train(model, rank)
    return found


def _refusal(module: Any, moe_layer: Any) -> str:
    """The error where "flex" stands for another dispatcher than ours."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moe_layer, "MoEFlexTokenDispatcher", lambda *args, **kwargs: None)
        with pytest.raises(RuntimeError) as raised:
            module.build_model(OPTIONS)
    return str(raised.value).removeprefix("flex: ").split(";")[0]


def _accumulated(backward: Any, model: Any, rank: int) -> dict[str, float]:
    """How far the gradients of two batches at once are from the mean of each one's, and from half of the second's."""
    generator = torch.Generator().manual_seed(10 + rank)
    batches = [torch.randint(256, (2, 16), generator=generator) for _ in range(2)]
    first, second, both = (_gradients(backward, model, some) for some in (batches[:1], batches[1:], batches))
    scale = float(both.abs().max())
    return {
        "micro batches": float((both - (first + second) / 2).abs().max()) / scale,
        "without the first": float((both - second / 2).abs().max()) / scale,
    }


def _gradients(backward: Any, model: Any, batches: list[torch.Tensor]) -> torch.Tensor:
    model.zero_grad()
    backward(model, batches)
    found = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    model.zero_grad()
    return found


def _train(model: Any, rank: int) -> dict[str, Any]:
    tokens = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(rank))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(STEPS):
        loss = _mean_loss(model, tokens, backward=True)
        if step == 0:
            slope = _slope(model, tokens, loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    spread = 0.0
    for parameter in model.parameters():
        if getattr(parameter, "allreduce", True):
            first = parameter.detach().clone()
            dist.broadcast(first, src=0)
            spread = max(spread, float((first - parameter.detach()).abs().max()))
    return {"losses": losses, "slope": slope, "spread": spread}


def _mean_loss(model: Any, tokens: torch.Tensor, backward: bool = False) -> float:
    with torch.set_grad_enabled(backward):
        loss = model(input_ids=tokens, labels=tokens).loss
    if backward:
        loss.backward()
    mean = loss.detach().double()
    dist.all_reduce(mean)
    return float(mean) / dist.get_world_size()


def _slope(model: Any, tokens: torch.Tensor, loss: float) -> float:
    """How far the mean loss falls along the experts' gradients, over what these say."""
    experts = [parameter for parameter in model.parameters() if not getattr(parameter, "allreduce", True)]
    square = torch.stack([parameter.grad.double().square().sum() for parameter in experts]).sum()
    dist.all_reduce(square)
    length = 0.02 / float(square)
    with torch.no_grad():
        for parameter in experts:
            parameter.sub_(length * parameter.grad)
        lower = _mean_loss(model, tokens)
        for parameter in experts:
            parameter.add_(length * parameter.grad)
    return (loss - lower) / 0.02
