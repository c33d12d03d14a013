"""The suite `layers` of Megatron-core: its MoELayer.

Without TransformerEngine Megatron's grouped experts are its GroupedMLP, see serve_grouped_products.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist

from ep_plugin.bench.suites.layers import EXPERTS, OURS, STOCK, LayersSuite, Tensors
from ep_plugin.bench.timing import Run
from ep_plugin.moe.communicator import MoECommunicator
from ep_plugin.testing.megatron import make_megatron_run_here, serve_grouped_products, without_transformer_engine

_DISPATCHERS = {STOCK: "alltoall", OURS: "flex"}
_SEED = 1
ROUTER = "router alone"

Batch = tuple[torch.Tensor, torch.Tensor]  # tokens, and the gradient of the output, `[T, 1, H]`


class FrameworkLayers:
    """Megatron-core's MoELayer, one per dispatcher.

    They share router and experts, the router the same on all ranks. Routing is the plain top-k of sigmoid scores, in
    float32, without groups of experts: for random tokens uniformly random.
    """

    layer_name = "MoE layer"

    def __init__(self, suite: LayersSuite, device: torch.device) -> None:
        self._suite, self._device = suite, device
        if device.type == "cpu":
            make_megatron_run_here()
        without_transformer_engine()
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
        from megatron.core.transformer.moe.moe_layer import MoELayer

        from ep_plugin.integrations import megatron

        megatron.switch_on()
        parallel_state.initialize_model_parallel(expert_model_parallel_size=suite.ranks)
        if device.type == "cuda":
            model_parallel_cuda_manual_seed(_SEED)
        self.experts = "SequentialMLP: one expert after the other" if suite.sequential else serve_grouped_products()
        self._layers: dict[str, Any] = {}
        for impl, dispatcher in _DISPATCHERS.items():
            layer = MoELayer(_config(suite, dispatcher, device), _submodules(suite), layer_number=1)
            layer.to(device=device, dtype=torch.bfloat16).train()
            if self._layers:
                layer.router, layer.experts = self._layers[STOCK].router, self._layers[STOCK].experts
            self._layers[impl] = layer
        _initialise(self._layers[STOCK])
        assert type(self._layers[OURS].token_dispatcher) is megatron.EpPluginTokenDispatcher

    def batch(self, turn: int) -> Batch:
        generator = torch.Generator(self._device).manual_seed(turn * self._suite.ranks + dist.get_rank())
        shape = (self._suite.tokens, 1, self._suite.hidden)
        x, dy = (torch.randn(shape, generator=generator, device=self._device).bfloat16() for _ in range(2))
        return x.requires_grad_(), dy

    def step(self, impl: str, batch: Batch) -> Run:
        layer, (x, dy) = self._layers[impl], batch

        def step() -> torch.Tensor:
            layer.zero_grad(set_to_none=True)
            x.grad = None
            y, _ = layer(x)
            y.backward(dy)
            return y

        return step

    def forward_backward(self, impl: str, batch: Batch) -> Tensors:
        layer, x, y = self._layers[impl], batch[0], self.step(impl, batch)()
        found = {"y": y.detach(), "x.grad": x.grad}  # type: ignore[attr-defined]
        found |= {f"{name}.grad": parameter.grad for name, parameter in layer.named_parameters()}
        layer.zero_grad(set_to_none=True)
        x.grad = None
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def alone(self, batch: Batch) -> dict[str, Run]:
        layer, x = self._layers[STOCK], batch[0]
        given: list[Any] = []
        hook = layer.experts.register_forward_pre_hook(lambda module, inputs: given.extend(inputs))
        with torch.no_grad():
            layer(x)
        hook.remove()
        rows, counts, probs = given
        rows, probs = (tensor.detach().clone().requires_grad_() for tensor in (rows, probs))
        dy, router_dy = torch.randn_like(rows), torch.rand_like(layer.router(x)[0].detach())

        def experts() -> torch.Tensor:
            layer.zero_grad(set_to_none=True)
            rows.grad = probs.grad = None
            y, _ = layer.experts(rows, counts, probs)
            y.backward(dy)
            return y

        def router() -> torch.Tensor:
            layer.zero_grad(set_to_none=True)
            x.grad = None
            probs, _ = layer.router(x)
            probs.backward(router_dy)
            return probs

        return {EXPERTS: experts, ROUTER: router}

    def ids(self, batch: Batch) -> torch.Tensor:
        with torch.no_grad():
            chosen = self._layers[STOCK].router(batch[0])[1]  # bool [T, E]
        found: torch.Tensor = chosen.int().topk(self._suite.topk, dim=1).indices
        return found

    def communicator(self) -> MoECommunicator:
        found: MoECommunicator = self._layers[OURS].token_dispatcher._communicator
        return found


def _config(suite: LayersSuite, dispatcher: str, device: torch.device) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=1,
        hidden_size=suite.hidden,
        ffn_hidden_size=suite.ffn,
        moe_ffn_hidden_size=suite.ffn,
        num_attention_heads=1,
        num_moe_experts=suite.experts,
        moe_router_topk=suite.topk,
        moe_router_score_function="sigmoid",
        moe_router_load_balancing_type="none",
        moe_router_dtype="fp32",
        moe_token_dispatcher_type=dispatcher,
        moe_grouped_gemm=not suite.sequential,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        expert_model_parallel_size=suite.ranks,
        params_dtype=torch.bfloat16,
        bf16=True,
        perform_initialization=False,
        use_cpu_initialization=device.type == "cpu",
    )


def _submodules(suite: LayersSuite) -> Any:
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The legacy GroupedMLP will be deprecated")
        spec = get_moe_module_spec(use_te=False, num_experts=suite.experts, moe_grouped_gemm=not suite.sequential)
    return spec.submodules


@torch.no_grad()
def _initialise(layer: Any) -> None:
    for module, seed in ((layer.router, 0), (layer.experts, 1 + dist.get_rank())):
        for parameter in module.parameters():
            parameter.normal_(0.0, 0.02, generator=torch.Generator(parameter.device).manual_seed(seed))
