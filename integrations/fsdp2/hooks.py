"""Puts the adapters into the parameter groups of a model, and takes them out."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.nn.parallel import DistributedDataParallel

from ep_plugin.errors import NotSupported
from ep_plugin.integrations import hooks
from ep_plugin.integrations.fallback import falls_back
from ep_plugin.integrations.fsdp2 import in_place, one_rank
from ep_plugin.integrations.fsdp2.adapters import Adapter, PluginAllGather, PluginReduceScatter
from ep_plugin.integrations.groups import check_group
from ep_plugin.transport.groups import checked_group

# FSDP2's attributes of a parameter group that hold its collectives, and our adapter for each.
ADAPTERS = {"_all_gather_comm": PluginAllGather, "_reduce_scatter_comm": PluginReduceScatter}
_SETTERS = ("set_symm_mem", "set_allocate_memory_from_process_group")  # of a parameter group
_enabled: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()  # for `status`
_later = (False, False)  # which of ADAPTERS serve modules that are sharded from now on


@dataclass(frozen=True, kw_only=True)
class Launches:
    """Counts what ran through ep_plugin since it was enabled, over all parameter groups of a model."""

    parameter_groups: int
    all_gathers: int
    reduce_scatters: int


def enable(model: torch.nn.Module | None = None, *, all_gather: bool = True, reduce_scatter: bool = True) -> int:
    """Serves the collectives of every FSDP2 module in ``model`` from now on, and says so in `status()`.

    Call it on every rank, between steps, after ``fully_shard`` (after ``accelerator.prepare()``). A gather moves bytes
    and changes no bit of any result. A reduction adds in float32 in a fixed order, which differs from other libraries
    in the last bits. The first forward makes the collectives, with the ranks of each group. All models share those of
    one process group, which stay open until ``disable``. Groups that are not served are refused here, or where a module
    is sharded later: both calls are collective. Parameter groups of one rank copy nothing, whichever
    is served (one_rank.py).

    Args:
        model: its FSDP2 modules may be nested at any depth. None: every module that this process shards from now on.
        all_gather: serve the gathers of parameters; False leaves them to PyTorch.
        reduce_scatter: serve the reductions of gradients; False leaves them to PyTorch.

    Returns:
        The number of parameter groups; 0 without a model, or if PyTorch is to serve it (fallback.py).

    Raises:
        ValueError: a model without FSDP2 modules, or on a device for which this build has no kernels.
        NotSupported: a PyTorch whose parameter groups have no attributes for the collectives, or a process group that
            is not served. With EP_PLUGIN_FALLBACK=stock, both only log a warning.
    """
    global _later
    if model is None:
        groups, init = [], FSDPParamGroup.__init__
        _later = all_gather, reduce_scatter
        if any(_later):
            ours = init if hooks.replaces("fsdp2", FSDPParamGroup, "__init__") else _serving(init)
            hooks.replace("fsdp2", FSDPParamGroup, "__init__", ours)
        else:
            hooks.restore("fsdp2")
    else:
        groups = groups_of(model)
        if not all(map(_has_places, groups)):
            return 0
        if (all_gather or reduce_scatter) and not all(map(_has_process_groups, groups)):
            return 0
        for group in groups:
            _serve(group, all_gather, reduce_scatter)
        _enabled.difference_update(model.modules())
        if all_gather or reduce_scatter:
            _enabled.add(model)
    if not hooks.replaces("fsdp2", FSDPParamGroup, "__init__"):
        names = ", ".join(sorted(type(one).__name__ for one in _enabled))
        hooks.record("fsdp2", *(("ready", f"fsdp2.enable({names})") if names else ("off", "disabled")))
    return len(groups)


def disable(model: torch.nn.Module | None = None) -> None:
    """Restores what served each parameter group before, and frees the memory that no other model uses.

    Without a model, modules that are sharded from now on are PyTorch's; those that are served already stay so.

    Call it on every rank, between steps. Raises as `enable` does; a model that is not enabled stays as it is.
    """
    enable(model, all_gather=False, reduce_scatter=False)


def launches(model: torch.nn.Module) -> Launches:
    """Returns counts of what ran through ep_plugin, by which you see that it is on. Raises as `enable` does."""
    groups = [group for group in groups_of(model) if _has_places(group)]
    serving = [comm for group in groups for name in ADAPTERS if isinstance(comm := getattr(group, name), Adapter)]
    return Launches(
        parameter_groups=len({id(comm.parameter_group) for comm in serving}),
        all_gathers=sum(comm.launches for comm in serving if isinstance(comm, PluginAllGather)),
        reduce_scatters=sum(comm.launches for comm in serving if isinstance(comm, PluginReduceScatter)),
    )


def _serving(init: Callable[..., None]) -> Callable[..., None]:
    """Returns FSDP2's constructor of a parameter group, extended to serve the group that it makes."""

    @functools.wraps(init)
    def init_and_serve(group: Any, *args: Any, **kwargs: Any) -> None:
        init(group, *args, **kwargs)
        if isinstance(group.mesh_info, FSDPMeshInfo) and _has_places(group) and _has_process_groups(group):
            _serve(group, *_later)

    return init_and_serve


def _serve(group: Any, *wanted: bool) -> None:
    """Puts those of ADAPTERS that are wanted, in order, into ``group``, and takes the others out."""
    # Whatever serves the group now, each of our adapters is open until it is taken out.
    made = vars(group).setdefault("_ep_plugin_adapters", {})
    for (name, adapter), is_wanted in zip(ADAPTERS.items(), wanted, strict=True):
        present = getattr(group, name)
        if is_wanted and isinstance(present, adapter):
            continue
        ours = made.pop(name, None)
        if ours is not None:
            if present is ours:  # else the script has set another one since
                setattr(group, name, ours.replaced)
            ours.leave()
        if is_wanted:
            made[name] = adapter(group, present)
            setattr(group, name, made[name])
    if made:
        one_rank.serve(group)
        in_place.serve(group)
    else:
        one_rank.leave(group)
        in_place.leave(group)
    for setter in _SETTERS:
        if made:
            vars(group)[setter] = functools.partial(_set_unless_served, group, setter)
        else:
            vars(group).pop(setter, None)


def _set_unless_served(group: Any, setter: str, *args: Any) -> None:
    """Replaces FSDP2's setters of other collectives, which refuse a group that is served without saying by whom."""
    if any(isinstance(getattr(group, name), Adapter) for name in ADAPTERS):
        raise NotSupported(
            f"{setter}_for_comm: expected collectives of PyTorch, got those of ep_plugin: call "
            "ep_plugin.integrations.fsdp2.disable(model) first, or leave fsdp2 out of EP_PLUGIN"
        )
    getattr(type(group), setter)(group, *args)


def groups_of(model: torch.nn.Module) -> list[Any]:
    """Returns FSDP2's sharded parameter groups of all modules of ``model``, each once.

    Raises ValueError as `enable` does.
    """
    if not isinstance(model, torch.nn.Module):
        raise ValueError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not modules:
        raise ValueError(f"model: expected modules wrapped by FSDP2, got {_described(model)}")
    # Modules that were sharded as a list share their groups.
    return list({id(group): group for module in modules for group in _groups_of_module(module)}.values())


def _groups_of_module(module: FSDPModule) -> Iterator[Any]:
    """Yields the sharded parameter groups of one FSDP module: at most one in PyTorch 2.11, any number from 2.12 on.

    A module that only replicates its parameters has nothing to gather.
    """
    state: Any = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    for group in [state._fsdp_param_group] if groups is None else groups:
        if group is not None and isinstance(group.mesh_info, FSDPMeshInfo):
            yield group


def _has_process_groups(group: Any) -> bool:
    """Returns whether our adapters may serve a parameter group. They leave to PyTorch what they do not serve.

    It is called before anything is changed, and is collective over each process group. It returns False if the ranks
    are threads and PyTorch's own collectives are to serve them (fallback.py).

    Raises:
        NotSupported: the group is not served, and PyTorch's own collectives are not to serve it.
    """
    for mesh_info in (group.mesh_info, group.post_forward_mesh_info):  # the latter: reshard_after_forward=int
        if isinstance(mesh_info, FSDPMeshInfo) and mesh_info.shard_mesh_size > 1:
            try:
                process_group = checked_group(mesh_info.shard_process_group)
            except NotSupported as error:
                return _unless_left(error)
            check_group("fsdp2", process_group, group.device)
    return True


def _has_places(group: Any) -> bool:
    """Returns whether FSDP2 has the attributes for our collectives.

    Raises:
        NotSupported: it has not, and PyTorch's own collectives are not to serve the group.
    """
    missing = next((name for name in (*ADAPTERS, "comm_ctx") if not hasattr(group, name)), None)
    return missing is None or _unless_left(
        NotSupported(
            f"FSDP2 of PyTorch {torch.__version__} is not supported: expected parameter groups with {missing}, as in "
            "2.11 and newer"
        )
    )


def _unless_left(error: NotSupported) -> bool:
    """Raises the error, or returns False where PyTorch's own collectives are to serve (fallback.py)."""
    if not falls_back("fsdp2", error):
        raise error
    hooks.record("fsdp2", "stock", str(error))
    return False


def _described(model: torch.nn.Module) -> str:
    name = type(model).__name__
    if isinstance(model, DistributedDataParallel):
        return f"{name}, which replicates and gathers nothing; shard the model with fully_shard instead"
    if isinstance(model, FullyShardedDataParallel):
        return f"{name}, which is FSDP1; use torch.distributed.fsdp.fully_shard (accelerate: fsdp_version=2)"
    return (
        f"{name} without any; call torch.distributed.fsdp.fully_shard on its blocks and on the model first, or, with "
        "accelerate, accelerator.prepare() under FullyShardedDataParallelPlugin(fsdp_version=2)"
    )
