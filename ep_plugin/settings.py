"""What `env.py` finds in the environment. Apart from it, since every ``import torch`` loads that module."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the ``EP_PLUGIN_*`` variables say; the docstring of `ep_plugin.env` explains each."""

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


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """What the process launcher (torchrun and its like) says about this process; None where it says nothing."""

    rank: int | None = None
    world_size: int | None = None
    local_rank: int | None = None
    local_world_size: int | None = None
