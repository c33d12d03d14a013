"""DeepSpeed: the parameter gathers and the gradient sums of ZeRO through ep_plugin (docs/deepspeed.md).

Two kinds of calls are left to DeepSpeed: calls that `Pair.why_left` names (one warning says so), and calls in compiled
code.
"""

from __future__ import annotations

# ruff: noqa: E402  an old DeepSpeed is refused before names that it lacks are imported
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.git_version_info import version as installed

from ep_plugin.integrations import hooks

hooks.check_version("deepspeed", installed)  # deepspeed.__version__ may not be there yet

from deepspeed.comm.reduce_op import ReduceOp
from deepspeed.comm.torch import TorchBackend

from ep_plugin.integrations.fallback import warn_once
from ep_plugin.integrations.pairs import PairUser

__all__ = ["disable", "enable"]

_NAMES = ("all_gather_into_tensor", "reduce_scatter_tensor")
for _name in (*_NAMES, "_reduce_op"):
    hooks.check_signatures("deepspeed", TorchBackend, [_name])  # on deepspeed.comm a decorator hides the arguments
_stock: dict[str, Callable[..., Any]] = {_name: getattr(TorchBackend, _name) for _name in _NAMES}
_user = PairUser("deepspeed")


def enable() -> None:
    """Serves the gathers and sums of every process group from now on. Call it on every rank, between steps."""
    hooks.replace("deepspeed", TorchBackend, "all_gather_into_tensor", all_gather_into_tensor)
    hooks.replace("deepspeed", TorchBackend, "reduce_scatter_tensor", reduce_scatter_tensor)


def disable() -> None:
    """Restores what was replaced, and closes the collectives. Call it on every rank, between steps."""
    hooks.restore("deepspeed")
    _user.leave()


def all_gather_into_tensor(
    self: Any,
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    group: Any = None,
    async_op: bool = False,
    **others: Any,
) -> Any:
    stock = functools.partial(_stock["all_gather_into_tensor"], self, **others)
    return _run("all_gather", stock, output_tensor, input_tensor, group, async_op)


def reduce_scatter_tensor(
    self: Any,
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    op: Any = ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    **others: Any,
) -> Any:
    stock = functools.partial(_stock["reduce_scatter_tensor"], self, **others)
    return _run("reduce_scatter", stock, output_tensor, input_tensor, group, async_op, op=self._reduce_op(op))


def _run(
    name: str,
    stock: functools.partial[Any],
    output: torch.Tensor,
    shards: torch.Tensor,
    group: Any,
    async_op: bool,
    **op: Any,
) -> Any:
    """Calls `name` of the group's Pair, or `stock`. A call with arguments that are unknown here goes to `stock`."""
    is_member = group is not dist.GroupMember.NON_GROUP_MEMBER
    is_enabled = hooks.is_enabled("deepspeed", TorchBackend)
    if stock.keywords or not is_member or not is_enabled or torch.compiler.is_compiling():
        return stock(output, shards, group=group, async_op=async_op, **op)
    pair = _user.pair(group or dist.group.WORLD, output.device)
    reason = pair.why_left(name, output, **op)
    if reason is None:
        work = pair.run(name, output, shards.contiguous(), async_op, **op)
        hooks.served("deepspeed")
        return work
    hooks.left("deepspeed")
    warn_once("deepspeed", f"{reason} are left to DeepSpeed's own collectives")
    return stock(output, shards, group=group, async_op=async_op, **op)
