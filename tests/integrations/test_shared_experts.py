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
    return values(run_ranks(2, function, checkpoints, timeout_s=timeout_s, framework="transformers"))


def _ours() -> object:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return importlib.import_module("ep_plugin.integrations.transformers")


class _Order:
    """What a forward did: "shared" for each time that shared experts ran, "dispatched" when a dispatch is completed."""

    def __init__(self, model: torch.nn.Module, patch: pytest.MonkeyPatch) -> None:
        from ep_plugin.moe.high_throughput.dispatch import Dispatch

        self.seen: list[str] = []
        patch.setattr(Dispatch, "finish", self._noting(Dispatch.finish))
        for layer in model.model.layers:
            layer.mlp.shared_experts.down_proj.register_forward_hook(lambda *_: self.seen.append("shared"))

    def _noting(self, finish: Callable) -> Callable:
        def noting(operation):
            if operation.number:  # it is asynchronous: a backward's is not
                self.seen.append("dispatched")
            return finish(operation)

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
    integration.enable()
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


def _checkpointed(model: torch.nn.Module, reentrant: bool) -> Callable:
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return model


MODES: dict[str, Callable[[torch.nn.Module], Callable]] = {
    "checkpointed": lambda model: _checkpointed(model, False),
    "checkpointed by a reentrant backward": lambda model: _checkpointed(model, True),
    "compiled": lambda model: torch.compile(model, backend="aot_eager"),
}


def _modes(rank: int, checkpoints: Path) -> dict[str, tuple[list[str], list[str]]]:
    """What differs from the same mode without overlap, and the order in the first forward."""
    integration, found = _ours(), {}
    for name, mode in MODES.items():
        plain, model = (cases._load(checkpoints, CASE, "ep_plugin") for _ in range(2))
        expected = _results(plain, CASE, rank, mode(plain))
        integration.overlap_shared_experts(model)
        with pytest.MonkeyPatch.context() as patch:
            order = _Order(model, patch)
            differ = _same(_results(model, CASE, rank, mode(model)), expected)
        found[name] = differ, order.seen[: 2 * cases.LAYERS]
        for layer in model.model.layers:
            ahead = layer.mlp.shared_experts.forward.__self__
            assert ahead.given is None and ahead.made is None
    return found


@pytest.mark.slow
def test_checkpointed_and_compiled_models(checkpoints: Path) -> None:
    for found in _on_two_ranks(_modes, checkpoints, timeout_s=280):
        assert found == dict.fromkeys(MODES, ([], ["shared", "dispatched"] * cases.LAYERS))


def _hooked(rank: int, checkpoints: Path) -> list[str]:
    """A hook of the shared experts that changes what they return runs once."""
    integration, results = _ours(), []
    for overlaps in (False, True):
        model = cases._load(checkpoints, CASE, "ep_plugin")
        if overlaps:
            integration.overlap_shared_experts(model)
        for layer in model.model.layers:
            layer.mlp.shared_experts.register_forward_hook(lambda module, args, output: 2 * output)
        results.append(_results(model, CASE, rank))
    return _same(results[1], results[0])


def test_hooks_run_once(checkpoints: Path) -> None:
    assert _on_two_ranks(_hooked, checkpoints) == [[], []]


def _given_another(shared: torch.nn.Module) -> None:
    ahead = shared.forward
    shared.forward = lambda hidden_states: ahead(hidden_states + 0)


def _written_to(shared: torch.nn.Module) -> None:
    ahead = shared.forward
    shared.forward = lambda hidden_states: ahead(_touched(hidden_states))


def _touched(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        tensor.add_(0)
    return tensor


DISTURBED: dict[str, Callable[[torch.nn.Module], object]] = {
    "another input": _given_another,
    "a written input": _written_to,
    "a hook before forward": lambda shared: shared.register_forward_pre_hook(lambda *_: None),
    "a hook in backward": lambda shared: shared.register_full_backward_hook(lambda *_: None),
}


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
    for name, disturb in DISTURBED.items():
        model = cases._load(checkpoints, CASE, "ep_plugin")
        integration.overlap_shared_experts(model)
        disturb(model.model.layers[0].mlp.shared_experts)
        with pytest.raises(NotSupported) as unfit:
            _results(model, CASE, rank)
        said[name] = str(unfit.value)
    model = cases._load(checkpoints, CASE, "ep_plugin")
    shared = model.model.layers[0].mlp.shared_experts
    run = shared.forward
    shared.forward = lambda hidden_states, gammas: run(hidden_states)
    with pytest.raises(NotSupported) as unfit:
        integration.overlap_shared_experts(model)
    said["more arguments"] = str(unfit.value)
    return said


def test_refusals_say_what_was_expected(checkpoints: Path) -> None:
    for said in _on_two_ranks(_refusals, checkpoints):
        assert "Qwen3MoeForCausalLM" in said["no shared experts, ep_plugin"]
        assert "DeepseekV3ForCausalLM" in said["deepseek, all_to_all"]
        assert "Qwen2MoeSparseMoeBlock to run its shared experts after" in said["shared first"]
        for name in ("another input", "a written input"):
            assert "DeepseekV3MoE to run its shared experts on the block's own input" in said[name]
        for name in ("a hook before forward", "a hook in backward"):
            assert "DeepseekV3MoE to have shared experts with hooks after their forward alone" in said[name]
        assert "its input alone, got ones that require more" in said["more arguments"]


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
