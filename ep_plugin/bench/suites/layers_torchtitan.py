"""The suite `layers` of torchtitan: its routed experts. Routing is uniformly random and given: there is no router."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ep_plugin.bench.suites.layers import EXPERTS, OURS, STOCK, LayersSuite, Tensors
from ep_plugin.bench.timing import Run
from ep_plugin.moe.communicator import MoECommunicator
from ep_plugin.testing.torchtitan import without_triton


class Batch(NamedTuple):
    """The inputs of routed experts, and the gradient of their output, ``[1, T, H]`` as x."""

    x: torch.Tensor
    scores: torch.Tensor
    ids: torch.Tensor
    counts: torch.Tensor
    dy: torch.Tensor


class FrameworkLayers:
    """torchtitan's RoutedExperts, one per dispatcher."""

    layer_name = "routed experts"
    experts = "GroupedExperts, in BF16"

    def __init__(self, suite: LayersSuite, device: torch.device) -> None:
        self._suite, self._device = suite, device
        without_triton()
        from torch.distributed.device_mesh import init_device_mesh
        from torchtitan.distributed.utils import set_spmd_backend
        from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
        from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

        from ep_plugin.integrations.torchtitan import token_dispatcher

        set_spmd_backend("default")  # the all-to-all then goes over the mesh that it is given
        mesh = init_device_mesh(device.type, (suite.ranks,), mesh_dim_names=("ep",))
        few = GroupedExperts.Config(dim=8, hidden_dim=8, num_experts=1)
        stock = AllToAllTokenDispatcher.Config(num_experts=suite.experts, top_k=suite.topk)
        self._layers: dict[str, Any] = {
            impl: RoutedExperts.Config(inner_experts=few, token_dispatcher=dispatcher).build()
            for impl, dispatcher in ((STOCK, stock), (OURS, token_dispatcher(stock)))
        }
        local = suite.workload.local_experts
        all_here = GroupedExperts.Config(dim=suite.hidden, hidden_dim=suite.ffn, num_experts=local)
        with device:
            experts = _in_bfloat16(all_here.build)
        generator = torch.Generator(device).manual_seed(1 + dist.get_rank())
        for parameter in experts.parameters():
            parameter.data.normal_(0.0, 0.02, generator=generator)
        for layer in self._layers.values():
            layer.inner_experts = experts
            layer.token_dispatcher.wire_meshes(ep_mesh=mesh)

    def batch(self, turn: int) -> Batch:
        sizes, device = self._suite, self._device
        generator = torch.Generator(device).manual_seed(turn * sizes.ranks + dist.get_rank())
        shape = (1, sizes.tokens, sizes.hidden)
        x, dy = (torch.randn(shape, generator=generator, device=device).bfloat16() for _ in range(2))
        chances = torch.rand((1, sizes.tokens, sizes.experts), generator=generator, device=device)
        scores, ids = chances.topk(sizes.topk, dim=-1)
        counts = ids.flatten().bincount(minlength=sizes.experts)
        return Batch(x.requires_grad_(), scores.requires_grad_(), ids, counts, dy)

    def step(self, impl: str, batch: Batch) -> Run:
        layer = self._layers[impl]

        def step() -> torch.Tensor:
            self._forget(layer, batch)
            y = layer(*batch[:4])
            y.backward(batch.dy)
            return y

        return step

    def forward_backward(self, impl: str, batch: Batch) -> Tensors:
        layer, y = self._layers[impl], self.step(impl, batch)()
        found = {"y": y.detach(), "x.grad": batch.x.grad, "scores.grad": batch.scores.grad}  # type: ignore[attr-defined]
        found |= {f"{name}.grad": parameter.grad for name, parameter in layer.named_parameters()}
        self._forget(layer, batch)
        missing = [name for name, tensor in found.items() if tensor is None]
        assert not missing, f"no gradients: {missing}"
        return found

    def alone(self, batch: Batch) -> dict[str, Run]:
        layer = self._layers[OURS]
        given: list[Any] = []
        hook = layer.inner_experts.register_forward_pre_hook(lambda module, inputs: given.extend(inputs))
        with torch.no_grad():
            layer(*batch[:4])
        hook.remove()
        rows, counts = given[0].detach().clone().requires_grad_(), given[1]
        dy = torch.randn_like(rows)

        def experts() -> torch.Tensor:
            layer.zero_grad(set_to_none=True)
            rows.grad = None
            y = layer.inner_experts(rows, counts)
            y.backward(dy)
            return y

        return {EXPERTS: experts}

    def ids(self, batch: Batch) -> torch.Tensor:
        return batch.ids[0]

    def communicator(self) -> MoECommunicator:
        found: MoECommunicator = self._layers[OURS].token_dispatcher.communicator
        return found

    @staticmethod
    def _forget(layer: Any, batch: Batch) -> None:
        layer.zero_grad(set_to_none=True)
        batch.x.grad = batch.scores.grad = None


def _in_bfloat16(make: Callable[[], Any]) -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        return make()
    finally:
        torch.set_default_dtype(before)
