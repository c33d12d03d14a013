"""Enables an integration right after its framework's module is imported, checks the framework, keeps what is replaced.

Of a framework that the script does not import, nothing is imported. A finder in front of ``sys.meta_path`` waits for
the modules in `INTEGRATIONS`. An error in ours ends the script's import with an EpPluginError. It is not an
ImportError, since scripts take that for "not installed" and continue without.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import multiprocessing
import operator
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

from ep_plugin import counts, env
from ep_plugin.counts import left as left
from ep_plugin.counts import served as served
from ep_plugin.errors import EpPluginError, NotSupported
from ep_plugin.integrations.fallback import falls_back, has_fallen_back
from ep_plugin.integrations.finder import Finder
from ep_plugin.integrations.rows import Row, Status
from ep_plugin.log import log


class Integration(NamedTuple):
    """An integration that a name in EP_PLUGIN stands for.

    module: the framework's module to wait for. If it is the name itself, ours is imported in its place. Otherwise our
        `enable()` is called after it was executed, and again after a reload.
    package: the module whose __version__ must be `at_least` and, if given, `below`.
    before: modules that may be imported without `module`, and of which ours replaces something. `module` is imported
        after them.
    """

    module: str
    package: str = ""
    at_least: str = ""
    below: str = ""
    before: tuple[str, ...] = ()


INTEGRATIONS = {
    "megatron": Integration(
        "megatron.core.transformer.moe.moe_layer",
        "megatron.core",
        "0.16.1",
        below="0.20",
        before=("megatron.core.distributed", "megatron.core.pipeline_parallel"),
    ),
    "fsdp2": Integration("torch.distributed.fsdp"),
    "transformers": Integration("transformers.distributed.expert_parallel", "transformers", "5.23"),
    "torchtitan": Integration("torchtitan.models.common.token_dispatcher", "torchtitan", "0.3.0"),
    "pipelining": Integration("torch.distributed.pipelining.schedules", "torch", "2.11"),
    "deepspeed": Integration("deepspeed.comm.torch", "deepspeed", "0.19.8"),
    "deep_ep": Integration("deep_ep"),
}
# Our modules that are not called ep_plugin.integrations.NAME.
HOMES = {"deep_ep": "ep_plugin.deep_ep", "deep_ep_cpp": "ep_plugin.deep_ep.cpp"}
ALONG = {"deep_ep": ("deep_ep_cpp",)}  # modules that are ours where the integration's is


@dataclasses.dataclass
class _Replacement:
    """An object of ours in the place of another, under the name that `status` shows.

    serves: False after a `restore` or a `replace` that found something else there, such as a wrapper of ours.
    """

    owner: Any
    attribute: str
    ours: Any
    theirs: Any
    said: str
    serves: bool = True

    def is_there(self) -> bool:
        return _members(self.owner).get(self.attribute) is self.ours


_rows: dict[str, Row] = {}
_replaced: dict[str, list[_Replacement]] = {}  # by integration


def status() -> Status:
    """The state of every known integration."""
    return Status(map(_row_of, INTEGRATIONS))


def _row_of(name: str) -> Row:
    row = _rows.get(name, Row(name, "off", "not in EP_PLUGIN"))
    is_known = name in _rows and row.state != "waiting"
    if INTEGRATIONS[name].module == name and not is_known and home_of(name) in sys.modules:
        row = Row(name, "ready", f"the script imports {home_of(name)}")  # it needs no call, and imports nothing of ours
    num_served = counts.num_served[name]
    state = "on" if row.state == "ready" and num_served else row.state
    kinds = [(n, kind) for (of, kind), n in list(counts.num_served_of_kind.items()) if of == name]
    served_each = f"served {', '.join(f'{n} {kind}' for n, kind in kinds)}; " if len(kinds) > 1 else ""
    row = row._replace(state=state, detail=served_each + row.detail)
    return row._replace(served=num_served, left=counts.num_left[name], peer_bytes=counts.peer_bytes(name))


def record(name: str, state: str, detail: str) -> None:
    """Store the state of an integration for `status`, and log it."""
    row = Row(name, state, detail)
    if _rows.get(name) != row:
        log().info("%s: %s: %s", *row[:3])
    _rows[name] = row


def replace(name: str, owner: Any, attribute: str, ours: Any, said: str = "") -> None:
    """Put `ours` in the place of an attribute of a module or a class, or of an item of a dict.

    A second call changes nothing. `restore` puts the very object back that was there. `status` lists what is replaced,
    as `said` or as the owner's name and the attribute.
    """
    present = _members(owner)[attribute]
    if present is not ours:
        for one in _of(name, owner):
            one.serves &= one.attribute != attribute  # what stands between may call it: one call would count twice
        _put(owner, attribute, ours)
        said = said or f"{owner.__name__.rpartition('.')[2]}.{attribute}"
        _replaced.setdefault(name, []).append(_Replacement(owner, attribute, ours, present, said))
    for one in _of(name, owner):
        one.serves |= one.is_there()
    _record_replaced(name)


def restore(name: str, *owners: Any) -> None:
    """Put back what `replace` has replaced, in `owners` or everywhere, unless somebody else has replaced it since.

    If that is undone, a later `replace` or `restore` knows ours again.
    """
    for one in reversed(_replaced.pop(name, [])):
        is_asked = not owners or any(one.owner is owner for owner in owners)
        if is_asked and one.is_there():
            _put(one.owner, one.attribute, one.theirs)
        else:
            one.serves &= not is_asked
            _replaced.setdefault(name, []).insert(0, one)
    if any(one.serves for one in _replaced.get(name, ())):
        _record_replaced(name)
    elif name in _rows:
        record(name, "off", "disabled")


def is_enabled(name: str, owner: Any) -> bool:
    """Whether attributes of `owner` are replaced. Not after `restore`, when somebody's wrapper may still call ours."""
    return any(one.serves and one.owner is owner for one in _replaced.get(name, ()))


def serves(name: str, owner: Any, ours: Any) -> bool:
    """Whether `ours` is what serves in its place. Not if a later `replace` has put another object over it."""
    return any(one.serves and one.owner is owner and one.ours is ours for one in _replaced.get(name, ()))


def replaces(name: str, owner: Any, attribute: str) -> bool:
    """Whether an object of ours, put there by `replace`, is there now."""
    return any(one.attribute == attribute and one.is_there() for one in _of(name, owner))


def _of(name: str, owner: Any) -> list[_Replacement]:
    return [one for one in _replaced.get(name, ()) if one.owner is owner]


def _record_replaced(name: str) -> None:
    said = dict.fromkeys(one.said for one in _replaced.get(name, ()) if one.serves)
    record(name, "ready", f"replaced {', '.join(said)}")


def _members(owner: Any) -> Any:
    return owner if isinstance(owner, dict) else vars(owner)  # vars: a class's own, with its staticmethods as such


def _put(owner: Any, attribute: str, value: Any) -> None:
    if isinstance(owner, dict):
        owner[attribute] = value
    else:
        setattr(owner, attribute, value)


def enable(names: Sequence[str]) -> None:
    """Enable these integrations: at once if their module has been imported, else right after its import."""
    _check_names(names)
    for name in names:
        if importlib.util.find_spec(home_of(name)) is None:
            raise NotSupported(
                f"EP_PLUGIN: {name}: expected the module {home_of(name)}, found none; leave {name} out of EP_PLUGIN"
            )
    for name in names:
        module, package, *_, before = INTEGRATIONS[name]
        if name in _finder.homes:
            continue
        if module not in sys.modules:
            record(name, "waiting", f"{module} has not been imported")
        if module == name:
            _watch_imports()
            _serve_in_place_of(name)
            continue
        _forget(name)
        if package and not _is_being_imported(package):
            after_import(package, functools.partial(_check_version, name))
        after_import(module, functools.partial(_enable, name))
        for other in before:
            after_import(other, functools.partial(_import_module_of, name))


def disable(names: Sequence[str]) -> None:
    """Disable these integrations, whether enabled by name, by their own `enable()` or not at all."""
    _check_names(names)
    for name in names:
        _forget(name)
        if name in _rows:
            record(name, "off", "disabled")
        home = sys.modules.get(home_of(name))
        if home is not None and INTEGRATIONS[name].module != name:
            home.disable()


def _check_names(names: Sequence[str]) -> None:
    for name in names:
        if name not in INTEGRATIONS:
            raise ValueError(f"EP_PLUGIN: expected names among {', '.join(INTEGRATIONS)}, got {name!r}")


def _forget(name: str) -> None:
    """Wait for the integration's modules no more, and let its name mean an installed package again."""
    for callbacks in _finder.callbacks.values():
        callbacks[:] = [callback for callback in callbacks if getattr(callback, "args", None) != (name,)]
    for module in (name, *ALONG.get(name, ())):
        _finder.forget(module)


def warn_at_exit(names: Sequence[str]) -> None:
    """Log a warning, when this process ends, with those of `names` that have served nothing.

    Nothing is logged where a process group was never made, as in launchers, on ranks other than 0, after an uncaught
    error, in children, and for names that were left to the framework with a warning of their own (fallback.py).
    """
    pid = os.getpid()

    @atexit.register
    def warn() -> None:
        served_nothing = [row for row in status() if row.name in names and not row.served]
        idle = [f"{row.name} ({row.state}: {row.detail})" for row in served_nothing if not has_fallen_back(row.name)]
        if idle and os.getpid() == pid and not hasattr(sys, "last_value") and _is_first_rank():
            log().warning("EP_PLUGIN: nothing was served by %s", ", ".join(idle))


def _is_first_rank() -> bool:
    """Whether this process is, or was, rank 0 of a job. A launcher is not, nor a child of multiprocessing."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None or multiprocessing.parent_process() is not None:
        return False
    if c10d.is_initialized():
        return bool(c10d.get_rank() == 0)
    return getattr(c10d, "_default_pg_init_method", None) is not None and env.launcher().rank in (0, None)


def home_of(name: str) -> str:
    """Our module for a name in EP_PLUGIN."""
    return HOMES.get(name, f"ep_plugin.integrations.{name}")


def check_version(name: str, version: str | None = None) -> None:
    """Raise NotSupported unless the integration `name` serves `version`, by default the imported package's."""
    _, package, at_least, below, _ = INTEGRATIONS[name]
    version = version or getattr(sys.modules.get(package), "__version__", None)
    if not version or version.endswith("+unknown"):  # as torchtitan says in a checkout that is not installed
        return
    if _release(version) >= _release(at_least) and (not below or _release(version) < _release(below)):
        return
    record(name, "failed", f"{package} is {version}")
    served = f"{at_least} or newer" + (f" and below {below}" if below else "")
    raise NotSupported(
        f"{name}: expected {package} {served}, got {version}; install such a version, or leave {name} out of EP_PLUGIN"
    )


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:3])


def check_signatures(name: str, module: ModuleType, expected: Iterable[str], advice: str = "") -> None:
    """Raise NotSupported for the first attribute of `module` that differs from the oldest version that `name` serves.

    expected: signatures such as "Class.method(self, x)", or "Class.attribute". advice: ends the message.
    """
    _, package, known, *_ = INTEGRATIONS[name]
    for entry in expected:
        path, bracket, _ = entry.partition("(")
        try:
            found = operator.attrgetter(path)(module)
            got = f"({', '.join(inspect.signature(found).parameters)})" if bracket else ""
        except AttributeError:
            got = "none"
        if path + got != entry:
            version = getattr(sys.modules[package], "__version__", "").partition("+")[0]  # Megatron adds a commit
            raise NotSupported(
                f"{package} {version}: expected {entry}, as in {known}, got {got}; install {package} {known}, or leave "
                f"{name} out of EP_PLUGIN{advice}"
            )


def _serve_in_place_of(name: str) -> None:
    for module in (name, *ALONG.get(name, ())):
        found = sys.modules.get(module)
        if found is not None and found is not sys.modules.get(home_of(module)):
            raise _too_late(module, f"got {module} from {getattr(found, '__file__', None)} in sys.modules")
        _finder.homes[module] = home_of(module)


def _watch_imports() -> None:
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def after_import(module: str, callback: Callable[[], object]) -> None:
    """Call back after `module` is executed; at once if it has been."""
    _watch_imports()
    _finder.callbacks.setdefault(module, []).append(callback)
    if _is_being_imported(module):
        raise _too_late(module, "which is being imported now")
    if module in sys.modules:
        callback()


def _too_late(module: str, found: str) -> EpPluginError:
    return EpPluginError(f"EP_PLUGIN: expected torch to be imported before {module}, {found}; put `import torch` first")


def _is_being_imported(module: str) -> bool:
    """Whether `module` is still being imported, and has no __version__ yet. Its import may have imported torch."""
    present = sys.modules.get(module)
    return getattr(getattr(present, "__spec__", None), "_initializing", False) and not hasattr(present, "__version__")


def _check_version(name: str) -> bool:
    """Whether the version is served; if not, and the framework is not to serve in our place, raise NotSupported."""
    try:
        check_version(name)
    except NotSupported as error:
        if not falls_back(name, error):
            raise
        record(name, "stock", str(error))
        return False
    return True


def _import_module_of(name: str) -> None:
    """Import the module after which ours is enabled, unless that has happened or is happening."""
    if INTEGRATIONS[name].module not in sys.modules:
        importlib.import_module(INTEGRATIONS[name].module)


def _enable(name: str) -> None:
    """Call our `enable` for the integration `name`."""
    if not _check_version(name):
        return
    try:
        importlib.import_module(home_of(name)).enable()
    except Exception as error:
        if isinstance(error, NotSupported) and falls_back(name, error):
            return record(name, "stock", str(error))
        record(name, "failed", f"{type(error).__name__}: {error}")
        if isinstance(error, EpPluginError):
            raise
        raise EpPluginError(f"EP_PLUGIN: {name}: {type(error).__name__}: {error}") from error


_finder = Finder(lambda name, detail: record(name, "ready", detail) if name in INTEGRATIONS else None)
