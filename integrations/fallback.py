"""``EP_PLUGIN_FALLBACK=stock``: what ep_plugin does not serve is left to the framework's own exchange, with a warning.

It is for versions of a framework, options and groups for which ep_plugin raises NotSupported, as it does without the
variable. Failures stay errors.
"""

from __future__ import annotations

import warnings

from ep_plugin import env
from ep_plugin.errors import NotSupported

_said: set[tuple[str, str]] = set()


def falls_back(name: str, error: NotSupported) -> bool:
    """Whether the framework's own exchange takes the place of the integration `name`. Rank 0 warns once for each error.

    All ranks must ask alike: `error` is one that each of them has.
    """
    if env.settings().fallback is None:
        return False
    if (name, str(error)) not in _said:
        _said.add((name, str(error)))
        if env.launcher().rank in (0, None):
            warnings.warn(f"ep_plugin: {name} is left to the framework (EP_PLUGIN_FALLBACK): {error}", stacklevel=3)
    return True
