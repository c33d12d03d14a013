"""The versions of frameworks that integrations accept are those of which tests have run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ep_plugin.errors import NotSupported
from ep_plugin.integrations import hooks
from tests.scripts_on_ranks import run_code

PASSED = json.loads(Path(__file__).with_name("megatron_receipt.json").read_text())


def _minor(version: str) -> tuple[int, int]:
    major, minor, *_ = map(int, version.split("."))
    return major, minor


def test_every_recorded_version_of_megatron_is_accepted() -> None:
    for version, found in PASSED.items():
        assert found["passed"] > 0
        hooks.check_version("megatron", version)


def test_other_minor_versions_of_megatron_are_refused() -> None:
    recorded = {_minor(version) for version in PASSED}
    for minor in range(40):
        version = f"0.{minor}.9"
        if _minor(version) in recorded:
            hooks.check_version("megatron", version)
        else:
            with pytest.raises(NotSupported, match=f"expected megatron.core .*, got {version}"):
                hooks.check_version("megatron", version)
    with pytest.raises(NotSupported, match="got 0.16.0"):
        hooks.check_version("megatron", "0.16.0")


@pytest.mark.parametrize("name", [name for name, one in hooks.INTEGRATIONS.items() if one.package not in ("", "torch")])
def test_an_old_framework_is_refused_where_a_script_imports_ours(name: str, tmp_path: Path) -> None:
    """The same error for each, before something that an old version lacks is imported."""
    package = tmp_path.joinpath(*hooks.INTEGRATIONS[name].package.split("."))
    package.mkdir(parents=True)
    for file in (
        "__init__.py",
        "package_info.py",
        "git_version_info.py",
    ):  # the latter are Megatron-core's, DeepSpeed's
        (package / file).write_text("__version__ = version = '0.1.2'\n")
    status, output = run_code(f"import ep_plugin.integrations.{name}", tmp_path, PYTHONPATH=str(tmp_path))
    last = output.splitlines()[-1]
    assert status == 1 and last.startswith(f"ep_plugin.errors.NotSupported: {name}: expected ") and "got 0.1.2" in last


def test_a_checkout_that_does_not_know_its_version_is_served() -> None:
    hooks.check_version("torchtitan", "0.0.0+unknown")
    with pytest.raises(NotSupported, match="got 0.0.0"):
        hooks.check_version("torchtitan", "0.0.0")


def test_an_old_deepspeed_stays_as_it_is_where_asked(tmp_path: Path) -> None:
    """The module to wait for is there long before `deepspeed.__version__`."""
    comm = tmp_path / "deepspeed" / "comm"
    comm.mkdir(parents=True)
    (comm.parent / "git_version_info.py").write_text("version = '0.14.0'\n")
    (comm.parent / "__init__.py").write_text("from .comm import torch\n__version__ = '0.14.0'\n")
    (comm / "__init__.py").touch()
    methods = "all_gather_into_tensor = reduce_scatter_tensor = _reduce_op = lambda self: None"
    (comm / "torch.py").write_text(f"class TorchBackend:\n    {methods}\n")
    (comm / "reduce_op.py").write_text("class ReduceOp:\n    SUM = 0\n")
    code = (
        "import torch, deepspeed.comm.torch, ep_plugin.integrations as ours\n"
        "print(deepspeed.comm.torch.TorchBackend.all_gather_into_tensor.__name__)\n"
        "print([row.state for row in ours.status() if row.name == 'deepspeed'])"
    )
    env = dict(PYTHONPATH=str(tmp_path), EP_PLUGIN="deepspeed")
    status, output = run_code(code, tmp_path, EP_PLUGIN_FALLBACK="stock", **env)
    assert status == 0 and output.splitlines()[-2:] == ["<lambda>", "['stock']"], output
    status, output = run_code(code, tmp_path, **env)
    assert status == 1 and "expected deepspeed 0.19.8 or newer, got 0.14.0" in output.splitlines()[-1], output
