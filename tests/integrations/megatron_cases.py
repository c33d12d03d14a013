"""A layer of Megatron-core's through our dispatcher and through its alltoall, on CPU ranks."""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ep_plugin.errors import NotSupported
from tests.integrations.megatron_layers import make_config, make_layer

VERSION = importlib.metadata.version("megatron-core")
RELEASE = tuple(map(int, VERSION.split(".")[:2]))
GRAPHS = "cuda_graph_modules" if RELEASE >= (0, 18) else "cuda_graph_scope"
WORLD = 4
LIMIT = 1e-5
HYBRIDEP = {"moe_flex_dispatcher_backend": "hybridep"}


@dataclass(frozen=True)
class Case:
    """One layer. options: of both configurations; ours: beside them, of the one with our dispatcher."""

    tp: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    ours: dict[str, Any] = field(default_factory=dict)
    tokens: int = 7


DEEPSEEK = {
    "moe_router_topk": 4,
    "moe_router_score_function": "sigmoid",
    "moe_router_num_groups": 4,
    "moe_router_group_topk": 2,
    "moe_router_topk_scaling_factor": 2.5,
    "moe_router_enable_expert_bias": True,
    "moe_shared_expert_intermediate_size": 24,
}


def run_case(rank: int, case: Case, dispatcher: str = "EpPluginTokenDispatcher") -> dict[str, Any]:
    """Differences of the output and of each gradient, relative to the largest value of alltoall's, and the exchanges
    of each layer.

    dispatcher: the class that "flex" stands for.
    """
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: F401

    ep = WORLD // case.tp
    layers = {}
    for kind, more in (("alltoall", {}), ("flex", case.ours)):
        torch.manual_seed(11)
        layers[kind] = make_layer(make_config(kind, case.tp, ep, **case.options, **more))
    assert type(layers["flex"].token_dispatcher).__name__ == dispatcher
    layers["flex"].load_state_dict(layers["alltoall"].state_dict())
    results, counts = {}, {}
    for kind, layer in layers.items():
        generator = torch.Generator().manual_seed(100 + rank)
        x = torch.randn((case.tokens, 2, 32), generator=generator).to(layer.config.params_dtype).requires_grad_()
        with _counting() as counts[kind]:
            y, bias = layer(x)
            y.backward(torch.randn(y.shape, generator=generator).to(y.dtype))
        assert bias is None
        results[kind] = {"y": y.detach(), "x.grad": x.grad} | {
            name: parameter.grad for name, parameter in layer.named_parameters() if parameter.grad is not None
        }
    assert results["flex"].keys() == results["alltoall"].keys()
    return {
        "difference": {name: relative(results["flex"][name], theirs) for name, theirs in results["alltoall"].items()},
        "ours": counts["flex"],
        "theirs": counts["alltoall"],
    }


def refusal(options: dict[str, Any]) -> Exception:
    """With which a layer with our dispatcher is refused when it is built."""
    config = make_config("flex", 1, WORLD, **options)
    with pytest.raises(NotSupported) as caught:
        make_layer(config)
    return caught.value


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp_min(1e-3)) if theirs.numel() else 0.0


class _counting:
    """Calls of our operators, and of torch's all-to-all, in a forward (and what it recomputes in backward)."""

    def __enter__(self) -> dict[str, int]:
        from ep_plugin import MoECommunicator
        from ep_plugin.deep_ep import Buffer

        self.counts = {"dispatch": 0, "combine": 0, "stock": 0}
        self.inside = False  # a call of Buffer that makes one of MoECommunicator is one call
        self.patch = pytest.MonkeyPatch()
        for owner, name, key in (
            (MoECommunicator, "dispatch", "dispatch"),
            (MoECommunicator, "combine", "combine"),
            (MoECommunicator, "combine_with_values", "combine"),
            (Buffer, "dispatch", "dispatch"),
            (Buffer, "combine", "combine"),
            (dist, "all_to_all_single", "stock"),
        ):
            self.patch.setattr(owner, name, self._counted(getattr(owner, name), key))
        return self.counts

    def _counted(self, function: Callable[..., Any], key: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            outermost, self.inside = not self.inside, True
            self.counts[key] += outermost or key == "stock"
            try:
                return function(*args, **kwargs)
            finally:
                self.inside = not outermost

        return counted

    def __exit__(self, *error: object) -> None:
        self.patch.undo()
