"""CheckpointCallback and Checkpoints: runs that are killed continue as if they had never ended."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.scripts_on_ranks import run_until_end

transformers = pytest.importorskip("transformers", minversion="5.23")

from ep_plugin.integrations.transformers import CheckpointCallback, Checkpoints  # noqa: E402

SCRIPT = Path(__file__).parent / "scripts" / "train_resume.py"
STEPS = 8  # a checkpoint every second step
LONG = pytest.mark.skipif("not __import__('os').environ.get('EP_TEST_LONG')", reason="takes minutes: EP_TEST_LONG=1")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    config = transformers.Qwen3MoeConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_experts=8,
        num_experts_per_tok=3, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(path)
    return path


def train(out: Path, model: Path, *kill: str, ranks: int = 2, **options: Any) -> dict[str, Any] | None:
    """Trains in `out`, and returns what the run has written there. Returns None if the run was to be killed."""
    (out / "found.json").unlink(missing_ok=True)
    words = [SCRIPT, out, model, str(STEPS), *kill]
    codes, logs = run_until_end(
        words, ranks, out, CUDA_VISIBLE_DEVICES="", EP_PLUGIN="transformers", TEST_OPTIONS=json.dumps(options)
    )
    if kill:
        assert -9 in codes, logs
        return None
    assert codes == [0] * ranks, "\n".join(log[-3000:] for log in logs)
    found: dict[str, Any] = json.loads((out / "found.json").read_text())
    return found


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run that nothing has interrupted."""
    found = train(tmp_path_factory.mktemp("whole"), model)
    assert found is not None and found["begin"] is None and len(set(found["losses"])) == STEPS
    return found


@pytest.fixture(scope="module")
def killed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that one rank has left at step 5, and another while it wrote the checkpoint of step 6, beside
    the training."""
    out = tmp_path_factory.mktemp("killed")
    train(out, model, "1:5")
    train(out, model, "0:6:save", asynchronous=True)
    assert (out / "trainer" / "checkpoint-6" / "run").is_dir()
    return out


@pytest.mark.slow
def test_a_killed_run_continues_as_if_it_had_never_ended(
    killed: Path, model: Path, whole: dict[str, Any], tmp_path: Path
) -> None:
    shutil.copytree(killed / "trainer", tmp_path / "trainer")
    found = train(tmp_path, model)
    assert found is not None and found["begin"].endswith("checkpoint-4")
    assert (found["losses"], found["drawn"]) == (whole["losses"], whole["drawn"])
    assert {one.name for one in (tmp_path / "trainer").iterdir()} == {"checkpoint-6", "checkpoint-8"}
    loaded = transformers.Qwen3MoeForCausalLM.from_pretrained(tmp_path / "trainer" / "checkpoint-8")
    assert all(one.isfinite().all() for one in loaded.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, pytest.param(4, marks=LONG)])
def test_another_number_of_ranks_continues(
    killed: Path, model: Path, whole: dict[str, Any], tmp_path: Path, ranks: int
) -> None:
    shutil.copytree(killed / "trainer", tmp_path / "trainer")
    found = train(tmp_path, model, ranks=ranks)
    assert found is not None and found["begin"].endswith("checkpoint-4")
    assert found["losses"] == pytest.approx(whole["losses"], abs=1e-4)


@LONG
@pytest.mark.timeout(1800)
def test_ten_kills_at_random(model: Path, whole: dict[str, Any], tmp_path: Path) -> None:
    draw = random.Random(0)
    for _ in range(10):
        place = draw.choice(["", ":save"])
        step = draw.choice([4, 6, 8]) if place else draw.randrange(3, STEPS + 1)
        shutil.rmtree(tmp_path / "trainer", ignore_errors=True)
        asynchronous = draw.choice([False, True])
        train(tmp_path, model, f"{draw.randrange(2)}:{step}{place}", asynchronous=asynchronous)
        found = train(tmp_path, model, asynchronous=asynchronous)
        assert found is not None and found["losses"] == whole["losses"]


def loop(folder: Path, **options: Any) -> tuple[Checkpoints, torch.nn.Linear, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    layer = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(layer.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return Checkpoints(folder, layer, optimizer, scheduler, **options), layer, optimizer, scheduler


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_loop_of_ones_own(tmp_path: Path, asynchronous: bool) -> None:
    def steps(run: Any, begin: int, end: int) -> None:
        checkpoints, layer, optimizer, scheduler = run
        for step in range(begin, end):
            layer(torch.rand(4, 3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            checkpoints.save(step + 1, {"step": step + 1, "rows": torch.tensor([step])})
        checkpoints.wait()

    first = loop(tmp_path, asynchronous=asynchronous)
    assert first[0].load() is None
    steps(first, 0, 4)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["step-3", "step-4"]
    shutil.rmtree(tmp_path / "step-3" / "__0_0.distcp", ignore_errors=True)
    (tmp_path / "step-9").mkdir()  # left half written
    second = loop(tmp_path, asynchronous=asynchronous)
    position = second[0].load()
    assert position == {"step": 4, "rows": torch.tensor([3])}
    steps(first, 4, 6)
    torch.manual_seed(1)
    second[0].load()
    assert second[3].get_last_lr() == first[3].get_last_lr()
    assert all(
        torch.equal(one, other) for one, other in zip(first[1].parameters(), second[1].parameters(), strict=True)
    )


def test_groups_of_another_schedule_are_refused(tmp_path: Path) -> None:
    checkpoints, _, optimizer, scheduler = loop(tmp_path)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))], "lr": 1.0})
    state = scheduler.state_dict() | {"base_lrs": [0.1, 0.2, 0.3]}
    with pytest.raises(ValueError, match="expected 2 equal groups in base_lrs"):
        checkpoints._run._fitted(state)


def fake_trainer(out: Path, **options: Any) -> Any:
    args = SimpleNamespace(**({"output_dir": str(out), "save_only_model": True, "save_total_limit": None} | options))
    return SimpleNamespace(args=args, save_model=None, add_callback=lambda callback: None)


def test_what_trainer_would_save_itself_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="save_only_model: expected True"):
        CheckpointCallback(fake_trainer(tmp_path, save_only_model=False))
    with pytest.raises(ValueError, match="save_total_limit: expected at least 2 with asynchronous=True, got 1"):
        CheckpointCallback(fake_trainer(tmp_path, save_total_limit=1), asynchronous=True)
    with pytest.raises(ValueError, match="keep: expected an integer of at least 1, got 0"):
        loop(tmp_path, keep=0)


def test_an_incomplete_checkpoint_is_never_loaded(tmp_path: Path) -> None:
    trainer = fake_trainer(tmp_path)
    callback = CheckpointCallback(trainer)
    assert callback.latest() is None
    for step, state in ((2, "{}"), (4, "{"), (6, "{}"), (10, "{}")):
        (tmp_path / f"checkpoint-{step}" / "run").mkdir(parents=True)
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(state)
        if step != 6:
            (tmp_path / f"checkpoint-{step}" / "run" / ".metadata").touch()
    (tmp_path / "checkpoint-12").mkdir()  # half removed
    assert callback.latest() == str(tmp_path / "checkpoint-10")
    shutil.rmtree(tmp_path / "checkpoint-10")
    assert callback.latest() == str(tmp_path / "checkpoint-2")
    with pytest.raises(ValueError, match="expected a complete checkpoint .* got .*checkpoint-6"):
        trainer._load_from_checkpoint(str(tmp_path / "checkpoint-6"))
    callback.on_train_begin(trainer.args, None, None)  # type: ignore[arg-type]
    oldest_first = sorted(tmp_path.iterdir(), key=lambda one: one.stat().st_mtime)
    assert oldest_first[-1].name == "checkpoint-2"
