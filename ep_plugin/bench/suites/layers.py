"""The suite `layers` times forward and backward of a framework's MoE layer, with its own all-to-all and with ours.

One set of experts (and one router, where the layer has one) serves both layers. `experts alone` are the same experts,
forward and backward, on the rows that our dispatcher gave them, with no exchange. First both layers run on two batches
in turn, and outputs and all gradients must agree. The second batch is the one that is timed. `bytes_wire` counts the
bytes of dispatch, combine and the backward of both, in the busier direction of the busiest rank.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import torch
import torch.distributed as dist
import typer

from ep_plugin.bench.exchange.cases import sms_of
from ep_plugin.bench.exchange.workload import CUDA_SIZES, ROUNDTRIP, ExchangeSuite, rows_on_the_wire
from ep_plugin.bench.suite import BY_BACKEND, OURS, Way, check_names, require_module, time_ways
from ep_plugin.bench.timing import clock_of
from ep_plugin.moe.communicator import MoECommunicator
from ep_plugin.testing.megatron import serve_grouped_products, submodules_of, without_transformer_engine
from ep_plugin.testing.torchtitan import without_triton

STOCK, EXPERTS, ROUTER = "alltoall", "experts alone", "router alone"
FRAMEWORKS = {"megatron": "megatron.core", "torchtitan": "torchtitan"}
LIMIT = 2e-2  # for BF16: the largest difference of a tensor divided by its largest value
_CROSSINGS = 4  # dispatch, combine, and the backward of both
_CPU_SIZES: dict[str, Any] = {"ranks": 2, "tokens": 256, "hidden": 512, "topk": 4, "experts": 16, "ffn": 128}

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class LayersSuite(ExchangeSuite):
    """Times a framework's MoE layer, forward and backward: with its all-to-all, with ours, and its experts alone."""

    command_name = "layers"
    defaults: ClassVar = {"cpu": _CPU_SIZES, "cuda": CUDA_SIZES | {"ffn": 2048}}
    least: ClassVar = ExchangeSuite.least | {"ffn": 1}

    framework: Annotated[str, typer.Option(help=", ".join(FRAMEWORKS) + ".")]
    ffn: Annotated[int, typer.Option(help="Experts' intermediate size. Default on cuda: 2048.")] = BY_BACKEND

    def __post_init__(self) -> None:
        super().__post_init__()
        check_names("framework", FRAMEWORKS, [self.framework])
        if (self.framework, self.backend) == ("megatron", "cpu"):
            raise ValueError("backend: expected cuda for megatron, whose layers call CUDA, got 'cpu'")
        for name in ("hidden", "ffn"):
            if getattr(self, name) % 8:
                raise ValueError(f"{name}: expected a multiple of 8, for rows of 16 bytes, got {getattr(self, name)}")
        require_module(FRAMEWORKS[self.framework], "framework", "whose layers are measured")

    @property
    def name(self) -> str:
        return f"layers_{self.framework}"

    def measure(self, device: torch.device) -> dict[str, Any]:
        setup = (_megatron if self.framework == "megatron" else _torchtitan)(self, device)
        batches = [setup.batch(turn) for turn in range(2)]
        batch, difference = batches[-1], dict[str, float]()
        steps = {impl: _step(setup.layers[impl], batch.inputs, batch.dy) for impl in (STOCK, OURS)}
        given: list[torch.Tensor] = []  # the tensors that our layer passes to the experts
        hook = setup.experts.register_forward_pre_hook(lambda module, inputs: given.extend(inputs))
        with torch.no_grad():
            setup.layers[OURS](*batch.inputs)
        hook.remove()
        steps[EXPERTS] = _alone(setup.experts, given)
        if setup.router is not None:
            steps[ROUTER] = _alone(setup.router, batch.inputs)

        def compare(_: Any) -> str | None:
            for turn, compared in enumerate(batches):
                theirs, ours = (_output_and_gradients(setup.layers[impl], compared) for impl in (STOCK, OURS))
                found = differences(ours, theirs).items()
                difference.update({f"{name} of batch {turn}": value for name, value in found})
                del theirs, ours
            return "; ".join(too_different(difference)) or None

        ids: list[torch.Tensor] = [torch.empty(0)] * self.ranks
        dist.all_gather_object(ids, batch.ids.cpu())
        row_bytes = self.hidden * torch.bfloat16.itemsize
        size = f"T {self.tokens}, H {self.hidden}, {self.ffn} wide, top {self.topk} of {self.experts}"
        ways = [Way(case=f"{setup.layer_name}, {size}", impl=impl, run=step) for impl, step in steps.items()]
        for index, impl in enumerate((STOCK, OURS)):  # an all-to-all sends a row per expert, ours one per rank
            wire = _CROSSINGS * rows_on_the_wire(self.workload, ids, dedup=impl == OURS) * row_bytes
            ways[index] = replace(ways[index], bytes_wire=wire)
        sms = sms_of(setup.communicator(), ROUNDTRIP, self.workload, row_bytes) if device.type == "cuda" else None
        ways[1] = replace(ways[1], check=compare, sms=sms, holders=[setup.communicator()])
        rows = time_ways(clock_of(device), ways, self.iterations)
        notes = notes_of(setup.about, {row["impl"]: row["median_us"] for row in rows})
        return {"rows": rows, "notes": notes, "max_rel_diff": max(difference.values())}


@dataclass(frozen=True)
class _Batch:
    """One rank's tokens: `inputs` of the layer, `dy`, the gradient of its output, and the expert `ids` ``[T, K]``."""

    inputs: tuple[torch.Tensor, ...]
    dy: torch.Tensor
    ids: torch.Tensor


@dataclass(frozen=True)
class _Setup:
    """A framework's layers in BF16, by implementation, STOCK and OURS. They share experts and router.

    Attributes:
        layer_name: the name of the layer in names of cases.
        about: a sentence about the experts.
        batch: makes this rank's tokens, which differ from turn to turn.
        communicator: returns the communicator of our layer, once the layer has run.
    """

    layer_name: str
    about: str
    layers: dict[str, Any]
    experts: torch.nn.Module
    router: torch.nn.Module | None
    batch: Callable[[int], _Batch]
    communicator: Callable[[], MoECommunicator]


def _step(module: Any, inputs: Sequence[torch.Tensor], dy: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Returns a step that runs forward and backward with new gradients, as after zero_grad, and returns the output."""

    def step() -> torch.Tensor:
        _forget(module, inputs)
        y = _first(module(*inputs))
        y.backward(dy)
        return y

    return step


def _alone(module: Any, inputs: Sequence[torch.Tensor]) -> Callable[[], torch.Tensor]:
    """Returns the step of a part of the layer, on copies of the inputs."""
    inputs = [tensor.detach().clone().requires_grad_(tensor.is_floating_point()) for tensor in inputs]
    with torch.no_grad():
        dy = torch.randn_like(_first(module(*inputs)))
    return _step(module, inputs, dy)


def _forget(module: Any, inputs: Sequence[torch.Tensor]) -> None:
    module.zero_grad(set_to_none=True)
    for tensor in inputs:
        tensor.grad = None


def _first(found: Any) -> torch.Tensor:
    """Returns the output of a module that may return more than that."""
    return found[0] if isinstance(found, tuple) else found


def _megatron(suite: LayersSuite, device: torch.device) -> _Setup:
    """Makes a MoELayer of Megatron-core for each dispatcher. Collective.

    Routing is the plain top-k of sigmoid scores, which is uniformly random for random tokens. All ranks have the same
    router.
    """
    without_transformer_engine()
    from megatron.core import parallel_state
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.transformer_config import TransformerConfig

    from ep_plugin.integrations import megatron

    megatron.enable()
    parallel_state.initialize_model_parallel(expert_model_parallel_size=suite.ranks)
    if device.type == "cuda":
        model_parallel_cuda_manual_seed(1)
    grouped = serve_grouped_products()
    about = grouped or "SequentialMLP, a product per expert"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The legacy GroupedMLP will be deprecated")
        spec = get_moe_module_spec(use_te=False, num_experts=suite.experts, moe_grouped_gemm=grouped is not None)
    layers = {}
    for impl, dispatcher in ((STOCK, "alltoall"), (OURS, "flex")):
        config = TransformerConfig(
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
            moe_grouped_gemm=grouped is not None,
            add_bias_linear=False,
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
            expert_model_parallel_size=suite.ranks,
            params_dtype=torch.bfloat16,
            bf16=True,
            perform_initialization=False,
            use_cpu_initialization=device.type == "cpu",
        )
        layer = MoELayer(config, submodules_of(spec), layer_number=1)
        layers[impl] = layer.to(device=device, dtype=torch.bfloat16).train()
    stock, ours = layers[STOCK], layers[OURS]
    assert type(ours.token_dispatcher) is megatron.EpPluginTokenDispatcher
    ours.router, ours.experts = stock.router, stock.experts
    _initialise(stock.router, 0)
    _initialise(stock.experts, 1 + dist.get_rank())

    def batch(turn: int) -> _Batch:
        x, dy, _ = _random_tokens(suite, device, turn, (suite.tokens, 1, suite.hidden))
        with torch.no_grad():
            chosen = stock.router(x)[1]  # bool [T, E]
        return _Batch((x,), dy, chosen.int().topk(suite.topk, dim=1).indices)

    comm = ours.token_dispatcher
    return _Setup("MoE layer", about, layers, stock.experts, stock.router, batch, lambda: comm._communicator)


def _torchtitan(suite: LayersSuite, device: torch.device) -> _Setup:
    """Makes RoutedExperts of torchtitan for each dispatcher. They take the routing, which is uniformly random."""
    without_triton()
    from torch.distributed.device_mesh import init_device_mesh
    from torchtitan.distributed.utils import set_spmd_backend
    from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
    from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

    from ep_plugin.integrations.torchtitan import token_dispatcher

    set_spmd_backend("default")  # then the all-to-all uses the given mesh
    mesh = init_device_mesh(device.type, (suite.ranks,), mesh_dim_names=("ep",))
    few = GroupedExperts.Config(dim=8, hidden_dim=8, num_experts=1)
    stock = AllToAllTokenDispatcher.Config(num_experts=suite.experts, top_k=suite.topk)
    layers = {
        impl: RoutedExperts.Config(inner_experts=few, token_dispatcher=dispatcher).build()
        for impl, dispatcher in ((STOCK, stock), (OURS, token_dispatcher(stock)))
    }
    local = suite.workload.local_experts
    with device:
        experts = GroupedExperts.Config(dim=suite.hidden, hidden_dim=suite.ffn, num_experts=local).build()
    experts.to(torch.bfloat16)
    _initialise(experts, 1 + dist.get_rank())
    for layer in layers.values():
        layer.inner_experts = experts
        layer.token_dispatcher.wire_meshes(ep_mesh=mesh)

    def batch(turn: int) -> _Batch:
        x, dy, random = _random_tokens(suite, device, turn, (1, suite.tokens, suite.hidden))
        chances = torch.rand((1, suite.tokens, suite.experts), generator=random, device=device)
        scores, ids = chances.topk(suite.topk, dim=-1)
        counts = ids.flatten().bincount(minlength=suite.experts)
        return _Batch((x, scores.requires_grad_(), ids, counts), dy, ids[0])

    comm = layers[OURS].token_dispatcher
    return _Setup("routed experts", "GroupedExperts, in BF16", layers, experts, None, batch, lambda: comm.communicator)


def _random_tokens(suite: LayersSuite, device: torch.device, turn: int, shape: tuple[int, ...]) -> Any:
    """Returns this rank's tokens, the gradient of the layer's output, and the generator for more."""
    random = torch.Generator(device).manual_seed(turn * suite.ranks + dist.get_rank())
    x, dy = (torch.randn(shape, generator=random, device=device).bfloat16() for _ in range(2))
    return x.requires_grad_(), dy, random


@torch.no_grad()
def _initialise(module: Any, seed: int) -> None:
    for parameter in module.parameters():
        parameter.normal_(0.0, 0.02, generator=torch.Generator(parameter.device).manual_seed(seed))


def _output_and_gradients(layer: torch.nn.Module, batch: _Batch) -> Tensors:
    """Runs a step. Returns its output and gradients, which the layer and the batch then no longer have."""
    found = {"y": _step(layer, batch.inputs, batch.dy)().detach()}
    leaves = {f"input {index}": tensor for index, tensor in enumerate(batch.inputs) if tensor.requires_grad}
    assert all(leaf.grad is not None for leaf in leaves.values())
    for name, leaf in (leaves | dict(layer.named_parameters())).items():
        if leaf.grad is not None:
            found[f"{name}.grad"] = leaf.grad
    _forget(layer, batch.inputs)
    return found


def differences(ours: Tensors, theirs: Tensors) -> dict[str, float]:
    """Returns each tensor's largest difference over the largest value of theirs; infinite if a tensor is missing."""
    found = dict.fromkeys(ours.keys() | theirs.keys(), float("inf"))
    for name in ours.keys() & theirs.keys():
        mine, their = ours[name], theirs[name]
        if mine.shape == their.shape:
            found[name] = float((mine - their).abs().max()) / max(float(their.abs().max()), 1e-12)
    return found


def too_different(difference: dict[str, float]) -> list[str]:
    """Returns a sentence for each tensor that differs too much."""
    return [
        f"{name}: expected {STOCK}'s within {LIMIT} of its largest value, differs by {value:.2e}"
        for name, value in difference.items()
        if not value <= LIMIT
    ]


def notes_of(experts: str, medians: dict[str, float]) -> list[str]:
    """Returns sentences on the experts, and on the time of both layers beyond that of the experts."""
    above = {impl: medians[impl] - medians[EXPERTS] for impl in (STOCK, OURS)}
    ratio = f"; ratio {above[OURS] / above[STOCK]:.2f}" if above[STOCK] > 0 else ""
    listed = ", ".join(f"{impl} {took:,.0f} µs" for impl, took in above.items())
    return [f"experts: {experts}", f"above the experts' own compute: {listed}{ratio}"]
