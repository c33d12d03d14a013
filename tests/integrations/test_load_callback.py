"""LoadCallback: Trainer's log, and the files of `ep-bench load`, have what the routers chose."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

import ep_plugin
from ep_plugin import LoadStats, read_stats
from ep_plugin.bench import cli
from tests.bench.test_load import stats
from tests.scripts_on_ranks import run_code, run_script

transformers = pytest.importorskip("transformers", minversion="5.23")

ROOT, EXPERTS = Path(__file__).parents[2], 8


def train(out: Path, *tracker: str, skewed: bool = False) -> None:
    """A run on two ranks that writes to `out`, and to a tracker that Trainer knows. skewed: one rank gets no token."""
    config = transformers.Qwen3MoeConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_experts=EXPERTS,
        num_experts_per_tok=3, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Qwen3MoeForCausalLM(config)
    for layer in model.model.layers if skewed else []:
        layer.mlp.gate.weight.data.zero_()  # of equal logits the same neighbours are chosen for every token
    model.save_pretrained(out / "model")
    script = ROOT / "tests" / "integrations" / "scripts" / "train_load.py"
    run_script([script, out, out / "model", *tracker], 2, out, CUDA_VISIBLE_DEVICES="", PYTHONPATH=str(ROOT))


@pytest.fixture(scope="module", params=["random", "skewed"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run."""
    out = tmp_path_factory.mktemp("load")
    train(out, skewed=request.param == "skewed")
    return out


@pytest.mark.slow
def test_the_log_has_what_the_routers_chose(run: Path, request: pytest.FixtureRequest) -> None:
    found = json.loads((run / "found.json").read_text())
    chosen = torch.tensor(found["chosen"]).double()  # [ranks, logs, layers, experts]
    if "skewed" in request.node.name:
        assert (chosen.sum((0, 1, 2)).view(2, -1).sum(1) == 0).sum() == 1
    loads = [entry for entry in found["logged"] if "moe/expert_skew" in entry]
    assert len(loads) == chosen.shape[1] == 2
    for log, per_expert in zip(loads, chosen.sum(0), strict=True):
        skews = per_expert.amax(1) / per_expert.mean(1)
        assert log["moe/expert_skew"] == pytest.approx(float(skews.mean()))
        assert log["moe/worst_expert_skew"] == pytest.approx(float(skews.max()))
        assert log["moe/worst_layer"] == int(skews.argmax())
        received = per_expert.view(2, 2, -1).sum(2)  # [layers, ranks]
        assert log["moe/rank_skew"] == pytest.approx(float((received.amax(1) / received.mean(1)).mean()))
        assert log["moe/dropped"] == log["moe/rail_gb"] == 0
        assert log["moe/link_gb"] > 0 and log["moe/longest_wait_s"] >= 0


@pytest.mark.slow
def test_the_loss_is_logged_as_without_it(run: Path) -> None:
    found = json.loads((run / "found.json").read_text())
    assert [entry["step"] for entry in found["steps"] if "loss" in entry] == [2, 4]
    assert sum("loss" in entry for entry in found["logged"]) == 2


@pytest.mark.slow
def test_the_files_have_the_whole_run(run: Path) -> None:
    layers = torch.tensor(json.loads((run / "found.json").read_text())["chosen"]).sum(1)  # [ranks, layers, experts]
    chosen = layers.sum(1)
    for rank in range(2):
        (stats,) = read_stats(run / f"load-{rank}.json").values()
        here = slice(rank * EXPERTS // 2, (rank + 1) * EXPERTS // 2)
        assert torch.equal(stats.tokens, chosen[:, here])
        assert list(stats.layers) == ["transformers MoE layer 0", "transformers MoE layer 1"]
        for number, tokens in enumerate(stats.layers.values()):
            assert torch.equal(tokens, layers[:, number, here])
    files = [str(run / f"load-{rank}.json") for rank in range(2)]
    printed = CliRunner().invoke(cli.main, ["load", *files])
    busiest = int(chosen.sum(0).argmax())
    assert f"The busiest of 8 experts is {busiest}, with {int(chosen.sum(0).max()):,} tokens" in printed.output
    assert "| transformers MoE layer 1 " in printed.output


def metrics_of(*ranks: list[LoadStats]) -> dict[str, float]:
    from ep_plugin.integrations.transformers import load

    return load._metrics([load._numbers(found) for found in ranks])


def test_communicators_that_serve_one_layer_are_added() -> None:
    """As training and low latency do."""
    rows, more = [[5, 5], [5, 5]], [[1, 1], [1, 1]]
    ranks = [[stats(rank, rows, {"first": rows}), stats(rank, more, {"first": more})] for rank in range(2)]
    found = metrics_of(*ranks)
    assert (found["moe/expert_skew"], found["moe/rank_skew"], found["moe/worst_layer"]) == (1, 1, 0)


def test_copies_of_an_expert_are_one_expert() -> None:
    """Four ranks, of which each two have all experts."""
    busy, idle = [[6, 2], [6, 2]], [[2, 6], [2, 6]]
    found = metrics_of(*([stats(rank % 2, rows)] for rank, rows in enumerate([busy, busy, idle, idle])))
    assert found["moe/expert_skew"] == found["moe/rank_skew"] == 1


def test_layers_that_only_some_ranks_have() -> None:
    rows, uneven, nothing = [[5, 5], [5, 5]], [[9, 3], [9, 3]], [[0, 0], [0, 0]]
    found = metrics_of([stats(0, nothing)], [stats(1, rows, {"late": rows})])
    assert found["moe/expert_skew"] == 2 and found["moe/worst_layer"] == 1  # behind what rank 0 has in no layer
    assert metrics_of([stats(0, nothing)], [stats(1, uneven)])["moe/rank_skew"] == 2  # compiled layers
    assert metrics_of([stats(0, nothing)], [stats(1, nothing)]) == {}


@pytest.mark.slow
def test_epochs_are_logged_without_what_was_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    from ep_plugin.integrations.transformers import LoadCallback, load

    seen = iter([stats(0, [[9, 1], [9, 1]]), stats(0, [[9, 5], [9, 1]])])
    monkeypatch.setattr(ep_plugin, "stats", lambda: {"communicator 0.1": next(seen)})
    monkeypatch.setattr(ep_plugin, "record_stats", lambda: None)
    monkeypatch.setattr(load, "gather_object", lambda of_rank: of_rank)
    logged: list[dict[str, float]] = []
    callback = LoadCallback(SimpleNamespace(log=logged.append))  # type: ignore[arg-type]
    control = SimpleNamespace(should_log=True)
    callback.on_train_begin(None, None, control)  # type: ignore[arg-type]
    callback.on_epoch_end(None, None, control)  # type: ignore[arg-type]
    assert logged[0]["moe/expert_skew"] == 2 and logged[0]["moe/dropped"] == 0 and control.should_log


MODEL_FIRST = """
import sys
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeForCausalLM
assert "ep_plugin.integrations.transformers" in sys.modules
assert "transformers.trainer_callback" not in sys.modules  # 5.24's needs modules of models, which are being imported
from ep_plugin.integrations.transformers import LoadCallback
"""


def test_the_switch_needs_nothing_of_trainer_while_a_model_is_imported(tmp_path: Path) -> None:
    status, output = run_code(MODEL_FIRST, tmp_path, EP_PLUGIN="transformers")
    assert status == 0, output


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    from ep_plugin.integrations.transformers import LoadCallback

    with pytest.raises(ValueError, match="folder: expected an existing folder, got"):
        LoadCallback(None, folder=str(tmp_path / "none"))  # type: ignore[arg-type]
