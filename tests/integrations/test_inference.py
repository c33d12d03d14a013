"""Inference with transformers over several ranks: tokens are those of one rank alone, and what is refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from ep_plugin import MoECommunicator, NotSupported
from tests.integrations import inference_cases as cases
from tests.integrations.logs import logged_warnings
from tests.moe.moe_cases import poisoned
from tests.ranks import run_ranks, values

transformers = pytest.importorskip("transformers", minversion="5.23")

LIMIT = 1e-4
HOST_READS = ("aten._local_scalar_dense", "aten.nonzero", "aten.equal", "aten.is_nonzero")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    cases.save_checkpoints(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_tokens_are_those_of_one_rank_alone(checkpoints: Path, size: int) -> None:
    kinds = cases.KINDS if size == 2 else ("even",)  # the others' 8 experts do not go into 3
    for results in values(
        run_ranks(size, cases.both, size, checkpoints, kinds, timeout_s=280, framework="transformers")
    ):
        assert len(results) == 2 * len(kinds)
        for name, (tokens, expected) in results.items():
            assert tokens == expected, name
            assert len({tuple(row) for row in tokens}) == len(tokens)  # not all alike


@pytest.mark.slow
@pytest.mark.parametrize("per_node", [1, 2])
def test_tokens_over_two_nodes_are_those_of_one_rank_alone(checkpoints: Path, per_node: int) -> None:
    env, size = {"EP_PLUGIN_RANKS_PER_NODE": str(per_node)}, 2 * per_node
    for results in values(
        run_ranks(size, cases.both, size, checkpoints, ("even",), env=env, timeout_s=280, framework="transformers")
    ):
        for name, (tokens, expected) in results.items():
            assert tokens == expected, name


@pytest.mark.slow
def test_groups_that_each_have_all_experts(checkpoints: Path) -> None:
    for difference in values(run_ranks(4, _two_groups, checkpoints, timeout_s=240, framework="transformers")):
        assert difference < LIMIT


def _two_groups(rank: int, folder: Path) -> float:
    config = cases.integration().InferenceConfig(ep_size=2, fsdp_size=4, ep_implementation="ep_plugin")
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(folder / "even", distributed_config=config)
    assert model.model.layers[0].mlp.experts.gate_up_proj.to_local().size(0) == 6
    return _difference(model, cases.load(folder / "even", 0), rank % 2)


@pytest.fixture(scope="module")
def found(checkpoints: Path) -> list[dict[str, Any]]:
    """Of each of two ranks, what the functions below have found."""
    return values(run_ranks(2, _everything, checkpoints, timeout_s=280, framework="transformers"))


CHECKS: dict[str, Callable[[int, Path], Any]] = {}


def _check(function: Callable[[int, Path], Any]) -> Callable[[int, Path], Any]:
    CHECKS[function.__name__] = function
    return function


def _everything(rank: int, folder: Path) -> dict[str, Any]:
    cases.integration()
    return {name: function(rank, folder) for name, function in CHECKS.items()}


@_check
def _weights(rank: int, folder: Path) -> tuple[list[str], int]:
    model = cases.load(folder / "even", 2)
    sharded = [name for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)]
    return sharded, sum(isinstance(module, FSDPModule) for module in model.modules())


def test_only_experts_are_sharded_and_nothing_gathers_weights(found: list[dict[str, Any]]) -> None:
    for sharded, num_gathered in (results["_weights"] for results in found):
        assert len(sharded) == 4 and all(".mlp.experts." in name for name in sharded)
        assert num_gathered == 0


@torch.no_grad()
def _logits(model: torch.nn.Module, tokens: torch.Tensor, most: int | None = 32) -> torch.Tensor:
    if most is None:
        return model(input_ids=tokens).logits
    with cases.integration().low_latency(model, max_tokens_per_rank=most):
        return model(input_ids=tokens).logits


def _difference(model: torch.nn.Module, alone: torch.nn.Module, rank: int) -> float:
    tokens = cases.prompts(3)[rank::2]
    expected = _logits(alone, tokens, None)
    return float((_logits(model, tokens) - expected).abs().max() / expected.abs().max())


@_check
def _implementations(rank: int, folder: Path) -> dict[str, float]:
    differences = {}
    with poisoned():
        for kind in cases.KINDS:
            alone = cases.load(folder / kind, 0)
            for experts in ("grouped_mm", "batched_mm", "eager"):
                model = cases.load(folder / kind, 2, experts_implementation=experts)
                differences[f"{kind}, {experts}"] = _difference(model, alone, rank)
    return differences


def test_rows_of_nobody_reach_no_token_whatever_runs_the_experts(found: list[dict[str, Any]]) -> None:
    for differences in (results["_implementations"] for results in found):
        assert len(differences) == 9
        for name, difference in differences.items():
            assert difference < LIMIT, name


@_check
def _layouts(rank: int, folder: Path) -> dict[str, float]:
    """Differences of models that are loaded in other ways."""
    from transformers.distributed import DistributedConfig

    ours, alone = cases.integration(), cases.load(folder / "deepseek", 0)
    load = transformers.AutoModelForCausalLM.from_pretrained
    overlapped = cases.load(folder / "deepseek", 2)
    ours.overlap_shared_experts(overlapped)
    sharded = DistributedConfig(ep_size=2, fsdp_size=2, ep_implementation="ep_plugin")
    found = {
        "shared experts overlap": _difference(overlapped, alone, rank),
        "FSDP": _difference(load(folder / "deepseek", distributed_config=sharded), alone, rank),
    }
    with pytest.MonkeyPatch.context() as patch:
        names = transformers.distributed.expert_parallel.EPImplementationInterface
        patch.setattr(names, "_global_mapping", dict(names._global_mapping))
        ours.enable()
        shared = DistributedConfig(ep_size=2, tp_size=2)
        model = load(folder / "deepseek", distributed_config=shared)
        modes = _modes(patch)
        found["TP, auto"] = _difference(model, alone, 0)  # the ranks have the same batch
        assert modes == ["ll"] * len(model.model.layers)
        _logits(model, cases.prompts(2), None)
        assert modes == ["ll"] * len(model.model.layers)  # its all-reduce
    return found


def test_other_layouts_exchange_in_low_latency_too(found: list[dict[str, Any]]) -> None:
    for differences in (results["_layouts"] for results in found):
        assert len(differences) == 3
        for name, difference in differences.items():
            assert difference < LIMIT, name


def _modes(patch: pytest.MonkeyPatch) -> list[str]:
    """The modes of the communicators that dispatch from here on."""
    modes, stock = [], MoECommunicator.dispatch

    @functools.wraps(stock)
    def dispatch(comm: MoECommunicator, *args: Any, **more: Any) -> Any:
        modes.append(comm.config.mode)
        return stock(comm, *args, **more)

    patch.setattr(MoECommunicator, "dispatch", dispatch)
    return modes


@_check
def _switching(rank: int, folder: Path) -> tuple[list[str], list[int | None]]:
    ours, model = cases.integration(), cases.load(folder / "even", 2)
    tokens = cases.prompts(3)[rank::2]
    exchange = ours.expert_parallel.exchanges[id(model.model.layers[0].mlp.experts)]
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        modes, limits = _modes(patch), []
        for most in (None, 32, None):
            _logits(model, tokens, most)
            limits.append(exchange.max_tokens_per_rank)
        with ours.low_latency(model, max_tokens_per_rank=32):
            with pytest.raises(KeyError), ours.low_latency(model, max_tokens_per_rank=16):
                limits.append(exchange.max_tokens_per_rank)
                raise KeyError
            limits.append(exchange.max_tokens_per_rank)
    return modes, limits


def test_the_mode_is_low_latency_inside_alone(found: list[dict[str, Any]]) -> None:
    for modes, limits in (results["_switching"] for results in found):
        assert modes == ["ht", "ht", "ll", "ll", "ht", "ht"]
        assert limits == [None, None, None, 16, 32]


@_check
@torch.no_grad()
def _no_tokens(rank: int, folder: Path) -> list[list[float]]:
    """Exchanges in which one rank, or each, has no token."""
    experts = _Doubling(2)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("tp", "ep"))
    exchange = cases.integration().EpPluginExpertParallel(experts, mesh["ep"], mesh["tp"])
    exchange.max_tokens_per_rank = 4
    results = []
    for counts in ((3, 0), (0, 0), (0, 4)):
        x = torch.arange(1.0, 1 + counts[rank]).unsqueeze(1).expand(-1, 8)
        ids = torch.tensor([[0, 3]]).expand(len(x), 2)
        with poisoned():
            results.append(exchange(x, ids, torch.full((len(x), 2), 0.5))[:, 0].tolist())
    return results


class _Doubling(torch.nn.Module):
    """Experts of no implementation that we know."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts

    def forward(self, rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        assert not rows.isnan().any()
        return 2 * rows * weights


def test_ranks_without_tokens_take_part(found: list[dict[str, Any]]) -> None:
    assert [results["_no_tokens"] for results in found] == [
        [[2.0, 4.0, 6.0], [], []],
        [[], [], [2.0, 4.0, 6.0, 8.0]],
    ]


class _Names(TorchDispatchMode):
    """The operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(function.overloadpacket))
        return function(*args, **(kwargs or {}))


@_check
def _host_reads(rank: int, folder: Path) -> dict[str, list[str]]:
    """Operators of a decoding step by which the host reads a tensor, with masks as a capture makes them."""
    reads = {}
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        for experts in ("grouped_mm", "eager"):
            model = cases.load(folder / "even", 2, experts_implementation=experts)
            cache = transformers.StaticCache(config=model.config, max_cache_len=16)
            model(input_ids=cases.prompts(2), past_key_values=cache)
            patch.setattr(transformers.utils.import_utils, "is_cuda_stream_capturing", lambda: True)
            with cases.integration().low_latency(model, max_tokens_per_rank=2), _Names() as names:
                model(input_ids=torch.zeros((2, 1), dtype=torch.long), past_key_values=cache)
            patch.undo()
            assert names.seen.count("ep_plugin.dispatch") == 2
            reads[experts] = [name for name in names.seen if name in HOST_READS]
    return reads


def test_a_step_does_not_wait_for_the_host(found: list[dict[str, Any]]) -> None:
    for reads in (results["_host_reads"] for results in found):
        assert reads["grouped_mm"] == []
        assert reads["eager"]  # or such reads would not be seen


# -- what is refused -------------------------------------------------------------------------------------------------


@_check
def _refusals(rank: int, folder: Path) -> dict[str, str]:
    ours, model = cases.integration(), cases.load(folder / "even", 2)
    tokens = cases.prompts(2)
    said = {}

    def refused(name: str, kind: type[Exception], function: Callable[[], Any]) -> None:
        with pytest.raises(kind) as error:
            function()
        said[name] = str(error.value)

    def with_gradients() -> None:
        with ours.low_latency(model, max_tokens_per_rank=16):
            model(input_ids=tokens)

    refused("gradients", NotSupported, with_gradients)
    refused("too many tokens", ValueError, lambda: _logits(model, tokens, 9))
    refused("number", ValueError, lambda: _logits(model, tokens, 4097))
    refused("stock", ValueError, lambda: _logits(cases.load(folder / "even", 0), tokens))
    _logits(model, tokens)  # what was refused has left nothing behind
    return said


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gradients", r"low_latency: expected a forward under torch.no_grad\(\) or .*, got one with gradients"),
        ("too many tokens", "x: expected at most max_tokens_per_rank=9 tokens, got 10"),
        ("number", 'max_tokens_per_rank: expected 1 to 4096 in mode="ll", got 4097'),
        ("stock", "model: expected experts whose exchange is ep_plugin's, found none in Qwen3MoeForCausalLM"),
    ],
)
def test_refusals(found: list[dict[str, Any]], name: str, message: str) -> None:
    for said in (results["_refusals"] for results in found):
        with pytest.raises(ValueError, match=message):
            raise ValueError(said[name])


@pytest.mark.slow
def test_groups_over_nodes_are_refused_before_a_forward(checkpoints: Path) -> None:
    env = {"EP_PLUGIN_RANKS_PER_NODE": "1", "EP_TEST_KERNELS": "simt"}  # the kernels of GPUs
    for outcome in run_ranks(2, _over_nodes, checkpoints, env=env, timeout_s=240, framework="transformers"):
        assert isinstance(outcome.error, NotSupported), outcome.trace
        assert 'mode="ll": expected all 2 ranks of GPUs on one node, got 2 nodes of 1' in str(outcome.error)


def _over_nodes(rank: int, folder: Path) -> None:
    model = cases.load(folder / "even", 2)
    with cases.integration().low_latency(model, max_tokens_per_rank=32):
        raise AssertionError("entered")


@pytest.mark.slow
def test_groups_over_nodes_fall_back_where_that_is_asked_for(checkpoints: Path) -> None:
    env = {"EP_PLUGIN_RANKS_PER_NODE": "1", "EP_PLUGIN_FALLBACK": "stock", "EP_TEST_KERNELS": "simt"}
    outcomes = run_ranks(2, _falls_back, checkpoints, env=env, timeout_s=240, framework="transformers")
    for difference, warned in values(outcomes):
        assert difference < LIMIT and warned == 1


def _falls_back(rank: int, folder: Path) -> tuple[float, int]:
    """How far logits in low_latency are from those of one rank alone, and how often its refusal was warned of."""
    model, alone = cases.load(folder / "even", 2), cases.load(folder / "even", 0)
    with logged_warnings() as said:
        difference = max(_difference(model, alone, rank) for _ in range(2))
    return difference, sum("transformers is left to the framework" in one for one in said)


@_check
def _mega_moe(rank: int, folder: Path) -> str:
    """What is said of a model whose experts' own kernel exchanges tokens."""
    from transformers.distributed import DistributedConfig
    from transformers.distributed.expert_parallel import AutoEP

    ours, stock = cases.integration(), AutoEP.__init__

    def with_kernel(exchange: Any, *given: Any) -> None:
        stock(exchange, *given)
        exchange.megamoe = lambda *inputs: inputs[0]

    with pytest.MonkeyPatch.context() as patch:
        names = transformers.distributed.expert_parallel.EPImplementationInterface
        patch.setattr(names, "_global_mapping", dict(names._global_mapping))
        patch.setattr(AutoEP, "__init__", with_kernel)
        ours.enable()
        load = transformers.AutoModelForCausalLM.from_pretrained
        model = load(folder / "even", distributed_config=DistributedConfig(ep_size=2, fsdp_size=2))
    with pytest.raises(ValueError) as caught, ours.low_latency(model, max_tokens_per_rank=32):
        pass
    return str(caught.value)


def test_experts_whose_kernel_exchanges_tokens_are_not_ours(found: list[dict[str, Any]]) -> None:
    for said in (results["_mega_moe"] for results in found):
        assert "expected experts whose exchange is ep_plugin's, found none" in said


def test_another_transformers_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.distributed import mixin

    from ep_plugin.integrations.transformers import inference

    monkeypatch.setattr(mixin, "apply_fully_sharded_data_parallelism", lambda model: model)
    inference._leave_weights_whole.cache_clear()
    with pytest.raises(NotSupported, match=r"expected apply_fully_sharded_data_parallelism\(model, mesh_manager, "):
        inference.InferenceConfig(ep_size=2, ep_implementation="ep_plugin")
