"""EP_PLUGIN=deep_ep beside a deep_ep that is installed: names that ours does not have are those of the other."""

from __future__ import annotations

import json
import shlex
import subprocess
import sysconfig
from pathlib import Path

import pytest

from tests.integrations.test_autoload import run
from tests.integrations.test_hooks import write

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


THREADS = """
import threading, torch
together, found = threading.Barrier(4), {}
def imports(number):
    together.wait()
    import deep_ep, deep_ep.utils.math, deep_ep_cpp
    found[number] = deep_ep.Buffer, deep_ep.utils.math.calc_diff, deep_ep_cpp.Config
threads = [threading.Thread(target=imports, args=(number,)) for number in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
import ep_plugin.deep_ep, deep_ep
assert len(found) == 4 and len(set(found.values())) == 1, found
assert deep_ep is ep_plugin.deep_ep and deep_ep.__spec__.name == 'ep_plugin.deep_ep'
"""


def test_threads_that_import_it_at_the_same_time_all_get_it() -> None:
    run(THREADS, EP_PLUGIN="deep_ep")


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


@pytest.mark.slow
def test_without_an_installed_deep_ep_the_name_is_missing() -> None:
    done = run(MISSES, fails=True, EP_PLUGIN="deep_ep")
    assert "cannot import name 'HybridEPBuffer' from 'ep_plugin.deep_ep'" in done.stdout
    assert "No module named 'deep_ep.hybrid'" in done.stdout
    said = "AttributeError: ep_plugin.deep_ep has no 'HybridEPBuffer', and no deep_ep is installed that has it"
    assert done.stderr.splitlines()[-1] == said


@pytest.mark.slow
def test_an_installed_deep_ep_that_fails_is_named(installed: Path) -> None:
    write(installed, "deep_ep/__init__.py", "import no_such_library")
    code = "import torch, deep_ep; print(deep_ep.Buffer); deep_ep.HybridEPBuffer"
    done = run(code, fails=True, EP_PLUGIN="deep_ep", PYTHONPATH=str(installed))
    assert "ep_plugin.deep_ep.buffer" in done.stdout
    said = "is installed cannot be imported: ModuleNotFoundError: No module named 'no_such_library'"
    assert done.stderr.splitlines()[-1].endswith(said)


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
