"""What an MoE layer runs in torch beside the exchange and the experts, counted, so that no operation comes back.

The experts of these tests return their rows, so that all other operations are of the integration or of autograd.
docs/transformers.md and docs/megatron.md say what they cost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tests.ranks import run_ranks, values

pytestmark = pytest.mark.slow

WORLD, TOKENS, HIDDEN, EXPERTS, TOPK = 2, 64, 32, 8, 4
# They move no bytes of tensors, or only if one of COPIES is below.
FREE = {"contiguous", "detach", "empty", "empty_like", "flatten", "reshape", "select", "slice", "to", "view"}
COPIES = {"aten::_to_copy", "aten::clone"}
# Without a profiler combine has no second output, whose gradient this is.
EMPTY = {"zeros": 1}


def operations(step: Callable[[], object]) -> dict[str, int]:
    """The operations of torch by name, without those inside of others, of dispatch and of combine."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        step()
    found: Counter[str] = Counter()
    for event in profiled.events():
        kind, _, name = event.name.partition("::")
        caller = event.cpu_parent
        while caller is not None and not caller.name.startswith(("aten::", "ep_plugin::")):
            caller = caller.cpu_parent
        is_free = name in FREE and not any(child.name in COPIES for child in event.cpu_children)
        if kind == "aten" and caller is None and not is_free:
            found[name] += 1
    return dict(found)


def counted(forward: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> dict[str, dict[str, int]]:
    """The operations of the second forward and backward. The first has grown memory."""
    forward(*inputs).sum().backward()
    outputs: list[torch.Tensor] = []
    found = {"forward": operations(lambda: outputs.append(forward(*inputs)))}
    gradient = torch.ones_like(outputs[0])
    for tensor in inputs:
        tensor.grad = None
    return found | {"backward": operations(lambda: outputs[0].backward(gradient))}


def routed(rank: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, ids and weights."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(TOKENS, HIDDEN, generator=generator).to(dtype).requires_grad_()
    weights, ids = torch.rand(TOKENS, EXPERTS, generator=generator).topk(TOPK)
    return x, ids, weights.to(dtype).requires_grad_()


# -- transformers ----------------------------------------------------------------------------------------------------


def _transformers(rank: int) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    from ep_plugin.integrations.transformers import expert_parallel

    expert_parallel.sorted_experts = lambda experts, rows, *unused: rows
    mesh = init_device_mesh("cpu", (WORLD, 1), mesh_dim_names=("ep", "tp"))
    sizes = dict(hidden_size=HIDDEN, moe_intermediate_size=16, num_experts=EXPERTS // WORLD)
    config = SimpleNamespace(**sizes, hidden_act="silu", _experts_implementation="grouped_mm")
    exchange = expert_parallel.EpPluginExpertParallel(Qwen3MoeExperts(config), mesh["ep"], mesh["tp"])
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        x, ids, weights = routed(rank, dtype)
        found[str(dtype)] = counted(lambda x, weights, ids=ids: exchange(x, ids, weights), x, weights)
    return found


def test_of_transformers() -> None:
    pytest.importorskip("transformers", minversion="5.23")
    for found in values(run_ranks(WORLD, _transformers, framework="transformers")):
        assert found["torch.float32"] == {"forward": {}, "backward": EMPTY}
        cast = {"to": 1}  # weights [T, K] travel in float32
        assert found["torch.bfloat16"] == {"forward": cast, "backward": cast | EMPTY}


# -- Megatron --------------------------------------------------------------------------------------------------------


def _megatron(rank: int) -> dict[str, Any]:
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection

    from ep_plugin.integrations.megatron import EpPluginTokenDispatcher
    from tests.integrations.megatron_layers import initialise, make_config

    initialise(1, WORLD)
    config = make_config("flex", 1, WORLD, hidden_size=HIDDEN, num_moe_experts=EXPERTS, moe_router_topk=TOPK)
    dispatcher = EpPluginTokenDispatcher(EXPERTS // WORLD, [], config, get_default_pg_collection())
    x, ids, weights = routed(rank)
    chosen = torch.zeros(TOKENS, EXPERTS, dtype=torch.bool).scatter_(1, ids, True)
    probs = torch.zeros(TOKENS, EXPERTS).scatter_(1, ids, weights.detach()).requires_grad_()

    def forward(x: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        rows, some = dispatcher.dispatch_preprocess(x, chosen, probs)
        rows, _, _ = dispatcher.dispatch_postprocess(*dispatcher.token_dispatch(rows, some))
        return dispatcher.combine_postprocess(dispatcher.token_combine(dispatcher.combine_preprocess(rows)))

    return counted(forward, x, probs)


def test_of_megatron() -> None:
    pytest.importorskip("megatron.core", reason="needs megatron-core")
    for found in values(run_ranks(WORLD, _megatron, framework="megatron")):
        assert found["forward"] == {"topk": 1, "sub": 1, "__or__": 1, "gather": 1}
        assert found["backward"] == {"gather_backward": 1, "new_zeros": 1} | EMPTY


# -- torchtitan ------------------------------------------------------------------------------------------------------


def _torchtitan(rank: int) -> dict[str, Any]:
    from ep_plugin.testing.torchtitan import without_triton

    without_triton()
    from torch.distributed.device_mesh import init_device_mesh

    from ep_plugin.integrations.torchtitan import EpPluginTokenDispatcher

    dispatcher = EpPluginTokenDispatcher.Config(num_experts=EXPERTS, top_k=TOPK).build()
    dispatcher.wire_meshes(ep_mesh=init_device_mesh("cpu", (WORLD,), mesh_dim_names=("ep",)))
    x, ids, scores = routed(rank)
    counts = ids.flatten().bincount(minlength=EXPERTS)

    def forward(x: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        rows, _, metadata = dispatcher.dispatch(x, scores, ids, counts)
        return dispatcher.combine(rows, metadata, x)

    return counted(forward, x, scores)


def test_of_torchtitan() -> None:
    from ep_plugin.testing.torchtitan import without_triton

    without_triton()
    pytest.importorskip("torchtitan.models.qwen3", reason="needs torchtitan", exc_type=ImportError)
    for found in values(run_ranks(WORLD, _torchtitan)):
        assert found == {"forward": {}, "backward": EMPTY}
