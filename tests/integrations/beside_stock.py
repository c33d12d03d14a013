"""Runs of FSDP2 with ep_plugin, compared with the same runs of stock, bit for bit."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable
from typing import Any

import torch

Use = Callable[[bool], list[torch.Tensor]]  # what a run makes, with ep_plugin or without


def differing(uses: dict[str, Use]) -> dict[str, Any]:
    """Returns by use which tensors differ from stock's, or the trace of what was raised."""
    return {name: or_error(functools.partial(_differing, use)) for name, use in uses.items()}


def or_error(run: Callable[[], Any]) -> Any:
    """Returns what `run` returns, or the trace of what it raises."""
    try:
        return run()
    except Exception:
        return traceback.format_exc()


def _differing(use: Use) -> list[int]:
    ours, stock = use(True), use(False)
    return [at for at, pair in enumerate(zip(ours, stock, strict=True)) if not torch.equal(*pair)]
