"""The environment, read in this one place.

Variables of ep_plugin (all optional):

=============================  ==================================================================================
EP_PLUGIN                      names of integrations, separated by commas, to switch on when torch is imported
EP_PLUGIN_TRANSPORT            ``auto`` (default), ``shm`` or ``nvlink``: where peer-mapped memory comes from
EP_PLUGIN_RANKS_PER_NODE       splits hosts: so many consecutive ranks of the job are a node, in all groups
EP_PLUGIN_HOST                 this process's host by another name: one machine is then as many as it has names
EP_PLUGIN_CHECK_IDS            ``1``: validate expert ids on GPUs too; costs a synchronisation per dispatch
EP_PLUGIN_PLAIN_KERNELS        ``1``: load/store kernels in place of the ones with bulk copies
EP_PLUGIN_TEST_GATE            a step at which to halt, see TEST_GATES (tests only)
EP_PLUGIN_LOG                  ``1``: say on stderr what is chosen and allocated
EP_PLUGIN_EMULATION            what ``ep_plugin.testing.nodes`` makes of this machine; `ep-bench` puts it into results
EP_PLUGIN_COMMIT               the commit that `ep-bench` writes into results where the tree is no git checkout
EP_PLUGIN_LAUNCHED_BY          how ``ep_plugin.testing.nodes`` was called; in results it precedes `ep-bench`'s own words
=============================  ==================================================================================

``EP_PLUGIN_CUDA_ARCHS`` and ``EP_PLUGIN_BUILD_*`` belong to the build. Any other ``EP_PLUGIN_*`` is ignored with one
warning. Every ``import torch`` loads this module, so nothing in it may take long.
"""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections.abc import Iterator
from typing import NamedTuple

TRANSPORTS = ("auto", "shm", "nvlink")
TEST_GATES = ("plan", "notify", "dispatch_send", "dispatch_recv", "combine_send", "all_gather", "reduce_scatter")

_PREFIX = "EP_PLUGIN"
_BOOLEANS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
_READ_HERE = (
    "TRANSPORT", "RANKS_PER_NODE", "HOST", "CHECK_IDS", "PLAIN_KERNELS", "TEST_GATE", "LOG", "EMULATION",
    "LAUNCHED_BY", "COMMIT",
)  # fmt: skip
_KNOWN = {_PREFIX, f"{_PREFIX}_CUDA_ARCHS", *(f"{_PREFIX}_{name}" for name in _READ_HERE)}
_SYMMETRIC_MEMORY = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
_warned: set[str] = set()


class Settings(NamedTuple):
    """The values of the ``EP_PLUGIN_*`` variables; the module's docstring explains each."""

    transport: str = "auto"
    ranks_per_node: int | None = None
    host: str | None = None
    check_ids: bool = False
    plain_kernels: bool = False
    test_gate: str | None = None
    log: bool = False
    emulation: str | None = None
    launched_by: str | None = None
    commit: str | None = None


class Launcher(NamedTuple):
    """The variables of the process launcher (torchrun and its like); None where one is not set."""

    rank: int | None = None
    world_size: int | None = None
    local_rank: int | None = None
    local_world_size: int | None = None


def integrations() -> tuple[str, ...]:
    """The names in ``EP_PLUGIN``, in their order, each once; whoever serves them refuses those it does not know."""
    names = (name.strip() for name in os.environ.get(_PREFIX, "").split(","))
    return tuple(dict.fromkeys(name for name in names if name))


def settings() -> Settings:
    """The settings as the environment has them now. A bad value raises ValueError naming variable and value."""
    return _parsed(tuple(os.environ.get(f"{_PREFIX}_{name}") for name in _READ_HERE))


@functools.lru_cache(maxsize=8)
def _parsed(values: tuple[str | None, ...]) -> Settings:
    """Operations ask for the settings often: the environment is looked through once for given ``values``."""
    _warn_about_unknown()
    return Settings(
        transport=_choice("EP_PLUGIN_TRANSPORT", TRANSPORTS) or "auto",
        ranks_per_node=_integer("EP_PLUGIN_RANKS_PER_NODE", at_least=1),
        host=_value("EP_PLUGIN_HOST"),
        check_ids=_boolean("EP_PLUGIN_CHECK_IDS"),
        plain_kernels=_boolean("EP_PLUGIN_PLAIN_KERNELS"),
        test_gate=_choice("EP_PLUGIN_TEST_GATE", TEST_GATES),
        log=_boolean("EP_PLUGIN_LOG"),
        emulation=_value("EP_PLUGIN_EMULATION"),
        launched_by=_value("EP_PLUGIN_LAUNCHED_BY"),
        commit=_value("EP_PLUGIN_COMMIT"),
    )


def check_ids() -> bool:
    """settings().check_ids by itself: dispatches on GPUs ask each time, and looking up a variable costs 1 us."""
    return _boolean("EP_PLUGIN_CHECK_IDS")


def launcher() -> Launcher:
    """The launcher's ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK`` and ``LOCAL_WORLD_SIZE``."""
    return Launcher(
        rank=_integer("RANK", at_least=0),
        world_size=_integer("WORLD_SIZE", at_least=1),
        local_rank=_integer("LOCAL_RANK", at_least=0),
        local_world_size=_integer("LOCAL_WORLD_SIZE", at_least=1),
    )


@contextlib.contextmanager
def symmetric_memory_variables() -> Iterator[None]:
    """The variables under which PyTorch's symmetric memory exchanges our blocks; as they were afterwards.

    Two ranks may share a GPU, or each may see a different GPU under the index 0 (SLURM and Ray start them so): PyTorch
    refuses both unless it is told to allow overlapping devices. Multicast mappings cost time and are never used.
    """
    saved = {name: os.environ.get(name) for name in _SYMMETRIC_MEMORY}
    os.environ.update(_SYMMETRIC_MEMORY)
    try:
        yield
    finally:
        for name, value in saved.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def socket_directory() -> str:
    """Where PyTorch's symmetric memory puts the sockets over which ranks hand each other descriptors."""
    return next((os.environ[name] for name in ("TMPDIR", "TMP", "TEMP", "TEMPDIR") if name in os.environ), "/tmp")


def _warn_about_unknown() -> None:
    for name in os.environ:
        if not name.startswith(f"{_PREFIX}_") or name.startswith(f"{_PREFIX}_BUILD_") or name in _KNOWN | _warned:
            continue
        _warned.add(name)
        known = ", ".join(sorted(_KNOWN))
        warnings.warn(f"{name} is set but not known to ep_plugin, and ignored; known: {known}", stacklevel=3)


def _value(name: str) -> str | None:
    """The variable without surrounding blanks; an empty one counts as not set."""
    return os.environ.get(name, "").strip() or None


def _choice(name: str, choices: tuple[str, ...]) -> str | None:
    value = _value(name)
    if value is None or value.lower() in choices:
        return value and value.lower()
    raise ValueError(f"{name}: expected one of {', '.join(choices)}, got {value!r}")


def _boolean(name: str) -> bool:
    value = _value(name)
    if value is None:
        return False
    if value.lower() not in _BOOLEANS:
        raise ValueError(f"{name}: expected one of {', '.join(_BOOLEANS)}, got {value!r}")
    return _BOOLEANS[value.lower()]


def _integer(name: str, *, at_least: int) -> int | None:
    value = _value(name)
    if value is None:
        return None
    if not (value.isascii() and value.isdigit()) or int(value) < at_least:
        raise ValueError(f"{name}: expected an integer of at least {at_least}, got {value!r}")
    return int(value)
