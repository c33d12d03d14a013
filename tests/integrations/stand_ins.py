"""Imports single modules of a framework that is not installed, from its source. All else of it is a stand-in."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock


class _StandIn(types.ModuleType):
    """A module that has every name, as a mock."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = mock.MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module of the package in `source`, the folder that has it.

    real: the modules that are imported from their source. Their packages' own files are not executed.
    given: what stand-ins have, by module and name.
    """

    def __init__(self, source: Path, real: Collection[str], given: Mapping[str, Mapping[str, Any]]) -> None:
        self.source, self.real, self.given = source, real, given
        self.roots = {name.partition(".")[0] for name in (*real, *given)}

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> Any:
        if fullname.partition(".")[0] not in self.roots:
            return None
        if fullname in self.real:
            folder = self.source.joinpath(*fullname.split(".")[:-1])
            return importlib.machinery.PathFinder.find_spec(fullname, [str(folder)])
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        vars(module).update(self.given.get(module.__name__, {}))


def imported(source: Path, real: Collection[str], given: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Import the `real` modules, with the last part of each name as its key."""
    sys.meta_path.insert(0, StandIns(source, real, given))
    return {name.rpartition(".")[2]: importlib.import_module(name) for name in real}
