"""Checks variables, PyTorch, the build of ep_plugin, and frameworks and their integrations."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.metadata
import sys
import warnings
from collections.abc import Iterator
from typing import Any

from ep_plugin import env
from ep_plugin.doctor.findings import FAILURE, OK, WARNING, Finding
from ep_plugin.errors import NotSupported

OLDEST_TORCH = "2.11"
# The distributions of the frameworks, and our name for the integration. None: any version is served.
FRAMEWORKS = {
    "megatron-core": "megatron",
    "transformers": "transformers",
    "accelerate": None,
    "trl": None,
    "peft": None,
    "deepspeed": "deepspeed",
    "torchtitan": "torchtitan",
    "deep_ep": None,
}


def check_variables() -> Iterator[Finding]:
    for name in env.unknown_variables():
        close = difflib.get_close_matches(name, env.KNOWN - {"EP_PLUGIN"}, n=1, cutoff=0.8)
        do = f"did you mean {close[0]}?" if close else f"unset it; known are {', '.join(sorted(env.KNOWN))}"
        yield Finding(WARNING, "variables", f"{name} is set, but ep_plugin has no such variable and ignores it", do)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about those above
        for read in (env.settings, env.launcher):
            try:
                found = read()
                defaults = type(found)()._asdict()
                given = {name: value for name, value in found._asdict().items() if value != defaults[name]}
            except ValueError as error:
                yield Finding(FAILURE, "variables", str(error), "correct the variable or unset it")
                continue
            if "test_gate" in given:
                what = f"EP_PLUGIN_TEST_GATE={given['test_gate']} halts every rank at that step; it is for tests"
                yield Finding(FAILURE, "variables", what, "unset EP_PLUGIN_TEST_GATE")
            if given:
                yield Finding(OK, "variables", ", ".join(f"{name} is {value}" for name, value in given.items()))


def imported_torch() -> Any:
    """Returns the module torch if this process has imported it, else None."""
    return sys.modules.get("torch")


def check_torch() -> Iterator[Finding]:
    """Imports torch without its backends, so that a wrong EP_PLUGIN cannot end the import."""
    try:
        with env.without_autoload():
            import torch
    except Exception as error:
        what = f"PyTorch cannot be imported: {type(error).__name__}: {error}"
        yield Finding(FAILURE, "torch", what, f"install it: pip install 'torch>={OLDEST_TORCH}'")
        return
    from ep_plugin.bench.provenance import versions

    found = ", ".join(f"{name} {version}" for name, version in versions().items() if version)
    if torch.__version__ < OLDEST_TORCH:
        what = f"PyTorch is {torch.__version__}; ep_plugin needs {OLDEST_TORCH} or newer"
        yield Finding(FAILURE, "torch", what, f"pip install 'torch>={OLDEST_TORCH}'")
    else:
        yield Finding(OK, "torch", found)


def extension() -> Any:
    """Returns the compiled extension; None if it cannot be loaded."""
    try:
        return importlib.import_module("ep_plugin._C")
    except ImportError:
        return None


def check_build() -> Iterator[Finding]:
    try:
        _C = importlib.import_module("ep_plugin._C")
    except ImportError as error:
        python = ".".join(map(str, sys.version_info[:2]))
        what = f"the compiled part of ep_plugin, ep_plugin._C, cannot be loaded in Python {python}: {error}"
        do = "install again with this Python: pip install . in the checkout, or make build for an editable install"
        yield Finding(FAILURE, "build", what, do)
        return
    torch = imported_torch()
    gpus = torch.cuda.device_count() if torch is not None and torch.cuda.is_available() else 0
    if not hasattr(_C, "cuda"):
        if gpus:
            what = f"this build has kernels for CPUs only, but PyTorch sees {gpus} GPU{'s'[: gpus != 1]}"
            do = "install again where nvcc is found: set CUDA_HOME and EP_PLUGIN_BUILD_CUDA=1, then pip install ."
            yield Finding(FAILURE, "build", f"{what}; tensors on GPUs are refused", do)
        else:
            yield Finding(OK, "build", "kernels for CPUs only")
        return
    major, minor = _C.cuda_version // 1000, _C.cuda_version % 1000 // 10
    archs = ", ".join(f"sm_{arch}" for arch in _C.cuda_archs)
    yield Finding(OK, "build", f"kernels for CPUs and for {archs}, by CUDA {major}.{minor}")
    for gpu in range(gpus):
        major, minor = torch.cuda.get_device_capability(gpu)
        if not any(arch // 10 == major and arch % 10 <= minor for arch in _C.cuda_archs):
            newer = major > max(_C.cuda_archs) // 10
            hope = "they run only if the build has PTX, compiled when they are first used" if newer else "none can run"
            what = f"GPU {gpu} is sm_{major}{minor}, for which the build has no kernels: {hope}"
            do = f'install again with EP_PLUGIN_CUDA_ARCHS="{major}{minor}" pip install .'
            yield Finding(WARNING if newer else FAILURE, "build", what, do)


def framework_versions() -> dict[str, str]:
    """Returns the versions of the frameworks that are installed."""
    found = {}
    for name in FRAMEWORKS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def check_integrations() -> Iterator[Finding]:
    """Enables the integrations in EP_PLUGIN, and imports their frameworks, as a script would."""
    from ep_plugin.integrations import fallback, hooks, status

    names = env.integrations()
    if names and not env.torch_autoloads():
        what = f"EP_PLUGIN={','.join(names)} has no effect, since TORCH_DEVICE_BACKEND_AUTOLOAD is not 1"
        yield Finding(WARNING, "integrations", what, "unset TORCH_DEVICE_BACKEND_AUTOLOAD")
    backends = importlib.metadata.entry_points(group="torch.backends")
    if names and "ep_plugin" not in backends.names:
        what = f"EP_PLUGIN={','.join(names)} has no effect, since this Python has no ep_plugin that was installed"
        yield Finding(WARNING, "integrations", what, "pip install . (or -e .) instead of setting PYTHONPATH")
    if imported_torch() is None:
        return
    try:
        hooks.enable(names)
    except Exception as error:
        do = "correct EP_PLUGIN: a script ends in `import torch`, and this is the last line that it prints"
        yield Finding(FAILURE, "integrations", str(error), do)
        return
    for name in names:
        try:
            importlib.import_module(hooks.INTEGRATIONS[name].module)
        except Exception as error:
            if fallback.has_fallen_back(name):  # its framework lacks the module, and will not import it
                continue
            what = f"{name} is in EP_PLUGIN, but {hooks.INTEGRATIONS[name].module} fails: {error}"
            missing = error.name if isinstance(error, ModuleNotFoundError) else None
            do = f"install {missing or 'a version that is served'}, or leave {name} out of EP_PLUGIN"
            yield Finding(FAILURE, "integrations", what, do)
    for row in status():
        if row.state == "stock":
            reason, _, do = row.detail.partition("; ")
            what = f"{row.name} is left to the framework (EP_PLUGIN_FALLBACK): {reason}"
            yield Finding(WARNING, "integrations", what, do or f"leave {row.name} out of EP_PLUGIN")
        elif row.state in ("ready", "on", "off"):
            yield Finding(OK, "integrations", f"{row.name} is {row.state}: {row.detail}")


def check_frameworks() -> Iterator[Finding]:
    from ep_plugin.integrations import hooks

    is_left = False
    with contextlib.suppress(ValueError):  # check_variables says it
        is_left = env.settings().fallback is not None
    for name, version in framework_versions().items():
        integration = FRAMEWORKS[name]
        try:
            if integration is not None:
                hooks.check_version(integration, version)
        except NotSupported as error:
            on = integration in env.integrations() and not is_left
            what, _, do = str(error).partition("; ")
            yield Finding(FAILURE if on else WARNING, "frameworks", what, do)
        else:
            served = "is served" if integration is not None else "is installed; any version is served"
            yield Finding(OK, "frameworks", f"{name} {version} {served}")
    missing = ", ".join(sorted(FRAMEWORKS.keys() - framework_versions()))
    if missing:
        yield Finding(OK, "frameworks", f"not installed: {missing}")


CHECKS = (check_variables, check_torch, check_build, check_integrations, check_frameworks)
