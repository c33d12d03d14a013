"""Puts the adapters into the parameter groups of a model, and takes them out."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.nn.parallel import DistributedDataParallel

from ep_plugin.errors import NotSupported
from ep_plugin.integrations.fsdp2.adapters import PluginAllGather, PluginReduceScatter

# FSDP2's attribute of a parameter group that holds its collective, and our adapter for it.
PLACES = {"_all_gather_comm": PluginAllGather, "_reduce_scatter_comm": PluginReduceScatter}
_MODEL = "comm_ctx"  # what the parameter groups of one model share


@dataclass(frozen=True, kw_only=True)
class Launches:
    """What ran through ep_plugin since it was enabled, over all parameter groups of a model."""

    parameter_groups: int
    all_gathers: int
    reduce_scatters: int


def enable(model: torch.nn.Module, *, all_gather: bool = True, reduce_scatter: bool = True) -> int:
    """Serves the collectives of every FSDP2 module in ``model`` from now on; returns the number of parameter groups.

    Call it on every rank, between steps, after ``fully_shard`` (after ``accelerator.prepare()``). What is not asked for
    is PyTorch's own, and so is what it does better (`ep_plugin.integrations.fsdp2` says which). A gather moves bytes
    and changes no bit of any result; a reduction adds in float32 and in a fixed order, which differs from other
    libraries' in the last bits. The collectives are made, with the ranks of each group, by the first forward; those of
    one set of ranks are shared by all models, and are open until ``disable``.

    Raises ValueError for a model without FSDP2 modules, NotSupported for a PyTorch whose FSDP2 has no place for them.
    """
    groups = groups_of(model)
    for group in groups:
        _put_in(group, all_gather=all_gather, reduce_scatter=reduce_scatter)
    return len(groups)


def disable(model: torch.nn.Module) -> None:
    """Brings back what served each parameter group before; memory that no other model uses is given back.

    Call it on every rank, between steps. Raises as `enable` does; a model that is not enabled stays as it is.
    """
    for group in groups_of(model):
        _take_out(group)


def launches(model: torch.nn.Module) -> Launches:
    """Counts of what ran through ep_plugin: the way to see that it is on. Raises as `enable` does."""
    groups = groups_of(model)
    counts = {
        place: sum(comm.launches for group in groups if isinstance(comm := getattr(group, place), adapter))
        for place, adapter in PLACES.items()
    }
    enabled = [group for group in groups if _is_served(group)]
    return Launches(
        parameter_groups=len(enabled),
        all_gathers=counts["_all_gather_comm"],
        reduce_scatters=counts["_reduce_scatter_comm"],
    )


def switch_on() -> str:
    """Serves every module that this process shards from now on (``EP_PLUGIN=fsdp2``); says so in a sentence."""
    group_type = _fsdp_param_group.FSDPParamGroup
    if not hasattr(group_type, "_ep_plugin_init"):
        group_type._ep_plugin_init = group_type.__init__
        group_type.__init__ = _serving(group_type.__init__)
    return "every module that fully_shard wraps gathers and reduces through ep_plugin"


def _serving(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def init_and_put_in(group: Any, *args: Any, **kwargs: Any) -> None:
        init(group, *args, **kwargs)
        if isinstance(group.mesh_info, FSDPMeshInfo):
            _check_places(group)
            _put_in(group, all_gather=True, reduce_scatter=True)

    return init_and_put_in


def _put_in(group: Any, *, all_gather: bool, reduce_scatter: bool) -> None:
    for (place, adapter), wanted in zip(PLACES.items(), (all_gather, reduce_scatter), strict=True):
        present = getattr(group, place)
        if wanted and not isinstance(present, adapter):
            _take_out(group, place)
            made = _adapters_of(group)[place] = adapter(group, present)
            setattr(group, place, made)
        elif not wanted:
            _take_out(group, place)


def _take_out(group: Any, *places: str) -> None:
    for place in places or PLACES:
        made = _adapters_of(group).pop(place, None)
        if made is not None:
            if getattr(group, place) is made:  # or the script has set another of its own
                setattr(group, place, made.replaced)
            made.user.leave()


def _adapters_of(group: Any) -> dict[str, Any]:
    """Ours, by place, whoever serves the group now: each is open until it is taken out."""
    return vars(group).setdefault("_ep_plugin_adapters", {})


def _is_served(group: Any) -> bool:
    return any(isinstance(getattr(group, place), adapter) for place, adapter in PLACES.items())


def groups_of(model: torch.nn.Module) -> list[Any]:
    """FSDP2's sharded parameter groups of all modules of ``model``, each once. Raises as `enable` does."""
    if not isinstance(model, torch.nn.Module):
        raise ValueError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not modules:
        raise ValueError(f"model: expected modules wrapped by FSDP2, got {_described(model)}")
    # Modules that were sharded as a list share their groups.
    groups = list({id(group): group for module in modules for group in _groups_of_module(module)}.values())
    for group in groups:
        _check_places(group)
    return groups


def _groups_of_module(module: FSDPModule) -> Iterator[Any]:
    """The sharded parameter groups of one FSDP module: at most one in PyTorch 2.11, any number from 2.12 on.

    A module that only replicates its parameters has nothing to gather.
    """
    state: Any = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    for group in [state._fsdp_param_group] if groups is None else groups:
        if group is not None and isinstance(group.mesh_info, FSDPMeshInfo):
            yield group


def _check_places(group: Any) -> None:
    for place in (*PLACES, _MODEL):
        if not hasattr(group, place):
            raise NotSupported(
                f"FSDP2 of PyTorch {torch.__version__} is not supported: expected parameter groups with {place}, as in "
                "2.11 to 2.15"
            )


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
