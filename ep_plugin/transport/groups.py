"""What we ask of the process groups of torch.distributed.

A group is served by one backend for each type of device, or it is a class of its own: Python code may derive one from
``ProcessGroup`` and register it as a backend. Such a group has no backends below it, and often no name.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, TypeAlias

from ep_plugin.config import MAX_TIMEOUT_S
from ep_plugin.errors import NotSupported

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

Group: TypeAlias = "dist.ProcessGroup | DeviceMesh | None"


def checked_group(group: Group) -> dist.ProcessGroup:
    """The process group of `group`, a mesh of one dimension, or None for the default group.

    Raises:
        ValueError: there is no such group, or this rank does not belong to it.
        NotSupported: the group's ranks are threads of one process.
    """
    from torch.distributed import distributed_c10d as c10d
    from torch.distributed.device_mesh import DeviceMesh

    if not c10d.is_initialized():
        raise ValueError("group: expected an initialised torch.distributed process group, got none")
    group = c10d.GroupMember.WORLD if group is None else group
    if isinstance(group, DeviceMesh) and group.get_coordinate() is not None:
        if group.ndim != 1:
            raise ValueError(f"group: expected a mesh of one dimension, such as mesh['ep'], got {group!r}")
        group = group.get_group()
    if not isinstance(group, c10d.ProcessGroup):  # new_group() returns a plain marker to ranks that it leaves out
        raise ValueError(f"group: expected a process group that this rank belongs to, got {group!r}")
    if not is_alive(group):
        raise ValueError(f"group: expected a process group that has not been destroyed, got {group!r}")
    if "threaded" in backends_of(group).values():
        raise NotSupported("group: expected ranks that are processes, got threads of one process (backend 'threaded')")
    return group


@functools.cache
def _c10d() -> Any:
    """torch.distributed's module of groups, without the time of an import statement."""
    from torch.distributed import distributed_c10d as c10d

    return c10d


def is_alive(group: dist.ProcessGroup) -> bool:
    """Whether the process group has not been destroyed."""
    return group in _c10d()._world.pg_group_ranks  # get_process_group_ranks() would copy the ranks at every call


def timeout_of(group: dist.ProcessGroup) -> float:
    """The group's timeout in seconds: the shortest of its backends', torch's default if none has one."""
    from torch.distributed import distributed_c10d as c10d

    timeouts = []
    for backend in [backend_of(group, device) for device in group._device_types] or [group]:
        timeout = getattr(getattr(backend, "options", None), "_timeout", None)
        if timeout is not None:
            timeouts.append(timeout.total_seconds())
    return min(*timeouts, MAX_TIMEOUT_S) if timeouts else c10d.default_pg_timeout.total_seconds()


def name_of(group: dist.ProcessGroup) -> str:
    """The name that torch.distributed gave the group."""
    from torch.distributed import distributed_c10d as c10d

    return c10d._get_process_group_name(group)


def backends_of(group: dist.ProcessGroup | None) -> dict[str, str]:
    """The names of the group's backends by type of device."""
    import torch.distributed as dist

    return dict(entry.split(":", 1) for entry in str(dist.get_backend_config(group)).split(","))


def backend_of(group: dist.ProcessGroup, device: str | torch.device) -> Any:
    """The object that moves data of ``device``: a backend below the group, or the group where it is of Python."""
    import torch
    import torch.distributed as dist

    return group._get_backend(torch.device(device)) if type(group) is dist.ProcessGroup else group


def serves_gpus(group: dist.ProcessGroup | None) -> bool:
    """Whether the group has a backend for GPU memory, and this process a GPU."""
    import torch

    backends = backends_of(group)
    # gloo and MPI call themselves a backend for CUDA tensors too.
    return backends.get("cuda") not in (None, "gloo", "mpi") and torch.cuda.is_available()
