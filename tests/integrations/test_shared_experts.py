"""Shared experts of transformers' blocks, run while tokens travel: the same bits as after it, and what is refused."""

from __future__ import annotations

import gc
import importlib
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.integrations import test_transformers as cases
from tests.ranks import run_ranks, values

transformers = pytest.importorskip("transformers", minversion="5.23")

CASE = cases.Case(ep=2, fsdp=2, checkpoint="deepseek")
CASES = {
    "fp32": CASE,
    "bf16": cases.Case(ep=2, fsdp=2, checkpoint="deepseek", dtype=torch.bfloat16),
    "ragged": cases.Case(ep=2, fsdp=2, checkpoint="deepseek", seq_lens=(1, 14)),
    "eager experts": cases.Case(ep=2, fsdp=2, checkpoint="deepseek", experts="eager"),
    "tp": cases.Case(ep=2, fsdp=1, tp=2, checkpoint="deepseek", seq_lens=(13,)),
    "eval": cases.Case(ep=2, fsdp=2, checkpoint="deepseek", train=False),
    "tp, eval": cases.Case(ep=2, fsdp=1, tp=2, checkpoint="deepseek", seq_lens=(13,), train=False),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    torch.manual_seed(0)
    cases._deepseek().save_pretrained(folder / "deepseek")
    cases._model(hidden_size=32, num_experts=4, num_experts_per_tok=3).save_pretrained(folder / "no shared experts")
    _qwen2().save_pretrained(folder / "shared first")
    return folder


def _qwen2() -> torch.nn.Module:
    config = transformers.Qwen2MoeConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        use_cache=False,
    )
    return transformers.Qwen2MoeForCausalLM(config)


def _on_two_ranks(function: Callable, checkpoints: Path, timeout_s: float = 240) -> list:
    return values(run_ranks(2, function, checkpoints, timeout_s=timeout_s))


def _ours() -> object:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return importlib.import_module("ep_plugin.integrations.transformers")


class _Order:
    """What a forward did: "shared" for each time that shared experts ran, "dispatched" when a dispatch is completed."""

    def __init__(self, model: torch.nn.Module, patch: pytest.MonkeyPatch) -> None:
        from ep_plugin.moe import communicator

        self.seen: list[str] = []
        finish = communicator.finish_dispatch
        patch.setattr(communicator, "finish_dispatch", self._noting("dispatched", finish))
        for layer in model.model.layers:
            layer.mlp.shared_experts.down_proj.register_forward_hook(lambda *_: self.seen.append("shared"))

    def _noting(self, what: str, function: Callable) -> Callable:
        def noting(*args):
            self.seen.append(what)
            return function(*args)

        return noting


def _results(model: torch.nn.Module, case: cases.Case, rank: int, run: Callable | None = None) -> dict:
    with torch.set_grad_enabled(case.train):
        results = cases._forward(model if run is None else run, cases._tokens(case, rank))
    if case.train:
        results["loss"].backward()
        results |= cases._gradients(model)
    return {name: tensor.detach() for name, tensor in results.items()}


def _same(ours: dict, theirs: dict) -> list[str]:
    assert ours.keys() == theirs.keys() and len(ours) > 1
    return [name for name in theirs if not torch.equal(ours[name], theirs[name])]


def _run_cases(rank: int, checkpoints: Path) -> dict:
    integration, found = _ours(), {}
    for name, case in CASES.items():
        expected = _results(cases._load(checkpoints, case, "ep_plugin"), case, rank)
        model = cases._load(checkpoints, case, "ep_plugin")
        counts = [integration.overlap_shared_experts(model) for _ in range(2)]
        with pytest.MonkeyPatch.context() as patch:
            order = _Order(model, patch)
            differ = _same(_results(model, case, rank), expected)
        found[name] = counts, differ, order.seen
    return found


@pytest.fixture(scope="module")
def ran(checkpoints: Path) -> list[dict]:
    return _on_two_ranks(_run_cases, checkpoints)


@pytest.mark.parametrize("name", CASES)
def test_the_same_bits(ran: list[dict], name: str) -> None:
    for found in ran:
        counts, differ, _ = found[name]
        assert counts == [cases.LAYERS] * 2 and not differ


@pytest.mark.parametrize("name", CASES)
def test_shared_experts_run_once_and_before_the_dispatch_is_complete(ran: list[dict], name: str) -> None:
    for found in ran:
        assert found[name][2] == ["shared", "dispatched"] * cases.LAYERS


def _auto(rank: int, checkpoints: Path) -> tuple[list[str], list[str]]:
    """Where ranks share a batch and want no gradients, "auto" makes an all-reduce of it: nothing to overlap with."""
    integration = _ours()
    integration.switch_on()
    case = CASES["tp, eval"]
    expected = _results(cases._load(checkpoints, case, "auto"), case, rank)
    model = cases._load(checkpoints, case, "auto")
    integration.overlap_shared_experts(model)
    with pytest.MonkeyPatch.context() as patch:
        order = _Order(model, patch)
        differ = _same(_results(model, case, rank), expected)
    return differ, order.seen


def test_auto_without_a_dispatch(checkpoints: Path) -> None:
    assert _on_two_ranks(_auto, checkpoints) == [([], ["shared"] * cases.LAYERS)] * 2


def _modes(rank: int, checkpoints: Path) -> dict[str, list[str]]:
    integration, found = _ours(), {}
    for name in ("checkpointed", "compiled"):
        expected = _results(cases._load(checkpoints, CASE, "ep_plugin"), CASE, rank)
        model = cases._load(checkpoints, CASE, "ep_plugin")
        integration.overlap_shared_experts(model)
        run: Callable = model
        if name == "checkpointed":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        else:
            run = torch.compile(model, backend="aot_eager")
        ours = _results(model, CASE, rank, run)
        limit = cases.LIMITS[CASE.dtype]
        found[name] = [key for key, differs in cases._difference(ours, expected).items() if differs > limit]
        kept = [getattr(layer.mlp.shared_experts.forward, "__self__", None) for layer in model.model.layers]
        assert all(ahead is None or (ahead.given is None and ahead.made is None) for ahead in kept)
    return found


def test_checkpointed_and_compiled_models(checkpoints: Path) -> None:
    for found in _on_two_ranks(_modes, checkpoints, timeout_s=280):
        assert found == {"checkpointed": [], "compiled": []}


def _refusals(rank: int, checkpoints: Path) -> dict[str, str]:
    from ep_plugin import NotSupported

    integration, said = _ours(), {}
    for checkpoint, exchange in (("no shared experts", "ep_plugin"), ("deepseek", "all_to_all")):
        model = cases._load(checkpoints, cases.Case(ep=2, fsdp=2, checkpoint=checkpoint), exchange)
        with pytest.raises(ValueError) as refused:
            integration.overlap_shared_experts(model)
        said[f"{checkpoint}, {exchange}"] = str(refused.value)
    case = cases.Case(ep=2, fsdp=2, checkpoint="shared first")
    model = cases._load(checkpoints, case, "ep_plugin")
    integration.overlap_shared_experts(model)
    with pytest.raises(NotSupported) as unfit:
        _results(model, case, rank)
    said["shared first"] = str(unfit.value)
    model = cases._load(checkpoints, CASE, "ep_plugin")
    integration.overlap_shared_experts(model)
    block = model.model.layers[0].mlp
    residual = type(block.shared_experts).__call__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            type(block.shared_experts),
            "__call__",
            lambda module, x: residual(module, x if module.forward.__self__.ahead else x + 0),
        )
        with pytest.raises(NotSupported) as unfit:
            _results(model, CASE, rank)
    said["another input"] = str(unfit.value)
    return said


def test_refusals_say_what_was_expected(checkpoints: Path) -> None:
    for said in _on_two_ranks(_refusals, checkpoints):
        assert "Qwen3MoeForCausalLM" in said["no shared experts, ep_plugin"]
        assert "DeepseekV3ForCausalLM" in said["deepseek, all_to_all"]
        assert "Qwen2MoeSparseMoeBlock to run its shared experts after" in said["shared first"]
        assert "DeepseekV3MoE to run its shared experts on the block's own input" in said["another input"]


def _lives_on(rank: int, checkpoints: Path) -> bool:
    integration = _ours()
    model = cases._load(checkpoints, CASE, "ep_plugin")
    integration.overlap_shared_experts(model)
    _results(model, CASE, rank)
    experts = weakref.ref(model.model.layers[0].mlp.experts)
    del model
    gc.collect()
    return experts() is not None


def test_a_model_that_is_dropped_is_gone(checkpoints: Path) -> None:
    assert _on_two_ranks(_lives_on, checkpoints) == [False, False]
