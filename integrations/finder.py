"""A finder in front of ``sys.meta_path``: it calls back after modules are imported, and finds ours under other names.

Attributes that our module lacks come from the package that is installed under the name. That package is imported under
a third name: ``deep_ep_installed``, where ``import deep_ep`` gives ours.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


class Finder(importlib.abc.MetaPathFinder):
    """Finds nothing until `callbacks` or `homes` names it.

    Args:
        say: called with a name of `homes` and a sentence when somebody imports something under it.

    Attributes:
        callbacks: by module, what is called after it was executed.
        homes: our module for each name that means ours.
    """

    def __init__(self, say: Callable[[str, str], None]) -> None:
        self._say = say
        self.callbacks: dict[str, list[Callable[[], object]]] = {}
        self.homes: dict[str, str] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        name, _, below = fullname.partition(".")
        if name in self.homes:
            module = self.homes[name] + fullname[len(name) :]
            if below and not _exists(module):
                package = self._installed_as(name)
                if package is None or not _exists(module := f"{package}.{below}"):
                    return None
            loader = _SecondName(module, None if below else functools.partial(self._given, name))
            return importlib.machinery.ModuleSpec(fullname, loader, is_package=path is None)
        if fullname not in self.callbacks:
            return None
        spec = self._found_by_others(fullname, path, target)
        if spec is not None:
            _call_after(spec.loader, fullname, self.callbacks[fullname])
        return spec

    def forget(self, name: str) -> None:
        """Lets `name` mean an installed package again."""
        home = self.homes.pop(name, None)
        if home is not None:
            if home in sys.modules:
                vars(sys.modules[home]).pop("__getattr__", None)
            for module in [module for module in sys.modules if module.partition(".")[0] == name]:
                del sys.modules[module]

    def _given(self, name: str) -> None:
        """Our module has been imported under `name`."""
        home = self.homes[name]
        vars(sys.modules[home])["__getattr__"] = functools.partial(self._of_installed, name, home)
        self._say(name, f"import {name} gives {home}")

    def _of_installed(self, name: str, home: str, attribute: str) -> Any:
        """An attribute that our module does not have."""
        problem = f"no {name} is installed that has it"
        if not attribute.startswith("__"):  # Python asks for such names of every module
            try:
                package = self._installed_as(name)
                if package is not None and hasattr(sys.modules[package], attribute):
                    self._say(name, f"import {name} gives {home}, and {attribute} of the {name} that is installed")
                    return getattr(sys.modules[package], attribute)
            except Exception as error:
                problem = f"the {name} that is installed cannot be imported: {type(error).__name__}: {error}"
        raise AttributeError(f"{home} has no {attribute!r}, and {problem}")

    def _installed_as(self, name: str) -> str | None:
        """Imports the package that is installed under `name`, and returns its third name; None: there is none."""
        other = f"{name}_installed"
        if other not in sys.modules:
            found = self._found_by_others(name, None)
            if found is None or found.origin is None:
                return None
            # An extension is initialised by a function of its own name, and may put itself there.
            is_extension = found.origin.endswith(tuple(importlib.machinery.EXTENSION_SUFFIXES))
            spec = importlib.util.spec_from_file_location(
                name if is_extension else other,
                found.origin,
                submodule_search_locations=found.submodule_search_locations,
            )
            assert spec is not None and spec.loader is not None
            ours = sys.modules[name]
            try:
                sys.modules[other] = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(sys.modules[other])
            except BaseException:
                sys.modules.pop(other, None)
                raise
            finally:
                sys.modules[name] = ours
        return other

    def _found_by_others(self, *given: Any) -> importlib.machinery.ModuleSpec | None:
        """What the other finders find, with the arguments of `find_spec`."""
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)  # Python skips those without it too
            spec: importlib.machinery.ModuleSpec | None = find and find(*given)
            if spec is not None:
                return spec
        return None


class _SecondName(importlib.abc.Loader):
    """Gives an existing module a second name in sys.modules, and then calls `given`."""

    def __init__(self, module: str, given: Callable[[], None] | None) -> None:
        self._module, self._given = module, given

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """The complete module, so that no thread ever finds an empty one under the second name."""
        module = importlib.import_module(self._module)
        self._spec = module.__spec__  # the import system replaces it by `spec`
        return module

    def exec_module(self, module: ModuleType) -> None:
        if self._given is not None:
            self._given()
        module.__spec__ = self._spec


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # nor is there a parent of it
        return False


def _call_after(loader: Any, name: str, callbacks: list[Callable[[], object]]) -> None:
    """Lets `loader` call back whenever it has executed the module `name`."""
    execute = getattr(loader, "exec_module", None)
    if execute is None:  # a package without code of its own
        return

    def exec_module(module: ModuleType) -> None:
        execute(module)
        if module.__name__ == name:  # loaders of archives serve several modules
            for callback in callbacks:
                callback()

    loader.exec_module = exec_module
