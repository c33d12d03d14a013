"""Every example as its docstring says, without a GPU. Megatron's runs on CPUs by stand-ins.

torchrun itself starts the shortest; the others run on ranks as torchrun starts them (tests/scripts_on_ranks.py).
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.scripts_on_ranks import run_script

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
MEGATRON = "train_deepseek_megatron"
ON_CPUS = ("-m", "tests.integrations.on_cpus")
NEEDS = {
    "generate_qwen3_moe": "transformers",
    "train_qwen3_moe": "transformers",
    "train_trainer": "transformers",
    "train_accelerate": "accelerate",
    MEGATRON: "megatron",
}
LINES = {
    "api": "comm = MoECommunicator(None, config)",
    "generate_qwen3_moe": 'InferenceConfig(ep_size=ranks, ep_implementation="ep_plugin")',
    "ring_all_gather": "p2p.exchange(",
    "train_fsdp2": "fsdp2.enable(model)",
    "train_accelerate": "fsdp2.enable(model)",
    "train_qwen3_moe": 'DistributedConfig(ep_size=ranks, fsdp_size=ranks, ep_implementation="ep_plugin")',
    "train_trainer": 'DistributedConfig(ep_size=ranks, fsdp_size=ranks, ep_implementation="ep_plugin")',
    MEGATRON: "EP_PLUGIN=megatron torchrun",
}


@functools.cache
def on_ranks(*words: str, ranks: int = 2, **variables: str) -> str:
    """The output of ranks without GPUs; each script runs once."""
    with tempfile.TemporaryDirectory() as folder:
        run_script(words, ranks, Path(folder), CUDA_VISIBLE_DEVICES="", PYTHONPATH=str(ROOT), **variables)
        return "".join(log.read_text() for log in sorted(Path(folder).glob("log.*")))


def torchrun(*words: str, **variables: str) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *words]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("EP_PLUGIN")}
    environment = inherited | {"CUDA_VISIBLE_DEVICES": ""} | variables
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def losses_in(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"""loss'?:? '?(\d+\.\d+)""", output)]


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_runs_as_printed(path: Path) -> None:
    needed = NEEDS.get(path.stem)
    if needed and importlib.util.find_spec(needed) is None:
        pytest.skip(f"needs {needed}")
    assert LINES[path.stem] in path.read_text()
    printed = re.search(r"^ *((?:\w+=\w+ )?torchrun .*?)(?: \[.*| +#.*)?$", path.read_text(), re.MULTILINE)
    assert printed is not None
    *settings, _, option, ranks, script = shlex.split(printed[1])
    assert (option, ranks, script) == ("--nproc-per-node", "2", f"examples/{path.name}")
    variables = dict(setting.split("=") for setting in settings)
    if path.stem == "api":
        output = torchrun(script, **variables)
        assert sorted(re.findall(r"rank (\d): (\d+) tokens", output)) == [("0", "100"), ("1", "101")]
        return
    output = on_ranks(*(ON_CPUS if path.stem == MEGATRON else ()), str(path), **variables)
    if path.stem == "generate_qwen3_moe":
        assert sorted(re.findall(r"rank (\d): (\d) sequences of 24", output)) == [("0", "3"), ("1", "2")]
        assert sorted(re.findall(r"rank (\d): one rank alone gives the same tokens", output)) == ["0", "1"]
        return
    if path.stem == "ring_all_gather":
        assert sorted(re.findall(r"rank (\d): 2 parts, equal to gloo's bit for bit: True", output)) == ["0", "1"]
        return
    losses = losses_in(output)
    assert len(losses) >= 4 and losses[-1] < losses[0], output
    if path.stem == MEGATRON:
        assert re.search(r"^megatron +on +[1-9]", output, re.MULTILINE), output
    if "fsdp2.enable" in path.read_text():
        counts = {name: int(count) for name, count in re.findall(r"(\w+)=(\d+)", output)}
        assert counts["all_gathers"] >= 20 * counts["parameter_groups"] > 20
        assert counts["reduce_scatters"] == 20 * counts["parameter_groups"]


@pytest.mark.slow
def test_the_accelerate_loop_has_the_losses_of_stock_fsdp2(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    (tmp_path / "stock.py").write_text(
        "import runpy\n"
        "from ep_plugin.integrations import fsdp2\n"
        "fsdp2.enable = lambda model: 0\n"
        f"runpy.run_path({str(ROOT / 'examples' / 'train_accelerate.py')!r}, run_name='__main__')\n"
    )
    ours, stock = on_ranks(str(ROOT / "examples" / "train_accelerate.py")), on_ranks(str(tmp_path / "stock.py"))
    assert "all_gathers=0" in stock and "all_gathers=0" not in ours
    assert len(losses_in(ours)) == 8
    assert losses_in(ours) == pytest.approx(losses_in(stock), rel=1e-5)


@pytest.mark.slow
def test_over_two_nodes_a_model_has_the_losses_of_one_node() -> None:
    pytest.importorskip("transformers")
    run = functools.partial(on_ranks, str(ROOT / "examples" / "train_qwen3_moe.py"), ranks=4)
    one_node, two_nodes = losses_in(run()), losses_in(run(EP_PLUGIN_RANKS_PER_NODE="2"))
    assert len(one_node) >= 5 and one_node[-1] < one_node[0]
    assert two_nodes == pytest.approx(one_node, rel=1e-3)


@pytest.mark.slow
def test_over_two_nodes_decoding_gives_the_tokens_of_one_rank() -> None:
    pytest.importorskip("transformers")
    output = on_ranks(str(ROOT / "examples" / "generate_qwen3_moe.py"), ranks=4, EP_PLUGIN_RANKS_PER_NODE="2")
    assert sorted(re.findall(r"rank (\d): one rank alone gives the same tokens", output)) == ["0", "1", "2", "3"]


@pytest.mark.slow
def test_the_megatron_example_has_the_losses_of_stock(tmp_path: Path) -> None:
    pytest.importorskip("megatron")
    compare_megatron_with_stock(tmp_path, functools.partial(on_ranks, *ON_CPUS, ranks=4))


def compare_megatron_with_stock(folder: Path, run: Callable[..., str]) -> None:
    """Over two stages of two ranks: ours, and stock with Megatron's own dispatcher, collectives and messages.
    `run(script, *arguments, **variables)` runs the script on 4 ranks and returns their output.
    """
    ours, stock = folder / "ours_megatron.py", folder / "stock_megatron.py"
    ours.write_text(
        (ROOT / "examples" / f"{MEGATRON}.py").read_text().replace("= 64, 2, 128, 4, 20", "= 16, 2, 128, 4, 10")
    )
    stock.write_text(ours.read_text().replace('"flex"', '"alltoall"'))
    arms = {
        name: run(str(script), "--pipeline", "2", **switch)
        for name, script, switch in (("ours", ours, {"EP_PLUGIN": "megatron"}), ("stock", stock, {}))
    }
    row = re.search(r"^megatron +on +(\d+) .* served (.*); replaced", arms["ours"], re.MULTILINE)
    assert row is not None, arms["ours"]
    kinds = dict(reversed(each.split(" ", 1)) for each in row[2].split(", "))
    assert kinds.keys() == {"dispatches and combines", "gathers and sums", "messages"}
    assert sum(map(int, kinds.values())) == int(row[1])
    assert int(kinds["messages"]) == 10 * 4 * 2  # steps, micro batches, and both ways
    assert re.search(r"^megatron +off", arms["stock"], re.MULTILINE)
    assert len(losses_in(arms["ours"])) == 4
    assert losses_in(arms["ours"]) == pytest.approx(losses_in(arms["stock"]), rel=1e-2)
