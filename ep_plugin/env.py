"""Reads all environment variables of ep_plugin. No other module reads one.

Variables of ep_plugin (all optional):

=============================  ==================================================================================
EP_PLUGIN                      names of integrations, separated by commas, to switch on when torch is imported
EP_PLUGIN_CHILDREN             ``0``: no ``EP_PLUGIN`` in programs that ranks or scripts start; ``ranks``: only in ranks
EP_PLUGIN_TRANSPORT            ``auto`` (default), ``shm`` or ``nvlink``: where peer-mapped memory comes from
EP_PLUGIN_RAIL                 ``auto`` (default) or ``c10d``: what carries rows between nodes. The same on all ranks
EP_PLUGIN_FALLBACK             ``stock``: integrations leave what ep_plugin does not serve to the framework, and warn
EP_PLUGIN_RANKS_PER_NODE       the number of consecutive ranks of the job that are one node, in all groups
EP_PLUGIN_HOST                 the name of this process's host. Ranks of one machine with two names are on two hosts
EP_PLUGIN_CHECK_IDS            ``1``: communicators made from now on check expert ids on GPUs, too; each dispatch waits
EP_PLUGIN_PLAIN_KERNELS        ``1``: dispatch, combine and messages on GPUs use plain loads and stores
EP_PLUGIN_TEST_GATE            a step at which to halt, see TEST_GATES (tests only)
EP_PLUGIN_LOG                  ``1``: show records of level INFO, such as choices and allocations, on stderr (log.py)
EP_PLUGIN_RANGES               ``profiler`` or ``nvtx``: put operations into ranges that profilers show (ranges.py)
EP_PLUGIN_DUMP                 a folder into which a rank that fails writes its latest operations (runtime/calls.py)
EP_PLUGIN_EMULATION            the nodes that ``ep_plugin.testing.nodes`` emulates; `ep-bench` puts it into results
EP_PLUGIN_COMMIT               the commit that `ep-bench` writes into results outside of a git checkout
EP_PLUGIN_LAUNCHED_BY          the command line of ``ep_plugin.testing.nodes``; `ep-bench` puts it before its own
=============================  ==================================================================================

``EP_PLUGIN_CUDA_ARCHS`` and ``EP_PLUGIN_BUILD_*`` belong to the build. Any other ``EP_PLUGIN_*`` is ignored with one
warning. Every ``import torch`` loads this module, so it must load fast.
"""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections.abc import Iterator
from typing import NamedTuple

TRANSPORTS = ("auto", "shm", "nvlink")
RAILS = ("auto", "c10d")
FALLBACKS = ("stock",)
RANGES = ("profiler", "nvtx")
_RANKS = "ranks"  # a value of EP_PLUGIN_CHILDREN
TEST_GATES = (
    "plan", "notify", "dispatch_send", "dispatch_recv", "combine_send", "all_gather", "reduce_scatter",
    "ll_dispatch_send", "ll_dispatch_recv", "ll_combine_send", "ll_combine_recv",
)  # fmt: skip

_PREFIX = "EP_PLUGIN"
_BOOLEANS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
_READ_HERE = (
    "TRANSPORT", "RAIL", "RANKS_PER_NODE", "HOST", "CHECK_IDS", "PLAIN_KERNELS", "TEST_GATE", "LOG", "EMULATION",
    "LAUNCHED_BY", "COMMIT", "FALLBACK", "CHILDREN", "RANGES", "DUMP",
)  # fmt: skip
KNOWN = {_PREFIX, f"{_PREFIX}_CUDA_ARCHS", *(f"{_PREFIX}_{name}" for name in _READ_HERE)}
_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
_RAIL = {"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}  # both together disable the watchdog
_SYMMETRIC_MEMORY = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
_warned: set[str] = set()


class Settings(NamedTuple):
    """The values of the ``EP_PLUGIN_*`` variables; the module's docstring explains each."""

    transport: str = "auto"
    rail: str = "auto"
    ranks_per_node: int | None = None
    host: str | None = None
    check_ids: bool = False
    plain_kernels: bool = False
    test_gate: str | None = None
    log: bool = False
    emulation: str | None = None
    launched_by: str | None = None
    commit: str | None = None
    fallback: str | None = None
    children: bool = True
    only_ranks: bool = False
    ranges: str | None = None
    dump: str | None = None


class Launcher(NamedTuple):
    """The variables that a process launcher such as torchrun sets. None: not set."""

    rank: int | None = None
    world_size: int | None = None
    local_rank: int | None = None
    local_world_size: int | None = None


def integrations() -> tuple[str, ...]:
    """Returns the names in ``EP_PLUGIN``, in their order, each once. The caller refuses unknown names."""
    names = (name.strip() for name in os.environ.get(_PREFIX, "").split(","))
    return tuple(dict.fromkeys(name for name in names if name))


def keep_from_children() -> None:
    """Removes ``EP_PLUGIN`` from the environment of programs that this process starts from now on."""
    os.environ.pop(_PREFIX, None)


def keep_from_programs() -> None:
    """Limits ``EP_PLUGIN`` to ranks: other programs that this process starts from now on ignore it."""
    os.environ[f"{_PREFIX}_CHILDREN"] = _RANKS


def settings() -> Settings:
    """Returns the current settings. Raises ValueError with the variable and its value if a value is wrong."""
    return _parsed(tuple(os.environ.get(f"{_PREFIX}_{name}") for name in _READ_HERE))


@functools.lru_cache(maxsize=8)
def _parsed(values: tuple[str | None, ...]) -> Settings:
    """Parses ``values``. Cached, since operations ask for the settings often."""
    _warn_about_unknown()
    only_ranks = (_value("EP_PLUGIN_CHILDREN") or "").lower() == _RANKS
    return Settings(
        transport=_choice("EP_PLUGIN_TRANSPORT", TRANSPORTS) or "auto",
        rail=_choice("EP_PLUGIN_RAIL", RAILS) or "auto",
        ranks_per_node=_integer("EP_PLUGIN_RANKS_PER_NODE", at_least=1),
        host=_value("EP_PLUGIN_HOST"),
        check_ids=_boolean("EP_PLUGIN_CHECK_IDS"),
        plain_kernels=_boolean("EP_PLUGIN_PLAIN_KERNELS"),
        test_gate=_choice("EP_PLUGIN_TEST_GATE", TEST_GATES),
        log=_boolean("EP_PLUGIN_LOG"),
        emulation=_value("EP_PLUGIN_EMULATION"),
        launched_by=_value("EP_PLUGIN_LAUNCHED_BY"),
        commit=_value("EP_PLUGIN_COMMIT"),
        fallback=_choice("EP_PLUGIN_FALLBACK", FALLBACKS),
        children=not only_ranks and _boolean("EP_PLUGIN_CHILDREN", default=True),
        only_ranks=only_ranks,
        ranges=_choice("EP_PLUGIN_RANGES", RANGES),
        dump=_value("EP_PLUGIN_DUMP"),
    )


def check_ids() -> bool:
    """Returns ``settings().check_ids``, and reads no other variable: each costs 1 us, and dispatches call this."""
    return _boolean("EP_PLUGIN_CHECK_IDS")


def launcher() -> Launcher:
    """Returns the launcher's ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK`` and ``LOCAL_WORLD_SIZE``."""
    return Launcher(
        rank=_integer("RANK", at_least=0),
        world_size=_integer("WORLD_SIZE", at_least=1),
        local_rank=_integer("LOCAL_RANK", at_least=0),
        local_world_size=_integer("LOCAL_WORLD_SIZE", at_least=1),
    )


def master() -> tuple[str, int]:
    """Returns the launcher's ``MASTER_ADDR`` and ``MASTER_PORT``; without them, the loopback address and port 8361."""
    return _value("MASTER_ADDR") or "127.0.0.1", _integer("MASTER_PORT", at_least=1, at_most=65535) or 8361


def has_agent_store() -> bool:
    """Whether the launcher's process serves the store at ``MASTER_ADDR``, as with torchrun. Otherwise rank 0 does."""
    return _value("TORCHELASTIC_USE_AGENT_STORE") == "True"


def torch_autoloads() -> bool:
    """Whether ``import torch`` calls the backends that are installed. Only then is ``EP_PLUGIN`` read."""
    return os.environ.get(_AUTOLOAD, "1") == "1"


def without_autoload() -> contextlib.AbstractContextManager[None]:
    """Makes ``import torch`` call no backend, and restores the variable afterwards."""
    return _variables({_AUTOLOAD: "0"})


def symmetric_memory_variables() -> contextlib.AbstractContextManager[None]:
    """Sets the variables that PyTorch's symmetric memory needs to exchange blocks, and restores them afterwards.

    Two ranks may share a GPU, or each may see a different GPU as index 0, as under SLURM and Ray. PyTorch refuses both
    unless overlapping devices are allowed. Multicast mappings are disabled: they cost time and are never used.
    """
    return _variables(_SYMMETRIC_MEMORY)


def rail_variables() -> contextlib.AbstractContextManager[None]:
    """Sets the variables with which an NCCL backend of a rail is made, and restores them afterwards.

    They disable PyTorch's watchdog, since a rail has deadlines of its own. After a peer has died or aborted, the
    watchdog would make all ranks of the job write a dump, wait a minute for the dumps, and end the process.
    """
    return _variables(_RAIL)


@contextlib.contextmanager
def _variables(wanted: dict[str, str]) -> Iterator[None]:
    saved = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in saved.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def socket_directory() -> str:
    """Returns the directory of the sockets over which PyTorch's symmetric memory passes descriptors between ranks."""
    return next((os.environ[name] for name in ("TMPDIR", "TMP", "TEMP", "TEMPDIR") if name in os.environ), "/tmp")


def unknown_variables() -> list[str]:
    """Returns the names of the variables ``EP_PLUGIN_*`` that are set and unknown to ep_plugin and to its build."""
    ours = [name for name in os.environ if name.startswith(f"{_PREFIX}_")]
    return [name for name in ours if not name.startswith(f"{_PREFIX}_BUILD_") and name not in KNOWN]


def _warn_about_unknown() -> None:
    for name in unknown_variables():
        if name in _warned:
            continue
        _warned.add(name)
        known = ", ".join(sorted(KNOWN))
        warnings.warn(f"{name} is set but not known to ep_plugin, and ignored; known: {known}", stacklevel=3)


def _value(name: str) -> str | None:
    """Returns the variable without surrounding blanks, or None if it is not set or empty."""
    return os.environ.get(name, "").strip() or None


def _choice(name: str, choices: tuple[str, ...]) -> str | None:
    value = _value(name)
    if value is None or value.lower() in choices:
        return value and value.lower()
    raise ValueError(f"{name}: expected one of {', '.join(choices)}, got {value!r}")


def _boolean(name: str, *, default: bool = False) -> bool:
    value = _value(name)
    if value is None:
        return default
    if value.lower() not in _BOOLEANS:
        raise ValueError(f"{name}: expected one of {', '.join(_BOOLEANS)}, got {value!r}")
    return _BOOLEANS[value.lower()]


def _integer(name: str, *, at_least: int, at_most: int | None = None) -> int | None:
    value = _value(name)
    if value is None:
        return None
    if not (value.isascii() and value.isdigit()) or not at_least <= int(value) <= (at_most or int(value)):
        expected = f"of at least {at_least}" if at_most is None else f"from {at_least} to {at_most}"
        raise ValueError(f"{name}: expected an integer {expected}, got {value!r}")
    return int(value)
