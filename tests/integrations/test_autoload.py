"""EP_PLUGIN=...: what is switched on by importing torch, when, at what cost, and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ep_plugin import env
from ep_plugin.integrations import hooks

MOST_MS = 4.0
ENTRY_POINT = (
    "importlib.metadata.EntryPoint('ep_plugin', 'ep_plugin.integrations.autoload:start', 'torch.backends').load()()"
)


def run(code: str, *, fails: bool = False, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs `code` in a fresh Python that has only these EP_PLUGIN* variables."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("EP_PLUGIN")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=inherited | variables, capture_output=True, text=True, timeout=240
    )
    assert (done.returncode != 0) == fails, done.stdout + done.stderr
    return done


@pytest.fixture
def stand_in_for_torch(tmp_path: Path) -> Path:
    """A folder with a package `torch` that only does what torch does at the end of its import. The whole import in each
    of many processes would take most of a test's time."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(f"import importlib.metadata\n{ENTRY_POINT}\n")
    return tmp_path


@pytest.mark.slow
def test_without_the_variable_hardly_anything_is_loaded() -> None:
    code = "import sys, torch; print(sorted(name for name in sys.modules if name.startswith('ep_plugin')))"
    loaded = ["ep_plugin", "ep_plugin.env", "ep_plugin.integrations", "ep_plugin.integrations.autoload"]
    assert run(code).stdout.strip() == str(loaded)


@pytest.mark.slow
def test_without_the_variable_it_costs_a_few_milliseconds_at_most(tmp_path: Path) -> None:
    code = f"""
import importlib.metadata, sys, time
import torch
# Other tests' settings must not make Python compile our files each time. PyTorch's are where they always are.
sys.dont_write_bytecode, sys.pycache_prefix = False, {str(tmp_path)!r}
def once():
    for name in [name for name in sys.modules if name.startswith('ep_plugin')]:
        del sys.modules[name]
    began = time.perf_counter()
    {ENTRY_POINT}
    return time.perf_counter() - began
print(min(once() for _ in range(300)) * 1e3)
"""
    assert 0 < float(run(code).stdout) < MOST_MS


def test_an_unknown_name_ends_the_import_of_torch() -> None:
    done = run("import torch", fails=True, EP_PLUGIN="transformers,magatron")
    said = f"EP_PLUGIN: expected names among {', '.join(hooks.INTEGRATIONS)}, got 'magatron'"
    assert done.stderr.splitlines()[-1].endswith(said) and "backend extension" not in done.stderr


def test_a_late_import_of_torch_ends_with_our_sentence_too() -> None:
    code = "import sys, types; sys.modules['deep_ep'] = types.ModuleType('deep_ep'); import torch"
    last = run(code, fails=True, EP_PLUGIN="deep_ep").stderr.splitlines()[-1]
    assert last.endswith("got deep_ep from None in sys.modules; put `import torch` first")


CHILD = """
import subprocess, sys, torch, ep_plugin.integrations as integrations
state = {row.name: row.state for row in integrations.status()}['fsdp2']
if len(sys.argv) > 1:
    sys.exit(f"child {state}")
print(state, flush=True)
subprocess.run([sys.executable, "-c", sys.orig_argv[2], "child"])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variables", "child"),
    [
        ({"RANK": "0"}, "waiting"),
        ({"RANK": "0", "EP_PLUGIN_CHILDREN": "0"}, "off"),
        ({}, "waiting"),
        ({"EP_PLUGIN_CHILDREN": "0"}, "off"),
    ],
    ids=["a rank", "a rank that keeps it", "a script", "a script that keeps it"],
)
def test_a_rank_or_a_script_can_keep_the_switch_from_its_children(variables: dict[str, str], child: str) -> None:
    done = run(CHILD, EP_PLUGIN="fsdp2", **variables)
    assert (done.stdout.strip(), done.stderr.strip().splitlines()[-1]) == ("waiting", f"child {child}")


SCRIPT = """
import multiprocessing, os, subprocess, sys, torch
import ep_plugin.integrations as integrations

def say(what):
    print(what, {row.name: row.state for row in integrations.status()}["fsdp2"], flush=True)

def start(what, **variables):
    command = [sys.executable, __file__, what]
    subprocess.run(command, env=os.environ | variables, check=True)

def rank(method):
    say(f"{method}:")
    start(f"program of {method}:")

if __name__ == "__main__":
    if len(sys.argv) > 1:
        say(sys.argv[1])
        if sys.argv[1] in ("rank:", "launcher:"):
            start(f"program of {sys.argv[1]}" if sys.argv[1] == "rank:" else "its rank:", RANK="0")
        sys.exit()
    assert not hasattr(torch, "Tensor")  # the stand-in
    say("script:")
    start("program:")
    start("rank:", RANK="0")
    start("launcher:")
    for method in ("fork", "spawn", "forkserver"):
        process = multiprocessing.get_context(method).Process(target=rank, args=(method,))
        process.start()
        process.join()
        assert process.exitcode == 0
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variables", "off"),
    [
        ({}, ()),
        (
            {"EP_PLUGIN_CHILDREN": "0"},
            ("program", "program of rank", "launcher", "program of fork", "program of spawn", "program of forkserver"),
        ),
    ],
    ids=["by default", "EP_PLUGIN_CHILDREN=0"],
)
def test_what_a_script_without_a_launcher_starts(
    stand_in_for_torch: Path, variables: dict[str, str], off: tuple[str, ...]
) -> None:
    """Its ranks use ep_plugin, however they are started. Other programs do not, if it says so."""
    (stand_in_for_torch / "script.py").write_text(SCRIPT)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("EP_PLUGIN")}
    done = subprocess.run(
        [sys.executable, stand_in_for_torch / "script.py"],
        env=inherited | {"EP_PLUGIN": "fsdp2"} | variables,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    found = dict(line.split(": ") for line in done.stdout.splitlines())
    assert found.keys() == {
        *("script", "program", "rank", "program of rank", "launcher", "its rank"),
        *("fork", "spawn", "forkserver", "program of fork", "program of spawn", "program of forkserver"),
    }
    assert {who for who, state in found.items() if state == "off"} == set(off)
    assert {state for who, state in found.items() if who not in off} == {"waiting"}


@pytest.mark.slow
def test_transformers_is_switched_on_when_the_script_gets_there_and_not_before() -> None:
    code = """
import json, sys
import torch
import ep_plugin.integrations as integrations
watched = ('transformers', 'transformers.distributed.expert_parallel', 'ep_plugin.integrations.transformers')
def seen():
    state = {row.name: row.state for row in integrations.status()}
    return [name for name in watched if name in sys.modules], state['transformers']
steps = [seen()]
import transformers
steps.append(seen())
from transformers.distributed.expert_parallel import EPImplementationInterface
steps.append(seen())
names = {name: cls.__name__ for name, cls in EPImplementationInterface._global_mapping.items()}
print(json.dumps([steps, names]))
"""
    done = run(code, EP_PLUGIN=" transformers, ", EP_PLUGIN_LOG="1")
    steps, names = json.loads(done.stdout)
    whole = ["transformers", "transformers.distributed.expert_parallel", "ep_plugin.integrations.transformers"]
    assert steps == [[[], "waiting"], [["transformers"], "waiting"], [whole, "ready"]]
    assert (names["auto"], names["ep_plugin"]) == ("AutoEpPlugin", "EpPluginExpertParallel")
    assert names["all_to_all"] == "AllToAllEP"
    said = [line for line in done.stderr.splitlines() if line.startswith("ep_plugin: transformers")]
    assert "waiting: transformers.distributed.expert_parallel has not been imported" in said[0]
    assert said[-1] == 'ep_plugin: transformers: ready: replaced ep_implementation="auto", the default'


@pytest.mark.parametrize(
    ("value", "names"),
    [("", ()), (" , ", ()), ("fsdp2", ("fsdp2",)), ("megatron, fsdp2,megatron", ("megatron", "fsdp2"))],
)
def test_names_are_separated_by_commas(monkeypatch: pytest.MonkeyPatch, value: str, names: tuple[str, ...]) -> None:
    monkeypatch.setenv("EP_PLUGIN", value)
    assert env.integrations() == names


# -- the warning at exit ---------------------------------------------------------------------------------------------

IDLE = "EP_PLUGIN: nothing was served by"
TRAIN = """
import torch
from torch.distributed.fsdp import fully_shard
torch.distributed.init_process_group("gloo")
model = fully_shard(torch.nn.Linear(8, 8))
model(torch.ones(1, 8)).sum().backward()
from ep_plugin.integrations import status
row = next(row for row in status() if row.name == "fsdp2")
assert (row.state, row.detail) == ("on", "replaced FSDPParamGroup.__init__") and row.served >= 2, row
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_the_first_rank_says_which_switch_served_nothing(tmp_path: Path) -> None:
    """Once, though the launcher and both ranks have the variable."""
    (tmp_path / "train.py").write_text(TRAIN)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    variables = os.environ | {"EP_PLUGIN": "megatron,fsdp2", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith(("ep_plugin", "EP_PLUGIN"))]
    waiting = "waiting: megatron.core.transformer.moe.moe_layer has not been imported"
    assert said == [f"{IDLE} megatron ({waiting})"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "warns"),
    [("", True), ("torch.distributed.destroy_process_group()", True), ("raise ValueError", False)],
    ids=["open", "destroyed", "error"],
)
def test_who_ends_without_an_error_is_warned(tmp_path: Path, end: str, warns: bool) -> None:
    group = f"'gloo', init_method='file://{tmp_path}/store', rank=0, world_size=1"
    code = f"import torch\ntorch.distributed.init_process_group({group})\n{end}"
    done = run(code, fails=not warns, EP_PLUGIN="fsdp2")
    assert (IDLE in done.stderr) == warns


def test_who_was_left_to_the_framework_is_warned_of_that_alone(tmp_path: Path) -> None:
    code = f"""
import torch
torch.distributed.init_process_group('gloo', init_method='file://{tmp_path}/store', rank=0, world_size=1)
from ep_plugin.errors import NotSupported
from ep_plugin.integrations.fallback import falls_back
assert falls_back("fsdp2", NotSupported("a reason"))
"""
    done = run(code, EP_PLUGIN="fsdp2", EP_PLUGIN_FALLBACK="stock")
    assert done.stderr.splitlines() == ["fsdp2 is left to the framework (EP_PLUGIN_FALLBACK): a reason"]


def test_who_never_makes_a_group_is_not_warned() -> None:
    assert not run("import torch", EP_PLUGIN="fsdp2", RANK="0").stderr
