"""The Megatron models of examples/compare, small and on CPU ranks; the command itself asks for GPUs."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ep_plugin import HierarchicalAllGather, HierarchicalReduceScatter, counts
from examples.compare.options import OURS, Options
from tests.integrations.on_cpus import make_distributed_optimizer_run_here
from tests.ranks import run_ranks, values

pytest.importorskip("megatron.core", reason="needs megatron-core")
pytest.importorskip("transformers", reason="examples.compare.train needs it")

WORLD, STEPS, MICRO_BATCHES = 2, 4, 2
# One dense layer and one mixture of DeepSeek-V3; two layers of the dense model.
OPTIONS = Options(
    model="megatron", arm=OURS, preset="tiny", checkpoint=None, layers=2, text=None, steps=STEPS, seq_len=32, batch=2,
    micro_batches=MICRO_BATCHES, lr=1e-3, dtype="float32", seed=0, fsdp2=False, overlap=False,
)  # fmt: skip
BUILT_IN = {"megatron": "alltoall", "megatron_dense": "stock"}
# Per step: a dispatch and a combine of the mixture, and those of their backward.
EXCHANGES = {"megatron": 4 * STEPS * MICRO_BATCHES, "megatron_dense": 0}
# In BF16 experts are grouped, and a row may be rounded elsewhere.
CASES = [(model, dtype) for model in BUILT_IN for dtype in ("float32", "bfloat16")]
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    """What every rank found; the world runs once, all models and arms."""
    return values(run_ranks(WORLD, _run_rank, timeout_s=240, framework="megatron"))


@pytest.mark.slow
@pytest.mark.parametrize(("model", "dtype"), CASES)
def test_both_arms_have_the_same_losses(results: list[dict[str, Any]], model: str, dtype: str) -> None:
    for found in results:
        ours, stock = found[model, dtype, OURS]["losses"], found[model, dtype, BUILT_IN[model]]["losses"]
        assert len(ours) == STEPS and ours[-1] < ours[0]
        assert ours[0] == pytest.approx(math.log(256), abs=0.3)  # it guesses
        assert ours == pytest.approx(stock, rel=TOLERANCE[dtype])


@pytest.mark.slow
@pytest.mark.parametrize(("model", "dtype"), CASES)
def test_every_exchange_gather_and_sum_is_ours_and_none_in_the_other_arm(
    results: list[dict[str, Any]], model: str, dtype: str
) -> None:
    for found in results:
        ours, stock = found[model, dtype, OURS], found[model, dtype, BUILT_IN[model]]
        assert ours["calls"]["HierarchicalAllGather"] >= STEPS
        assert ours["calls"]["HierarchicalReduceScatter"] >= STEPS
        assert ours["sums"] == {torch.float32}
        assert ours["served"] == {"megatron": {"served": ours["calls"].total() + EXCHANGES[model], "left": 0}}
        assert stock["served"] == {} and not stock["calls"]


@pytest.mark.slow
@pytest.mark.parametrize("model", BUILT_IN)
def test_gradients_are_of_the_mean_loss_over_ranks_and_batches(results: list[dict[str, Any]], model: str) -> None:
    for found in results:
        assert found[model]["slope"] == pytest.approx(1.0, abs=0.1)
        assert found[model]["micro batches"] < 1e-5 < found[model]["without the first"]


@pytest.mark.slow
def test_arms_that_would_not_be_ours_are_refused(results: list[dict[str, Any]]) -> None:
    for found in results:
        assert found["refused"] == [
            "EP_PLUGIN=megatron: expected ready, got off (not in EP_PLUGIN)",
            "flex: expected EpPluginTokenDispatcher, got NoneType; install ep_plugin",
        ]


def _run_rank(rank: int) -> dict[str, Any]:
    make_distributed_optimizer_run_here()
    from megatron.core import parallel_state
    from megatron.core.transformer.moe import moe_layer

    from ep_plugin.integrations import hooks
    from examples.compare import megatron, train

    calls: Counter[str] = Counter()
    sums: set[torch.dtype] = set()
    for collective in (HierarchicalAllGather, HierarchicalReduceScatter):
        collective.__call__ = _counted(collective.__call__, calls, sums)  # type: ignore[method-assign]
    found: dict[Any, Any] = {"refused": [_refusal(megatron)]}
    for model, dtype in CASES:
        for arm in (BUILT_IN[model], OURS):
            (hooks.enable if arm == OURS else hooks.disable)(["megatron"])
            counts.num_served.clear()
            calls.clear()
            sums.clear()
            options = replace(OPTIONS, model=model, arm=arm, dtype=dtype)
            trained = train.train(options, torch.device("cpu"))
            found[model, dtype, arm] = trained | {"calls": calls.copy(), "sums": sums.copy()}
        if dtype == "float32":
            found[model] = _gradients_of(train.backward, megatron.build_model(options), rank)
        if (model, dtype) == CASES[0]:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(moe_layer, "MoEFlexTokenDispatcher", lambda *args, **kwargs: None)
                found["refused"].append(_refusal(megatron))
        parallel_state.destroy_model_parallel()
    return found


def _counted(call: Callable[..., Any], calls: Counter[str], sums: set[torch.dtype]) -> Callable[..., Any]:
    @functools.wraps(call)
    def counted(self: Any, output: torch.Tensor, *args: Any, **options: Any) -> Any:
        calls[type(self).__name__] += 1
        if isinstance(self, HierarchicalReduceScatter):
            sums.add(output.dtype)
        return call(self, output, *args, **options)

    return counted


def _refusal(module: Any) -> str:
    with pytest.raises(RuntimeError) as raised:
        module.build_model(OPTIONS)
    return str(raised.value)


def _gradients_of(backward: Any, model: Any, rank: int) -> dict[str, float]:
    """How far the gradients of two batches at once are from the mean of each one's, and from half of the second's; and
    how far the mean loss falls along them, over what they say."""
    generator = torch.Generator().manual_seed(10 + rank)
    batches = [torch.randint(256, (2, 16), generator=generator) for _ in range(2)]
    first, second, both = (_gradients(backward, model, some) for some in (batches[:1], batches[1:], batches))
    scale = float(both.abs().max())
    return {
        "micro batches": float((both - (first + second) / 2).abs().max()) / scale,
        "without the first": float((both - second / 2).abs().max()) / scale,
        "slope": _slope(model, batches),
    }


def _gradients(backward: Any, model: Any, batches: list[torch.Tensor]) -> torch.Tensor:
    """As `main_grad` of the parameters, and flat."""
    model.parallel.zero_grad_buffer()
    backward(model, batches)
    model.parallel.finish_grad_sync()
    for buffer in [*model.parallel.buffers, *model.parallel.expert_parallel_buffers]:
        group = buffer.data_parallel_group
        for bucket in buffer.buckets:
            shard = bucket.grad_data.chunk(group.size())[group.rank()].clone()
            dist.all_gather(list(bucket.grad_data.chunk(group.size())), shard, group=group)
    return torch.cat([parameter.main_grad.flatten() for parameter in model.parameters()])


def _slope(model: Any, batches: list[torch.Tensor]) -> float:
    square = sum(
        parameter.main_grad.double().square().sum() for parameter in model.parameters() if not _is_expert(parameter)
    )
    of_experts = torch.zeros((), dtype=torch.float64)
    for parameter in filter(_is_expert, model.parameters()):
        of_experts += parameter.main_grad.double().square().sum()
    dist.all_reduce(of_experts)
    length = 0.01 / float(square + of_experts)
    before = _mean_loss(model, batches)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(length * parameter.main_grad)
    return (before - _mean_loss(model, batches)) / 0.01


def _is_expert(parameter: torch.nn.Parameter) -> bool:
    return not getattr(parameter, "allreduce", True)


def _mean_loss(model: Any, batches: list[torch.Tensor]) -> float:
    with torch.no_grad():
        total = sum(model(input_ids=tokens, labels=tokens).loss.double() for tokens in batches)
    dist.all_reduce(total)
    return float(total) / len(batches) / dist.get_world_size()
