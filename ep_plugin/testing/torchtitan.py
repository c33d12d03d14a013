"""Makes torchtitan 0.3.0 importable without Triton, with a stand-in for an unused import."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any

import torch

# Triton kernels of a dispatcher that is imported but not used here.
_KERNELS = "torchtitan.distributed.minimal_async_ep.kernels"


class _Absent:
    """A stand-in for a class or function of a missing module."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("expected no call of a stand-in")


def without_triton() -> None:
    """Makes models and dispatchers importable without Triton. Dispatchers then also run under PyTorch 2.11."""
    compiler: Any = torch.compiler
    if not hasattr(compiler, "_is_non_strict_tracing"):
        compiler._is_non_strict_tracing = lambda: False
    if importlib.util.find_spec("triton") is None:
        stand_in(_KERNELS)


def stand_in(name: str) -> None:
    """Makes the missing module `name` importable. Every name in it is a class that cannot be called."""
    module = ModuleType(name)
    module.__path__ = []

    def attribute(attribute_name: str) -> type[_Absent]:
        if attribute_name.startswith("__"):
            raise AttributeError(attribute_name)
        return _Absent

    module.__getattr__ = attribute  # type: ignore[method-assign]
    sys.modules.setdefault(name, module)
