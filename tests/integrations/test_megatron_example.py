"""The model of examples/train_deepseek_megatron.py, small and on CPU ranks; the script itself asks for GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ep_plugin.testing.megatron import make_megatron_run_here
from tests.ranks import run_ranks, values

pytest.importorskip("megatron.core", reason="needs megatron-core")
pytest.importorskip("typer")

WORLD, STEPS = 2, 3
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "expected NVIDIA GPUs, which Megatron-core's layers need, found none: train_deepseek_hf.py runs on CPUs"),
        (("--dispatcher", "allgather"), "expected flex or alltoall, got 'allgather'"),
        (("--compare", "flex"), "expected another dispatcher than flex"),
        (("--preset", "tiny", "--layers", "1"), "expected more than 1, the first 1 being dense, got 1"),
    ],
    ids=["no-gpu", "dispatcher", "compare-itself", "only-dense-layers"],
)
def test_what_cannot_run_is_refused_before_anything_starts(arguments: tuple[str, ...], message: str) -> None:
    variables = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "300", "NO_COLOR": "1"}
    command = [sys.executable, str(EXAMPLES / "train_deepseek_megatron.py"), *arguments]
    result = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120)
    assert result.returncode == 2
    assert message in " ".join(result.stderr.split())


def test_model_trains_through_flex_as_through_alltoall() -> None:
    for found in values(run_ranks(WORLD, _run_rank, timeout_s=240)):
        assert found["refused"] == "expected EpPluginTokenDispatcher, got NoneType"
        assert found["flex"]["losses"][-1] < found["flex"]["losses"][0]
        assert found["flex"]["losses"] == pytest.approx(found["alltoall"]["losses"], rel=1e-5)
        for dispatcher in ("flex", "alltoall"):
            assert found[dispatcher]["spread"] == 0  # what is on every rank stays the same there
            assert found[dispatcher]["slope"] == pytest.approx(1.0, abs=0.1)
            assert found[dispatcher]["micro batches"] < 1e-5 < found[dispatcher]["without the first"]


def _run_rank(rank: int) -> dict[str, Any]:
    make_megatron_run_here()
    sys.path.insert(0, str(EXAMPLES))
    import _megatron
    import _training
    from _options import MEGATRON, TrainOptions
    from megatron.core.transformer.moe import moe_layer

    import ep_plugin.integrations.megatron

    def options(dispatcher: str) -> TrainOptions:
        return TrainOptions(
            architecture=MEGATRON, preset="tiny", model=None, layers=2, text=None, steps=STEPS, seq_len=16, batch=2,
            lr=1e-3, seed=0, dtype="float32", ep_implementation=dispatcher, fsdp2="stock",
        )  # fmt: skip

    found: dict[str, Any] = {"refused": _refusal(_megatron, moe_layer, options("flex"))}
    ep_plugin.integrations.megatron.switch_on()
    for dispatcher in ("flex", "alltoall"):
        model = _megatron.build_model(options(dispatcher))
        found[dispatcher] = _accumulated(_training._backward, model, rank) | _train(model, rank)
    return found


def _refusal(module: Any, moe_layer: Any, options: Any) -> str:
    """What is said where another dispatcher than ours is behind the name flex."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moe_layer, "MoEFlexTokenDispatcher", lambda *args, **kwargs: None)
        with pytest.raises(RuntimeError) as raised:
            module.build_model(options)
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
