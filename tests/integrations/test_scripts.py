"""Scripts that know nothing of us, switched over by EP_PLUGIN: they train as before, and every exchange is ours."""

from __future__ import annotations

import functools
import importlib.util
import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from ep_plugin.integrations import hooks
from tests.scripts_on_ranks import run_script, run_until_end

transformers = pytest.importorskip("transformers", minversion="5.23")

ROOT, WORLD, STEPS = Path(__file__).parents[2], 2, 4
SCRIPTS = Path(__file__).parent / "scripts"
MODELS = ("deepseek_v3", "qwen3_moe")
LOSS_LIMIT = 1e-4
EXCHANGES = {"ep_plugin::dispatch", "ep_plugin::combine"}


@dataclass(frozen=True)
class Run:
    """What one launch left: its folder, and of each rank its exchanges and what `status()` says that it served."""

    out: Path
    counts: list[Counter[str]]
    served: list[dict[str, int]]


def launch(
    out: Path, script: str, *arguments: str | Path, switched_on: str = "", ranks: int = WORLD, **variables: str
) -> Run:
    """Runs a script on some ranks, as torchrun would."""
    run_script(words_of(out, script, *arguments), ranks, out, **variables_of(switched_on), **variables)
    counts = [Counter(json.loads((out / f"counts.{rank}").read_text())) for rank in range(ranks)]
    return Run(out, counts, [json.loads((out / f"counts.{rank}.served").read_text()) for rank in range(ranks)])


def words_of(out: Path, script: str, *arguments: str | Path) -> list[str | Path]:
    out.mkdir(parents=True)
    return ["-m", "tests.integrations.counted", out / "counts", SCRIPTS / script, *arguments]


def variables_of(switched_on: str) -> dict[str, str]:
    return {"PYTHONPATH": str(ROOT)} | ({"EP_PLUGIN": switched_on} if switched_on else {})


def losses_of(run: Run, name: str) -> list[float]:
    losses = [float(loss) for loss in json.loads((run.out / name).read_text())]
    assert len(losses) == STEPS
    return losses


def every_exchange_is_ours(run: Run, name: str, fsdp2: bool = True) -> None:
    """name: the integration that counts them. fsdp2: the collectives of FSDP2 are ours too, or there are none."""
    expected = EXCHANGES if fsdp2 else EXCHANGES | {"fsdp2"}
    for counts, served in zip(run.counts, run.served, strict=True):
        assert counts.keys() == expected and min(counts.values()) > 0, counts
        assert served.keys() - {"fsdp2"} == {name}
        seen = sum(counts[one] for one in EXCHANGES)
        if name == "torchtitan":  # with selective checkpointing or a compiler the profiler sees some calls twice
            assert seen >= served[name] >= STEPS * 2 * 2 * 2  # layers, exchanges, directions
        else:
            assert seen == served[name]


# -- transformers ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny DeepSeek-V3 and a tiny Qwen3-MoE."""
    folder = tmp_path_factory.mktemp("models")
    shared = dict(vocab_size=64, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, use_cache=False)
    shared |= dict(num_attention_heads=4, num_experts_per_tok=3, initializer_range=0.1)
    deepseek = transformers.DeepseekV3Config(
        **shared,
        num_hidden_layers=3,
        first_k_dense_replace=1,
        num_key_value_heads=4,
        n_routed_experts=8,
        n_shared_experts=1,
        n_group=4,
        topk_group=2,
        q_lora_rank=32,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
    )
    qwen = transformers.Qwen3MoeConfig(
        **shared, num_hidden_layers=2, num_key_value_heads=2, head_dim=16, num_experts=8, norm_topk_prob=True
    )
    torch.manual_seed(0)
    transformers.DeepseekV3ForCausalLM(deepseek).save_pretrained(folder / "deepseek_v3")
    transformers.Qwen3MoeForCausalLM(qwen).save_pretrained(folder / "qwen3_moe")
    return folder


@pytest.fixture(scope="module")
def trained(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Run]:
    """The run of (script, what is switched on); each is made once and trains all models."""

    @functools.cache
    def run(script: str, switched_on: str) -> Run:
        out = tmp_path_factory.mktemp("runs") / "out"
        return launch(out, script, out, *(checkpoints / name for name in MODELS), switched_on=switched_on)

    return run


@pytest.mark.slow
@pytest.mark.parametrize("script", ["train_trainer.py", "train_accelerate.py"])
def test_transformers_scripts_exchange_through_us(trained, script: str) -> None:
    every_exchange_is_ours(trained(script, "transformers"), "transformers", fsdp2=False)
    for counts in trained(script, "").counts:
        assert counts.keys() == {"stock", "fsdp2"} and min(counts.values()) > 0


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("script", ["train_trainer.py", "train_accelerate.py"])
def test_losses_are_those_of_the_built_in_exchange(trained, script: str, model: str) -> None:
    ours, theirs = (losses_of(trained(script, name), f"{model}/losses.json") for name in ("transformers", ""))
    for mine, other in zip(ours, theirs, strict=True):
        assert abs(mine - other) <= LOSS_LIMIT * other


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_an_evaluation_with_a_short_last_batch_has_the_loss_of_the_built_in_exchange(trained, model: str) -> None:
    runs = (trained("train_trainer.py", name).out / model for name in ("transformers", ""))
    ours, theirs = (json.loads((out / "evaluated.json").read_text()) for out in runs)
    assert ours == pytest.approx(theirs, rel=LOSS_LIMIT)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("script", ["train_trainer.py", "train_accelerate.py"])
def test_stock_transformers_reads_the_checkpoint(trained, checkpoints: Path, script: str, model: str) -> None:
    out = trained(script, "transformers").out / model
    expected = torch.load(out / "logits.pt")
    restored, started = (
        transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        for path in (out / "checkpoint", checkpoints / model)
    )
    with torch.no_grad():
        logits = restored(input_ids=expected["input_ids"]).logits
        before = started(input_ids=expected["input_ids"]).logits
    torch.testing.assert_close(logits, expected["logits"], rtol=1e-4, atol=1e-4)
    assert (before - logits).abs().max() > 1e-2  # it was trained


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_trainer_goes_on_from_a_checkpoint(checkpoints: Path, tmp_path: Path, model: str) -> None:
    """It is loaded as a new model: transformers refuses the rest, as docs/transformers.md says."""
    out = tmp_path / "out"
    run = launch(out, "continue_trainer.py", out, checkpoints / model, switched_on="transformers")
    every_exchange_is_ours(run, "transformers", fsdp2=False)
    found = json.loads((out / "found.json").read_text())
    assert found["whole"][3] < found["whole"][0]
    assert found["continued"] == pytest.approx(found["whole"][2:], rel=LOSS_LIMIT)
    assert "Resuming is not supported for models sharded at load time" in found["saving the optimizer"]
    assert "Error" in found["resuming"]


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("ep_plugin.integrations.fsdp2") is None, reason="needs ep_plugin.integrations.fsdp2"
)
@pytest.mark.parametrize("script", ["train_trainer.py", "train_accelerate.py"])
def test_losses_are_the_same_with_the_collectives_of_fsdp_replaced_too(trained, script: str) -> None:
    both = trained(script, "transformers,fsdp2")
    every_exchange_is_ours(both, "transformers")
    assert min(served["fsdp2"] for served in both.served) > 0
    for model in MODELS:
        ours, theirs = (losses_of(run, f"{model}/losses.json") for run in (both, trained(script, "")))
        assert ours == pytest.approx(theirs, rel=LOSS_LIMIT)


# -- Megatron and torchtitan -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs megatron-core")
def test_a_megatron_script_trains_as_with_alltoall(tmp_path: Path) -> None:
    theirs = launch(tmp_path / "stock", "train_megatron.py", tmp_path / "stock", "alltoall")
    ours = launch(tmp_path / "ours", "train_megatron.py", tmp_path / "ours", "flex", switched_on="megatron")
    every_exchange_is_ours(ours, "megatron")
    for rank in range(WORLD):
        # It gathers counts of tokens as FSDP2 gathers parameters.
        assert theirs.counts[rank].keys() - {"fsdp2"} == {"stock"}
        name = f"losses.{rank}.json"
        assert losses_of(ours, name) == pytest.approx(losses_of(theirs, name), rel=LOSS_LIMIT)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs megatron-core")
def test_callers_of_megatron_train_as_with_alltoall(tmp_path: Path) -> None:
    name = "train_megatron_callers.py"
    theirs = launch(tmp_path / "stock", name, tmp_path / "stock", "alltoall")
    assert all(counts.keys() - {"fsdp2"} == {"stock"} for counts in theirs.counts)
    for switch in ("megatron", "deep_ep"):
        ours = launch(tmp_path / switch, name, tmp_path / switch, "flex", switched_on=switch)
        every_exchange_is_ours(ours, switch)
        for rank in range(WORLD):
            found, expected = (json.loads((run.out / f"losses.{rank}.json").read_text()) for run in (ours, theirs))
            assert found.keys() == expected.keys() and len(found) == 8
            for case, losses in found.items():
                assert losses == pytest.approx(expected[case], rel=LOSS_LIMIT), (switch, case)
                assert len(set(losses)) == STEPS, case


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("torchtitan") is None, reason="needs torchtitan")
def test_a_torchtitan_script_trains_as_with_the_all_to_all(tmp_path: Path) -> None:
    theirs = launch(tmp_path / "stock", "train_torchtitan.py", tmp_path / "stock")
    ways = {
        "ours": ("torchtitan,fsdp2", []),
        "compiled": ("torchtitan,fsdp2", ["--compile", "aot_eager"]),
        "deepep": ("deep_ep", ["--exchange", "deepep"]),
    }
    for way, (switched_on, options) in ways.items():
        ours = launch(tmp_path / way, "train_torchtitan.py", tmp_path / way, *options, switched_on=switched_on)
        first, *others = switched_on.split(",")
        every_exchange_is_ours(ours, first, fsdp2="fsdp2" in others)
        for rank in range(WORLD):
            assert theirs.counts[rank].keys() == {"stock", "fsdp2"}
            name = f"losses.{rank}.json"
            losses = losses_of(ours, name)
            assert losses == pytest.approx(losses_of(theirs, name), rel=LOSS_LIMIT)
            assert losses[-1] < losses[0]


# -- What is not served is left to the framework ---------------------------------------------------------------------

RANKS_OF_UNEQUAL_NODES, UNEQUAL = 4, {"EP_PLUGIN_RANKS_PER_NODE": "3"}
REASON = "nodes with different numbers of ranks are not supported"


def left_to_the_framework(run: Run, *names: str) -> None:
    """Nothing was served, and rank 0 alone has said of each name once that it is left."""
    assert not any(run.served) and not any(counts.keys() & EXCHANGES for counts in run.counts)
    for rank in range(RANKS_OF_UNEQUAL_NODES):
        said = [line for line in (run.out / f"log.{rank}").read_text().splitlines() if FALLBACK.search(line)]
        assert len(said) == (len(names) if rank == 0 else 0), said
        for name in names if rank == 0 else ():
            assert any(f"{name} is left to the framework (EP_PLUGIN_FALLBACK): {REASON}" in line for line in said)


FALLBACK = re.compile("ep_plugin|EP_PLUGIN|is left to|are left to")


def every_rank_refuses(out: Path, script: str, *arguments: str | Path, switched_on: str) -> None:
    words, variables = words_of(out, script, *arguments), variables_of(switched_on) | UNEQUAL
    codes, logs = run_until_end(words, RANKS_OF_UNEQUAL_NODES, out, **variables)
    assert codes == [1] * RANKS_OF_UNEQUAL_NODES
    assert all(re.search(f"NotSupported: .*{REASON}", log.splitlines()[-1]) for log in logs), logs


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs megatron-core")
def test_a_megatron_script_over_unequal_nodes_trains_through_its_own_exchange(tmp_path: Path) -> None:
    name, ranks = "train_megatron.py", RANKS_OF_UNEQUAL_NODES
    theirs = launch(tmp_path / "stock", name, tmp_path / "stock", "alltoall", ranks=ranks)
    variables = UNEQUAL | {"EP_PLUGIN_FALLBACK": "stock"}
    left = launch(tmp_path / "left", name, tmp_path / "left", "flex", switched_on="megatron", ranks=ranks, **variables)
    left_to_the_framework(left, "megatron")
    for rank in range(ranks):
        assert left.counts[rank] == theirs.counts[rank]
        losses = f"losses.{rank}.json"
        assert losses_of(left, losses) == losses_of(theirs, losses)
    every_rank_refuses(tmp_path / "refused", name, tmp_path / "refused", "flex", switched_on="megatron")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("torchtitan") is None, reason="needs torchtitan")
def test_a_torchtitan_script_over_unequal_nodes_trains_through_its_own_exchange(tmp_path: Path) -> None:
    name, ranks, switches = "train_torchtitan.py", RANKS_OF_UNEQUAL_NODES, "torchtitan,fsdp2"
    theirs = launch(tmp_path / "stock", name, tmp_path / "stock", ranks=ranks)
    variables = UNEQUAL | {"EP_PLUGIN_FALLBACK": "stock"}
    left = launch(tmp_path / "left", name, tmp_path / "left", switched_on=switches, ranks=ranks, **variables)
    left_to_the_framework(left, "torchtitan", "fsdp2")
    for rank in range(ranks):
        losses = f"losses.{rank}.json"
        assert losses_of(left, losses) == losses_of(theirs, losses)
    every_rank_refuses(tmp_path / "refused", name, tmp_path / "refused", switched_on=switches)


# -- DeepEP ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_callers_of_deep_ep_train_as_dense_experts_do(tmp_path: Path) -> None:
    hooks.enable(["deep_ep"])
    from tests.integrations.scripts import train_deep_ep as script

    hooks.disable(["deep_ep"])
    run = launch(tmp_path / "out", "train_deep_ep.py", tmp_path / "out", switched_on="deep_ep")
    every_exchange_is_ours(run, "deep_ep")
    found = [json.loads((run.out / f"losses.{rank}.json").read_text()) for rank in range(WORLD)]
    assert found[0].keys() == {f"{style}, {routing}" for style in script.STYLES for routing in script.ROUTINGS}
    for case in found[0]:
        style, _, routing = case.partition(", ")
        limit = 1e-2 if style == "axolotl" else LOSS_LIMIT  # its rows are bfloat16
        # In Axolotl a rank that receives no row gives the weights of its tokens no gradient.
        fixed = {1} if (style, routing) == ("axolotl", "all to one rank") else set()
        expected = _dense_losses(script, routing, fixed)
        assert [losses[case] for losses in found] == [pytest.approx(losses, rel=limit) for losses in expected], case


def _dense_losses(script: Any, routing: str, fixed: set[int]) -> list[list[float]]:
    """The training of scripts/train_deep_ep.py in one process, every expert on every token. By rank and step.
    fixed: ranks whose routing weights get no gradient."""
    experts, hidden = script.EXPERTS, script.HIDDEN
    generator = torch.Generator().manual_seed(7)
    router = (torch.randn((hidden, experts), generator=generator) / 8).requires_grad_()
    weight = (torch.randn((experts, hidden, hidden), generator=generator) / 8).requires_grad_()
    data = torch.randn((STEPS, WORLD, script.TOKENS, hidden), generator=generator)
    steps = []
    for step in range(STEPS):
        losses = []
        for rank in range(WORLD):
            x = script.tokens_of(data[step], rank, routing)
            values, ids = script.route(x @ (router.detach() if rank in fixed else router), routing)
            gates = torch.zeros((len(x), experts)).scatter_add(1, ids.clamp(min=0), values)
            z = torch.einsum("te,teh->th", gates, torch.einsum("tk,ekh->teh", x, weight))
            losses.append(script.loss_of(z, x))
        router.grad, weight.grad = None, None
        torch.stack(losses).sum().backward()
        with torch.no_grad():
            router -= 0.5 * router.grad
            weight -= 0.5 * weight.grad
        steps.append([loss.item() for loss in losses])
    return [list(losses) for losses in zip(*steps, strict=True)]
