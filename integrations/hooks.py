"""Import hooks: an integration goes in right after its framework's module was imported, and not before.

Nothing is imported that the script does not import: a finder in front of ``sys.meta_path`` waits for the modules of
`INTEGRATIONS` and calls a function of ours when one of them has been executed. An error there ends the script's own
import with an EpPluginError, which is no ImportError: scripts take those for "not installed" and go on without.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import re
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

from ep_plugin import env
from ep_plugin.errors import EpPluginError, NotSupported


class Integration(NamedTuple):
    """What EP_PLUGIN's name for it stands for.

    module: the framework's module that is waited for; once it has been executed, `function` ("module:name" of ours) is
    called without arguments. It replaces what it replaces, and returns a sentence that says what. It may be called
    again when the module is reloaded. package: the module whose __version__ must be `at_least` and, where it is given,
    `below`.
    """

    module: str
    function: str
    package: str = ""
    at_least: str = ""
    below: str = ""

    def refuses(self, version: str) -> str | None:
        """The served versions and what to do, for a message; None for a served `version`."""
        served = f"{self.at_least} or newer" + (f" and below {self.below}" if self.below else "")
        if release(version) < release(self.at_least):
            return f"{served}, got {version}; upgrade it"
        if self.below and release(version) >= release(self.below):
            return f"{served}, got {version}; install one of these"
        return None


INTEGRATIONS = {
    "megatron": Integration(
        "megatron.core.transformer.moe.moe_layer",
        "ep_plugin.integrations.megatron:switch_on",
        package="megatron.core",
        at_least="0.16.1",
        below="0.17",
    ),
    "fsdp2": Integration("torch.distributed.fsdp", "ep_plugin.integrations.fsdp2:switch_on"),
    "transformers": Integration(
        "transformers.distributed.expert_parallel",
        "ep_plugin.integrations.transformers:switch_on",
        package="transformers",
        at_least="5.23",
    ),
    "torchtitan": Integration(
        "torchtitan.models.common.token_dispatcher",
        "ep_plugin.integrations.torchtitan:switch_on",
        package="torchtitan",
        at_least="0.3.0",
    ),
}
# Packages of ours that are imported under another name as well.
ALIASES = {"deep_ep": "ep_plugin.deep_ep"}
KNOWN = (*INTEGRATIONS, *ALIASES)


class Row(NamedTuple):
    """One integration: whether it is "off", "waiting", "on" or "failed", and what that means."""

    name: str
    state: str
    detail: str


class Status(list[Row]):
    """Rows (name, state, detail), one for each integration; printed, a table."""

    def __repr__(self) -> str:
        cells = [("integration", "state", "detail"), *self]
        widths = [max(len(row[column]) for row in cells) for column in (0, 1)]
        return "\n".join(f"{name:<{widths[0]}}  {state:<{widths[1]}}  {detail}" for name, state, detail in cells)


_rows: dict[str, Row] = {}


def switch_on(names: Sequence[str]) -> None:
    """Serves the integrations of these `names` from now on: at once where their module is there, else when it comes."""
    unknown = [name for name in names if name not in KNOWN]
    if unknown:
        raise ValueError(f"EP_PLUGIN: expected names among {', '.join(KNOWN)}, got {', '.join(map(repr, unknown))}")
    for name in names:
        home = ALIASES.get(name) or INTEGRATIONS[name].function.partition(":")[0]
        if importlib.util.find_spec(home) is None:
            raise NotSupported(f"EP_PLUGIN: {name} is not there yet ({home} is missing); leave it out of EP_PLUGIN")
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    for name in names:
        if name in ALIASES:
            _serve_alias(name)
        else:
            _wait_for(name, INTEGRATIONS[name])


def rows() -> list[Row]:
    """The state of every known integration."""
    return [_rows.get(name, Row(name, "off", "not in EP_PLUGIN")) for name in KNOWN]


def record(name: str, state: str, detail: str) -> None:
    """Notes the state of an integration for `rows`, and says it on stderr with EP_PLUGIN_LOG=1."""
    row = Row(name, state, detail)
    if _rows.get(name) != row and env.settings().log:
        print(f"ep_plugin: {name}: {state}: {detail}", file=sys.stderr)
    _rows[name] = row


def _wait_for(name: str, integration: Integration) -> None:
    record(name, "waiting", f"{integration.module} has not been imported")
    if integration.package and not _is_being_imported(integration.package):
        _after_import(integration.package, lambda: _check_version(name, integration))
    _after_import(integration.module, lambda: _put_in(name, integration))


def _serve_alias(name: str) -> None:
    found = sys.modules.get(name)
    if found is not None and found is not sys.modules.get(ALIASES[name]):
        raise EpPluginError(
            f"EP_PLUGIN: {name}: expected torch to be imported before {name}, got {name} from "
            f"{getattr(found, '__file__', None)} in sys.modules; put `import torch` first"
        )
    _finder.aliases.add(name)
    record(name, "waiting", f"{name} has not been imported")


def _after_import(module: str, callback: Callable[[], None]) -> None:
    """Calls back after `module` was executed; at once where that has been."""
    _finder.callbacks.setdefault(module, []).append(callback)
    if module not in sys.modules:
        return
    if _is_being_imported(module):
        raise EpPluginError(
            f"EP_PLUGIN: expected torch to be imported before {module}, which is being imported now; "
            "put `import torch` first"
        )
    callback()


def _is_being_imported(module: str) -> bool:
    """Whether the script has begun to import `module`, which imports torch, and not come to its version yet."""
    present = sys.modules.get(module)
    return getattr(getattr(present, "__spec__", None), "_initializing", False) and not hasattr(present, "__version__")


def _check_version(name: str, integration: Integration) -> None:
    """Refuses a version of the framework that is not served, before it is used."""
    package = integration.package
    version = getattr(sys.modules[package], "__version__", None)
    refused = version and integration.refuses(version)
    if not refused:
        return
    record(name, "failed", f"{package} is {version}")
    raise NotSupported(f"EP_PLUGIN: {name}: expected {package} {refused}, or leave {name} out of EP_PLUGIN")


def release(version: str) -> tuple[int, ...]:
    """The three numbers of a release, for comparisons."""
    numbers = [int(number) for number in re.findall(r"\d+", version.split("+")[0])[:3]]
    return (*numbers, *[0] * (3 - len(numbers)))


def _put_in(name: str, integration: Integration) -> None:
    module, _, function = integration.function.partition(":")
    if integration.package:
        _check_version(name, integration)
    try:
        said = getattr(importlib.import_module(module), function)()
    except Exception as error:
        record(name, "failed", f"{type(error).__name__}: {error}")
        if isinstance(error, EpPluginError):
            raise
        raise EpPluginError(f"EP_PLUGIN: {name}: {type(error).__name__}: {error}") from error
    record(name, "on", said)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds nothing by itself: it adds a callback to the loader that the other finders found."""

    def __init__(self) -> None:
        self.callbacks: dict[str, list[Callable[[], None]]] = {}
        self.aliases: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        top = fullname.partition(".")[0]
        if top in self.aliases:
            home = ALIASES[top] + fullname[len(top) :]
            there = importlib.util.find_spec(home)
            return there and importlib.machinery.ModuleSpec(fullname, _AliasLoader(home), is_package=bool(path is None))
        if fullname not in self.callbacks:
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)  # Python skips those without it too
            spec = find and find(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _CallbackLoader(spec.loader, self.callbacks[fullname])
                return spec
        return None


class _CallbackLoader(importlib.abc.Loader):
    """The framework's own loader, and the callbacks after it."""

    def __init__(self, loader: Any, callbacks: list[Callable[[], None]]) -> None:
        self._loader, self._callbacks = loader, callbacks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        for callback in self._callbacks:
            callback()


class _AliasLoader(importlib.abc.Loader):
    """A second name for a module: what is in sys.modules under it is the module itself."""

    def __init__(self, home: str) -> None:
        self._home = home

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = importlib.import_module(self._home)
        name = module.__name__
        if name in ALIASES:
            record(name, "on", f"import {name} gives {self._home}")


_finder = _Finder()
