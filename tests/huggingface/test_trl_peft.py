"""TRL and PEFT train and refuse with ep_plugin as without it. Adapters of experts train with ep_plugin alone.

`make test-huggingface` runs it, in an environment that has both.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.test_scripts import Run, every_exchange_is_ours, launch

pytest.importorskip("trl", reason="needs trl; `make test-huggingface` installs it")
peft = pytest.importorskip("peft", reason="needs peft; `make test-huggingface` installs it")
transformers = pytest.importorskip("transformers", minversion="5.23")

SCRIPT = str(Path(__file__).with_name("train_stack.py"))
LOSS_LIMIT = 1e-4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3-MoE with a tokenizer that knows the words w4 to w63."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("checkpoint")
    words = ["<pad>", "<bos>", "<eos>", "<unk>", *(f"w{number}" for number in range(4, 64))]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = dict(pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>")
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=8, num_experts_per_tok=3,
        norm_topk_prob=True, initializer_range=0.1, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def ours(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    out = tmp_path_factory.mktemp("ours") / "out"
    return launch(out, SCRIPT, out, checkpoint, switched_on="transformers")


@pytest.fixture(scope="module")
def stock(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    out = tmp_path_factory.mktemp("stock") / "out"
    return launch(out, SCRIPT, out, checkpoint)


def found(run: Run) -> dict[str, Any]:
    return json.loads((run.out / "found.json").read_text())


def test_every_exchange_is_ours(ours: Run, stock: Run) -> None:
    every_exchange_is_ours(ours, "transformers", fsdp2=False)
    for counts in stock.counts:
        assert counts.keys() == {"stock", "fsdp2"}


@pytest.mark.parametrize("name", ["sft", "grpo", "grpo rewards", "lora"])
def test_losses_are_those_without_us(ours: Run, stock: Run, name: str) -> None:
    mine, theirs = found(ours)[name], found(stock)[name]
    assert len(mine) >= 3 and len(set(mine)) > 1
    assert mine == pytest.approx(theirs, rel=LOSS_LIMIT, abs=1e-5)


@pytest.mark.parametrize("name", ["sft", "grpo", "lora", "lora on experts"])
def test_the_checkpoint_loads_without_us(ours: Run, checkpoint: Path, name: str) -> None:
    kind, saved = transformers.AutoModelForCausalLM, ours.out / name
    expected = torch.load(ours.out / "logits.pt")
    base = kind.from_pretrained(checkpoint, dtype=torch.float32).eval()
    with torch.no_grad():
        before = base(input_ids=expected["input_ids"]).logits
        is_adapter = name.startswith("lora")
        restored = peft.PeftModel.from_pretrained(base, saved) if is_adapter else kind.from_pretrained(saved)
        logits = restored.eval()(input_ids=expected["input_ids"]).logits
    torch.testing.assert_close(logits, expected[name], rtol=1e-4, atol=1e-4)
    assert (before - logits).abs().max() > 1e-3  # it was trained


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("saving the optimizer", "Resuming is not supported for models sharded at load time"),
        ("resuming", "loading state_dict for FSDPQwen3MoeForCausalLM"),
    ],
)
def test_refusals_are_those_without_us(ours: Run, stock: Run, name: str, words: str) -> None:
    assert words in found(ours)[name]
    assert found(ours)[name] == found(stock)[name]


def test_adapters_of_experts_train_with_us_alone(ours: Run, stock: Run) -> None:
    assert "mixed torch.Tensor and DTensor" in found(stock)["training adapters of experts"]
    assert found(ours)["training adapters of experts"] == ""
    mine = found(ours)["lora on experts"]
    assert len(set(mine)) == len(mine) == 3
    assert mine[0] == found(ours)["lora"][0]  # adapters change nothing at first
    assert found(ours)["adapters of experts differ"] == 0.0  # Trainer averages their gradients


def test_who_averages_the_gradients_of_adapters(ours: Run, stock: Run) -> None:
    for run in (ours, stock):
        assert found(run)["adapters differ"] == 0.0  # Trainer does
        assert found(run)["gradients differ in a loop"] > 1e-3  # nobody does
        assert found(run)["averages differ"] == 0.0 and found(run)["averages differ from the mean"] < 1e-6
