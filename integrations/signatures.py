"""Whether a framework's classes are called as those that ours take the place of: another version's may not be."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import ModuleType

from ep_plugin.errors import NotSupported


def check_calls(
    module: ModuleType,
    expected: Mapping[str, Mapping[str, tuple[str, ...]]],
    *,
    framework: str,
    known: str,
    advice: str,
) -> None:
    """expected: of `module`'s classes, the parameters of members as version `known` has them; framework: with its own
    version. Raises NotSupported with the first that is called otherwise."""
    for name, members in expected.items():
        for member, parameters in members.items():
            found = _parameters(module, name, member)
            if found != parameters:
                raise NotSupported(
                    f"{framework}: expected {name}.{member}({', '.join(parameters)}), as in {known}, got "
                    f"{'none' if found is None else '(' + ', '.join(found) + ')'}; {advice}"
                )


def _parameters(module: ModuleType, name: str, member: str) -> tuple[str, ...] | None:
    if not hasattr(module, name):
        return None
    found = getattr(getattr(module, name), member, None)
    return None if found is None else tuple(inspect.signature(found).parameters)
