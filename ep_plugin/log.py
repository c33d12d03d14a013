"""The logger ``ep_plugin``. EP_PLUGIN_LOG=1 shows its INFO records on stderr, unless the script configures logging."""

from __future__ import annotations

import functools
import logging

from ep_plugin import env

logger = logging.getLogger("ep_plugin")


def log() -> logging.Logger:
    """Returns the logger. With EP_PLUGIN_LOG=1 its INFO records are shown from the first call on."""
    if env.settings().log:
        _show_info()
    return logger


@functools.cache
def _show_info() -> None:
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    # A script may configure logging at any time. Then its handlers get the records instead.
    handler.addFilter(lambda _: not logging.root.handlers and logger.handlers == [handler])
    logger.addHandler(handler)
