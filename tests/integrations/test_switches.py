"""enable() and disable() of every integration: each restores the very objects that it replaced."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.scripts_on_ranks import run_code

ROOT = Path(__file__).parents[2]
# By integration: the framework's package, what makes it importable here, and the places that are replaced.
PLACES = {
    "fsdp2": (
        "torch",
        "from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup",
        ["FSDPParamGroup.__init__"],
    ),
    "pipelining": (
        "torch",
        "from torch.distributed.pipelining import schedules, stage",
        ["schedules._batch_p2p", "stage._PipelineStageBase.__init__"],
    ),
    "transformers": (
        "transformers",
        "from transformers.distributed.expert_parallel import EPImplementationInterface as names",
        ["names()['auto']"],
    ),
    "megatron": (
        "megatron",
        "from tests.integrations.on_cpus import make_megatron_run_here; make_megatron_run_here()\n"
        "from megatron.core.transformer.moe import moe_layer\n"
        "from megatron.core.pipeline_parallel import p2p_communication as p2p\n"
        "from megatron.core.distributed import param_and_grad_buffer as buffers",
        [
            "moe_layer.MoEFlexTokenDispatcher",
            "vars(moe_layer.BaseMoELayer).get('set_layer_number')",
            "p2p._p2p_ops",
            "p2p._batched_p2p_ops",
            "p2p.P2PCommunicator._communicate",
            "buffers._coalescing_manager",
            "buffers.dist_reduce_scatter_func",
            "buffers._ParamAndGradBuffer.__init__",
        ],
    ),
    "torchtitan": (
        "torchtitan",
        "from ep_plugin.testing.torchtitan import without_triton; without_triton()\n"
        "from torchtitan.models.common import token_dispatcher as stock",
        ["stock.AllToAllTokenDispatcher", "stock.TorchAOTokenDispatcher"],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PLACES)
def test_disable_restores_the_very_objects(name: str, tmp_path: Path) -> None:
    package, imports, places = PLACES[name]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}")
    code = f"""
import torch
{imports}
import ep_plugin.integrations
from ep_plugin.integrations import {name} as ours
def found(): return [{", ".join(places)}]
def row(): return next(row for row in ep_plugin.integrations.status() if row.name == "{name}")
def both(): return zip(found(), before, strict=True)
before = found()
began = row().state
ours.disable()
assert all(now is then for now, then in both()) and row().state == began, row()
switches = (ours.enable, ours.disable), (lambda: ep_plugin.integrations.enable("{name}"),) + (
    lambda: ep_plugin.integrations.disable("{name}"),
)
for enable, disable in switches:
    enable(), enable()
    assert all(now is not then for now, then in both()), found()
    assert row().state == "ready" and row().detail.startswith("replaced "), row()
    disable(), disable()
    assert all(now is then for now, then in both()), found()
    assert "replaced" not in row().detail and row().state == ("ready" if "registered" in row().detail else "off")
"""
    status, output = run_code(code, tmp_path, PYTHONPATH=str(ROOT))
    assert status == 0, output


def test_disable_gives_the_names_of_deep_ep_back(tmp_path: Path) -> None:
    """`deep_ep` replaces what its names import."""
    for name in ("deep_ep", "deep_ep_cpp"):
        (tmp_path / f"{name}.py").write_text("")
    code = f"""
import importlib, sys, torch
import ep_plugin.integrations as integrations
names = "deep_ep", "deep_ep_cpp"
def found(): return [importlib.import_module(name).__file__ for name in names]
stock = [f"{tmp_path}/{{name}}.py" for name in names]
for _ in range(2):
    integrations.enable("deep_ep"), integrations.enable("deep_ep")
    assert all("ep_plugin/deep_ep" in now for now in found()), found()
    integrations.disable("deep_ep"), integrations.disable("deep_ep")
    assert found() == stock, found()
    for name in names:
        del sys.modules[name]
"""
    status, output = run_code(code, tmp_path, PYTHONPATH=f"{ROOT}:{tmp_path}")
    assert status == 0, output
