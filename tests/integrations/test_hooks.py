"""Hooks on a framework made for the occasion: when they run, what they restore, and what is refused."""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from ep_plugin import counts
from ep_plugin.errors import EpPluginError, NotSupported
from ep_plugin.integrations import hooks
from ep_plugin.integrations.finder import Finder
from ep_plugin.transport.peer import PeerBuffer


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
    monkeypatch.setattr(counts, "_holders", {})
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


@pytest.mark.parametrize("first", ["toyframe.early", "toyframe.layer"])
def test_the_module_is_imported_after_others_that_ours_changes(
    framework: Path, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    served = hooks.Integration("toyframe.layer", "toyframe", "1.2", before=("toyframe.early",))
    monkeypatch.setitem(hooks.INTEGRATIONS, "toy", served)
    write(framework, "toyframe/early.py", "begun = True")
    write(framework, "toyframe/layer.py", "import toyframe.early\nlayer = 'stock'")
    hooks.enable(["toy"])
    importlib.import_module(first)
    assert sys.modules["toyframe.layer"].layer == "ours"
    assert state() == ("ready", "replaced layer.layer")


@pytest.mark.parametrize("enabled_again", [False, True])
def test_ours_is_known_again_when_a_wrapper_is_taken_away(framework: Path, enabled_again: bool) -> None:
    layer = importlib.import_module("toyframe.layer")
    hooks.enable(["toy"])
    layer.layer = "a wrapper of ours"
    hooks.disable(["toy"])
    assert (layer.layer, hooks.is_enabled("toy", layer)) == ("a wrapper of ours", False)
    layer.layer = "ours"
    assert hooks.replaces("toy", layer, "layer")
    if enabled_again:
        hooks.enable(["toy"])
        assert hooks.is_enabled("toy", layer) and state() == ("ready", "replaced layer.layer")
    hooks.disable(["toy"])
    assert layer.layer == "stock"


@pytest.mark.parametrize("disabled_between", [True, False])
def test_only_the_latest_of_ours_serves(framework: Path, disabled_between: bool) -> None:
    """A wrapper between two of ours calls the earlier one, which leaves the call as it is."""
    layer = importlib.import_module("toyframe.layer")
    layer.call = stock = lambda: "stock"

    def over(present: Callable[[], str]) -> Callable[[], str]:
        def call() -> str:
            if hooks.serves("toy", layer, call):
                hooks.left("toy")
            return present()

        return call

    hooks.replace("toy", layer, "call", first := over(layer.call))
    layer.call = wrapper = lambda: first()
    if disabled_between:
        hooks.restore("toy", layer)
    hooks.replace("toy", layer, "call", over(layer.call))
    assert layer.call() == "stock" and counts.num_left["toy"] == 1
    hooks.restore("toy", layer)
    assert layer.call is wrapper and layer.call() == "stock" and counts.num_left["toy"] == 1
    layer.call = first
    hooks.replace("toy", layer, "call", first)
    assert layer.call() == "stock" and counts.num_left["toy"] == 2
    hooks.restore("toy", layer)
    assert layer.call is stock


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
    assert hooks.status()[-1][1:] == ("on", "replaced layer.layer", 1, 3, 0)
    hooks.disable(["toy"])
    assert hooks.status()[-1][1:] == ("off", "disabled", 1, 3, 0)
    hooks.enable(["toy"])
    assert hooks.status()[-1][1:] == ("on", "replaced layer.layer", 1, 3, 0)


def test_several_kinds_are_counted_apart(framework: Path) -> None:
    importlib.import_module("toyframe.layer")
    hooks.enable(["toy"])
    hooks.served("toy", 2, "messages")
    assert hooks.status()[-1][1:] == ("on", "replaced layer.layer", 2, 0, 0)
    hooks.served("toy", 1, "gathers")
    assert hooks.status()[-1][1:] == ("on", "served 2 messages, 1 gathers; replaced layer.layer", 3, 0, 0)


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


def test_another_package_of_an_aliased_name_is_refused(framework: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(hooks.INTEGRATIONS, "toyframe", hooks.Integration("toyframe"))
    monkeypatch.setitem(hooks.HOMES, "toyframe", "toyhook")
    importlib.import_module("toyframe")
    with pytest.raises(EpPluginError, match=r"expected torch to be imported before toyframe, got toyframe from .*init"):
        hooks.enable(["toyframe"])


@dataclass(eq=False)
class Holder:
    """A communicator with these blocks of peer memory."""

    blocks: tuple[PeerBuffer, ...]

    def peer_buffers(self) -> tuple[PeerBuffer, ...]:
        return self.blocks


def test_memory_that_communicators_share_counts_once(framework: Path) -> None:
    shared, own = (PeerBuffer(nbytes=mib << 20, ptrs=(0,), what="block", release=lambda: None) for mib in (3, 2))
    first, second = holders = [Holder((shared,)), Holder((shared, own))]
    for holder in holders:
        counts.holds("toy", holder)
        counts.holds("toy", holder)  # again
    assert hooks.status()[-1].peer_bytes == 5 << 20
    assert repr(hooks.status()).splitlines()[-1].split()[:5] == ["toy", "off", "0", "0", "5.0"]
    del second, holders, holder
    assert hooks.status()[-1].peer_bytes == 3 << 20 and first.blocks == (shared,)


def test_status_is_a_table(framework: Path) -> None:
    from ep_plugin.integrations import status

    hooks.enable(["toy"])
    lines = repr(status()).splitlines()
    assert len(lines) == 1 + len(hooks.INTEGRATIONS)
    assert lines[0].split() == ["integration", "state", "served", "left", "MiB", "detail"]
    assert [line.split()[:5] for line in lines[1:]][-1] == ["toy", "waiting", "0", "0", "0"]
    assert len({line.index(row.state) for line, row in zip(lines[1:], status(), strict=True)}) == 1
