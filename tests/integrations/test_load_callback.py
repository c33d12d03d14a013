"""LoadCallback: Trainer's log, and the files of `ep-bench load`, have what the routers chose."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from ep_plugin import read_stats
from ep_plugin.bench import cli
from tests.scripts_on_ranks import run_script

transformers = pytest.importorskip("transformers", minversion="5.23")

ROOT, EXPERTS = Path(__file__).parents[2], 8


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run on two ranks."""
    out = tmp_path_factory.mktemp("load")
    config = transformers.Qwen3MoeConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_experts=EXPERTS,
        num_experts_per_tok=3, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(out / "model")
    script = ROOT / "tests" / "integrations" / "scripts" / "train_load.py"
    run_script([script, out, out / "model"], 2, out, CUDA_VISIBLE_DEVICES="", PYTHONPATH=str(ROOT))
    return out


def test_the_log_has_what_the_routers_chose(run: Path) -> None:
    found = json.loads((run / "found.json").read_text())
    chosen = torch.tensor(found["chosen"]).double()  # [ranks, logs, experts]
    loads = [entry for entry in found["logged"] if "moe/expert_skew" in entry]
    assert len(loads) == chosen.shape[1] == 2
    for log, per_expert in zip(loads, chosen.sum(0), strict=True):
        assert log["moe/expert_skew"] == pytest.approx(float(per_expert.max() / per_expert.mean()))
        received = per_expert.view(2, -1).sum(1)
        assert log["moe/rank_skew"] == pytest.approx(float(received.max() / received.mean()))
        assert log["moe/dropped"] == log["moe/rail_gb"] == 0
        assert log["moe/link_gb"] > 0 and log["moe/longest_wait_s"] >= 0


def test_the_loss_is_logged_as_without_it(run: Path) -> None:
    found = json.loads((run / "found.json").read_text())
    assert [entry["step"] for entry in found["steps"] if "loss" in entry] == [2, 4]
    assert sum("loss" in entry for entry in found["logged"]) == 2


def test_the_files_have_the_whole_run(run: Path) -> None:
    chosen = torch.tensor(json.loads((run / "found.json").read_text())["chosen"]).sum(1)  # [ranks, experts]
    for rank in range(2):
        (stats,) = read_stats(run / f"load-{rank}.json").values()
        assert torch.equal(stats.tokens, chosen[:, rank * EXPERTS // 2 :][:, : EXPERTS // 2])
    files = [str(run / f"load-{rank}.json") for rank in range(2)]
    printed = CliRunner().invoke(cli.main, ["load", *files])
    busiest = int(chosen.sum(0).argmax())
    assert f"The busiest of 8 experts is {busiest}, with {int(chosen.sum(0).max()):,} tokens" in printed.output


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    from ep_plugin.integrations.transformers import LoadCallback

    with pytest.raises(ValueError, match="folder: expected an existing folder, got"):
        LoadCallback(None, folder=str(tmp_path / "none"))  # type: ignore[arg-type]
