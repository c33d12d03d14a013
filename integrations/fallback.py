"""``EP_PLUGIN_FALLBACK=stock``: what ep_plugin does not serve is left to the framework's own exchange, with a warning.

It is for versions of a framework, options and groups for which ep_plugin raises NotSupported, as it does without the
variable. Failures stay errors.
"""

from __future__ import annotations

from ep_plugin import env
from ep_plugin.errors import NotSupported
from ep_plugin.log import log

_said: set[tuple[str, str]] = set()
_fallen_back: set[str] = set()


def falls_back(name: str, error: NotSupported) -> bool:
    """Whether the framework's own exchange takes the place of the integration `name`. Rank 0 warns once for each error.

    All ranks must ask alike: `error` is one that each of them has.
    """
    if env.settings().fallback is None:
        return False
    _fallen_back.add(name)
    warn_once(f"{name} is left to the framework (EP_PLUGIN_FALLBACK)", str(error))
    return True


def has_fallen_back(name: str) -> bool:
    """Whether the framework has taken the place of the integration `name` anywhere in this process."""
    return name in _fallen_back


def warn_once(what: str, why: str) -> None:
    """Log a warning: on rank 0, and once in a process for each text."""
    if (what, why) not in _said:
        _said.add((what, why))
        if env.launcher().rank in (0, None):
            log().warning("%s: %s", what, why)
