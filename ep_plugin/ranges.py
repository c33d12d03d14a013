"""Ranges that profilers show around operations. They are off unless EP_PLUGIN_RANGES names a profiler.

Code that opens ranges keeps the result of `opener` and compares it with None. While ranges are off, they cost nothing
else. A range enqueues nothing and waits for nothing. Code that torch.compile traces opens none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

from ep_plugin import env

Opener: TypeAlias = Callable[[str], AbstractContextManager[Any]]
"""A function that takes a range's name and returns a context manager."""
NOTHING = nullcontext()
"""A context that does nothing, in the place of a range that is off."""


def opener() -> Opener | None:
    """Returns the function that opens ranges for the profiler in EP_PLUGIN_RANGES, or None if the variable is not set.

    Raises:
        ValueError: the variable has an unknown value, or names NVTX where PyTorch was built without it.
    """
    kind = env.settings().ranges
    if kind is None:
        return None
    import torch

    if kind == "profiler":
        return torch.profiler.record_function
    if torch.version.cuda is None:
        raise ValueError("EP_PLUGIN_RANGES: expected profiler, since this PyTorch was built without CUDA, got 'nvtx'")
    return functools.partial(torch.cuda.nvtx.range, "{}")
