"""Makes torchtitan 0.3.0 run on CPU ranks, by stand-ins for unused imports and for its accelerator."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

# Triton kernels of a dispatcher that is imported but not used here.
_KERNELS = "torchtitan.distributed.minimal_async_ep.kernels"
_IMPORTED_ONLY = {"datasets": ("datasets", "datasets.distributed"), "tensorboard": ("torch.utils.tensorboard",)}


class _Absent:
    """A stand-in for a class or function of a missing module."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("expected no call of a stand-in")


def without_triton() -> None:
    """Make models and dispatchers importable without Triton; dispatchers also run under PyTorch 2.11."""
    compiler: Any = torch.compiler
    if not hasattr(compiler, "_is_non_strict_tracing"):
        compiler._is_non_strict_tracing = lambda: False
    if importlib.util.find_spec("triton") is None:
        _stand_in(_KERNELS)


def make_torchtitan_run_here() -> None:
    """Make its trainer run on CPUs, also under a PyTorch without torch.distributed.set_timeout."""
    without_triton()
    for package, modules in _IMPORTED_ONLY.items():
        if importlib.util.find_spec(package) is None:
            for module in modules:
                _stand_in(module)
    if not hasattr(dist, "set_timeout"):
        dist.set_timeout = lambda timeout, group=None: None  # type: ignore[attr-defined]
    import torchtitan.tools.utils as utils

    utils.device_type, utils.device_module = "cpu", _cpu_as_accelerator()
    utils.get_local_device = lambda: torch.device("cpu")


def _stand_in(name: str) -> None:
    module = ModuleType(name)
    module.__path__ = []

    def attribute(attribute_name: str) -> type[_Absent]:
        if attribute_name.startswith("__"):
            raise AttributeError(attribute_name)
        return _Absent

    module.__getattr__ = attribute  # type: ignore[method-assign]
    sys.modules.setdefault(name, module)


def _cpu_as_accelerator() -> SimpleNamespace:
    """A stand-in for torch.cuda."""
    nothing = dict.fromkeys(("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats"))
    properties = SimpleNamespace(name="CPU", total_memory=2**30)
    answers: dict[str, Any] = nothing | {
        "current_device": 0,
        "device_count": 1,
        "get_device_name": "CPU",
        "get_device_properties": properties,
        "memory_stats": {},
    }
    return SimpleNamespace(**{name: lambda *args, answer=answer: answer for name, answer in answers.items()})
