"""Parity of ``ep_implementation="ep_plugin"`` with the exchange built into transformers, in real processes.

Every case loads one checkpoint twice, once per exchange, feeds both the same tokens, and compares logits,
loss and the gradient of every parameter shard. A world of ranks is started once and runs all of its cases.

The file is long because it also has the models and the comparison, which other tests of transformers import.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

from ep_plugin import MoECommunicator, NotSupported
from tests.ranks import run_ranks, values

transformers = pytest.importorskip("transformers", minversion="5.23")

LAYERS, EXPERTS, TOPK = 2, 8, 2


@dataclass(frozen=True)
class Case:
    """``seq_lens``: tokens of each data-parallel rank. ``experts``: how transformers runs them. ``limit``: of
    attention's parameters; None is that of the dtype, as for all others."""

    ep: int
    fsdp: int
    tp: int = 1
    checkpoint: str = "even"
    dtype: torch.dtype = torch.float32
    seq_lens: tuple[int, ...] = (12, 12, 12, 12)
    train: bool = True
    experts: str = "grouped_mm"
    limit: float | None = None


# Weights' gradients are summed in another order than PyTorch's, so that what follows differs in its last bits. Of a
# token alone nothing else is there: its query and key have no gradients but what rounding leaves.
ONE_TOKEN, SKEWED = 1e-3, 1e-4
CASES = {
    2: {
        "ep2": Case(ep=2, fsdp=2),
        "ep2-bf16": Case(ep=2, fsdp=2, dtype=torch.bfloat16),
        "ep2-eager": Case(ep=2, fsdp=2, experts="eager"),
        "ep2-batched": Case(ep=2, fsdp=2, experts="batched_mm"),
        "ep2-deepseek": Case(ep=2, fsdp=2, checkpoint="deepseek"),
        "ep2-deepseek-bf16": Case(ep=2, fsdp=2, checkpoint="deepseek", dtype=torch.bfloat16),
        "ep2-gpt-oss": Case(ep=2, fsdp=2, checkpoint="gpt_oss"),
        "ep2-tp2-same-group": Case(ep=2, fsdp=1, tp=2, seq_lens=(13,)),
        "ep2-tp2-eval": Case(ep=2, fsdp=1, tp=2, seq_lens=(13,), train=False),
        "ep2-tp2-one-token": Case(ep=2, fsdp=1, tp=2, seq_lens=(1,), limit=ONE_TOKEN),
        "ep2-tp2-skewed": Case(ep=2, fsdp=1, tp=2, seq_lens=(7,), checkpoint="skewed", limit=SKEWED),
    },
    4: {
        "ep4": Case(ep=4, fsdp=4),
        "ep4-ragged": Case(ep=4, fsdp=4, seq_lens=(3, 17, 1, 8)),
        "ep4-ragged-eval": Case(ep=4, fsdp=4, seq_lens=(5, 1, 30, 2), train=False),
        "ep4-skewed": Case(ep=4, fsdp=4, checkpoint="skewed", limit=SKEWED),
        "ep2-efsdp2": Case(ep=2, fsdp=4),
        "ep4-deepseek": Case(ep=4, fsdp=4, checkpoint="deepseek", seq_lens=(9, 1, 2, 14)),
        "ep4-tp2": Case(ep=4, fsdp=2, tp=2, seq_lens=(11, 6)),
        "ep4-tp2-skewed": Case(ep=4, fsdp=2, tp=2, seq_lens=(5, 5), checkpoint="skewed", limit=SKEWED),
    },
}
NAMED = [
    pytest.param(world, name, id=name, marks=[pytest.mark.slow] if world > 2 else [])
    for world, cases in CASES.items()
    for name in cases
]
LIMITS = {torch.float32: 2e-5, torch.bfloat16: 3e-2}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the checkpoints of the cases and a second model's, ``other``."""
    folder = tmp_path_factory.mktemp("checkpoints")
    torch.manual_seed(0)
    _model(hidden_size=64, num_experts=EXPERTS, num_experts_per_tok=TOPK).save_pretrained(folder / "even")
    _skew(_model(hidden_size=64, num_experts=EXPERTS, num_experts_per_tok=TOPK)).save_pretrained(folder / "skewed")
    _model(hidden_size=32, num_experts=4, num_experts_per_tok=3).save_pretrained(folder / "other")
    _deepseek().save_pretrained(folder / "deepseek")
    _gpt_oss().save_pretrained(folder / "gpt_oss")
    return folder


@pytest.fixture(scope="module")
def run_world(checkpoints: Path) -> Callable[[int], list[dict[str, dict]]]:
    """Results by case of every rank of a world, which runs once however many tests ask for it."""
    return functools.cache(
        lambda world: values(run_ranks(world, _run_rank, world, checkpoints, timeout_s=240, framework="transformers"))
    )


@pytest.mark.parametrize(("world", "name"), NAMED)
@pytest.mark.slow
def test_matches_the_built_in_exchange(run_world, world: int, name: str) -> None:
    for rank, results in enumerate(run_world(world)):
        _check_difference(CASES[world][name], rank, results[name]["difference"])


@pytest.mark.parametrize(("world", "name"), NAMED)
def test_every_layer_went_through_the_communicator(run_world, world: int, name: str) -> None:
    for results in run_world(world):
        assert results[name]["calls"] == {"dispatch": LAYERS, "combine": LAYERS}


@pytest.mark.parametrize(("world", "name"), NAMED)
def test_nothing_is_sorted(run_world, world: int, name: str) -> None:
    for results in run_world(world):
        assert results[name]["sorts"]["ep_plugin"] == 0
        assert results[name]["sorts"]["all_to_all"] >= LAYERS  # or such a sort would not be seen


@pytest.mark.slow
def test_a_group_over_two_nodes_matches_the_built_in_exchange(checkpoints: Path) -> None:
    env = {"EP_PLUGIN_RANKS_PER_NODE": "2"}
    for rank, results in enumerate(
        values(run_ranks(4, _run_over_nodes, checkpoints, env=env, timeout_s=240, framework="transformers"))
    ):
        for name, found in results.items():
            _check_difference(CASES[4][name], rank, found["difference"])
            assert found["rail_bytes"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ep4-skewed", "ep4-tp2-skewed"])
def test_skewed_routing_leaves_ranks_without_rows(run_world, name: str) -> None:
    rows = [results[name]["rows"] for results in run_world(4)]
    assert min(rows[0]) > 0
    assert rows[1:] == [[0] * LAYERS] * 3


@pytest.mark.slow
def test_the_layers_share_a_communicator(run_world) -> None:
    for results in run_world(4):
        assert results["ep4"]["communicators"] == 1


def test_two_models_in_one_process(run_world) -> None:
    for results in run_world(2):
        difference = results["two models"]["difference"]
        assert max(difference.values()) <= LIMITS[torch.float32], difference


@pytest.mark.slow
def test_a_compiled_model_has_the_loss_and_gradients_of_the_built_in_exchange(checkpoints: Path) -> None:
    for difference in values(run_ranks(2, _run_compiled, checkpoints, timeout_s=280, framework="transformers")):
        assert max(difference.values()) <= LIMITS[torch.float32], difference


@pytest.mark.slow
def test_losses_of_training_in_bf16_stay_within_a_hundredth(checkpoints: Path) -> None:
    """Of the losses with the built-in exchange, as README.md says."""
    outcomes = run_ranks(2, _train_in_bf16, checkpoints, timeout_s=200, framework="transformers")
    for losses in values(outcomes):
        assert losses["ep_plugin"] == pytest.approx(losses["all_to_all"], rel=1e-2)
        assert losses["ep_plugin"][-1] < 0.9 * losses["ep_plugin"][0]


def test_other_experts_get_unit_weights_and_the_real_ones_stay_in_float32() -> None:
    for found in values(run_ranks(2, _run_bf16_experts, framework="transformers")):
        assert found["units"]
        assert found["out"] < 4e-3 and found["weights.grad"] < 1e-6, found


def test_older_transformers_is_refused_by_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.__version__", "5.22.1")
    monkeypatch.delitem(sys.modules, "ep_plugin.integrations.transformers", raising=False)
    with pytest.raises(NotSupported, match=r"expected transformers 5\.23 or newer.*got 5\.22\.1"):
        importlib.import_module("ep_plugin.integrations.transformers")


def _check_difference(case: Case, rank: int, difference: dict[str, float]) -> None:
    assert ("loss" in difference) and (len(difference) > 10) == case.train
    for what, differs in difference.items():
        in_attention = case.limit is not None and ".self_attn." in what
        limit = case.limit if in_attention else LIMITS[case.dtype]
        assert differs <= limit, f"rank {rank}: {what} differs by {differs}"


def _model(*, hidden_size: int, num_experts: int, num_experts_per_tok: int) -> torch.nn.Module:
    config = transformers.Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=hidden_size,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=num_experts,
        num_experts_per_tok=num_experts_per_tok,
        norm_topk_prob=True,
        use_cache=False,
        initializer_range=0.2,
    )
    return transformers.Qwen3MoeForCausalLM(config)


def _deepseek() -> torch.nn.Module:
    """Float32 weights of another order, groups of experts, and an expert that all tokens share."""
    config = transformers.DeepseekV3Config(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=16,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=TOPK,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=0,
        use_cache=False,
        initializer_range=0.2,
    )
    return transformers.DeepseekV3ForCausalLM(config)


def _gpt_oss() -> torch.nn.Module:
    """Experts with biases, transposed matrices, and a gate of their own."""
    config = transformers.GptOssConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=EXPERTS,
        num_experts_per_tok=TOPK,
        use_cache=False,
        initializer_range=0.2,
    )
    model = transformers.GptOssForCausalLM(config)
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.mlp.experts.gate_up_proj_bias)
        torch.nn.init.normal_(layer.mlp.experts.down_proj_bias)
    return model


def _skew(model: torch.nn.Module) -> torch.nn.Module:
    """Make every token choose the first TOPK experts: one large positive coordinate decides the router."""
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 30.0
        for layer in model.model.layers:
            layer.mlp.gate.weight[:, 0] = -5.0
            layer.mlp.gate.weight[:TOPK, 0] = 5.0
    return model


class _Spy:
    """Counts what one forward does with the communicator, and the rows that the experts run on."""

    def __init__(self) -> None:
        self.calls = {"dispatch": 0, "combine": 0}
        self.rows: list[int] = []
        self.communicators: set[MoECommunicator] = set()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for name in self.calls:
                patch.setattr(MoECommunicator, name, self._counting(name, getattr(MoECommunicator, name)))
            yield

    def _counting(self, name: str, method: Callable) -> Callable:
        @functools.wraps(method)
        def counted(communicator, tensor, *args, **kwargs):
            self.calls[name] += 1
            self.communicators.add(communicator)
            if name == "combine":
                self.rows.append(tensor.size(0))
            return method(communicator, tensor, *args, **kwargs)

        return counted


def _run_rank(rank: int, world: int, checkpoints: Path) -> dict[str, dict]:
    results = _run_cases(CASES[world], checkpoints, rank)
    if world == 2:
        results["two models"] = _run_two_models(checkpoints, rank)
    return results


def _run_over_nodes(rank: int, checkpoints: Path) -> dict[str, dict]:
    cases = {name: CASES[4][name] for name in ("ep4-ragged", "ep4-deepseek", "ep4-tp2")}
    return _run_cases(cases, checkpoints, rank)


def _run_cases(cases: dict[str, Case], checkpoints: Path, rank: int) -> dict[str, dict]:
    importlib.import_module("ep_plugin.integrations.transformers")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return {name: _run_case(case, checkpoints, rank) for name, case in cases.items()}


def _load(checkpoints: Path, case: Case, exchange: str) -> torch.nn.Module:
    from transformers.distributed import DistributedConfig

    model = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoints / case.checkpoint,
        dtype=case.dtype,
        experts_implementation=case.experts,
        distributed_config=DistributedConfig(
            ep_size=case.ep, fsdp_size=case.fsdp, tp_size=case.tp, ep_implementation=exchange
        ),
    )
    return model.train(case.train)


def _tokens(case: Case, rank: int, seed: int = 0) -> torch.Tensor:
    """The batch of this rank, which the ranks of a tensor-parallel group share."""
    data_rank = rank // case.tp
    generator = torch.Generator().manual_seed(1000 * seed + data_rank)
    return torch.randint(64, (1, case.seq_lens[data_rank]), generator=generator)


def _forward(model: torch.nn.Module, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    # Labels are the tokens themselves, unshifted, so that a single token has a loss too.
    logits = model(input_ids=tokens).logits
    loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())
    return {"logits": logits, "loss": loss}


def _gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """This rank's shard of every gradient."""
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {
        name: gradient.to_local() if isinstance(gradient, DTensor) else gradient for name, gradient in gradients.items()
    }


def _difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> dict[str, float]:
    """Largest difference of each tensor, relative to the largest value that the other holds."""
    assert ours.keys() == theirs.keys()
    return {
        name: float(
            (ours[name].float() - theirs[name].float()).abs().max() / theirs[name].float().abs().max().clamp_min(1e-3)
        )
        for name in theirs
        if theirs[name].numel()
    }


def _run_case(case: Case, checkpoints: Path, rank: int) -> dict:
    tokens = _tokens(case, rank)
    tensors, sorts, seen = {}, {}, _Spy()
    for exchange in ("all_to_all", "ep_plugin"):
        model = _load(checkpoints, case, exchange)
        with profile(activities=[ProfilerActivity.CPU]) as run:
            with torch.set_grad_enabled(case.train), seen.watching():
                results = _forward(model, tokens)
            if case.train:
                results["loss"].backward()
        if case.train:
            results |= _gradients(model)
        tensors[exchange] = {name: tensor.detach() for name, tensor in results.items()}
        sorts[exchange] = sum(event.name() == "aten::sort" for event in run.profiler.kineto_results.events())
    return {
        "difference": _difference(tensors["ep_plugin"], tensors["all_to_all"]),
        "calls": seen.calls,
        "rows": seen.rows,
        "sorts": sorts,
        "communicators": len(seen.communicators),
        "rail_bytes": sum(comm.rail_bytes_sent for comm in seen.communicators),
    }


class _Identity(torch.nn.Module):
    """Experts of no implementation that we know, which return their rows times their weights."""

    num_experts = EXPERTS

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.Tensor] = []

    def forward(self, rows: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        self.seen.append(weights)
        return rows * weights.sum(1, keepdim=True)


def _run_bf16_experts(rank: int) -> dict[str, float | bool]:
    """BF16 rows with float32 weights: errors relative to float64."""
    from torch.distributed.device_mesh import init_device_mesh

    from ep_plugin.integrations.transformers import EpPluginExpertParallel

    meshes = init_device_mesh("cpu", (2, 1), mesh_dim_names=("ep", "tp"))
    experts = _Identity()
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn((100, 64), generator=generator).bfloat16()
    weights, ids = torch.rand((100, EXPERTS), generator=generator).topk(TOPK)
    weights.requires_grad_()
    out = EpPluginExpertParallel(experts, meshes["ep"], meshes["tp"])(x, ids, weights)
    out.float().sum().backward()
    exact = x.double() * weights.detach().double().sum(1, keepdim=True)
    exact_grad = x.double().sum(1, keepdim=True).expand(-1, TOPK)
    return {
        "units": bool((experts.seen[0] == 1).all()),
        "out": float((out.double() - exact).norm() / exact.norm()),
        "weights.grad": float((weights.grad.double() - exact_grad).norm() / exact_grad.norm()),
    }


def _train_in_bf16(rank: int, checkpoints: Path) -> dict[str, list[float]]:
    """Losses of ten steps with each exchange."""
    importlib.import_module("ep_plugin.integrations.transformers")
    transformers.utils.logging.disable_progress_bar()
    case = Case(ep=2, fsdp=2, dtype=torch.bfloat16, seq_lens=(200, 200))
    losses: dict[str, list[float]] = {}
    for exchange in ("all_to_all", "ep_plugin"):
        model = _load(checkpoints, case, exchange)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)  # with larger weights, rounding alone parts the losses
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
        losses[exchange] = []
        for _ in range(10):
            loss = _forward(model, _tokens(case, rank))["loss"]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[exchange].append(loss.item())
    return losses


def _run_compiled(rank: int, checkpoints: Path) -> dict[str, float]:
    """torch.compile(model) as people call it, against the built-in exchange as it is."""
    importlib.import_module("ep_plugin.integrations.transformers")
    transformers.utils.logging.disable_progress_bar()
    case, found = Case(ep=2, fsdp=2), {}
    for exchange in ("all_to_all", "ep_plugin"):
        model = _load(checkpoints, case, exchange)
        run = torch.compile(model, backend="aot_eager") if exchange == "ep_plugin" else model
        results = _forward(run, _tokens(case, rank))
        results["loss"].backward()
        found[exchange] = {name: tensor.detach() for name, tensor in (results | _gradients(model)).items()}
    return _difference(found["ep_plugin"], found["all_to_all"])


def _run_two_models(checkpoints: Path, rank: int) -> dict:
    """Two models of different shapes, their forwards and backwards interleaved."""
    cases = [Case(ep=2, fsdp=2), Case(ep=2, fsdp=2, checkpoint="other", seq_lens=(4, 9))]
    gradients = {}
    for exchange in ("all_to_all", "ep_plugin"):
        models = [_load(checkpoints, case, exchange) for case in cases]
        losses = [
            _forward(model, _tokens(case, rank, seed=1))["loss"] for model, case in zip(models, cases, strict=True)
        ]
        for loss in losses:
            loss.backward()
        gradients[exchange] = {
            f"{index}.{name}": gradient
            for index, model in enumerate(models)
            for name, gradient in _gradients(model).items()
        }
    return {"difference": _difference(gradients["ep_plugin"], gradients["all_to_all"])}
