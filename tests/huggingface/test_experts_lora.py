"""PEFT's adapters of divided experts train as those of a model on one process, and load without ep_plugin."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.huggingface.test_trl_peft import checkpoint as checkpoint  # a fixture
from tests.integrations.test_scripts import Run, every_exchange_is_ours, launch

peft = pytest.importorskip("peft", reason="needs peft; `make test-huggingface` installs it")
transformers = pytest.importorskip("transformers", minversion="5.23")
safetensors = pytest.importorskip("safetensors.torch")

SCRIPT = str(Path(__file__).with_name("train_experts_lora.py"))
# Ranks, ranks that the experts are divided among, EP_PLUGIN.
CASES = [(2, 2, "transformers"), (4, 2, "transformers"), (2, 2, "transformers,fsdp2")]
Key = tuple[int, int, str]


@pytest.fixture(scope="module")
def trained(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Key], Run]:
    @cache
    def run(key: Key) -> Run:
        ranks, ep_size, switched_on = key
        out = tmp_path_factory.mktemp("runs") / "out"
        return launch(out, SCRIPT, out, checkpoint, str(ep_size), switched_on=switched_on, ranks=ranks)

    return run


@pytest.fixture(scope="module")
def alone(trained: Callable[[Key], Run]) -> Run:
    return trained((1, 1, ""))


def adapters_of(run: Run, rank: int) -> dict[str, torch.Tensor]:
    return safetensors.load_file(run.out / f"adapters.{rank}" / "adapter_model.safetensors")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_losses_are_those_of_one_process(trained: Callable[[Key], Run], alone: Run, case: Key) -> None:
    run = trained(case)
    every_exchange_is_ours(run, "transformers", fsdp2="fsdp2" in case[2])
    mine, reference = (json.loads((one.out / "losses.json").read_text()) for one in (run, alone))
    assert len(set(mine)) == len(mine) > 1
    assert mine == pytest.approx(reference, rel=1e-5)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_adapters_are_those_of_one_process_on_every_rank(trained: Callable[[Key], Run], alone: Run, case: Key) -> None:
    reference, mine = adapters_of(alone, 0), adapters_of(trained(case), 0)
    assert mine.keys() == reference.keys() and sum("mlp.experts" in name for name in mine) == 2 * 2 * 2
    for name, adapter in mine.items():
        torch.testing.assert_close(adapter, reference[name], rtol=1e-4, atol=1e-5)
    for rank in range(1, case[0]):
        others = adapters_of(trained(case), rank)
        assert all(torch.equal(adapter, others[name]) for name, adapter in mine.items())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_adapters_load_without_us(trained: Callable[[Key], Run], checkpoint: Path, case: Key) -> None:
    out = trained(case).out
    expected = torch.load(out / "logits.pt")
    base = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    with torch.no_grad():
        before = base(input_ids=expected["input_ids"]).logits
        restored = peft.PeftModel.from_pretrained(base, out / "adapters.0").eval()
        logits = restored(input_ids=expected["input_ids"]).logits
    torch.testing.assert_close(logits, expected["logits"], rtol=1e-4, atol=1e-4)
    assert (before - logits).abs().max() > 1e-2
