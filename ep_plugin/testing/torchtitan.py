"""torchtitan 0.3.0 on CPU ranks: what it imports without calling it here, and asks of an accelerator, is answered."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

# Triton kernels of a dispatcher that is not used here, imported beside those that are.
_KERNELS = "torchtitan.distributed.minimal_async_ep.kernels"
_IMPORTED_ONLY = {"datasets": ("datasets", "datasets.distributed"), "tensorboard": ("torch.utils.tensorboard",)}


class _Absent:
    """What stands for a class or function of a module that is not there."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("this is a stand-in, which nothing should call")


def without_triton() -> None:
    """Models and dispatchers can be imported, and dispatchers run under PyTorch 2.11, too."""
    compiler: Any = torch.compiler
    if not hasattr(compiler, "_is_non_strict_tracing"):
        compiler._is_non_strict_tracing = lambda: False
    if importlib.util.find_spec("triton") is None:
        _stand_in(_KERNELS)


def make_torchtitan_run_here() -> None:
    """Its trainer runs, on CPUs and under a PyTorch without torch.distributed.set_timeout, which it calls."""
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


def _cpu_as_accelerator() -> ModuleType:
    """What torch.cuda would be."""
    module = ModuleType("cpu_as_accelerator")
    answers: dict[str, Any] = {
        "current_device": 0,
        "device_count": 1,
        "get_device_name": "CPU",
        "get_device_properties": SimpleNamespace(name="CPU", total_memory=2**30),
        "memory_stats": {},
    }
    for name in ("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats"):
        answers[name] = None
    for name, answer in answers.items():
        setattr(module, name, lambda *args, answer=answer: answer)
    return module
