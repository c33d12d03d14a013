"""EP_PLUGIN=...: what is switched on by importing torch, when, at what cost, and what is refused."""

from __future__ import annotations

import importlib
import json
import os
import shlex
import subprocess
import sys
import sysconfig
from collections import Counter
from pathlib import Path

import pytest

from ep_plugin import counts, env
from ep_plugin.errors import EpPluginError, NotSupported
from ep_plugin.integrations import hooks
from ep_plugin.integrations.finder import Finder

MOST_MS = 4.0
ENTRY_POINT = (
    "importlib.metadata.EntryPoint('ep_plugin', 'ep_plugin.integrations.autoload:start', 'torch.backends').load()()"
)


def run(code: str, *, fails: bool = False, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs `code` in a fresh Python that has only these EP_PLUGIN* variables."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("EP_PLUGIN")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=inherited | variables, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode != 0) == fails, done.stdout + done.stderr
    return done


def test_without_the_variable_hardly_anything_is_loaded() -> None:
    code = "import sys, torch; print(sorted(name for name in sys.modules if name.startswith('ep_plugin')))"
    loaded = ["ep_plugin", "ep_plugin.env", "ep_plugin.integrations", "ep_plugin.integrations.autoload"]
    assert run(code).stdout.strip() == str(loaded)


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
def test_what_a_script_without_a_launcher_starts(tmp_path: Path, variables: dict[str, str], off: tuple[str]) -> None:
    """Its ranks use ep_plugin, however they are started. Other programs do not, if it says so."""
    (tmp_path / "script.py").write_text(SCRIPT)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("EP_PLUGIN")}
    done = subprocess.run(
        [sys.executable, tmp_path / "script.py"],
        env=inherited | {"EP_PLUGIN": "fsdp2"} | variables,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found = dict(line.split(": ") for line in done.stdout.splitlines())
    assert found.keys() == {
        *("script", "program", "rank", "program of rank", "launcher", "its rank"),
        *("fork", "spawn", "forkserver", "program of fork", "program of spawn", "program of forkserver"),
    }
    assert {who for who, state in found.items() if state == "off"} == set(off)
    assert {state for who, state in found.items() if who not in off} == {"waiting"}


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


# -- hooks on a framework made for the occasion ----------------------------------------------------------------------


@pytest.fixture
def framework(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on sys.path for made-up frameworks; "toy" waits for toyframe.layer and calls toyhook.enable()."""
    monkeypatch.syspath_prepend(tmp_path)
    finder = Finder(hooks._finder._say)
    monkeypatch.setattr(hooks, "_finder", finder)
    monkeypatch.setattr(hooks, "_rows", {})
    monkeypatch.setattr(hooks, "_replaced", {})
    monkeypatch.setattr(counts, "num_served", Counter())
    monkeypatch.setattr(counts, "num_left", Counter())
    monkeypatch.setattr(counts, "num_served_of_kind", Counter())
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setitem(hooks.INTEGRATIONS, "toy", hooks.Integration("toyframe.layer", "toyframe", "1.2"))
    monkeypatch.setitem(hooks.HOMES, "toy", "toyhook")
    (tmp_path / "toyframe").mkdir()
    write(tmp_path, "toyframe/__init__.py", "__version__ = '1.10.0rc1'")
    write(tmp_path, "toyframe/layer.py", "layer = 'stock'")
    ours = "def enable(): replace('toy', m, 'layer', 'ours')\ndef disable(): restore('toy')"
    imports = "import toyframe.layer as m\nfrom ep_plugin.integrations.hooks import replace, restore"
    write(tmp_path, "toyhook.py", f"{imports}\n{ours}")
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("toy")]:
        del sys.modules[name]


def write(folder: Path, name: str, text: str) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text + "\n")
    importlib.invalidate_caches()


def state() -> tuple[str, str]:
    return next((row.state, row.detail) for row in hooks.status() if row.name == "toy")


def test_the_hook_runs_after_the_module_and_again_when_it_is_reloaded(framework: Path) -> None:
    hooks.enable(["toy"])
    assert state() == ("waiting", "toyframe.layer has not been imported")
    assert importlib.util.find_spec("toyframe.layer") is not None
    assert "toyhook" not in sys.modules
    layer = importlib.import_module("toyframe.layer")
    assert layer.layer == "ours"
    assert state() == ("ready", "replaced layer.layer")
    assert type(layer.__spec__.loader) is type(layer.__loader__) is importlib.machinery.SourceFileLoader
    assert importlib.reload(layer).layer == "ours"


def test_finders_without_find_spec_are_passed_over(framework: Path) -> None:
    class OfTheOldKind:
        def find_module(self, fullname: str, path: object = None) -> None: ...

    hooks.enable(["toy"])
    sys.meta_path.insert(0, OfTheOldKind())  # type: ignore[arg-type]
    assert importlib.import_module("toyframe.layer").layer == "ours"


def test_a_module_that_is_there_already_is_served_at_once(framework: Path) -> None:
    layer = importlib.import_module("toyframe.layer")
    hooks.enable(["toy"])
    assert layer.layer == "ours"


def test_enabled_and_disabled_any_number_of_times(framework: Path) -> None:
    hooks.disable(["toy"])
    assert state() == ("off", "not in EP_PLUGIN")
    for _ in range(2):
        hooks.enable(["toy"])
    hooks.disable(["toy"])  # before the framework is there
    layer = importlib.import_module("toyframe.layer")
    assert (layer.layer, state()) == ("stock", ("off", "disabled"))
    layer.layer = stock = object()
    for _ in range(2):
        for _ in range(2):
            hooks.enable(["toy"])
            assert (layer.layer, state()) == ("ours", ("ready", "replaced layer.layer"))
        for _ in range(2):
            hooks.disable(["toy"])
            assert layer.layer is stock and state() == ("off", "disabled")
    assert importlib.reload(layer).layer == "stock"
    with pytest.raises(ValueError, match="EP_PLUGIN: expected names among .*, got 'toi'"):
        hooks.disable(["toi"])


def test_what_somebody_else_has_replaced_since_stays(framework: Path) -> None:
    layer = importlib.import_module("toyframe.layer")
    hooks.enable(["toy"])
    layer.layer = theirs = object()
    hooks.disable(["toy"])
    assert layer.layer is theirs


def test_on_is_what_has_served(framework: Path) -> None:
    importlib.import_module("toyframe.layer")
    hooks.enable(["toy"])
    hooks.left("toy", 3)
    assert state()[0] == "ready"
    hooks.served("toy")
    assert hooks.status()[-1][1:] == ("on", "replaced layer.layer", 1, 3)
    hooks.disable(["toy"])
    assert hooks.status()[-1][1:] == ("off", "disabled", 1, 3)
    hooks.enable(["toy"])
    assert hooks.status()[-1][1:] == ("on", "replaced layer.layer", 1, 3)


def test_several_kinds_are_counted_apart(framework: Path) -> None:
    importlib.import_module("toyframe.layer")
    hooks.enable(["toy"])
    hooks.served("toy", 2, "messages")
    assert hooks.status()[-1][1:] == ("on", "replaced layer.layer", 2, 0)
    hooks.served("toy", 1, "gathers")
    assert hooks.status()[-1][1:] == ("on", "served 2 messages, 1 gathers; replaced layer.layer", 3, 0)


def test_an_old_framework_is_refused_with_both_versions(framework: Path) -> None:
    write(framework, "toyframe/__init__.py", "__version__ = '1.1.9+local'")
    hooks.enable(["toy"])
    with pytest.raises(NotSupported, match=r"toy: expected toyframe 1\.2 or newer, got 1\.1\.9\+local; install such"):
        importlib.import_module("toyframe")
    assert state() == ("failed", "toyframe is 1.1.9+local")


@pytest.mark.parametrize("version", ["2.0", "2.0.0rc1", "11.4.2"])
def test_a_framework_that_is_too_new_is_refused_with_both_versions(
    framework: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setitem(hooks.INTEGRATIONS, "toy", hooks.INTEGRATIONS["toy"]._replace(below="2.0"))
    write(framework, "toyframe/__init__.py", f"__version__ = {version!r}")
    hooks.enable(["toy"])
    expected = rf"toy: expected toyframe 1\.2 or newer and below 2\.0, got {version}; install such"
    with pytest.raises(NotSupported, match=expected):
        importlib.import_module("toyframe")
    assert state() == ("failed", f"toyframe is {version}")


def test_a_hook_that_fails_is_no_import_error(framework: Path) -> None:
    write(framework, "toyhook.py", "from toyframe.layer import gone\ndef enable(): ...")
    hooks.enable(["toy"])
    with pytest.raises(EpPluginError, match="EP_PLUGIN: toy: ImportError: cannot import name 'gone'"):
        importlib.import_module("toyframe.layer")
    assert state()[0] == "failed"


def test_an_integration_that_is_not_there_is_refused_by_name(framework: Path) -> None:
    (framework / "toyhook.py").unlink()
    importlib.invalidate_caches()
    with pytest.raises(
        NotSupported, match="EP_PLUGIN: toy: expected the module toyhook, found none; leave toy out of EP_PLUGIN"
    ):
        hooks.enable(["toy"])


def test_a_framework_that_is_being_imported_is_refused(framework: Path) -> None:
    write(framework, "toyframe/layer.py", "from ep_plugin.integrations import hooks; hooks.enable(['toy'])")
    with pytest.raises(EpPluginError, match=r"expected torch to be imported before toyframe\.layer"):
        importlib.import_module("toyframe.layer")


def test_an_alias_is_the_module_itself(framework: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (framework / "toyhome").mkdir()
    write(framework, "toyhome/__init__.py", "")
    write(framework, "toyhome/utils.py", "value = 1")
    monkeypatch.setitem(hooks.INTEGRATIONS, "toyname", hooks.Integration("toyname"))
    monkeypatch.setitem(hooks.HOMES, "toyname", "toyhome")
    hooks.enable(["toyname"])
    assert "toyhome" not in sys.modules
    alias, home = importlib.import_module("toyname.utils"), importlib.import_module("toyhome.utils")
    assert alias is home and alias.__name__ == "toyhome.utils"
    assert hooks.status()[-1][:3] == ("toyname", "ready", "import toyname gives toyhome")
    assert sys.modules["toyname"] is sys.modules["toyhome"]
    assert sys.modules["toyhome"].__spec__.name == "toyhome"
    hooks.enable(["toyname"])  # again
    assert sys.modules["toyname"] is sys.modules["toyhome"] and hooks.status()[-1].state == "ready"
    with pytest.raises(ModuleNotFoundError, match="toyname.none"):
        importlib.import_module("toyname.none")
    for _ in range(2):
        hooks.disable(["toyname"])
        assert hooks.status()[-1][:3] == ("toyname", "off", "disabled")
    with pytest.raises(ModuleNotFoundError, match="toyname"):
        importlib.import_module("toyname")
    assert sys.modules["toyhome.utils"] is home


INSTALLED = {
    "__init__.py": "from .buffer import HybridEPBuffer\nfrom .here import Buffer\n__version__ = '9'",
    "here.py": "class Buffer: ...",
    "utils.py": "",
    "buffer.py": "class HybridEPBuffer:\n    import deep_ep.utils as utils",
    "hybrid/__init__.py": "",
    "hybrid/deep.py": "from ..buffer import HybridEPBuffer",
}
USES = """
import json, torch, deep_ep, ep_plugin.deep_ep, ep_plugin.integrations as integrations
from deep_ep import Buffer, HybridEPBuffer
import deep_ep.hybrid.deep as deep
row = integrations.status()[-1]
print(json.dumps([
    deep_ep is ep_plugin.deep_ep, Buffer.__module__, HybridEPBuffer.__module__, deep.HybridEPBuffer is HybridEPBuffer,
    HybridEPBuffer.utils is deep_ep.utils, deep_ep.__version__ != '9', hasattr(deep_ep, 'nothing'), row.detail,
]))
integrations.disable('deep_ep')
assert not hasattr(ep_plugin.deep_ep, 'HybridEPBuffer')
import deep_ep
assert deep_ep.__version__ == '9'
"""


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    for name, code in INSTALLED.items():
        write(tmp_path, f"deep_ep/{name}", code)
    return tmp_path


def test_what_our_deep_ep_does_not_have_is_that_of_an_installed_one(installed: Path) -> None:
    found = json.loads(run(USES, EP_PLUGIN="deep_ep", PYTHONPATH=str(installed)).stdout)
    assert found == [
        True, "ep_plugin.deep_ep.buffer", "deep_ep_installed.buffer", True, True, True, False,
        "import deep_ep gives ep_plugin.deep_ep, and HybridEPBuffer of the deep_ep that is installed",
    ]  # fmt: skip


EXTENSION = """
#include <Python.h>
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "deep_ep_cpp", NULL, -1, NULL};
PyMODINIT_FUNC PyInit_deep_ep_cpp(void) {
    PyObject* module = PyModule_Create(&definition);
    PyModule_AddIntConstant(module, "kernels", 7);
    return module;
}
"""
USES_EXTENSION = """
import sys, torch, deep_ep, deep_ep_cpp, ep_plugin.deep_ep.cpp as ours
for _ in range(2):
    assert deep_ep_cpp.kernels == 7 and not hasattr(deep_ep_cpp, 'nothing')
    assert sys.modules['deep_ep_cpp'] is deep_ep_cpp is ours and deep_ep_cpp.Config is deep_ep.Config
"""


def test_what_our_extension_does_not_have_is_that_of_an_installed_one(tmp_path: Path) -> None:
    write(tmp_path, "deep_ep_cpp.c", EXTENSION)
    built = tmp_path / f"deep_ep_cpp{sysconfig.get_config_var('EXT_SUFFIX')}"
    compiler = shlex.split(sysconfig.get_config_var("CC") or "cc")[0]
    include = f"-I{sysconfig.get_path('include')}"
    subprocess.run([compiler, "-shared", "-fPIC", include, tmp_path / "deep_ep_cpp.c", "-o", built], check=True)
    run(USES_EXTENSION, EP_PLUGIN="deep_ep", PYTHONPATH=str(tmp_path))


MISSES = """
import torch, deep_ep
try:
    from deep_ep import HybridEPBuffer
except ImportError as error:
    print(error)
try:
    import deep_ep.hybrid
except ImportError as error:
    print(error)
deep_ep.HybridEPBuffer
"""


def test_without_an_installed_deep_ep_the_name_is_missing() -> None:
    done = run(MISSES, fails=True, EP_PLUGIN="deep_ep")
    assert "cannot import name 'HybridEPBuffer' from 'ep_plugin.deep_ep'" in done.stdout
    assert "No module named 'deep_ep.hybrid'" in done.stdout
    said = "AttributeError: ep_plugin.deep_ep has no 'HybridEPBuffer', and no deep_ep is installed that has it"
    assert done.stderr.splitlines()[-1] == said


def test_an_installed_deep_ep_that_fails_is_named(installed: Path) -> None:
    write(installed, "deep_ep/__init__.py", "import no_such_library")
    code = "import torch, deep_ep; print(deep_ep.Buffer); deep_ep.HybridEPBuffer"
    done = run(code, fails=True, EP_PLUGIN="deep_ep", PYTHONPATH=str(installed))
    assert "ep_plugin.deep_ep.buffer" in done.stdout
    said = "is installed cannot be imported: ModuleNotFoundError: No module named 'no_such_library'"
    assert done.stderr.splitlines()[-1].endswith(said)


def test_another_package_of_an_aliased_name_is_refused(framework: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(hooks.INTEGRATIONS, "toyframe", hooks.Integration("toyframe"))
    monkeypatch.setitem(hooks.HOMES, "toyframe", "toyhook")
    importlib.import_module("toyframe")
    with pytest.raises(EpPluginError, match=r"expected torch to be imported before toyframe, got toyframe from .*init"):
        hooks.enable(["toyframe"])


def test_status_is_a_table(framework: Path) -> None:
    from ep_plugin.integrations import status

    hooks.enable(["toy"])
    lines = repr(status()).splitlines()
    assert len(lines) == 1 + len(hooks.INTEGRATIONS)
    assert lines[0].split() == ["integration", "state", "served", "left", "detail"]
    assert [line.split()[:4] for line in lines[1:]][-1] == ["toy", "waiting", "0", "0"]
    assert len({line.index(row.state) for line, row in zip(lines[1:], status(), strict=True)}) == 1


@pytest.mark.parametrize("variable", ["", "deep_ep"])
def test_a_direct_import_of_our_deep_ep_is_recorded(variable: str) -> None:
    code = """
import json, torch, ep_plugin.integrations as integrations
row = lambda: integrations.status()[-1]
rows = [row()]
import ep_plugin.deep_ep
print(json.dumps([*rows, row()]))
"""
    before, after = json.loads(run(code, EP_PLUGIN=variable).stdout)
    assert before[:2] == ["deep_ep", "waiting" if variable else "off"]
    assert after[:3] == ["deep_ep", "ready", "the script imports ep_plugin.deep_ep"]


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


def test_the_first_rank_says_which_switch_served_nothing(tmp_path: Path) -> None:
    """Once, though the launcher and both ranks have the variable."""
    (tmp_path / "train.py").write_text(TRAIN)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    variables = os.environ | {"EP_PLUGIN": "megatron,fsdp2", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith(("ep_plugin", "EP_PLUGIN"))]
    waiting = "waiting: megatron.core.transformer.moe.moe_layer has not been imported"
    assert said == [f"{IDLE} megatron ({waiting})"]


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
