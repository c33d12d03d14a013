"""What ep_plugin logs in a block, in processes without pytest's caplog."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def logged_warnings() -> Iterator[list[str]]:
    """The messages of level WARNING and above that ep_plugin logs from now to the end of the block."""
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("ep_plugin")
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)
