"""Memory that holds NaN until somebody writes it."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """What torch hands out meanwhile holds NaN, or the largest integers, on the device that it is on.

    It costs a write of every byte. PyTorch ties this to deterministic algorithms; the warnings about operations that
    have none are left out.
    """
    settings: Any = torch.utils.deterministic  # its annotations leave the setting out
    mode, fill = torch.get_deterministic_debug_mode(), settings.fill_uninitialized_memory
    torch.set_deterministic_debug_mode("warn")  # use_deterministic_algorithms would import the compiler
    settings.fill_uninitialized_memory = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        settings.fill_uninitialized_memory = fill
