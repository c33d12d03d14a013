"""What scripts do with sharded models beside training them: each with our collectives as with stock, to the bit.

Two ranks: their sums have one order.
"""

from __future__ import annotations

import datetime
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils import _pytree as pytree

from ep_plugin import _C
from tests.integrations import fsdp2_cases as cases
from tests.integrations.beside_stock import differing
from tests.ranks import run_ranks, values

Gradients = list[torch.Tensor]


def _build(enabled: bool, *, layers: int = 3, width: int = 8, wrap: Callable[[torch.Tensor], Any] | None = None) -> Any:
    """`layers` linear layers, each sharded; `wrap` makes another kind of tensor of their weights."""
    from ep_plugin.integrations import fsdp2

    torch.manual_seed(width)
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])
    for layer in model:
        if wrap is not None:
            layer.weight = nn.Parameter(wrap(layer.weight.detach()))
        fully_shard(layer)
    fully_shard(model)
    if enabled:
        fsdp2.enable(model)
    return model


def _loss(model: Any, seed: int = 0) -> torch.Tensor:
    rows = torch.randn(4, model[0].in_features, generator=torch.Generator().manual_seed(seed))
    return model(rows * (dist.get_rank() + 1)).pow(2).mean()


def _taken(model: Any) -> Gradients:
    """This rank's gradients, which the model then has no more."""
    gradients = [torch.as_tensor(parameter.grad.to_local()).clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = None
    return gradients


def _step(model: Any, seed: int = 0) -> Gradients:
    _loss(model, seed).backward()
    return _taken(model)


def _pytorch_counts(rank: int, enabled: bool) -> int:
    model = _build(enabled)
    with CommDebugMode() as counts:
        _step(model)
    return counts.get_total_counts()


@pytest.mark.parametrize("enabled", [False, True], ids=["stock", "ours"])
def test_comm_debug_mode_counts_collectives_of_pytorch_alone(enabled: bool) -> None:
    layers = 3
    expected = 0 if enabled else layers * 3  # a gather in forward and in backward, and a reduction
    assert values(run_ranks(2, _pytorch_counts, enabled)) == [expected] * 2


def _everything_unsharded_ahead(enabled: bool) -> Gradients:
    """More layers at once than there are blocks."""
    model = _build(enabled, layers=_C.max_blocks + 6)
    first = _step(model)
    for layer in model:
        layer.unshard(async_op=True)
    return first + _step(model)


def _inference_first(enabled: bool) -> Gradients:
    """After a forward that is stock's: FSDP2's own very first must not be in inference mode."""
    from ep_plugin.integrations import fsdp2

    model = _build(False, layers=4)
    with torch.no_grad():
        _loss(model)
    if enabled:
        fsdp2.enable(model)
    with torch.inference_mode():
        _loss(model)
    gradients = _step(model)
    with torch.inference_mode():
        _loss(model)
    return gradients + _step(model)


class _SentAsFp8(torch.Tensor):
    """A weight that travels as FP8 bytes and a number, as torchao's FP8 weights do."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=inner.device,
            requires_grad=inner.requires_grad,
        )

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map_only(_SentAsFp8, lambda tensor: tensor.inner, (args, kwargs or {}))
        return pytree.tree_map_only(torch.Tensor, _SentAsFp8, function(*args, **kwargs))

    def fsdp_pre_all_gather(self, *_: Any) -> Any:
        rank = torch.full((1,), float(dist.get_rank()))
        return (self.inner.to(torch.float8_e4m3fn).view(torch.uint8), rank), None

    def fsdp_post_all_gather(self, gathered: Any, meta: Any, dtype: torch.dtype, *, out: Any = None) -> Any:
        rows, ranks = gathered
        assert ranks.tolist() == [0.0, 1.0]
        whole = rows.view(torch.float8_e4m3fn).to(dtype)
        if out is None:
            return whole, (rows,)
        with torch.autograd._unsafe_preserve_version_counter(out), torch.no_grad():
            out.copy_(whole)


def _fp8_weights(enabled: bool) -> Gradients:
    model = _build(enabled, wrap=_SentAsFp8)
    return _step(model) + _step(model, 1)


def _wrapped_weights(enabled: bool) -> Gradients:
    """Weights that wrap two tensors, of which FSDP2 knows nothing. Only the layer without such weights is served."""
    from ep_plugin.integrations import fsdp2

    model = _build(False, wrap=lambda weight: TwoTensor(weight, weight.clone()))
    model.append(nn.Linear(8, 8))
    fully_shard(model[-1])
    if enabled:
        fsdp2.enable(model)
    gradients = _step(model) + _step(model, 1)
    assert not enabled or fsdp2.launches(model).all_gathers == 2 * 2, "in forward and backward of two steps"
    return gradients


def _newer_settings(enabled: bool) -> Gradients:
    """FSDP2's settings that came with PyTorch 2.14 and 2.15, as far as this version has them."""
    model = _build(enabled, layers=4)
    settings = {
        "set_reduce_scatter_max_input_buffers": 3,
        "set_reduce_scatter_unused_params": True,
        "set_keep_unsharded_storage": True,
        "set_separate_reduce_scatter_group": True,
    }
    for name, value in settings.items():
        if hasattr(model, name):
            getattr(model, name)(value)
    return _step(model) + _step(model, 1)


def _two_models_in_turns(enabled: bool) -> Gradients:
    models = [_build(enabled, layers=4, width=width) for width in (8, 12)]
    gradients = []
    for seed in range(2):
        losses = [_loss(model, seed) for model in models]
        for loss in losses:
            loss.backward()
        gradients += [gradient for model in models for gradient in _taken(model)]
    return gradients


def _disabled_with_work_outstanding(enabled: bool) -> Gradients:
    from ep_plugin.integrations import fsdp2

    model = _build(enabled, layers=4)
    gradients = _step(model)
    for layer in model:
        layer.unshard(async_op=True)
    fsdp2.disable(model)
    gradients += _step(model, 1)
    if enabled:
        fsdp2.enable(model)
    loss = _loss(model, 2)
    fsdp2.disable(model)
    loss.backward()
    return gradients + _taken(model)


USES: dict[str, Callable[[bool], Gradients]] = {
    "everything unsharded ahead": _everything_unsharded_ahead,
    "inference first": _inference_first,
    "weights that travel as fp8": _fp8_weights,
    "weights that wrap tensors": _wrapped_weights,
    "newer settings": _newer_settings,
    "two models in turns": _two_models_in_turns,
    "disabled with work outstanding": _disabled_with_work_outstanding,
}


@pytest.fixture(scope="module")
def results() -> Callable[[], list[dict[str, Any]]]:
    """Of every rank, by use: which gradients differ from stock's, or what was raised; the ranks run once."""
    return functools.cache(lambda: values(run_ranks(2, _run_uses, timeout_s=200)))


def _run_uses(rank: int) -> dict[str, Any]:
    return differing(USES)


@pytest.mark.parametrize("name", USES)
def test_as_with_stock(results, name: str) -> None:
    for rank in results():
        assert rank[name] == []


def _large_root(rank: int) -> dict[str, Any]:
    """CPUs as GPUs are: with a limit, below the size of any group, copies, and inputs of sums that nobody maps."""
    from ep_plugin import HierarchicalReduceScatter
    from ep_plugin.integrations import fsdp2, pairs
    from ep_plugin.integrations.fsdp2 import in_place

    in_place.serve = lambda group: None
    pairs.STOCK_FROM_BYTES = {"cpu": 1}
    HierarchicalReduceScatter.maps_nothing_on = ("cpu",)
    case = cases.Case(vocabulary=2000)
    stock = cases.train(case, cases.build(case))
    model = cases.build(case)
    fsdp2.enable(model)
    with cases.counting_stock_calls() as left:
        ours = cases.train(case, model)
    (pair,) = pairs._pairs.values()
    blocks = [len(collective._engine.blocks) for collective in (pair.all_gather, pair.reduce_scatter)]
    counts = {"ran": cases.as_dict(fsdp2.launches(model)), "left": cases.as_dict(left)}
    return {**cases.difference(ours, stock), **counts, "blocks": blocks}


def test_large_groups_that_peers_do_not_map_are_left_to_stock() -> None:
    of_root, first_layer, steps = 1, 1, cases.STEPS  # the first layer's first is of no other's size yet
    for rank in values(run_ranks(2, _large_root)):
        assert rank["losses"] == rank["parameters"] == 0.0
        left = of_root * steps + first_layer
        assert rank["left"] == {"all_gathers": left, "reduce_scatters": 0}
        assert rank["blocks"] == [2, 0]
        assert rank["ran"] == {
            "parameter_groups": cases.LAYERS + 1,
            "all_gathers": 2 * cases.LAYERS * steps - first_layer,
            "reduce_scatters": (cases.LAYERS + of_root) * steps,
        }


def _replaced_by_the_script(rank: int) -> None:
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather

    from ep_plugin.integrations import fsdp2, pairs

    model = _build(True)
    _step(model)
    (pair,) = pairs._pairs.values()
    own = DefaultAllGather()
    for layer in model:
        layer.set_custom_all_gather(own)
    fsdp2.disable(model)
    assert pairs._pairs == {}, pair.num_users
    assert cases.collectives_of(model)[::2] == [own] * len(model)
    fsdp2.enable(model)
    _step(model)
    model[0].set_custom_all_gather(own)
    fsdp2.enable(model)  # takes its place again
    _step(model)
    assert fsdp2.launches(model).all_gathers > 0
    fsdp2.disable(model)
    assert pairs._pairs == {}


def test_collectives_that_the_script_has_replaced_are_closed_too() -> None:
    values(run_ranks(2, _replaced_by_the_script))


def _of_their_own_timeout(rank: int) -> tuple[list[float], bool]:
    from ep_plugin.integrations.pairs import PairUser

    first, again, other = (dist.new_group(timeout=datetime.timedelta(seconds=seconds)) for seconds in (50, 50, 3))
    user, timeouts, model = PairUser("fsdp2"), [], torch.nn.Module()
    for group in (first, other):
        pair = user.pair(group, torch.device("cpu"), model)
        pair.all_gather(torch.empty(2), torch.ones(1))
        timeouts.append(pair.all_gather.engine_on(torch.device("cpu")).timeout_s)
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=7), first)
    same = user.pair(first, torch.device("cpu"), model) is user.pair(again, torch.device("cpu"), model)
    user.leave()
    return timeouts, same


def test_groups_wait_as_long_as_they_say() -> None:
    """Those of a model over the same ranks share their collectives if they wait as long, also if that changes later."""
    assert values(run_ranks(2, _of_their_own_timeout)) == [([50.0, 3.0], True)] * 2
